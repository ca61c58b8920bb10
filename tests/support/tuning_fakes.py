"""Variants that misbehave on purpose, for the tuner's tests. Loaded by `--plugin`, in the parent and in the worker."""

import ctypes
import os
import sys
import time

import torch

from registry import Design, Requires, Variant

CLAIMS = Requires(
    arch=("cpu",),
    dtypes=("float32", "float64"),
    head_dim=(1, 256),
    layouts=("bhsd", "bshd", "strided"),
    causal=True,
    ieee=True,
    cross_length=True,
)


def _good(q, k, v, *, causal, scale, config):
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        scores = scores.masked_fill(hidden, -torch.inf)
    time.sleep(config.get("sleep_us", 0) / 1e6)
    return torch.softmax(scores, dim=-1) @ v, None


def _hangs(q, k, v, **_):
    while True:
        time.sleep(0.01)


_calls = {"late": 0}


def _hangs_late(q, k, v, *, config, **more):
    """Passes the gate, then hangs at the clock."""
    _calls["late"] += 1
    if _calls["late"] > 1:
        _hangs(q, k, v)
    return _good(q, k, v, config={}, **more)


def _exits(q, k, v, **_):
    print("last words of a kernel")
    sys.stdout.flush()
    os._exit(7)


def _faults(q, k, v, **_):
    ctypes.string_at(0)


def _wrong_tile(q, k, v, *, config, **more):
    """One block of one head is off by a tenth."""
    out, lse = _good(q, k, v, config={}, **more)
    out[0, -1, -8:] *= 1.1
    return out, lse


def _not_a_number(q, k, v, *, config, **more):
    out, lse = _good(q, k, v, config={}, **more)
    out[0, 0, 0, 0] = float("nan")
    return out, lse


def _overwrites(q, k, v, *, config, **more):
    out, lse = _good(q, k, v, config={}, **more)
    k.mul_(2.0)
    return out, lse


def _raises(q, k, v, **_):
    raise ValueError("a plain mistake")


def _greedy(problem, config):
    return 1 << 40


def registry_variants():
    def fake(name, run, **more):
        return Variant(f"fake.{name}", op="attention", run=run, requires=CLAIMS, design=Design(dsl="python"), **more)

    greedy = Requires(
        arch=("cpu",),
        dtypes=("float32",),
        head_dim=(1, 256),
        layouts=("bhsd",),
        causal=True,
        ieee=True,
        shared_memory=_greedy,
    )
    return [
        fake("good", _good, configs=[{"sleep_us": 2000}, {"sleep_us": 0}, {"sleep_us": 50000}]),
        fake("hangs", _hangs),
        fake("hangs_late", _hangs_late),
        fake("exits", _exits),
        fake("faults", _faults),
        fake("wrong_tile", _wrong_tile),
        fake("not_a_number", _not_a_number),
        fake("overwrites", _overwrites),
        fake("raises", _raises),
        Variant("fake.greedy", op="attention", run=_good, requires=greedy, configs=[{"stages": 2}, {"stages": 3}]),
    ]
