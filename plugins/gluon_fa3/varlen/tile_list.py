"""The list of row blocks of a step, made on the device from its lengths: of which sequence each is, and where it lies.

Sequences come in the order of their keys, the most first, and the row blocks of each from its last to its first: so
long tiles begin early, and blocks that share keys follow one another. Each program finds the place of one sequence in
that order by looking at all others; none waits for another, and nothing is sorted.

Entry 0 is the number of row blocks; each further one is (row block, end of the queries, queries, keys, end of the
keys). Lengths are held to the memory there is, so that whatever the list names exists: see lengths.py of the op.
"""

import triton
import triton.language as tl

from registry.ops.attention_varlen import lengths as bits

WORDS = tl.constexpr(8)  # of 32 bits an entry
FILLED = tl.constexpr(32)  # entries that a program writes at once
_CU_Q, _CU_K = tl.constexpr(bits.BAD_CU_SEQLENS_Q), tl.constexpr(bits.BAD_CU_SEQLENS_K)
_MOST_Q, _MOST_K = tl.constexpr(bits.ABOVE_MAX_Q), tl.constexpr(bits.ABOVE_MAX_K)


@triton.jit
def _range(cu_seqlens, b, batch, rows):
    """(begin, end) of sequence b, or of several, within the rows there are; those beyond the batch are empty."""
    there = b < batch
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + b, mask=there, other=0), 0), rows)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + b + 1, mask=there, other=0), begin), rows)
    return begin, tl.where(there, end, begin)


@triton.jit
def _lies(cu_seqlens, b, batch, rows, most, BAD: tl.constexpr, ABOVE: tl.constexpr):
    """The bits of what is wrong with the lengths of several sequences."""
    there = b < batch
    begin = tl.load(cu_seqlens + b, mask=there, other=0)
    end = tl.load(cu_seqlens + b + 1, mask=there, other=0)
    wrong = (begin > end) | ((b == 0) & (begin != 0)) | ((b == batch - 1) & (end != rows)) | (end > rows)
    return tl.max(tl.where(there & wrong, BAD, 0), 0) | tl.max(tl.where(there & (end - begin > most), ABOVE, 0), 0)


@triton.jit(do_not_specialize=["batch", "total_q", "total_k", "most_q", "most_k", "room"])
def list_row_blocks(
    cu_q, cu_k, row_blocks, complaints, batch, total_q, total_k, most_q, most_k, room,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program b lists sequence b. `room` entries fit, as many as lengths need that do not lie."""
    if EARLY:  # the kernel that reads the list may start beside this one; it waits for its end by itself
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    own = tl.program_id(0)
    q_begin, q_end = _range(cu_q, own, batch, total_q)
    k_begin, k_end = _range(cu_k, own, batch, total_k)
    queries, keys = q_end - q_begin, k_end - k_begin

    before, count, wrong = 0, 0, 0
    for first in range(0, batch, CHUNK):
        b_B = first + tl.arange(0, CHUNK)
        begin_B, end_B = _range(cu_q, b_B, batch, total_q)
        blocks_B = (end_B - begin_B + (BLOCK_M - 1)) // BLOCK_M
        begin_B, end_B = _range(cu_k, b_B, batch, total_k)
        keys_B = end_B - begin_B
        ahead_B = (keys_B > keys) | ((keys_B == keys) & (b_B < own))
        before += tl.sum(tl.where(ahead_B, blocks_B, 0), 0)
        count += tl.sum(blocks_B, 0)
        if own == 0:
            wrong |= _lies(cu_q, b_B, batch, total_q, most_q, _CU_Q, _MOST_Q)
            wrong |= _lies(cu_k, b_B, batch, total_k, most_k, _CU_K, _MOST_K)
    if own == 0:
        tl.store(row_blocks, tl.minimum(count, room))
        if wrong != 0:
            tl.atomic_or(complaints, wrong)

    mine = (queries + (BLOCK_M - 1)) // BLOCK_M
    for first in range(0, mine, FILLED):
        i = first + tl.arange(0, FILLED)
        at = row_blocks + (1 + before + i) * WORDS
        fits = (i < mine) & (before + i < room)
        tl.store(at, mine - 1 - i, mask=fits)
        tl.store(at + 1, q_end + i * 0, mask=fits)
        tl.store(at + 2, queries + i * 0, mask=fits)
        tl.store(at + 3, keys + i * 0, mask=fits)
        tl.store(at + 4, k_end + i * 0, mask=fits)
    if (own == 0) & (count == 0):  # a tile that has no row, for kernels that load one before they look
        for word in tl.static_range(5):
            tl.store(row_blocks + WORDS + word, 0)
