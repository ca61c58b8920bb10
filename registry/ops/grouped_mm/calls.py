"""What every kernel of a grouped product says the same way on its host side: operands, output, strides."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from registry.contract.capability import Reason
from registry.ops.grouped_mm.problem import GroupedMmProblem
from registry.ops.op import problem_of_call
from registry.toolbox.call import Interface, Operands
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import turned

VECTORS = ("offs", "rows", "bias", "scale_a", "scale_b")
"""Small operands that a kernel may want dense."""


def _operands(problem: GroupedMmProblem) -> dict[str, StandIn]:
    found = {fact.name: StandIn.of(fact) for fact in problem.operands}
    groups, wide = problem.groups, found["b"].shape[-1]
    if problem.form != "batch":
        found["offs"] = StandIn((groups,), "int32", name="offs")
    if problem.gather:
        found["rows"] = StandIn((problem.m,), "int32", name="rows")
    if problem.bias:
        found["bias"] = StandIn((groups, wide), problem.out_dtype, name="bias")
    if problem.scaling:
        found["scale_a"] = StandIn(found["a"].shape[:-1], "float32", name="scale_a")
        found["scale_b"] = StandIn((groups, wide), "float32", name="scale_b")
    return found


GROUPED_MM = Interface(
    tensors=("a", "b"),
    optional=(*VECTORS, "out"),
    ignored=("out_dtype",),
    results=("out",),
    operands=_operands,
    problem_of=partial(problem_of_call, "grouped_mm"),
    late=lambda problem: True,  # alignment of offsets, dtype of rows
)


def out_of(problem: GroupedMmProblem, given: Operands) -> StandIn:
    """The output: the one that was given, or a dense one."""
    shape, _ = problem.result_shapes()["out"]
    return given.get("out", StandIn(shape, problem.out_dtype, name="out"))


def halves_reasons(problem: GroupedMmProblem) -> Iterable[Reason]:
    """For kernels that read what a gate multiplies by TMA: where it lies along rows of b, a box has to begin at a
    multiple of 16 bytes. On an H200 others ended in an illegal instruction."""
    b = _operands(problem)["b"]
    if problem.gated and not turned(b) and problem.n * b.dtype.itemsize % 16:
        unit = 16 // b.dtype.itemsize
        allowed = f"a multiple of {unit}, where columns of b are contiguous and gated"
        yield Reason("n", "n", problem.n, allowed, "store b as [groups, 2 n, k] and pass b.mT", "b")
