"""What every kernel of a product says the same way on its host side: operands, output, memory facts for TMA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from registry.contract.capability import Reason
from registry.ops.matmul.problem import MatmulProblem
from registry.toolbox.call import Interface, Operands
from registry.toolbox.launch import StandIn


def _operands(problem: MatmulProblem) -> dict[str, StandIn]:
    found = {fact.name: StandIn.of(fact) for fact in problem.operands}
    if problem.bias:
        found["bias"] = StandIn((problem.n,), problem.out_dtype, name="bias")
    if problem.scaling:
        for name, size in (("scale_a", problem.m), ("scale_b", problem.n)):
            found[name] = StandIn((size,) if problem.scaling == "rowwise" else (), "float32", name=name)
    return found


def _problem_of(*tensors: torch.Tensor, **given: Any) -> Any:
    from registry.ops.matmul import matmul

    return matmul.problem_of(*tensors, **given)[0]


MATMUL = Interface(
    tensors=("a", "b"),
    optional=("bias", "scale_a", "scale_b", "out"),
    ignored=("out_dtype",),
    results=("out",),
    operands=_operands,
    problem_of=_problem_of,
    late=lambda problem: problem.bias or problem.scaling or problem.out,
)


def out_of(problem: MatmulProblem, given: Operands) -> StandIn:
    """The output: the one that was given, or a dense one."""
    dense = StandIn((*given["a"].shape[:-1], problem.n), problem.out_dtype, name="out")
    return given.get("out", dense)


def sizes_of(given: Operands) -> tuple[int, int, int, int]:
    """(m, n, k, batch)."""
    a, b = given["a"], given["b"]
    return a.shape[-2], b.shape[-1], a.shape[-1], a.shape[0] if len(a.shape) == 3 else 1


def strides_of(operand: StandIn) -> tuple[int, int, int]:
    """Of batch, row and column; a matrix is its own batch."""
    z, row, column = (0, *operand.strides)[-3:]
    return z, row, column


def scale_strides(given: Operands) -> tuple[int, int]:
    """From one row of a to the next, and from one column of b; 0 where one scale is for all."""
    a, b = ((0, *given[name].strides)[-1] if name in given else 0 for name in ("scale_a", "scale_b"))
    return a, b


def turned(operand: Any) -> bool:
    """Whether an operand is contiguous along its second-last dimension rather than its last."""
    return bool(operand.shape[-1] != 1 and operand.strides[-1] != 1)


def tma_geometry(operand: StandIn) -> tuple[list[int], list[int]]:
    """Shape and strides [batch, rows, columns] for a tensor map: columns contiguous, one entry of a broadcast batch.
    Strides of extents of 1 are free."""
    z, outer, inner = strides_of(operand)
    rows, columns = operand.shape[-2:]
    if turned(operand):
        rows, columns, outer = columns, rows, inner
    unit = 16 // operand.dtype.itemsize
    outer = outer if rows > 1 else -(-columns // unit) * unit
    entries = operand.shape[0] if len(operand.shape) == 3 and z else 1
    z = z if entries > 1 else -(-rows * outer // unit) * unit
    return [entries, rows, columns], [z, outer, 1]


def tma_can_store(out: StandIn) -> bool:
    """Unit inner stride, everything else a multiple of 16 bytes, the row too: TMA stores whole units of 16 bytes, so a
    row that ends inside one would be written past its end."""
    size = out.dtype.itemsize
    if out.strides[-1] != 1 or out.alignment % 16 or out.shape[-1] * size % 16:
        return False
    outer = zip(out.shape[:-1], out.strides[:-1], strict=True)
    return all(extent == 1 or stride * size % 16 == 0 for extent, stride in outer)


def int32_reasons(problem: MatmulProblem) -> Iterable[Reason]:
    """For kernels that give int32 for int8 alone, and have no floating epilogue for it."""
    if problem.out_dtype != "int32":
        return
    if problem.dtype != "int8":
        yield Reason("out_dtype", "out_dtype", "int32", "int8 operands", "out_dtype=torch.float32")
    elif problem.scaling or problem.activation not in ("", "relu"):
        allowed = "a floating dtype with this epilogue"
        yield Reason("out_dtype", "out_dtype", "int32", allowed, "out_dtype=torch.bfloat16")
