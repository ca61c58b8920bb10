"""How long each sequence is, and which tile of which sequence a program has: read on the device, in every kernel.

The host knows how many sequences there are and how much memory they share, nothing else. What the device finds in
`cu_seqlens` and `seqused_k` is held to that memory here, so that lengths which lie cannot reach beyond it: starts lie
within the tensor, ends not before their starts, and no sequence has more keys than there is room for.

Rows of a tile are (query, head) pairs: the GROUP query heads that share a key head follow one another, so that a tile
of few queries is still full, and keys are read once for all of them. Row r of a sequence is head r % GROUP of query
r // GROUP.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from registry.ops.attention_varlen import lengths as bits


class Lengths(NamedTuple):
    """Where the lengths are, and what they are held to."""

    cu_q: Any
    cu_k: Any
    used: Any
    batch: Any
    total_q: Any
    room: Any
    """Keys that memory holds: of all sequences where they are packed, else of each."""


class Sequence(NamedTuple):
    """One sequence: where its queries start in q, and its keys in packed k and v; how many there are of each."""

    q_start: Any
    queries: Any
    k_start: Any
    keys: Any


@triton.jit
def within(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def read_sequence(b, lengths, cfg: tl.constexpr):
    """Sequence b, or several; those beyond the batch are empty."""
    there = b < lengths.batch
    q_start = within(tl.load(lengths.cu_q + b, mask=there, other=0), 0, lengths.total_q)
    q_end = within(tl.load(lengths.cu_q + b + 1, mask=there, other=0), q_start, lengths.total_q)
    if cfg.PACKED:
        k_start = within(tl.load(lengths.cu_k + b, mask=there, other=0), 0, lengths.room)
        keys = within(tl.load(lengths.cu_k + b + 1, mask=there, other=0), k_start, lengths.room) - k_start
    else:
        k_start = q_start * 0
        keys = within(tl.load(lengths.used + b, mask=there, other=0), 0, lengths.room)
    return Sequence(q_start, tl.where(there, q_end - q_start, 0), k_start, tl.where(there, keys, 0))


@triton.jit
def _find(tile, starts_ptr, batch, total, ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """(sequence, tile of it) of a tile, where each sequence is given as many tiles as it can need.

    A sequence that starts at s gets the tiles from s * ROWS // BLOCK + its number on: enough, whatever the lengths, and
    found without a list. Up to one tile a sequence is left over; it has no rows.
    """
    passed = 0
    for first in range(0, batch, CHUNK):
        b_B = first + tl.arange(0, CHUNK)
        starts_B = within(tl.load(starts_ptr + b_B, mask=b_B < batch, other=0), 0, total)
        begun_B = (starts_B * ROWS // BLOCK + b_B <= tile) & (b_B < batch)
        passed += tl.sum(begun_B.to(tl.int32), 0)
    b = tl.maximum(passed - 1, 0)
    start = within(tl.load(starts_ptr + b), 0, total)
    return b, tl.maximum(tile - (start * ROWS // BLOCK + b), 0)


@triton.jit
def assign_query_tile(slots, heads, together, lengths, cfg: tl.constexpr):
    """(sequence, tile, key head) of this program."""
    slot, head = _assign_slot(slots, heads, together)
    b, tile = _find(slot, lengths.cu_q, lengths.batch, lengths.total_q, cfg.GROUP, cfg.BLOCK_M, cfg.CHUNK)
    return b, tile, head


@triton.jit
def assign_key_tile(slots, heads, together, lengths, cfg: tl.constexpr):
    """The same for tiles of packed keys."""
    slot, head = _assign_slot(slots, heads, together)
    b, tile = _find(slot, lengths.cu_k, lengths.batch, lengths.room, 1, cfg.BLOCK_N, cfg.CHUNK)
    return b, tile, head


@triton.jit
def _assign_slot(slots, heads, together):
    """(slot, key head) of this program: heads that fit L2 together take their slots in turn."""
    program = tl.program_id(0)
    section = program // (together * slots)
    heads_here = tl.minimum(together, heads - section * together)
    place = program - section * together * slots
    slot = place // heads_here
    return slot, section * together + place - slot * heads_here


_CU_Q = tl.constexpr(bits.BAD_CU_SEQLENS_Q)
_CU_K = tl.constexpr(bits.BAD_CU_SEQLENS_K)
_USED = tl.constexpr(bits.BAD_SEQUSED_K)
_MOST_Q = tl.constexpr(bits.ABOVE_MAX_Q)
_MOST_K = tl.constexpr(bits.ABOVE_MAX_K)
BAD_TABLE = tl.constexpr(bits.BAD_TABLE)


@triton.jit
def complain(word_ptr, wrong, bit: tl.constexpr):
    """Leave a bit in the word of complaints where any of `wrong` is true."""
    tl.atomic_or(word_ptr, bit, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")


@triton.jit
def check_lengths(lengths, most_q, most_k, word_ptr, cfg: tl.constexpr):
    """Complain of lengths that are not what they must be. One program of a launch does this."""
    for first in range(0, lengths.batch, cfg.CHUNK):
        b_B = first + tl.arange(0, cfg.CHUNK)
        there_B = b_B < lengths.batch
        start_B = tl.load(lengths.cu_q + b_B, mask=there_B, other=0)
        end_B = tl.load(lengths.cu_q + b_B + 1, mask=there_B, other=0)
        expected_B = tl.where(b_B == lengths.batch - 1, lengths.total_q, end_B)
        complain(word_ptr, there_B & ((start_B > end_B) | (end_B != expected_B) | (start_B != 0) & (b_B == 0)), _CU_Q)
        complain(word_ptr, there_B & (end_B - start_B > most_q), _MOST_Q)
        if cfg.PACKED:
            start_B = tl.load(lengths.cu_k + b_B, mask=there_B, other=0)
            end_B = tl.load(lengths.cu_k + b_B + 1, mask=there_B, other=0)
            expected_B = tl.where(b_B == lengths.batch - 1, lengths.room, end_B)
            wrong_B = (start_B > end_B) | (end_B != expected_B) | (start_B != 0) & (b_B == 0)
            complain(word_ptr, there_B & wrong_B, _CU_K)
            complain(word_ptr, there_B & (end_B - start_B > most_k), _MOST_K)
        else:
            used_B = tl.load(lengths.used + b_B, mask=there_B, other=0)
            complain(word_ptr, there_B & ((used_B < 0) | (used_B > lengths.room)), _USED)
            complain(word_ptr, there_B & (used_B > most_k), _MOST_K)
