"""Attention forward: the registry's variants against cuDNN, FlashAttention-2 (both through torch) and FlashAttention-3.

    python benchmarks/attention_forward.py --set grid gqa small --out results.json
    FA3_LIBRARY=/path/to/fa3.so python benchmarks/attention_forward.py --configs all

Every contender is captured into a CUDA graph of several calls, so that times are the GPU's and not the host's.
Contenders run in shuffled order, each warmed for 15 ms, for several rounds; a cell's figure is the median over rounds.
On a power-limited card a fixed order favours the first by up to 6%. Compare ratios within one run: clocks drift.
TFLOPS are 4 B H Sq Sk D / time, half of that if causal.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import registry
from registry.ops.attention.problem import AttentionProblem

PEERS = ("torch_cudnn", "torch_flash", "fa3")
WARM_MS, MEASURE_MS = 15, 15


@dataclass(frozen=True)
class Cell:
    """One problem."""

    set: str
    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    head_dim: int
    causal: bool

    @property
    def flops(self) -> float:
        return 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim * (0.5 if self.causal else 1)

    def __str__(self) -> str:
        heads = str(self.heads) if self.heads == self.heads_kv else f"{self.heads}/{self.heads_kv}"
        return f"B{self.batch} H{heads} S{self.seqlen} D{self.head_dim} {'causal' if self.causal else 'full'}"


def grid() -> Iterator[Cell]:
    """16k tokens, hidden size 2048."""
    for d in (64, 128, 256):
        for causal in (False, True):
            for s in (1024, 4096, 16384):
                yield Cell("grid", 16384 // s, 2048 // d, 2048 // d, s, d, causal)


def gqa() -> Iterator[Cell]:
    """32 query heads on 8 key heads, causal."""
    for b in (1, 2, 4):
        for s in (2048, 8192, 32768):
            yield Cell("gqa", b, 32, 8, s, 128, True)


def small() -> Iterator[Cell]:
    """What a single request makes: grids that do not fill the GPU."""
    for causal in (False, True):
        for s in (512, 1024, 2048, 4096):
            for h in (8, 16, 32):
                yield Cell("small", 1, h, h, s, 128, causal)


SETS: dict[str, Callable[[], Iterator[Cell]]] = {"grid": grid, "gqa": gqa, "small": small}


def fa3_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable[[], torch.Tensor]:
    """FlashAttention-3 as vLLM builds it: varlen, the only entry of that build; short sequences may pay for it."""
    (b, h, s, d), hk = q.shape, k.shape[1]
    rows = [x.transpose(1, 2).reshape(b * s, n, d) for x, n in ((q, h), (k, hk), (v, hk))]
    ends = torch.arange(0, b * s + 1, s, device=q.device, dtype=torch.int32)
    nothing = (None,) * 9

    def call() -> torch.Tensor:
        given = (*rows, None, None, None, None, ends, ends, None, None, None, s, s, *nothing, d**-0.5, causal)
        out = torch.ops._vllm_fa3_C.fwd(*given, -1, -1, 0.0, True, None, 1, None, 0, None, 1, 0, None)[0]
        return out.view(b, s, h, d).transpose(1, 2)

    return call


def contenders(
    cell: Cell, tensors: tuple[torch.Tensor, ...], options: argparse.Namespace
) -> dict[str, Callable[[], Any]]:
    """Name to call: each declared variant that is legal, by its first legal config or by all of them, and FA3."""
    target = registry.Target.of(tensors[0].device)
    problem = AttentionProblem.of_shape(
        target, b=cell.batch, hq=cell.heads, hkv=cell.heads_kv, s=cell.seqlen, d=cell.head_dim, causal=cell.causal
    )
    found: dict[str, Callable[[], Any]] = {}
    for name, variant in registry.attention.variants.items():
        if name not in options.variants or variant.reasons(problem):
            continue
        configs = variant.legal_configs(problem)
        for i, config in enumerate(configs if options.configs == "all" else configs[:1]):
            label = name if len(configs) == 1 or options.configs == "first" else f"{name}[{i}]"
            found[label] = _bound(variant, problem, config, tensors, cell.causal)
            found[label].config = dict(config)  # type: ignore[attr-defined]
    if os.environ.get("FA3_LIBRARY") and "fa3" in options.variants:
        torch.ops.load_library(os.environ["FA3_LIBRARY"])
        found["fa3"] = fa3_call(*tensors, cell.causal)
    return found


def _bound(
    variant: registry.Variant, problem: Any, config: Any, tensors: tuple[torch.Tensor, ...], causal: bool
) -> Callable[[], Any]:
    scale = problem.head_dim**-0.5
    if variant.prepare is not None:
        launch = variant.prepare(problem, config)
        return lambda: launch(*tensors, scale=scale)[0]
    claimed: dict[str, Any] = {"causal": causal} if variant.requires.causal else {}
    claimed |= {"window": None} if variant.requires.window else {}
    claimed |= {"softcap": 0.0} if variant.requires.softcap else {}
    claimed |= {"return_lse": False} if variant.requires.lse else {}
    return lambda: variant.run(*tensors, scale=scale, config=config, **claimed)[0]


class Graphed:
    """Several calls in one CUDA graph, timed per call."""

    def __init__(self, call: Callable[[], Any]) -> None:
        call()
        torch.cuda.synchronize()
        self.calls = max(1, min(50, math.ceil(0.4 / self._once(call))))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for _ in range(self.calls):
                call()
        self.ms = self._once(self.graph.replay)

    @staticmethod
    def _once(call: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        start.record()
        call()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end), 1e-3)

    def sample(self) -> float:
        """Median milliseconds of one call, after warming up."""
        for _ in range(max(1, round(WARM_MS / self.ms))):
            self.graph.replay()
        count = max(3, round(MEASURE_MS / self.ms))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.graph.replay()
            event.record()
        events[-1].synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)) / self.calls


class Clocks:
    """SM clock and power through NVML, where that is installed."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        except Exception:  # no NVML: the benchmark still runs
            self._nvml = None

    def read(self) -> dict[str, float]:
        if self._nvml is None:
            return {}
        n, h = self._nvml, self._handle
        return {"sm_mhz": n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM), "watts": n.nvmlDeviceGetPowerUsage(h) / 1000}


