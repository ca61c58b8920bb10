"""Where the operands of a made-up call over sequences lie, and what is in memory there: pages, strides, slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from registry.ops.parts.kit import UNIT_BYTES
from registry.ops.parts.memory import dense_strides


def scale_strides(style: str, shape: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Of one scale a head, or one a token and head: slices of wider ones, those of k in the order of heads; or one for
    all heads, expanded. (Of scales of v other ones than of k.)"""
    if style == "expanded":
        return (*dense_strides(shape[:-1]), 0)
    if style == "strided" and name == "k_scale" and len(shape) > 1:
        last = len(shape) - 1
        return dense_strides(shape, (last - 1, last, *range(last - 2, -1, -1)))
    apart = (2 if name == "k_scale" else 3) if style == "strided" else 1
    return tuple(apart * stride for stride in dense_strides(shape))


def table(keys: Sequence[int], page: int, seed: int) -> tuple[torch.Tensor, int]:
    """A block table over pages in no order, -1 where a sequence needs none; and how many pages there are.

    Sequences of more than a page begin with the same one, as prompts do that share a prefix. The shape does not depend
    on the order of the sequences."""
    needed = [-(-n // page) for n in keys]
    pages = sum(needed) + 3
    found = torch.full((len(keys), max(needed) + 1), -1)
    free = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    for b, count in enumerate(needed):
        found[b, :count] = torch.tensor(free[:count], dtype=torch.int64)
        free = free[count:]
    several = torch.tensor(needed) > 1
    found[several, 0] = found[several, 0][:1]
    return found, pages


def slots(k: torch.Tensor, given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Where keys are, as indices of the leading dimensions of k."""
    if given["cu_seqlens_k"] is not None:
        return (torch.arange(k.shape[0], device=k.device),)
    lengths, table = given["seqused_k"].tolist(), given["block_table"]
    b = torch.tensor([b for b, n in enumerate(lengths) for _ in range(n)], dtype=torch.int64, device=k.device)
    at = torch.tensor([i for n in lengths for i in range(n)], dtype=torch.int64, device=k.device)
    return (b, at) if table is None else (table[b, at // k.shape[1]].long(), at % k.shape[1])


def strides(style: str, shape: tuple[int, ...], dtype: torch.dtype, of_v: bool) -> tuple[int, ...]:
    """Strides of [..., H, D] in one of the memory styles. Those of v are other ones than those of k."""
    unit = UNIT_BYTES // dtype.itemsize
    if style == "rows":
        widened = (*shape[:-1], -(-shape[-1] // unit) * unit + unit * (1 + of_v))
        return dense_strides(widened)
    if style == "odd":
        return dense_strides((*shape[:-1], shape[-1] + 1 + 2 * of_v))
    if style == "inner":
        return tuple(2 * stride for stride in dense_strides(shape))
    if style == "turned":  # [..., H, rows, D] in memory
        last = len(shape) - 1
        return dense_strides(shape, (last, last - 2, last - 1, *range(last - 3, -1, -1)))
    if style == "planes" and len(shape) > 3:  # k and v in one allocation, [.., 2, rows, H, D]
        return (2 * dense_strides(shape)[0], *dense_strides(shape)[1:])
    return dense_strides(shape)
