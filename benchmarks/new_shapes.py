"""CPU time of decisions for shapes that a process has not met, in microseconds: what who serves pays at each.

    python benchmarks/new_shapes.py [--output DIR] [--draw random:555001:500] [--processes 1]

Each op that draws such shapes in a process of its own, each shape decided once, as on an H200: what is said of a
shape, who may run, in which config; no checks of tensors and no launch. Then calls up to their launch (new_calls.py).
The first decision reads plugins and tables. Where cores are shared, of so many processes that of the least median
counts. Lengths in series go ways that the processor knows, and take less than this: tests hold those
(test_dispatch_overhead.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from new_calls import CALLS_OF, called


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


def in_its_own_process(name: str, draw: str, processes: int) -> list[float]:
    """Of an op's decisions or a kind of calls; of the quickest of so many."""
    one = [sys.executable, __file__, "--one", name, "--draw", draw]
    runs = (subprocess.run(one, check=True, capture_output=True, text=True).stdout for _ in range(processes))
    return min(map(json.loads, runs), key=statistics.median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for the raw figures")
    parser.add_argument("--draw", default="random:555001:500", help="the shapes of each op, by a grid's name")
    parser.add_argument("--processes", type=int, default=1, help="of each, of which the quickest counts")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # in this process, and nothing else
    options = parser.parse_args()
    if options.one:
        print(json.dumps(called(options.one) if options.one in CALLS_OF else decided(options.one, options.draw)))
        return
    found: dict[str, list[float]] = {}
    for name in (*drawing(options.draw.partition(":")[0]), *CALLS_OF):
        first, *others = found[name] = in_its_own_process(name, options.draw, options.processes)
        others.sort()
        median, late = others[len(others) // 2], others[int(len(others) * 0.95)]
        print(f"{name:45} first {first / 1e6:.2f} s, then {median:.0f} us, 95th percentile {late:.0f}", flush=True)
    if options.output:
        import torch

        from registry import Target
        from registry.tuning import machine

        options.output.mkdir(parents=True, exist_ok=True)
        record = {
            "unit": "microseconds of CPU time per decision, or per call up to its launch, each shape once",
            "draw": options.draw,
            "machine": machine.describe(Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))),
            "processes": options.processes,
            "figures": {name: taken for name, taken in found.items() if name not in CALLS_OF},
            "calls": {name: found[name] for name in CALLS_OF},
        }
        (options.output / "new_shapes.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
