"""Two or three consumer warp groups: the effect FlashAttention-3 is known for at head dim 64, as a table and a plot.

    python benchmarks/warp_groups.py measure --out warp_groups.json     # on a Hopper GPU
    python benchmarks/warp_groups.py plot warp_groups.json --png warp_groups.png

Both sides are `gluon_fa3` with key blocks of 128, two stages and a dynamic schedule. Three groups of 64 rows have 160
registers each, two have 240; the two use theirs for a part of Q, which is what suits them best.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from pathlib import Path
from typing import Any

LENGTHS = (1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
GROUPS = (2, 3)


def configs(causal: bool) -> dict[int, dict[str, Any]]:
    """By number of consumers, the best settings of each that were measured."""
    shared = {"BLOCK_N": 128, "stages": 2, "schedule": "dynamic"}
    two = {"consumers": 2, "pingpong": "off", "q_columns": 64, "rescale": "after_pv", "overlap": True}
    three = {"consumers": 3, "pingpong": "pair", "q_columns": 0, "rescale": "after_pv", "overlap": True}
    if causal:  # a tile of 192 rows and key blocks of 128 cannot overlap
        three |= {"rescale": "before_pv", "overlap": False}
    return {2: shared | two, 3: shared | three}


def measure(out: Path, rounds: int) -> None:
    import random

    import torch
    from attention_forward import Cell, Clocks, Graphed, versions

    import registry
    from registry.ops.attention.problem import AttentionProblem

    variant, target = registry.attention.variants["gluon_fa3"], registry.Target.of(torch.device("cuda", 0))
    clocks, records = Clocks(), []
    for causal in (False, True):
        for s in LENGTHS:
            cell = Cell("warp_groups", max(16384 // s, 1), 32, 32, s, 64, causal)
            problem = AttentionProblem.of_shape(target, b=cell.batch, hq=32, s=s, d=64, causal=causal)
            tensors = [torch.randn(cell.batch, 32, s, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            timed = {}
            for n, config in configs(causal).items():
                launch = variant.prepare(problem, config)
                timed[n] = Graphed(functools.partial(launch, *tensors, scale=0.125))
            record: dict[str, Any] = {"cell": dataclasses.asdict(cell), "groups": {n: [] for n in GROUPS}, "clocks": []}
            for _ in range(rounds):
                for n in random.sample(GROUPS, len(GROUPS)):
                    record["groups"][n].append(cell.flops / timed[n].sample() / 1e9)
                record["clocks"].append(clocks.read())
            records.append(record)
            print(
                f"{cell!s:28}",
                *(f"{n} groups: {statistics.median(t):.0f}" for n, t in record["groups"].items()),
                flush=True,
            )
    out.write_text(
        json.dumps(
            {
                "benchmark": "warp_groups",
                "versions": versions(),
                "configs": {str(causal): configs(causal) for causal in (False, True)},
                "cells": records,
            },
            indent=1,
        )
    )


def table(results: dict[str, Any]) -> str:
    lines = ["| mask | S | 2 groups | 3 groups | gain |", "|---|--:|--:|--:|--:|"]
    for r in results["cells"]:
        two, three = (statistics.median(r["groups"][str(n)]) for n in GROUPS)
        mask = "causal" if r["cell"]["causal"] else "full"
        lines.append(f"| {mask} | {r['cell']['seqlen']} | {two:.0f} | {three:.0f} | {three / two - 1:+.1%} |")
    return "\n".join(lines)


def plot(results: dict[str, Any], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, constrained_layout=True)
    for ax, causal in zip(axes, (False, True), strict=True):
        cells = [r for r in results["cells"] if r["cell"]["causal"] is causal]
        lengths = [r["cell"]["seqlen"] for r in cells]
        for n, color in zip(GROUPS, ("#7a8794", "#c2410c"), strict=True):
            samples = [r["groups"][str(n)] for r in cells]
            middle = [statistics.median(s) for s in samples]
            ax.plot(lengths, middle, "o-", color=color, markersize=4, label=f"{n} consumer warp groups ({64 * n} rows)")
            ax.fill_between(
                lengths, [min(s) for s in samples], [max(s) for s in samples], color=color, alpha=0.15, lw=0
            )
        ax.set_xscale("log", base=2)
        ax.set_xticks([1024, 2048, 4096, 8192, 16384], ["1k", "2k", "4k", "8k", "16k"])
        ax.set(title="causal" if causal else "full attention", xlabel="sequence length")
        ax.grid(alpha=0.25)
    axes[0].set(ylabel="TFLOPS", ylim=(0, None))
    axes[0].legend(frameon=False, loc="lower right", fontsize=8)
    v = results["versions"]
    figure.suptitle(
        f"gluon_fa3 forward, head dim 64, bf16, 16k tokens: {v['device']}, triton {v['triton']}", fontsize=10
    )
    figure.savefig(png, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = parser.add_subparsers(dest="command", required=True)
    measuring = sub.add_parser("measure")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("--rounds", type=int, default=7)
    plotting = sub.add_parser("plot")
    plotting.add_argument("results", type=Path)
    plotting.add_argument("--png", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.out, options.rounds)
        options.results = options.out
    results = json.loads(options.results.read_text())
    print(table(results))
    if options.command == "plot":
        plot(results, options.png)


if __name__ == "__main__":
    main()
