"""The list of row blocks of a step whose keys are shared out: several entries a block, each of some of its keys.

How long a share is depends on all lengths, so one long sequence among many short is divided, and they are not. Of a
few dozen lengths that one is taken by which SMs are done first, if shares are as long as their mean but for the longest
one: they begin in waves, and each takes some time besides its keys.

Entries are tile_list.py's, with two words more: which share (and SHARE_BITS higher how many), and where its rows begin
among those of parts. Behind the entries are four words a token: its row in the first share's part, shares, and how many
rows apart they lie. Those of a sequence lie one behind the other, so parts have no more rows than shares ask for.
"""

import triton
import triton.language as tl

from registry.ops.attention_varlen import lengths as bits
from registry.plugins.gluon_fa3 import traits
from registry.plugins.gluon_fa3.varlen.cached_list import keys_lie, keys_used, place_of_keys, say
from registry.plugins.gluon_fa3.varlen.configs import LEAST_BLOCKS, MOST_MORE, MOST_SHARES
from registry.plugins.gluon_fa3.varlen.tile_list import FILLED, WORDS, lies, range_of

TOKEN_WORDS = tl.constexpr(4)
TRIED = tl.constexpr(32)  # lengths of a share, and sequences looked at together for them
_CU_Q, _CU_K = tl.constexpr(bits.BAD_CU_SEQLENS_Q), tl.constexpr(bits.BAD_CU_SEQLENS_K)
_MOST_Q, _MOST_K = tl.constexpr(bits.ABOVE_MAX_Q), tl.constexpr(bits.ABOVE_MAX_K)
_SHARE_BITS = tl.constexpr(traits.SHARE_BITS)
_LEAST_BLOCKS, _MOST_SHARES, _MOST_MORE = tl.constexpr(LEAST_BLOCKS), tl.constexpr(MOST_SHARES), tl.constexpr(MOST_MORE)
SIZES = "batch total_q total_k most_q most_k room places part_rows left table_row pages sequence_rows"


@triton.jit
def _ceil(a, b):
    return (a + (b - 1)) // b


@triton.jit
def _look(cu_q, lengths, b, batch, total_q, total_k, left, ROWS: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr):
    """(rows, row blocks, keys, blocks of keys that a row block sees at most) of sequence b, or of several."""
    begin, end = range_of(cu_q, b, batch, total_q)
    if PACKED:
        keys_begin, keys_end = range_of(lengths, b, batch, total_k)
        keys = keys_end - keys_begin
    else:
        keys = keys_used(lengths, b, batch, total_k)
    rows = end - begin
    return rows, _ceil(rows, ROWS), keys, _ceil(tl.minimum(keys, left + rows), N)


