"""What another Triton makes of the kernels that dispatch picks, without a GPU:

    python tools/tritons.py                      # the Triton that is installed
    PYTHONPATH=FOLDER python tools/tritons.py    # another: pip install --no-deps --target FOLDER triton==3.8.0

For each variant up to seven kernels with other configs or dtypes, of random shapes on an H100, are compiled. Printed is
a row a kernel that has something to tell: how many do not compile, have wgmma serialised, spill inside of loops that
multiply, or take more shared memory than the variant declares. What is measured is measured with Triton 3.6; this says
where another one cannot be as fast, and not how fast it is.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Iterator
from typing import Any

import triton

import registry
from registry.contract.target import Target
from registry.ops.known import all_ops, op_named
from registry.toolbox.builds import compile_build, inspect, loop_spills
from registry.tuning.grids import grid

SEED, SHAPES, EACH = 5, 200, 7
DRAWS = ("random", "prompts", "cached", "float8", "int8", "float32", "batched")
"""Those of them that an op has."""
SERIALISED = ("C7510", "C7515")
"""What ptxas says where products wait one for another."""


def picked(target: Target) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """(variant, problem, config) as dispatch would launch them, few of each variant."""
    variants = registry.variants()
    seen: dict[str, set[Any]] = collections.defaultdict(set)
    for op in all_ops():
        draws = [name for name in DRAWS if name == "random" or name in op_named(op).tuning.draws]
        for case in (case for draw in draws for case in grid(op, f"{draw}:{SEED}:{SHAPES}")):
            problem = case.problem(target)
            decision = op_named(op).explain(problem)
            known = seen[decision.variant]
            kind = json.dumps(decision.config, sort_keys=True), problem.dtype
            if variants[decision.variant].builds is not None and kind not in known and len(known) < EACH:
                known.add(kind)
                yield variants[decision.variant], problem, decision.config


def findings(variant: Any, problem: Any, config: dict[str, Any], build: Any) -> Iterator[str]:
    try:
        found = inspect(compile_build(build, problem.target))
    except Exception as error:  # whatever a compiler raises is what is asked for here
        print(f"{variant.name} {build.name} {config}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        yield "does not compile"
        return
    if any(code in line for line in found.ptxas_warnings for code in SERIALISED):
        yield "serialised"
    if found.spills and loop_spills(found.sass):
        yield "spills in a loop"
    declared = variant.requires.shared_memory
    if declared is not None and found.shared > declared(problem, config):
        yield "more shared memory"


def main() -> None:
    counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for variant, problem, config in picked(Target.named("H100")):
        for build in variant.builds(problem, config):
            row = counts[variant.name, build.name]
            row["kernels"] += 1
            row.update(findings(variant, problem, config, build))
    print(f"Triton {triton.__version__}: {sum(row['kernels'] for row in counts.values())} kernels")
    for (variant_name, kernel), row in counts.items():
        told = ", ".join(f"{what} {count}" for what, count in row.items() if what != "kernels")
        if told:
            print(f"{variant_name} {kernel}, of {row['kernels']}: {told}")


if __name__ == "__main__":
    main()
