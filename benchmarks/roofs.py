"""How far the fastest kernel of each product of a journal is from what the card allows:

    python benchmarks/roofs.py benchmarks/results/h200/matmul.jsonl

The roof is the longer of what the card's memory and its matrix units take at the best that was measured of them (in the
journal). Single products of 16 bits, of two rows and columns or more, that move 32 MB and more, so that a launch is
little beside them.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from registry.contract.target import Target
from registry.ops.known import op_named
from registry.tuning import journal
from registry.tuning.fit import problem_of, target_of
from registry.tuning.journal import CaseResults

LEAST = 32e6
"""Bytes that a product moves, at least."""
DTYPES = ("float16", "bfloat16")


def over_roof(
    case: CaseResults, target: Target, limits: Mapping[str, Any]
) -> tuple[tuple[str, str, str], float] | None:
    """(whether 16 bytes divide rows, what bounds it, its layout), and how many times the roof the fastest takes."""
    problem = problem_of(case, target)
    moved = op_named(case.op).bytes_moved(problem)
    took = [one.ms for one in case.timed.values() if not one.variant.startswith("peer.")]
    if problem.dtype not in DTYPES or problem.batch > 1 or moved < LEAST or not took or min(problem.m, problem.n) == 1:
        return None
    memory, units = moved / limits["gbs"] / 1e6, case.flops / limits["tflops"][problem.dtype] / 1e9
    whole = all(one.stride_alignment >= 16 for one in problem.operands)
    kind = "divided by 16 bytes" if whole else "not divided", "memory" if memory > units else "matrix units"
    return (*kind, problem.layout), min(took) / max(memory, units)


def main(path: Path) -> None:
    results, found = journal.read(path), defaultdict(list)
    for case in results.of("matmul"):
        if one := over_roof(case, target_of(results.machine), results.limits):
            found[one[0]].append(one[1])
    print(
        "| rows | bound by | layout | products | fastest over the roof | 95th percentile |\n|---|---|---|--:|--:|--:|"
    )
    for kind, times in sorted(found.items()):
        if len(times) >= 20:
            middle, slow = statistics.geometric_mean(times), sorted(times)[int(0.95 * len(times))]
            print(f"| {' | '.join(kind)} | {len(times):,} | {middle:.2f} | {slow:.1f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
