"""What `registry.try_out` finds on drawn shapes, beside what the tables pick there:

    python benchmarks/try_out.py OUT OP SEED COUNT [MOST]

Writes OUT/try_out_SEED_OP.json: of each shape both picks, what was timed, and how long the first call took, kernels
compiled ahead by `registry.warm`. A sweep of the same shapes (benchmarks/judge.py) judges both: `make plots` holds one
against the other, by the sweep's times. It should measure 8 configs of a variant, which is as far as is tried.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import registry
from registry.contract.target import Target
from registry.dispatch.decision import Decision
from registry.dispatch.scope import EMPTY
from registry.dispatch.select import decide
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.ops.parts.workload import workload
from registry.trying import MOST, TryOuts
from registry.tuning.grids import random_grid
from registry.tuning.machine import describe


def main(out: Path, op: str, seed: int, count: int, most: int = MOST) -> None:
    """Try out so many drawn shapes, one after the other."""
    cases = random_grid(op, f"random:{seed}:{count}")
    with registry.try_out(most) as found:
        registry.warm(cases, launch=False, jobs=max(1, (os.cpu_count() or 2) - 2))
        rows = [tried(case, found) for case in cases]
    machine = describe(Target.of(torch.device("cuda", 0)))
    data = {"op": op, "seed": seed, "most": most, "machine": machine, "shapes": rows}
    (out / f"try_out_{seed}_{op}.json").write_text(json.dumps(data, separators=(",", ":")), encoding="utf-8")


def tried(case: Case, found: TryOuts) -> dict[str, Any]:
    """One first call."""
    inputs = workload(case, "cuda")
    with inputs.settings(), torch.no_grad():
        problem = inputs.problem()
        before, known, seconds = decide(problem, EMPTY), len(found.found), found.seconds
        op_named(case.op)(**inputs.front_door())  # type: ignore[operator]
        timed = [[one.variant, one.config, one.ms] for one in found.found[-1].timed] if found.found[known:] else []
        return {
            "text": case.text,
            "tables": pick(before),
            "tried": pick(decide(problem, EMPTY)),
            "timed": timed,
            "seconds": round(found.seconds - seconds, 4),
        }


def pick(decision: Decision) -> list[Any]:
    return [decision.variant, dict(decision.config)]


if __name__ == "__main__":
    folder, op, *numbers = sys.argv[1:]
    main(Path(folder), op, *map(int, numbers))
