"""The list of row blocks of a step, made on the device from its lengths: of which sequence each is, and where it lies.

Rows are queries, and others are keys; for gradients of keys the other way around. Sequences come in the order of their
others, the most first, and the row blocks of each from its last to its first, or from the first: so long tiles begin
early, and blocks that share others follow one another. Each program finds the place of one sequence in that order by
looking at all of them; none waits for another, and nothing is sorted.

Entry 0 is the number of row blocks; each further one is (row block, end of the rows, rows, others, end of the others,
first block of the others in workspaces that give each sequence blocks of its own, or if there is an OWN, of the rows).
Lengths are held to the memory there is, so that whatever the list names exists: see lengths.py of the op.
"""

import triton
import triton.language as tl

from registry.ops.attention_varlen import lengths as bits

WORDS = tl.constexpr(8)  # of 32 bits an entry
FILLED = tl.constexpr(32)  # entries that a program writes at once
_CU_Q, _CU_K = tl.constexpr(bits.BAD_CU_SEQLENS_Q), tl.constexpr(bits.BAD_CU_SEQLENS_K)
_MOST_Q, _MOST_K = tl.constexpr(bits.ABOVE_MAX_Q), tl.constexpr(bits.ABOVE_MAX_K)


@triton.jit
def range_of(cu_seqlens, b, batch, rows):
    """(begin, end) of sequence b, or of several, within the rows there are; those beyond the batch are empty."""
    there = b < batch
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + b, mask=there, other=0), 0), rows)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + b + 1, mask=there, other=0), begin), rows)
    return begin, tl.where(there, end, begin)


@triton.jit
def lies(cu_seqlens, b, batch, rows, most, BAD: tl.constexpr, ABOVE: tl.constexpr):
    """The bits of what is wrong with the lengths of several sequences."""
    there = b < batch
    begin = tl.load(cu_seqlens + b, mask=there, other=0)
    end = tl.load(cu_seqlens + b + 1, mask=there, other=0)
    wrong = (begin > end) | ((b == 0) & (begin != 0)) | ((b == batch - 1) & (end != rows)) | (end > rows)
    return tl.max(tl.where(there & wrong, BAD, 0), 0) | tl.max(tl.where(there & (end - begin > most), ABOVE, 0), 0)


@triton.jit(do_not_specialize=["batch", "total_rows", "total_others", "most_rows", "most_others", "room"])
def list_row_blocks(
    cu_rows, cu_others, row_blocks, complaints, batch, total_rows, total_others, most_rows, most_others, room,
    ROWS: tl.constexpr, OTHERS: tl.constexpr, OWN: tl.constexpr, OF_KEYS: tl.constexpr, LAST_FIRST: tl.constexpr,
    CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program b lists sequence b, in blocks of ROWS. `room` entries fit, as many as lengths need that do not lie."""
    if EARLY:  # the kernel that reads the list may start beside this one; it waits for its end by itself
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.program_id(0)
    begin, end = range_of(cu_rows, own, batch, total_rows)
    others_begin, others_end = range_of(cu_others, own, batch, total_others)
    rows, others = end - begin, others_end - others_begin

    before, count, wrong = 0, 0, 0
    for first in range(0, batch, CHUNK):
        b_B = first + tl.arange(0, CHUNK)
        begin_B, end_B = range_of(cu_rows, b_B, batch, total_rows)
        blocks_B = (end_B - begin_B + (ROWS - 1)) // ROWS
        begin_B, end_B = range_of(cu_others, b_B, batch, total_others)
        others_B = end_B - begin_B
        ahead_B = (others_B > others) | ((others_B == others) & (b_B < own))
        before += tl.sum(tl.where(ahead_B, blocks_B, 0), 0)
        count += tl.sum(blocks_B, 0)
        if own == 0:
            if OF_KEYS:
                wrong |= lies(cu_rows, b_B, batch, total_rows, most_rows, _CU_K, _MOST_K)
                wrong |= lies(cu_others, b_B, batch, total_others, most_others, _CU_Q, _MOST_Q)
            else:
                wrong |= lies(cu_rows, b_B, batch, total_rows, most_rows, _CU_Q, _MOST_Q)
                wrong |= lies(cu_others, b_B, batch, total_others, most_others, _CU_K, _MOST_K)
    if own == 0:
        tl.store(row_blocks, tl.minimum(count, room))
        if wrong != 0:
            tl.atomic_or(complaints, wrong)

    first_block = begin // OWN if OWN else others_begin // OTHERS
    blocks = (rows + (ROWS - 1)) // ROWS
    list_blocks(row_blocks, before, blocks, room, end, rows, others, others_end, first_block + own, LAST_FIRST)


@triton.jit
def list_blocks(
    row_blocks, before, blocks, room, end, rows, others, others_end, first_block, LAST_FIRST: tl.constexpr
):  # fmt: skip
    """Write the entries of a sequence, behind those of the ones before it, where there is room."""
    for first in range(0, blocks, FILLED):
        i = first + tl.arange(0, FILLED)
        at = row_blocks + (1 + before + i) * WORDS
        fits = (i < blocks) & (before + i < room)
        if LAST_FIRST:
            tl.store(at, blocks - 1 - i, mask=fits)
        else:
            tl.store(at, i, mask=fits)
        tl.store(at + 1, end + i * 0, mask=fits)
        tl.store(at + 2, rows + i * 0, mask=fits)
        tl.store(at + 3, others + i * 0, mask=fits)
        tl.store(at + 4, others_end + i * 0, mask=fits)
        tl.store(at + 5, first_block + i * 0, mask=fits)


@triton.jit
def find_block(block, cu_rows, batch, total_rows, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """(row block, where its sequence begins, rows of that, which it is) of a block of a workspace that gives each
    sequence blocks of its own: sequence b has those from begin // ROWS + b on, one more than it needs, or none."""
    passed = 0
    for first in range(0, batch, CHUNK):
        b_B = first + tl.arange(0, CHUNK)
        begin_B, _ = range_of(cu_rows, b_B, batch, total_rows)
        passed += tl.sum(((begin_B // ROWS + b_B <= block) & (b_B < batch)).to(tl.int32), 0)
    b = tl.maximum(passed - 1, 0)
    begin, end = range_of(cu_rows, b, batch, total_rows)
    return tl.maximum(block - (begin // ROWS + b), 0), begin, end - begin, b
