"""Where a tile's rows lie, and the keys that they see: in dense tensors, or in those of sequences packed end to end.

A tile's place is (row block, head, batch), or for packed sequences (row block, head, end of the sequence's queries,
number of queries, number of keys, share of them, end of the keys, where rows of the share's part begin); consumers load
no keys, and do not know where those end. Where keys lie on pages, that is the sequence's number, which says which row
of the block table is its own. Where heads lie side by side, "head" counts sets of them. What all packed sequences have
in common is their `extent`: (0, 0, left, right).

Packed rows have tensor maps in which each sequence ends like a tensor: [2^30, end, head, row, column], where row
2^30 - n is the first of n and 2^30 is none any more. The address of (2^30, end, head, 2^30 - n + i, c) is that of row
end - n + i: the first stride is 2^34 elements less one row, so 2^30 of them wrap around all 64 bits of an address
and take back the 2^30 rows that `row` has too many. So loads past a sequence's last row give zeros, and stores past it
are cut, as at the end of a dense tensor; neither meets the next sequence.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.traits import ROWS_LIMIT

OUTER_STRIDE = 1 << 34  # in elements, of which 2^30 wrap around if they have 1, 2, 4 or 8 bytes
OUTER_SIZE = (1 << 31) - 1
LIMIT = gl.constexpr(ROWS_LIMIT)


@gluon.jit
def queries_of(place, T: gl.constexpr):
    """What `box` takes for a tile's queries, and its rows of the output; with several heads the first of them, and
    behind that the first of the last box that shares their keys."""
    if T.heads > 1:
        shared = place[1] // T.sets
        first = shared * T.group + (place[1] - shared * T.sets) * T.heads
        return place[2], LIMIT - place[3], first, shared * T.group + (T.group - T.box_heads)
    elif T.packed:
        return place[2], LIMIT - place[3], place[1]
    else:
        return place[2], place[1]


@gluon.jit
def beside(where, b, T: gl.constexpr):
    """(the same of box b of the heads that lie side by side, whether it is the last one's again)."""
    head = where[2] + b * T.box_heads
    return (where[0], where[1], gl.minimum(head, where[3])), head > where[3]


@gluon.jit
def keys_of(place, group, T: gl.constexpr):
    """The same for the keys that it sees; on pages what `load_pages` takes."""
    if T.packed:
        if T.page > 0:
            return place[6], place[4], place[1] // group
        else:
            return place[6], LIMIT - place[4], place[1] // group
    else:
        return place[2], place[1] // group


@gluon.jit
def box(where, row, column, T: gl.constexpr):
    """The coordinates in a tensor map."""
    if T.packed:
        return LIMIT, where[0], where[2], where[1] + row, column
    else:
        return where[0], where[1], row, column


@gluon.jit
def extent_of(place, extent, T: gl.constexpr):
    """(queries, keys, left, right) of the sequence that a tile belongs to."""
    if T.packed:
        return place[3], place[4], extent[2], extent[3]
    else:
        return extent


@gluon.jit
def first_row_of(place, T: gl.constexpr):
    """The first row of a packed sequence, or of what one share of its keys leaves."""
    if T.shared_out:
        return place[7]
    else:
        return place[2] - place[3]


@gluon.jit
def sums_of(lse, place, pitch, extent, row, tile_rows, T: gl.constexpr):
    """(where the LSE of a group's rows lies, the first of which is `row`: in [batch, head, row] with `pitch` heads, or
    [head, pitch], and so do rows of parts; which of them there are)."""
    if T.heads > 1:
        _, _, first, last = queries_of(place, T)
        head, own = first + tile_rows // T.rows, row + tile_rows % T.rows
        there = (own < extent[0]) & (head < last + T.box_heads)
        return lse + head.to(gl.int64) * pitch + first_row_of(place, T) + own, there
    elif T.packed:
        own = row + tile_rows
        return lse + place[1].to(gl.int64) * pitch + first_row_of(place, T) + own, own < extent[0]
    else:
        own = row + tile_rows
        return lse + (place[2] * pitch + place[1]).to(gl.int64) * extent[0] + own, own < extent[0]


@gluon.jit
def sinks_of(sinks, place, tile_rows, T: gl.constexpr):
    """The sink of each of a group's rows, or of all: that of the head which it belongs to."""
    if T.heads > 1:
        _, _, first, last = queries_of(place, T)
        head = first + tile_rows // T.rows
        return gl.load(sinks + head, mask=head < last + T.box_heads, other=0.0)
    else:
        return gl.load(sinks + place[1])
