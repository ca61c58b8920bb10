"""What every kernel of attention says the same way on its host side: operands and outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

from registry.ops.attention.outputs import out_geometry
from registry.ops.attention.problem import AttentionBackwardProblem, AttentionProblem
from registry.ops.op import problem_of_call
from registry.toolbox.call import Interface, Operands
from registry.toolbox.launch import StandIn


def dense_like(operand: StandIn, name: str, columns: int | None = None) -> StandIn:
    """An output of this name: dense, in the memory order of `operand`."""
    columns = operand.shape[3] if columns is None else columns
    shape, strides = out_geometry(operand.shape, operand.stride(), columns)
    return StandIn(shape, operand.dtype, strides, name=name)


def out_of(given: Operands) -> StandIn:
    """The output of attention."""
    return dense_like(given["q"], "out", given["v"].shape[3])


def row_sums(q: StandIn, name: str) -> StandIn:
    """float32 [B, H, S]: an LSE, or what else there is one of for each row."""
    return StandIn(q.shape[:3], "float32", name=name)


def tensor_map(operand: StandIn, rows: int, columns: int) -> Any:
    """[batch, head, row, column], in boxes of so many rows and columns. A dimension of one element may carry any stride
    in torch; the map needs a multiple of 16 bytes."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from registry.toolbox.hopper import swizzled

    legal = -(-operand.shape[3] // 8) * 8
    outer = zip(operand.shape[:3], operand.strides[:3], strict=True)
    strides = [legal if size == 1 else stride for size, stride in outer]
    block = [1, 1, rows, columns]
    return TensorDescriptor(operand, list(operand.shape), [*strides, 1], block, swizzled(block, operand.dtype))


def _forward_operands(problem: AttentionProblem) -> dict[str, StandIn]:
    return {fact.name: StandIn.of(fact) for fact in problem.operands}


def _backward_operands(problem: AttentionBackwardProblem) -> dict[str, StandIn]:
    found = _forward_operands(problem)
    found = {"out": out_of(found), "grad_out": dense_like(found["q"], "grad_out", found["v"].shape[3])} | found
    found["lse"] = row_sums(found["q"], "lse")
    if problem.grad_lse:
        found["grad_lse"] = row_sums(found["q"], "grad_lse")
    return found


FORWARD = Interface(
    tensors=("q", "k", "v"),
    results=("out", "lse"),
    scale=True,
    operands=_forward_operands,
    problem_of=partial(problem_of_call, "attention"),
)
BACKWARD = Interface(
    tensors=("grad_out", "q", "k", "v", "out", "lse"),
    optional=("grad_lse",),
    results=("dq", "dk", "dv"),
    scale=True,
    operands=_backward_operands,
    problem_of=partial(problem_of_call, "attention_backward"),
)
