"""What calls and decisions cost, as tables for plots.py: of call_overhead.py, first_calls.py and new_shapes.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WARM_CALLS = (
    ("attention", "attention: registry, as dispatched", "attention: torch SDPA"),
    ("attention with gradients", "attention with grad: registry, as dispatched", "attention with grad: torch SDPA"),
    ("matmul", "matmul: registry, as dispatched", "matmul: torch"),
    ("attention, compiled", "attention: registry, compiled", "attention: torch SDPA, compiled"),
    ("matmul, compiled", "matmul: registry, compiled", "matmul: torch, compiled"),
)
"""What the overview shows of call_overhead.json: a name, our call, torch's."""
EARLY = 100
"""Decisions of a process after which what they share lies in its caches."""


BUILT = 4000.0
"""A first call that takes longer compiled a kernel, or had a library build one."""


def _records(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"*/{name}.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def _where(record: dict[str, Any]) -> str:
    where = record["machine"]
    return f"{where['device']} host, torch {where['torch']}, triton {where['triton']}, {where['date']}."


def warm_calls(folder: Path) -> str:
    """Markdown: what call_overhead.json has of calls as dispatched and of torch's own."""
    lines = ["| call | ours, us of CPU | torch's | ours over torch's in the same round |", "|---|--:|--:|--:|"]
    for record in _records(folder, "call_overhead"):
        found = record["figures"]
        for name, ours, theirs in WARM_CALLS:
            ratio = statistics.median(a / b for a, b in zip(found[ours], found[theirs], strict=True))
            medians = f"{statistics.median(found[ours]):.1f} | {statistics.median(found[theirs]):.1f}"
            lines.append(f"| {name} | {medians} | {ratio:.2f} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def call_overhead(folder: Path) -> str:
    """Markdown: microseconds of CPU time per call, the medians of call_overhead.json."""
    lines = []
    for record in _records(folder, "call_overhead"):
        lines += [_where(record), "", "| call | us |", "|---|--:|"]
        lines += [f"| {name} | {statistics.median(values):.1f} |" for name, values in record["figures"].items()]
    return "\n".join(lines)


def first_calls(folder: Path) -> str:
    """Markdown: microseconds of CPU time of whole calls of new shapes, of first_calls.json."""
    lines = []
    for record in _records(folder, "first_calls"):
        head = ("call", "shapes", "first call: median, 95th percentile", "over 4 ms", "second call")
        lines += [_where(record), "", "| " + " | ".join(head) + " |", "|---|--:|--:|--:|--:|"]
        for name, pairs in record["figures"].items():
            firsts, seconds = (sorted(taken) for taken in zip(*pairs, strict=True))
            built = sum(first > BUILT for first in firsts)
            spread = f"{statistics.median(firsts):.0f}, {firsts[int(len(firsts) * 0.95)]:.0f}"
            lines.append(f"| {name} | {len(pairs)} | {spread} | {built} | {statistics.median(seconds):.0f} |")
    return "\n".join(lines)


def new_shapes(folder: Path) -> str:
    """Markdown: microseconds of CPU time per decision, of new_shapes.json."""
    lines = []
    for record in _records(folder, "new_shapes"):
        lines += [f"{_where(record)} `{record['draw']}`: median, mean, 95th percentile.", ""]
        lines += [f"| op | the first | 2nd to {EARLY}th | later |", "|---|--:|--:|--:|"]
        for op, taken in record["figures"].items():
            early, later = taken[1:EARLY], taken[EARLY:]
            lines.append(f"| {op} | {taken[0] / 1e6:.2f} s | {_spread(early)} | {_spread(later)} |")
        lines.append("")
    return "\n".join(lines[:-1])


def new_calls(folder: Path) -> str:
    """Markdown: microseconds of CPU time per call up to its launch, of new_shapes.json; the first hundred left out."""
    records = [record for record in _records(folder, "new_shapes") if "calls" in record]
    lines = [_where(record) for record in records]
    lines += ["", "| calls | " + " | ".join(record["machine"]["device"] for record in records) + " |"]
    lines.append("|---|" + "---|" * len(records))
    for kind in records[0]["calls"] if records else ():
        lines.append(f"| {kind} | " + " | ".join(_spread(record["calls"][kind][EARLY:]) for record in records) + " |")
    return "\n".join(lines) if records else ""


def _spread(taken: Sequence[float]) -> str:
    late = sorted(taken)[int(len(taken) * 0.95)]
    return ", ".join(f"{x:.0f}" for x in (statistics.median(taken), statistics.mean(taken), late))
