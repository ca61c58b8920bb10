"""What torch's grouped kernel leaves to its caller, in small launches that read no offset on the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from registry.ops.grouped_mm.offsets import BAD_OFFSETS, BAD_ROWS, OFFSETS
from registry.toolbox.groups import complain_of_offsets, group_ends

BLOCK = 1024
_BAD_OFFSETS, _BAD_ROWS = tl.constexpr(BAD_OFFSETS), tl.constexpr(BAD_ROWS)


@triton.jit
def _in_order(offs_ptr, out_ptr, word_ptr, rows, groups, ENTRIES: tl.constexpr):
    at = tl.arange(0, ENTRIES)
    tl.store(out_ptr + at, group_ends(offs_ptr, rows, groups, ENTRIES), mask=at < groups)
    complain_of_offsets(word_ptr, _BAD_OFFSETS, offs_ptr, rows, groups, ENTRIES)


@triton.jit
def _within(rows_ptr, out_ptr, word_ptr, count, most, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(rows_ptr + at, mask=at < count, other=0)
    held = tl.minimum(tl.maximum(given, 0), most - 1)
    tl.store(out_ptr + at, held, mask=at < count)
    if tl.max((given != held).to(tl.int32), 0) != 0:
        tl.atomic_or(word_ptr, _BAD_ROWS)


@triton.jit
def _zero_behind(last_ptr, c_ptr, rows, columns, stride, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in range(tl.load(last_ptr) + tl.program_id(0), rows, tl.num_programs(0)):
        for first in range(0, columns, BLOCK):
            place = c_ptr + row.to(tl.int64) * stride + first + at
            tl.store(place, tl.zeros((BLOCK,), dtype=c_ptr.dtype.element_ty), mask=first + at < columns)


def in_order(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """Offsets that lie, put right: none beyond the rows, none before the one before it."""
    offs = offs.contiguous()
    found, groups = torch.empty_like(offs), offs.shape[0]
    entries = max(triton.next_power_of_2(groups), 16)
    _in_order[(1,)](offs, found, OFFSETS.word(offs.device), rows, groups, ENTRIES=entries, num_warps=4)
    return found


def within(rows: torch.Tensor, most: int) -> torch.Tensor:
    """Rows of a that are not there, put right."""
    rows = rows.contiguous()
    found, count = torch.empty_like(rows), rows.shape[0]
    _within[(triton.cdiv(count, BLOCK),)](rows, found, OFFSETS.word(rows.device), count, most, BLOCK=BLOCK)
    return found


def zero_behind(out: torch.Tensor, offs: torch.Tensor) -> None:
    """Zeros in the rows of a dense [T, N] behind the last group."""
    rows, columns = out.shape
    _zero_behind[(min(rows, 264),)](offs[-1:], out, rows, columns, out.stride(0), BLOCK=BLOCK)
