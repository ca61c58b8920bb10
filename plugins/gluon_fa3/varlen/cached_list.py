"""The list of row blocks of a step whose keys lie in a cache or on pages: as tile_list.py's, of other lengths.

The fifth word of an entry is the end of its keys among the rows of the whole cache, or on pages the sequence's number.
Each program looks at its sequence's row of the block table, too, so that kernels that load keys need not complain.
"""

import triton
import triton.language as tl

from registry.ops.attention_varlen import lengths as bits
from registry.plugins.gluon_fa3.varlen.tile_list import lies, list_blocks, range_of

_CU_Q, _MOST_Q = tl.constexpr(bits.BAD_CU_SEQLENS_Q), tl.constexpr(bits.ABOVE_MAX_Q)
_USED, _MOST_K = tl.constexpr(bits.BAD_SEQUSED_K), tl.constexpr(bits.ABOVE_MAX_K)
_TABLE = tl.constexpr(bits.BAD_TABLE)
LOOKED_UP = tl.constexpr(512)  # entries of a block table at once: 131,072 keys on pages of 16 are 8,192
SIZES = ["batch", "total_q", "slots", "most_q", "most_k", "room", "table_row", "pages", "sequence_rows"]


@triton.jit
def keys_used(used, b, batch, slots):
    """Keys of sequence b, or of several, no more than it can have."""
    return tl.minimum(tl.maximum(tl.load(used + b, mask=b < batch, other=0), 0), slots)


@triton.jit
def keys_lie(used, b, batch, slots, most):
    """The bits of what is wrong with how many keys several sequences have."""
    keys = tl.load(used + b, mask=b < batch, other=0)
    bad = tl.where((keys < 0) | (keys > slots), _USED, 0) | tl.where(keys > most, _MOST_K, 0)
    return tl.max(bad & _USED, 0) | tl.max(bad & _MOST_K, 0)


@triton.jit
def pages_lie(own_table, needed, pages):
    """Whether pages that a sequence needs are not there."""
    bad = tl.zeros([LOOKED_UP], tl.int32)
    for first in range(0, needed, LOOKED_UP):
        i = first + tl.arange(0, LOOKED_UP)
        page = tl.load(own_table + i, mask=i < needed, other=0)
        bad |= tl.where((page < 0) | (page >= pages), _TABLE, 0)
    return tl.max(bad, 0)


@triton.jit
def place_of_keys(own, keys, table, table_row, pages, sequence_rows, PAGE: tl.constexpr):
    """(an entry's fifth word, whether a page that the sequence needs is not there)."""
    bad = 0
    if PAGE:
        bad = pages_lie(table + own.to(tl.int64) * table_row, (keys + (PAGE - 1)) // PAGE, pages)
        place = own
    else:
        place = own * sequence_rows + keys
    return place, bad


@triton.jit
def say(row_blocks, complaints, own, count, wrong):
    """How many entries there are, and what is wrong."""
    if own == 0:
        tl.store(row_blocks, count)
    if wrong != 0:
        tl.atomic_or(complaints, wrong)


@triton.jit(do_not_specialize=SIZES)
def list_cached_row_blocks(
    cu_q, used, table, row_blocks, complaints, batch, total_q, slots, most_q, most_k, room, table_row, pages,
    sequence_rows,
    ROWS: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program b lists sequence b, in blocks of ROWS; a sequence has at most so many `slots` for keys."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.program_id(0)
    begin, end = range_of(cu_q, own, batch, total_q)
    rows, keys = end - begin, keys_used(used, own, batch, slots)

    before, count, wrong = 0, 0, 0
    for first in range(0, batch, CHUNK):
        b_B = first + tl.arange(0, CHUNK)
        begin_B, end_B = range_of(cu_q, b_B, batch, total_q)
        blocks_B = (end_B - begin_B + (ROWS - 1)) // ROWS
        keys_B = keys_used(used, b_B, batch, slots)
        before += tl.sum(tl.where((keys_B > keys) | ((keys_B == keys) & (b_B < own)), blocks_B, 0), 0)
        count += tl.sum(blocks_B, 0)
        if own == 0:
            wrong |= lies(cu_q, b_B, batch, total_q, most_q, _CU_Q, _MOST_Q)
            wrong |= keys_lie(used, b_B, batch, slots, most_k)
    place, bad = place_of_keys(own, keys, table, table_row, pages, sequence_rows, PAGE)
    say(row_blocks, complaints, own, tl.minimum(count, room), wrong | bad)
    list_blocks(row_blocks, before, (rows + (ROWS - 1)) // ROWS, room, end, rows, keys, place, 0, True)
