"""Rows behind the only group, in one small launch that reads where it ends on the device."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from registry.ops.grouped_mm.offsets import BAD_OFFSETS, OFFSETS
from registry.toolbox.groups import complain_of_offsets

BLOCK = 1024
PROGRAMS = 264
_BAD_OFFSETS = tl.constexpr(BAD_OFFSETS)


@triton.jit
def _zero_behind(end_ptr, c_ptr, word_ptr, rows, columns, stride, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    if first == 0:
        complain_of_offsets(word_ptr, _BAD_OFFSETS, end_ptr, rows, 1, 16)
    at = tl.arange(0, BLOCK)
    end = tl.load(end_ptr)
    for row in range(first, rows, tl.num_programs(0)):
        if row >= end:
            for column in range(0, columns, BLOCK):
                place = c_ptr + tl.cast(row, tl.int64) * stride + column + at
                tl.store(place, tl.zeros((BLOCK,), dtype=c_ptr.dtype.element_ty), mask=column + at < columns)


def zero_behind(out: torch.Tensor, offs: torch.Tensor) -> None:
    """Zeros in the rows of a dense [T, N] behind the end of its group; a complaint where that lies."""
    rows, columns = out.shape
    word = OFFSETS.word(out.device)
    _zero_behind[(min(rows, PROGRAMS),)](offs, out, word, rows, columns, out.stride(0), BLOCK=BLOCK)
