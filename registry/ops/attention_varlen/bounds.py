"""The kernel that holds lengths and page numbers to their bounds, for variants whose own kernels do not.

It writes copies that are within bounds whatever was given, and complains of what was not (lengths.py). It is one launch
of a few blocks, which a step's layers share if they share a schedule.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from registry.ops.attention_varlen import lengths

BLOCK = 1024
ALIGNED = 4
"""Numbers in 16 bytes."""

_BAD_Q, _BAD_K = tl.constexpr(lengths.BAD_CU_SEQLENS_Q), tl.constexpr(lengths.BAD_CU_SEQLENS_K)
_BAD_USED, _BAD_TABLE = tl.constexpr(lengths.BAD_SEQUSED_K), tl.constexpr(lengths.BAD_TABLE)
_ABOVE_Q, _ABOVE_K = tl.constexpr(lengths.ABOVE_MAX_Q), tl.constexpr(lengths.ABOVE_MAX_K)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _hold_rising(cu_seqlens, held, batch, rows, longest, BAD: tl.constexpr, ABOVE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy where sequences begin so that it rises within 0 and `rows`; the bits of what was wrong with it."""
    wrong, reached = 0, 0
    for start in range(0, batch + 1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at <= batch
        given = tl.load(cu_seqlens + at, mask=inside, other=0)
        before = tl.load(cu_seqlens + at - 1, mask=inside & (at > 0), other=0)
        bounded = tl.minimum(tl.maximum(given, 0), rows)
        risen = tl.maximum(tl.associative_scan(bounded, 0, _larger), reached)
        tl.store(held + at, risen, mask=inside)
        reached = tl.maximum(reached, tl.max(bounded, 0))
        off = ((at == 0) & (given != 0)) | ((at == batch) & (given != rows)) | (given < before) | (given != risen)
        wrong |= tl.max(tl.where(inside & off, BAD, 0), 0)
        wrong |= tl.max(tl.where(inside & (at > 0) & (given - before > longest), ABOVE, 0), 0)
    return wrong


@triton.jit
def _hold(
    cu_q, cu_k, used, table, held_q, held_k, held_used, held_table, word,
    batch, rows_q, rows_k, most, longest_q, longest_k, pages, page, width, table_stride,
    PACKED: tl.constexpr, PAGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Block 0 holds the lengths, the others the pages of one sequence each."""
    wrong = 0
    b = tl.program_id(0) - 1
    if b < 0:
        wrong |= _hold_rising(cu_q, held_q, batch, rows_q, longest_q, _BAD_Q, _ABOVE_Q, BLOCK)
        if PACKED:
            wrong |= _hold_rising(cu_k, held_k, batch, rows_k, longest_k, _BAD_K, _ABOVE_K, BLOCK)
        else:
            for start in range(0, batch, BLOCK):
                at = start + tl.arange(0, BLOCK)
                given = tl.load(used + at, mask=at < batch, other=0)
                tl.store(held_used + at, tl.minimum(tl.maximum(given, 0), most), mask=at < batch)
                wrong |= tl.max(tl.where((given < 0) | (given > most), _BAD_USED, 0), 0)
                wrong |= tl.max(tl.where(given > longest_k, _ABOVE_K, 0), 0)
    elif PAGED:
        needed = tl.cdiv(tl.minimum(tl.load(used + b), most), page)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            given = tl.load(table + b.to(tl.int64) * table_stride + at, mask=at < width, other=0)
            held = tl.minimum(tl.maximum(given, 0), pages - 1)
            tl.store(held_table + b.to(tl.int64) * width + at, held, mask=at < width)
            wrong |= tl.max(tl.where((at < needed) & (given != held), _BAD_TABLE, 0), 0)
    if wrong != 0:
        tl.atomic_or(word, wrong)


def within(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> dict[str, torch.Tensor | None]:
    """The same lengths and pages within their bounds; `registry.check()` tells of what was not."""
    batch, width = cu_seqlens_q.shape[0] - 1, 0 if block_table is None else block_table.shape[1]
    capacity = width * k.shape[1] if block_table is not None else k.shape[-3]
    step = -(-(batch + 1) // ALIGNED) * ALIGNED  # what is not aligned would be launched by the slow way
    made = torch.empty(2 * step + batch * width, dtype=torch.int32, device=q.device)
    held_q, held_k = made[: batch + 1], made[step : step + batch + 1]
    held_table = made[2 * step :].view(batch, width) if width else None
    packed = cu_seqlens_k is not None
    _hold[(1 + (batch if width else 0),)](
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        block_table,
        held_q,
        held_k,
        held_k,
        held_table,
        lengths.LENGTHS.word(q.device),
        batch,
        q.shape[0],
        k.shape[0],
        capacity,
        max_seqlen_q,
        max_seqlen_k,
        k.shape[0],
        k.shape[1] if width else 1,
        width,
        0 if block_table is None else block_table.stride(0),
        PACKED=packed,
        PAGED=width > 0,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return {
        "cu_seqlens_q": held_q,
        "cu_seqlens_k": held_k if packed else None,
        "seqused_k": None if packed else held_k[:batch],
        "block_table": held_table if width else block_table,
    }