@triton.jit
def _share_length(
    cu_q, lengths, batch, total_q, total_k, left, places,
    ROWS: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr, CHUNK: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Blocks of keys in a share; `places` row blocks can be worked on at once."""
    count, most, work = 0, 1, 0.0  # a float, which no lengths overflow
    for first in range(0, batch, CHUNK):
        b_B = first + tl.arange(0, CHUNK)
        _, blocks_B, _, seen_B = _look(cu_q, lengths, b_B, batch, total_q, total_k, left, ROWS, N, PACKED)
        count += tl.sum(blocks_B, 0)
        most = tl.maximum(most, tl.max(seen_B, 0))
        work += tl.sum(blocks_B.to(tl.float32) * seen_B.to(tl.float32), 0)

    # From a quarter of what each place has to do on, to twice as much.
    tried_T = tl.ceil(work / places * ((tl.arange(0, TRIED) + TRIED // 8) / (TRIED // 2)))
    tried_T = tl.minimum(tl.maximum(tried_T, _LEAST_BLOCKS), tl.maximum(most, _LEAST_BLOCKS)).to(tl.int32)
    tiles_T = tl.zeros([TRIED], tl.int32)
    for first in range(0, batch, TRIED):
        b_B = first + tl.arange(0, TRIED)
        _, blocks_B, _, seen_B = _look(cu_q, lengths, b_B, batch, total_q, total_k, left, ROWS, N, PACKED)
        tiles_T += tl.sum(blocks_B[:, None] * _shares(seen_B[:, None], tried_T[None, :]), 0)
    longest_T = _ceil(most, _ceil(most, tried_T)) + BESIDE
    waves_T = _ceil(tiles_T, places).to(tl.float32) * (work / tl.maximum(tiles_T, 1) + BESIDE)
    there_T = tiles_T <= count + _MOST_MORE * places
    span_T = tl.where(there_T, tl.maximum(longest_T, waves_T), float("inf"))
    found_T = there_T & (span_T == tl.min(span_T, 0))
    return tl.max(tl.where(found_T, tried_T, _LEAST_BLOCKS), 0)


@triton.jit
def _shares(seen, length):
    return tl.minimum(tl.maximum(_ceil(seen, length), 1), _MOST_SHARES)


@triton.jit(do_not_specialize=SIZES.split())
def list_shares(
    cu_q, lengths, table, row_blocks, complaints, batch, total_q, total_k, most_q, most_k, room, places, part_rows,
    left, table_row, pages, sequence_rows,
    ROWS: tl.constexpr, N: tl.constexpr, PACKED: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
    BESIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program b lists sequence b. `lengths` are cu_seqlens_k of packed keys, `total_k` in all, or how many a sequence
    has in a cache or on pages, which is at most `total_k`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.program_id(0)
    length = _share_length(cu_q, lengths, batch, total_q, total_k, left, places, ROWS, N, PACKED, CHUNK, BESIDE)
    rows, blocks, keys, seen = _look(cu_q, lengths, own, batch, total_q, total_k, left, ROWS, N, PACKED)

    before, part_row, count, wrong = 0, 0, 0, 0
    for first in range(0, batch, CHUNK):
        b_B = first + tl.arange(0, CHUNK)
        rows_B, blocks_B, keys_B, seen_B = _look(cu_q, lengths, b_B, batch, total_q, total_k, left, ROWS, N, PACKED)
        ahead_B = (keys_B > keys) | ((keys_B == keys) & (b_B < own))
        shares_B = _shares(seen_B, length)
        before += tl.sum(tl.where(ahead_B, blocks_B * shares_B, 0), 0)
        part_row += tl.sum(tl.where(ahead_B, rows_B * shares_B, 0), 0)
        count += tl.sum(blocks_B * shares_B, 0)
        if own == 0:
            wrong |= lies(cu_q, b_B, batch, total_q, most_q, _CU_Q, _MOST_Q)
            if PACKED:
                wrong |= lies(lengths, b_B, batch, total_k, most_k, _CU_K, _MOST_K)
            else:
                wrong |= keys_lie(lengths, b_B, batch, total_k, most_k)
    if PACKED:
        _, place = range_of(lengths, own, batch, total_k)
    else:
        place, bad = place_of_keys(own, keys, table, table_row, pages, sequence_rows, PAGE)
        wrong |= bad
    say(row_blocks, complaints, own, tl.minimum(count, room), wrong)

    shares = _shares(seen, length)
    fits = part_row + shares * rows <= part_rows  # if lengths do not lie
    part_row = tl.where(fits, part_row, 0)
    begin, end = range_of(cu_q, own, batch, total_q)
    for first in range(0, blocks * shares, FILLED):
        i = first + tl.arange(0, FILLED)
        at = row_blocks + (1 + before + i) * WORDS
        there = (i < blocks * shares) & (before + i < room)
        share = tl.where(fits, i % shares, 0)
        tl.store(at, blocks - 1 - i // shares, mask=there)
        tl.store(at + 1, end + i * 0, mask=there)
        tl.store(at + 2, rows + i * 0, mask=there)
        tl.store(at + 3, keys + i * 0, mask=there)
        tl.store(at + 4, place + i * 0, mask=there)
        tl.store(at + 6, share | (tl.where(fits, shares, 1) << _SHARE_BITS), mask=there)
        tl.store(at + 7, part_row + share * rows, mask=there)
    for first in range(0, rows, FILLED):
        i = first + tl.arange(0, FILLED)
        at = row_blocks + (1 + room) * WORDS + (begin + i) * TOKEN_WORDS
        tl.store(at, part_row + i, mask=i < rows)
        tl.store(at + 1, tl.where(fits, shares, 1) + i * 0, mask=i < rows)
        tl.store(at + 2, rows + i * 0, mask=i < rows)