def measure(cell: Cell, options: argparse.Namespace, clocks: Clocks) -> dict[str, Any]:
    q, k, v = (
        torch.randn(cell.batch, n, cell.seqlen, cell.head_dim, device="cuda", dtype=torch.bfloat16)
        for n in (cell.heads, cell.heads_kv, cell.heads_kv)
    )
    calls = contenders(cell, (q, k, v), options)
    reference = next((calls[n]().float() for n in PEERS if n in calls), None)
    record: dict[str, Any] = {"cell": asdict(cell), "contenders": {}}
    timed: dict[str, Graphed] = {}
    for name, call in calls.items():
        error = None if reference is None else ((call().float() - reference).norm() / reference.norm()).item()
        if error is not None and not error < 1e-2:
            raise AssertionError(f"{cell}: {name} differs from {PEERS} by {error}")
        timed[name] = Graphed(call)
        record["contenders"][name] = {
            "config": getattr(call, "config", {}),
            "difference": error,
            "ms": [],
            "clocks": [],
        }
    for _ in range(options.rounds):
        for name in random.sample(list(timed), len(timed)):
            record["contenders"][name]["ms"].append(timed[name].sample())
            record["contenders"][name]["clocks"].append(clocks.read())
    for entry in record["contenders"].values():
        entry["tflops"] = cell.flops / statistics.median(entry["ms"]) / 1e9
    return record


def versions() -> dict[str, Any]:
    from importlib import metadata

    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
        "driver": registry.Target.of(torch.device("cuda", torch.cuda.current_device())).driver,
        "python": platform.python_version(),
        "nvidia-ml-py": _installed(metadata, "nvidia-ml-py"),
        "registry": registry.__version__,
    }


def _installed(metadata: Any, name: str) -> str:
    try:
        return str(metadata.version(name))
    except metadata.PackageNotFoundError:
        return ""


def summary(records: list[dict[str, Any]], ours: str) -> str:
    """Per set: the best config of `ours` in each cell over the best peer; geometric mean and minimum."""
    lines = []
    for name in dict.fromkeys(r["cell"]["set"] for r in records):
        for pick in ("default", "best"):
            ratios = []
            for r in records:
                mine = [e["tflops"] for n, e in r["contenders"].items() if n.split("[")[0] == ours]
                peers = [e["tflops"] for n, e in r["contenders"].items() if n in PEERS]
                if r["cell"]["set"] == name and mine and peers:
                    ratios.append((mine[0] if pick == "default" else max(mine)) / max(peers))
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                least, cells = min(ratios), len(ratios)
                what = f"{name}: {ours} ({pick} config) over the best peer"
                lines.append(f"{what}: geomean {mean:.3f}, min {least:.3f}, {cells} cells")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--variants", nargs="+", default=["gluon_fa3", *PEERS], help="contenders")
    parser.add_argument("--ours", default="gluon_fa3", help="the variant that the summary compares with the peers")
    parser.add_argument("--configs", choices=("first", "all"), default="first")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--match", default="", help="only cells whose name contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clocks, records = Clocks(), []
    print(versions(), flush=True)
    for cell in (c for name in options.set for c in SETS[name]() if options.match in str(c)):
        records.append(measure(cell, options, clocks))
        entries = records[-1]["contenders"]
        print(f"{cell!s:32}", " ".join(f"{n}:{e['tflops']:.0f}" for n, e in entries.items()), flush=True)
        if options.out:
            head = {"benchmark": "attention_forward", "versions": versions(), "rounds": options.rounds}
            options.out.write_text(json.dumps({**head, "cells": records}, indent=1))
    print(summary(records, options.ours))


if __name__ == "__main__":
    main()
