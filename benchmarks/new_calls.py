"""Calls of shapes that a process has not met, up to their launch, for new_shapes.py.

Each shape is asked about once, as on an H200, with tensors that nobody writes to: arguments are checked, and it is
decided which kernel runs with which config. Nothing is bound or launched (first_calls.py does that, on a GPU).
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import registry

CALLS = 1200
"""Of each kind."""
H200 = registry.Target.named("H200")
PRODUCT = (None, None, None)
"""Settings of a product: activation, dtype of the result, variant."""
LAYERS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(columns, K) of a model of 8 billion parameters."""


def _attention(words: dict[str, Any]) -> tuple[Any, ...]:
    """Settings of attention: causal, window, softcap, whether the LSE is asked for, variant."""
    return words.get("causal", False), words.get("window"), float(words.get("softcap", 0.0)), False, None


CAUSAL = _attention({"causal": True})


def _tensor(*shape: int, dtype: str = "bfloat16") -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def products(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    while True:
        m, n, k = (round(2 ** draw.uniform(4, 14)) for _ in "mnk")
        yield PRODUCT, _tensor(m, k), _tensor(n, k).mT


def layers(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    while True:
        n, k = draw.choice(LAYERS)
        yield PRODUCT, _tensor(draw.randint(1, 16384), k), _tensor(n, k).mT


def prompts(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    while True:
        length = draw.randint(2, 1 << 15)
        yield CAUSAL, _tensor(1, 32, length, 128), *(_tensor(1, 8, length, 128) for _ in "kv")


def attentions(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    from registry.ops.parts.cases import parse_words
    from registry.tuning.grids import grid

    for case in grid("attention", f"random:{draw.randint(1, 10**6)}:4000"):
        words = dict(parse_words(case.text))
        heads, rows, width = words.get("hq", 1), words["s"], words["d"]
        batch, dtype = words.get("b", 1), words.get("dtype", "bfloat16")
        keys = batch, words.get("hkv", heads), words.get("sk", rows), width
        q, (k, v) = _tensor(batch, heads, rows, width, dtype=dtype), (_tensor(*keys, dtype=dtype) for _ in "kv")
        yield _attention(words), q, k, v


def tokens(draw: random.Random) -> Iterator[tuple[Any, ...]]:
    q, cache = _tensor(1, 32, 1, 128), _tensor(1, 8, 1 << 16, 128)
    for length in itertools.count(draw.randint(500, 2000)):
        yield CAUSAL, q, cache[:, :, :length], cache[:, :, :length]


CALLS_OF: dict[str, tuple[str, Callable[[random.Random], Iterator[tuple[Any, ...]]]]] = {
    "products of any size": ("matmul", products),
    "four layers of one model, any number of rows": ("matmul", layers),
    "prompts of one model, any length": ("attention", prompts),
    "attention of any kind": ("attention", attentions),
    "a cache that grows by a token": ("attention", tokens),
}


def called(kind: str, calls: int = CALLS) -> list[float]:
    """Microseconds of CPU time of each call, in their order, none of a shape that came before. For a process of its
    own: it takes the CPU for an H200 from then on."""
    name, shapes_of = CALLS_OF[kind]
    op, met, found = getattr(registry, name), set[str](), list[float]()
    registry.Target.of = staticmethod(lambda device: H200)  # type: ignore[assignment]
    for settings, *tensors in shapes_of(random.Random(kind)):
        key = f"{settings} {[(one.shape, one.dtype) for one in tensors]}"
        if key in met:
            continue
        met.add(key)
        begun = time.thread_time()
        op.find_plan(settings, *tensors)
        found.append(round((time.thread_time() - begun) * 1e6, 1))
        if len(found) == calls:
            break
    return found
