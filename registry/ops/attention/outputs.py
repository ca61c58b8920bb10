"""Outputs of attention as every variant allocates them: dense, in the memory order of q."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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


def in_the_order_of(result: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The result with the strides of such an output; differentiable, and for graphs, in which nothing is written to."""
    _, strides = out_geometry(q.shape, q.stride(), result.shape[3])
    if result.stride() == strides:
        return result
    order = sorted(range(4), key=lambda dim: -strides[dim])
    return result.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """An uninitialised float32 LSE [B, H, S]."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)
