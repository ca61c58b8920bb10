"""What every kernel of a product says the same way on its host side: operands, output, memory facts for TMA."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from registry.contract.capability import Reason
from registry.ops.matmul.problem import MatmulProblem
from registry.ops.op import problem_of_call
from registry.toolbox.call import Interface, Operands
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import strides_of, tma_can_store, tma_geometry, turned

__all__ = [
    "MATMUL",
    "int32_reasons",
    "out_of",
    "scale_strides",
    "sizes_of",
    "strides_of",
    "tma_can_store",
    "tma_geometry",
    "turned",
]


def _operands(problem: MatmulProblem) -> dict[str, StandIn]:
    found = {fact.name: StandIn.of(fact) for fact in problem.operands}
    if problem.bias:
        found["bias"] = StandIn((problem.n,), problem.out_dtype, name="bias")
    if problem.scaling:
        for name, size in (("scale_a", problem.m), ("scale_b", problem.n)):
            found[name] = StandIn((size,) if problem.scaling == "rowwise" else (), "float32", name=name)
    return found


MATMUL = Interface(
    tensors=("a", "b"),
    optional=("bias", "scale_a", "scale_b", "out"),
    ignored=("out_dtype",),
    results=("out",),
    operands=_operands,
    problem_of=partial(problem_of_call, "matmul"),
    late=lambda problem: problem.bias or problem.scaling or problem.out,
)


VECTORS = ("bias", "scale_a", "scale_b")
"""What kernels want dense: an index times a stride beyond 32 bits is none of their business."""


def out_of(problem: MatmulProblem, given: Operands) -> StandIn:
    """The output: the one that was given, or a dense one."""
    dense = StandIn((*given["a"].shape[:-1], problem.n), problem.out_dtype, name="out")
    return given.get("out", dense)


def sizes_of(given: Operands) -> tuple[int, int, int, int]:
    """(m, n, k, batch)."""
    a, b = given["a"], given["b"]
    return a.shape[-2], b.shape[-1], a.shape[-1], a.shape[0] if len(a.shape) == 3 else 1


def scale_strides(given: Operands) -> tuple[int, int]:
    """From one row of a to the next, and from one column of b; 0 where one scale is for all."""
    a, b = ((0, *given[name].strides)[-1] if name in given else 0 for name in ("scale_a", "scale_b"))
    return a, b


def int32_reasons(problem: MatmulProblem) -> Iterable[Reason]:
    """For kernels that give int32 for int8 alone, and have no floating epilogue for it."""
    if problem.out_dtype != "int32":
        return
    if problem.dtype != "int8":
        yield Reason("out_dtype", "out_dtype", "int32", "int8 operands", "out_dtype=torch.float32")
    elif problem.scaling or problem.activation not in ("", "relu"):
        allowed = "a floating dtype with this epilogue"
        yield Reason("out_dtype", "out_dtype", "int32", allowed, "out_dtype=torch.bfloat16")
