"""Outputs of attention as every variant allocates them: dense, in the memory order of q."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from registry.ops.attention.problem import AttentionProblem
from registry.toolbox.outputs import allocator


def out_geometry(
    shape: Sequence[int], strides: Sequence[int], head_dim_v: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, strides) of the output for a q of these: [B, H, S, Dv], dense, in the memory order of q."""
    b, h, s, _ = shape
    bshd = strides[1] < strides[2]
    row, head = (h * head_dim_v, head_dim_v) if bshd else (head_dim_v, s * head_dim_v)
    return (b, h, s, head_dim_v), (h * s * head_dim_v, head, row, 1)


def new_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An uninitialised output, as every variant allocates it."""
    return q.new_empty_strided(*out_geometry(q.shape, q.stride(), v.shape[3]))


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """An uninitialised float32 LSE [B, H, S]."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)


Allocate = Callable[[torch.Tensor], torch.Tensor]


def out_allocator(problem: AttentionProblem) -> Allocate:
    """`new_out` for a bound launch: `new_out = out_allocator(problem)` in `prepare`, `out = new_out(q)` per call."""
    return _allocator_like(problem, 0, problem.head_dim_v)


def lse_allocator(problem: AttentionProblem) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """`new_lse` for a bound launch, or None per call where the problem asks for no LSE."""
    if not problem.lse:
        return lambda q: None
    return allocator((problem.batch, problem.heads_q, problem.seqlen_q), torch.float32)


def grad_allocators(problem: AttentionProblem) -> tuple[Allocate, Allocate, Allocate]:
    """The same for the gradients of q, k and v: dense, in the memory order of what they are gradients of."""
    d = problem.head_dim
    return tuple(_allocator_like(problem, number, size) for number, size in enumerate((d, d, problem.head_dim_v)))  # type: ignore[return-value]


def _allocator_like(problem: AttentionProblem, number: int, head_dim: int) -> Allocate:
    fact = problem.operands[number]
    shape, strides = out_geometry(fact.shape, fact.strides, head_dim)
    return allocator(shape, getattr(torch, problem.dtype), strides)
