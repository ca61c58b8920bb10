"""What torch's grouped kernel leaves to its caller, in two small launches that read no offset on the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from registry.toolbox.groups import group_ends

COLUMNS = 1024


@triton.jit
def _in_order(offs_ptr, out_ptr, rows, groups, ENTRIES: tl.constexpr):
    at = tl.arange(0, ENTRIES)
    tl.store(out_ptr + at, group_ends(offs_ptr, rows, groups, ENTRIES), mask=at < groups)


@triton.jit
def _zero_behind(last_ptr, c_ptr, rows, columns, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in range(tl.load(last_ptr) + tl.program_id(0), rows, tl.num_programs(0)):
        for first in range(0, columns, BLOCK):
            place = c_ptr + row.to(tl.int64) * stride + first + at
            tl.store(place, tl.zeros((BLOCK,), dtype=c_ptr.dtype.element_ty), mask=first + at < columns)


def in_order(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """Offsets that lie, put right: none beyond the rows, none before the one before it."""
    found, groups = offs.new_empty(offs.shape[0]), offs.shape[0]
    entries = max(triton.next_power_of_2(groups), 16)
    _in_order[(1,)](offs.contiguous(), found, rows, groups, ENTRIES=entries, num_warps=4)
    return found


def zero_behind(out: torch.Tensor, offs: torch.Tensor) -> None:
    """Zeros in the rows of a dense [T, N] behind the last group."""
    rows, columns = out.shape
    _zero_behind[(min(rows, 264),)](offs[-1:], out, rows, columns, out.stride(0), BLOCK=COLUMNS)
