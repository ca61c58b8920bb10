"""CPU time of decisions for shapes that a process has not met, in microseconds: what who serves pays at each.

    python benchmarks/new_shapes.py [--output DIR] [--draw random:555001:500]

Each op that draws such shapes in a process of its own, each shape decided once, as on an H200: what is said of a
shape, who may run, in which config; no checks of tensors and no launch. The first decision reads plugins and tables.
Lengths in series go ways that the processor knows, and take less than this: tests hold those
(test_dispatch_overhead.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path


def drawing(kind: str) -> list[str]:
    """The ops that draw shapes of this kind."""
    from registry.ops.known import all_ops

    return [name for name, op in all_ops().items() if kind in op.tuning.draws]


def decided(op: str, draw: str) -> list[float]:
    """What each shape took, in their order."""
    from registry import Target
    from registry.dispatch.scope import EMPTY
    from registry.ops.known import op_named
    from registry.tuning.grids import grid

    asked, found = op_named(op), []
    for problem in [case.problem(Target.named("H200")) for case in grid(op, draw)]:
        begun = time.thread_time()
        asked._plan(problem, EMPTY, False)
        found.append(round((time.thread_time() - begun) * 1e6, 1))
    return found


def in_its_own_process(op: str, draw: str) -> list[float]:
    one = [sys.executable, __file__, "--op", op, "--draw", draw]
    found: list[float] = json.loads(subprocess.run(one, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the raw figures")
    parser.add_argument("--draw", default="random:555001:500", help="the shapes of each op, by a grid's name")
    parser.add_argument("--op", help=argparse.SUPPRESS)  # in this process, and nothing else
    options = parser.parse_args()
    if options.op:
        print(json.dumps(decided(options.op, options.draw)))
        return
    figures = {op: in_its_own_process(op, options.draw) for op in drawing(options.draw.partition(":")[0])}
    for op, (first, *others) in figures.items():
        others.sort()
        median, late = others[len(others) // 2], others[int(len(others) * 0.95)]
        print(f"{op:20} first {first / 1e6:.2f} s, then {median:.0f} us, 95th percentile {late:.0f}")
    if options.output:
        import torch

        from registry import Target
        from registry.tuning import machine

        options.output.mkdir(parents=True, exist_ok=True)
        record = {
            "unit": "microseconds of CPU time per decision, each shape once",
            "draw": options.draw,
            "machine": machine.describe(Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))),
            "figures": figures,
        }
        (options.output / "new_shapes.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
