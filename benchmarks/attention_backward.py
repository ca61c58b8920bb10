"""Attention backward: the registry's variants against cuDNN and FlashAttention-2 (both through torch).

    python benchmarks/attention_backward.py --out benchmarks/results/h200/attention_backward.json
    python benchmarks/attention_backward.py --window 1023      # what a window costs, beside full attention

Timing is that of attention_forward.py: CUDA graphs, shuffled order, the median over rounds. TFLOPS count 2.5 times the
forward's operations (five matrix products for two), whatever a kernel really does. Only TFLOPS within one run compare.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from attention_forward import Cell, Clocks, Graphed, grid, versions

import registry
from registry.ops.attention.problem import AttentionBackwardProblem

PEERS = ("torch_flash_backward", "torch_cudnn_backward")


def contenders(cell: Cell, window: int, names: list[str]) -> dict[str, Callable[[], Any]]:
    """Name to call for each variant that is legal, by its first legal config."""
    b, h, hk, s, d = cell.batch, cell.heads, cell.heads_kv, cell.seqlen, cell.head_dim
    q, grad_out = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(b, hk, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    mask: dict[str, Any] = {"causal": cell.causal, "window": (window, 0) if window else None}
    out, lse = registry.attention(q, k, v, return_lse=True, variant="triton_fa2", **mask)
    problem = AttentionBackwardProblem.of_shape(
        registry.Target.of(q.device), b=b, hq=h, hkv=hk, s=s, d=d, lse=True, **mask
    )
    found: dict[str, Callable[[], Any]] = {}
    for name, variant in registry.attention.backward.variants.items():
        if name in names and not variant.reasons(problem):
            config = variant.legal_configs(problem)[0]
            call = registry.attention.backward.bind(variant, problem, config)
            found[name] = lambda call=call: call(grad_out, q, k, v, out, lse, scale=d**-0.5, grad_lse=None)
            found[name].config = dict(config)  # type: ignore[attr-defined]
    return found


def measure(cell: Cell, options: argparse.Namespace, clocks: Clocks) -> dict[str, Any]:
    calls = contenders(cell, options.window, options.variants)
    record: dict[str, Any] = {"cell": asdict(cell), "window": options.window, "contenders": {}}
    reference = next((calls[n]() for n in PEERS if n in calls), None)
    timed = {}
    for name, call in calls.items():
        worst = None
        if reference is not None:
            pairs = zip(call(), reference, strict=True)
            worst = max(((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in pairs)
            assert worst < 2e-2, f"{cell}: {name} differs by {worst}"
        timed[name] = Graphed(call)
        record["contenders"][name] = {"config": call.config, "difference": worst, "ms": [], "clocks": []}
    for _ in range(options.rounds):
        for name in random.sample(list(timed), len(timed)):
            record["contenders"][name]["ms"].append(timed[name].sample())
            record["contenders"][name]["clocks"].append(clocks.read())
    for entry in record["contenders"].values():
        entry["tflops"] = 2.5 * cell.flops / statistics.median(entry["ms"]) / 1e9
    return record


def summary(records: list[dict[str, Any]], ours: str) -> str:
    lines = []
    for peer in PEERS:
        for d in (64, 128, 256):
            ratios = [
                r["contenders"][ours]["tflops"] / r["contenders"][peer]["tflops"]
                for r in records
                if r["cell"]["head_dim"] == d and {ours, peer} <= set(r["contenders"])
            ]
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios)))
                least, cells = min(ratios), len(ratios)
                lines.append(f"D{d}: {ours} over {peer}: geomean {mean:.3f}, min {least:.3f}, {cells} cells")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=["triton_fa2_backward", *PEERS])
    parser.add_argument("--window", type=int, default=0, help="keys that a query sees to its left, none to its right")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--match", default="", help="only cells whose name contains this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    clocks, records = Clocks(), []
    for cell in (c for c in grid() if options.match in str(c)):
        records.append(measure(cell, options, clocks))
        entries = records[-1]["contenders"]
        print(f"{cell!s:32}", " ".join(f"{n}:{e['tflops']:.0f}" for n, e in entries.items()), flush=True)
        if options.out:
            head = {"benchmark": "attention_backward", "versions": versions(), "rounds": options.rounds}
            options.out.write_text(json.dumps({**head, "cells": records}, indent=1))
    print(summary(records, "triton_fa2_backward"))


if __name__ == "__main__":
    main()
