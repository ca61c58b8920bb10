"""The work as one line, and which stretch of it is whose: found by every role of every program from the lengths.

The line has every block of keys of every sequence, one after the other, and before each sequence what it costs to begin
and end one (`overhead` blocks). Each of a key head's `chunks` programs takes an equal share. A sequence's keys may so
lie in several shares; each then leaves a part, and who comes last adds them up: see parts.py.

A sequence is one tile: where a key head has more rows than a tile, the variant is refused.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _clamped(x, low, high):
    return gl.minimum(gl.maximum(x, low), high)


@gluon.jit
def quotient(x, y):
    """x // y of numbers that are not negative: the compiler need not look at signs."""
    return (x.to(gl.uint32) // y.to(gl.uint32)).to(gl.int32)


@gluon.jit
def sequence_at(b, lengths):
    """(first row of q, queries, keys) of sequence b, or of several, within the memory there is; those beyond the batch
    are empty."""
    cu_q, used, batch, total_q, room = lengths
    there = b < batch
    begin = _clamped(gl.load(cu_q + b, mask=there, other=0), 0, total_q)
    end = _clamped(gl.load(cu_q + b + 1, mask=there, other=0), begin, total_q)
    keys = _clamped(gl.load(used + b, mask=there, other=0), 0, room)
    return begin, gl.where(there, end - begin, 0), gl.where(there, keys, 0)


@gluon.jit
def per_chunk(x, T: gl.constexpr):
    """x // chunks, likewise: a multiplication, for their number is known."""
    return (x.to(gl.uint32) // T.chunks).to(gl.int32)


@gluon.jit
def extent_of(queries, keys, left, T: gl.constexpr):
    """(first block of keys, blocks, whether there is a query, as a number) of a sequence. It has at least one block, so
    that it is somebody's and its output is written."""
    first = keys * 0
    if T.left:
        first = gl.maximum(keys - queries - left, 0) // T.tokens
    return first, gl.maximum((keys + (T.tokens - 1)) // T.tokens - first, 1), gl.minimum(queries, 1)


@gluon.jit
def even_shares(blocks, tiles, T: gl.constexpr):
    """(overhead, share) where all tiles have so many blocks: the same fraction of one tile for each program, if that
    takes hardly longer than an equal share, or share 0. So none begins a second tile. Tiles are filled up with overhead
    to a multiple of the fraction."""
    equal = gl.maximum(per_chunk(blocks * tiles + (T.chunks - 1), T), 1)
    programs = gl.maximum(quotient(gl.maximum(tiles * 0 + T.chunks, 1), gl.maximum(tiles, 1)), 1)
    fraction = gl.maximum(quotient(blocks + programs - 1, programs), 1)
    pays = (tiles > 1) & (tiles <= T.chunks) & (fraction * 8 <= equal * 9)
    filled = quotient(blocks + fraction - 1, fraction) * fraction - blocks
    return gl.where(pays, filled, 0), gl.where(pays, fraction, 0)


@gluon.jit
def equal_shares(total, T: gl.constexpr):
    """(share, how many chunks have one unit more) of so many units."""
    equal = per_chunk(total, T)
    return gl.maximum(equal, 1), gl.where(equal < 1, 0, total - equal * T.chunks)


@gluon.jit
def shares_of(blocks, tiles, longest, overhead, T: gl.constexpr):
    """(overhead, total, share, how many chunks have one unit more) of `tiles` tiles of so many blocks together, at most
    `longest` each."""
    filling, fraction = even_shares(longest, tiles, T)
    alike = blocks == longest * tiles
    even = alike & (fraction > 0)
    overhead = gl.where(alike, filling, overhead)
    total = blocks + overhead * tiles
    share, longer = equal_shares(total, T)
    return overhead, total, gl.where(even, fraction, share), gl.where(even, 0, longer)


@gluon.jit
def start_of(chunk, share, longer):
    return chunk * share + gl.minimum(chunk, longer)


@gluon.jit
def chunk_of(unit, share, longer):
    """Whose share a unit is in."""
    front = longer * (share + 1)  # the longer ones come first
    in_front = unit < front
    units = gl.where(in_front, unit, unit - front)
    return quotient(units, gl.where(in_front, share + 1, share)) + gl.where(in_front, 0, longer)


@gluon.jit
def piece_at(unit, stop, before, overhead, first, blocks):
    """(where the sequence begins in the line, where its keys are entered, first block of keys, blocks of this share) of
    the piece of work that is at `unit`; no blocks where only overhead is left of a share."""
    begin = before + overhead
    entered = gl.maximum(unit, begin)
    return begin, entered, first + entered - begin, gl.minimum(begin + blocks, stop) - entered


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def my_share(lengths, left, chunk, overhead, WARPS: gl.constexpr, T: gl.constexpr):
    """(unit, stop, sequence, units before it, overhead, share, longer) of a program."""
    batch = lengths[2]
    if T.chunk == 1:
        _, queries, keys = sequence_at(0, lengths)
        _, blocks, tiles = extent_of(queries, keys, left, T)
        total = blocks * tiles
        share, longer = equal_shares(total, T)
        stop = gl.minimum(start_of(chunk + 1, share, longer), total)
        return start_of(chunk, share, longer), stop, chunk * 0, chunk * 0, chunk * 0, share, longer
    else:
        # Each warp looks at all sequences by itself: none waits for another.
        LAYOUT: gl.constexpr = gl.BlockedLayout([T.chunk // 32], [32], [WARPS], [0])
        b_B = gl.arange(0, T.chunk, layout=LAYOUT)
        sequences = batch
        if T.few:
            sequences = T.chunk  # no loop, and lengths are read once for both
        total, number, longest = 0, 0, 0
        for some in range(0, sequences, T.chunk):
            _, queries_B, keys_B = sequence_at(some + b_B, lengths)
            _, blocks_B, tiles_B = extent_of(queries_B, keys_B, left, T)
            total += gl.sum(blocks_B * tiles_B, 0)
            number += gl.sum(tiles_B, 0)
            longest = gl.maximum(longest, gl.max(gl.where(tiles_B > 0, blocks_B, 0), 0))
        overhead, total, share, longer = shares_of(total, number, longest, overhead, T)
        unit = start_of(chunk, share, longer)
        stop = gl.minimum(start_of(chunk + 1, share, longer), total)
        b, before, counted = 0, 0, 0
        for some in range(0, sequences, T.chunk):
            _, queries_B, keys_B = sequence_at(some + b_B, lengths)
            _, blocks_B, tiles_B = extent_of(queries_B, keys_B, left, T)
            units_B = (blocks_B + overhead) * tiles_B
            ends_B = counted + gl.associative_scan(units_B, 0, _add)
            passed_B = (ends_B <= unit) & (some + b_B < batch)
            b += gl.sum(passed_B.to(gl.int32), 0)
            before = gl.maximum(before, gl.max(gl.where(passed_B, ends_B, 0), 0))
            counted += gl.sum(units_B, 0)
        return unit, stop, b, before, overhead, share, longer


@gluon.jit
def next_piece(unit, stop, b, before, overhead, lengths, left, T: gl.constexpr):
    """The first piece of work from `unit` on: (unit, sequence, units before it, first row of q, queries, keys, where
    the sequence begins in the line, its blocks, first block of the piece, how many or 0 where the share is over)."""
    q_start, queries, keys, begin, blocks, block, take = 0, 0, 0, 0, 0, 0, 0
    while (unit < stop) & (take <= 0):
        q_start, queries, keys = sequence_at(b, lengths)
        first, blocks, there = extent_of(queries, keys, left, T)
        units = (blocks + overhead) * there
        if unit >= before + units:
            before += units
            b += 1
        else:
            begin, unit, block, take = piece_at(unit, stop, before, overhead, first, blocks)
    return unit, b, before, q_start, queries, keys, begin, blocks, block, gl.maximum(take, 0)
