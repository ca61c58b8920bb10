"""Prompts over caches and pages beside FlashAttention-3: what the sweeps of shapes/prompts.txt say, for plots.py.

    FA3_LIBRARY=.../fa3.so FA3_CUDART=.../libcudart.so.12 \\
        kreg tune attention_varlen --graph --shapes benchmarks/shapes/prompts.txt --plugin benchmarks/peers.py \\
        --max-configs 6 --rounds 7 --out OUT/prompt_cells.jsonl
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from product_cells import dispatched, fastest, machine_of

from registry.tuning import journal
from registry.tuning.journal import Results

PEER, BEFORE = "peer.fa3_varlen", "triton_varlen*"


def prompt_cells(folder: Path) -> str:
    """Markdown: a table for each sweep."""
    sweeps = [journal.read(path) for path in sorted(folder.rglob("prompt_cells*.jsonl"))]
    return "\n\n".join("\n".join([machine_of(results), "", *_lines(results)]) for results in sweeps)


def _lines(results: Results) -> list[str]:
    """What is dispatched in each cell, over the peer and over the kernels that were there before."""
    lines = ["| batch | dispatched | us | over FlashAttention-3 | over triton_varlen |", "|---|---|--:|--:|--:|"]
    ratios: dict[str, list[tuple[float, float]]] = {"over caches and pages": [], "packed": []}
    for case in results.of("attention_varlen"):
        pick, peer, before = dispatched(results, case), fastest(case, PEER), fastest(case, BEFORE)
        if pick is None or peer is None or before is None:
            continue
        own = peer / pick.ms, before / pick.ms
        ratios["packed" if case.facts["kv_layout"] == "packed" else "over caches and pages"].append(own)
        lines.append(f"| `{case.text}` | `{pick.variant}` | {1000 * pick.ms:.0f} | {own[0]:.2f} | {own[1]:.2f} |")
    for kind, found in ratios.items():
        if found:
            means = " | ".join(_mean(one) for one in zip(*found, strict=True))
            lines.append(f"| geometric mean, {kind} ({len(found)}) | | | {means} |")
    return lines


def _mean(ratios: Sequence[float]) -> str:
    return f"**{statistics.geometric_mean(ratios):.3f}** (least {min(ratios):.2f})"
