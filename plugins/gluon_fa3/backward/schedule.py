"""Which tile a block works on, in which order, and which query blocks can see a tile's keys.

A tile is `block_n` keys of one key head; one thread block works on one tile, over all query heads that share the head.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.places import LIMIT
from registry.plugins.gluon_fa3.schedule import WORDS
from registry.toolbox.drawn import announce_drawn, learn_drawn


@gluon.jit
def tile_at(tile, work):
    """(key block, head, batch). By sections of heads; inside a section all heads' first key blocks come first, which
    under a causal mask are the longest."""
    heads_kv = work[0]
    key_blocks = work[3]
    heads = work[4]
    section_heads = work[5]
    last_first = work[6]
    section = tile // (section_heads * key_blocks)
    first = section * section_heads
    within = tile - first * key_blocks
    here = gl.minimum(section_heads, heads - first)
    n = within // here
    bh = first + within - n * here
    b = bh // heads_kv
    n = gl.where(last_first != 0, key_blocks - 1 - n, n)
    return n, bh - b * heads_kv, b


@gluon.jit
def place_at(tile, work, T: gl.constexpr):
    """(block of the tile's rows, head, batch); of packed sequences (block, head, end of the keys, keys, queries, end of
    the queries, the sequence's first row block in the workspaces, number in the list), out of a list that
    varlen/tile_list.py made."""
    n, head, b = tile_at(tile, work)
    if T.packed:
        entry = work[7] + (n + 1) * WORDS
        block = gl.load(entry)
        end = gl.load(entry + 1)
        rows = gl.load(entry + 2)
        others = gl.load(entry + 3)
        others_end = gl.load(entry + 4)
        first_block = gl.load(entry + 5)
        if T.of_queries:
            return block, head, others_end, others, rows, end, first_block, n
        else:
            return block, head, end, rows, others, others_end, first_block, n
    else:
        return n, head, b


@gluon.jit
def tiles_of(work):
    """How many there are."""
    return work[3] * work[4]


@gluon.jit
def announce_first(messages, counter, work, T: gl.constexpr):
    """Producer: the tile that a block begins with. In a fixed order it is drawn as well, and the others are told."""
    if T.drawn and T.ordered:
        return announce_drawn(messages, 0, counter, tiles_of(work), True)
    else:
        return gl.program_id(0)


@gluon.jit
def learn_first(messages, WARPS: gl.constexpr, T: gl.constexpr):
    """The others: that tile."""
    if T.drawn and T.ordered:
        return learn_drawn(messages, 0, WARPS)
    else:
        return gl.program_id(0)


@gluon.jit
def announce_next(messages, tiles, counter, work, T: gl.constexpr):
    """Producer: draw the tile after this one, the block's `tiles`-th, tell the others, and give it; `tiles_of` or more
    when there is none."""
    if T.drawn:
        return announce_drawn(messages, _message(tiles, T), counter, tiles_of(work), T.ordered)
    else:
        return tiles_of(work)


@gluon.jit
def learn_next(messages, tiles, work, WARPS: gl.constexpr, T: gl.constexpr):
    """The others: that tile."""
    if T.drawn:
        return learn_drawn(messages, _message(tiles, T), WARPS)
    else:
        return tiles_of(work)


@gluon.jit
def _message(tiles, T: gl.constexpr):
    """Which one tells what comes after a block's `tiles`-th tile."""
    if T.ordered:
        return tiles + 1
    else:
        return tiles


@gluon.jit
def extent_of(place, extent, T: gl.constexpr):
    """(queries, keys, left, right) of the sequence of a tile. Without a query it has one, and without a key one: a
    tile has one step at least. An LSE of +inf, that of all its rows, keeps them apart."""
    if T.packed:
        return gl.maximum(place[4], 1), gl.maximum(place[3], 1), extent[2], extent[3]
    else:
        return extent


@gluon.jit
def keys_of(place, T: gl.constexpr):
    """What `box` takes for a tile's keys."""
    if T.packed:
        return place[2], LIMIT - place[3], place[1] // T.parts
    else:
        return place[2], place[1] // T.parts


@gluon.jit
def queries_of(place, h, T: gl.constexpr):
    """The same for the queries of head h that see them."""
    if T.packed:
        return place[5], LIMIT - place[4], h
    else:
        return place[2], h


@gluon.jit
def first_row_block(place, h, work, T: gl.constexpr):
    """Where head h of a tile's sequence begins in the workspaces, in row blocks."""
    if T.packed:
        return h * work[2] + place[6]
    else:
        return (place[2] * work[0] * work[1] + h) * work[2]


@gluon.jit
def number_of(place, work, T: gl.constexpr):
    """Of a tile among those of all heads; its parts have the same."""
    if T.packed:
        return (place[7] * work[0] + place[1]) // T.parts
    else:
        return (place[2] * work[0] + place[1]) // T.parts * work[3] + place[0]


@gluon.jit
def query_blocks(first_key, extent, KEYS: gl.constexpr, BLOCK: gl.constexpr, T: gl.constexpr):
    """[low, high): the query blocks that can see some of KEYS keys; at least one, which may be wholly masked."""
    seqlen_q, seqlen_k, left, right = extent
    high = (seqlen_q + BLOCK - 1) // BLOCK
    low = 0
    if T.mask != "none":
        low = gl.minimum(gl.maximum(first_key - (seqlen_k - seqlen_q) - right, 0) // BLOCK, high - 1)
    if T.mask == "band":
        last_key = gl.minimum(first_key + KEYS, seqlen_k) - 1
        last = gl.minimum(gl.maximum(last_key - (seqlen_k - seqlen_q) + left, 0), seqlen_q - 1)
        high = gl.maximum(last // BLOCK, low) + 1
    return low, high


@gluon.jit
def next_block(m, low, high):
    """The one after m; after the last of a query head, the first of the next."""
    return gl.where(m + 1 == high, low, m + 1)


@gluon.jit
def first_step(high):
    """(query block, query head of those that share the keys) of a tile's first step: tiles of a head begin with the
    same queries, so that they read and add to the same memory at about the same time, whichever keys are theirs."""
    return high - 1, 0


@gluon.jit
def next_step(m, g, group):
    """Those of the step after: all heads of a query block come before the block above it. So tiles of unlike lengths
    keep one pace, and in a fixed order each is one turn behind the one before it."""
    around = g + 1 == group
    return gl.where(around, m - 1, m), gl.where(around, 0, g + 1)


@gluon.jit
def first_tile(m, extent, T: gl.constexpr):
    """The lowest tile whose `query_blocks` hold m; those that do follow each other."""
    if T.mask == "band":
        seqlen_q, seqlen_k, left, right = extent
        seen = gl.maximum(m * T.block_m + (seqlen_k - seqlen_q) - left, 0) // T.block_n
        return gl.where(m == 0, 0, seen)
    else:
        return 0


@gluon.jit
def key_blocks(first_query, extent, QUERIES: gl.constexpr, BLOCK: gl.constexpr, T: gl.constexpr):
    """[low, high): the key blocks that some of QUERIES queries can see; at least one, which may be wholly masked."""
    seqlen_q, seqlen_k, left, right = extent
    high = (seqlen_k + BLOCK - 1) // BLOCK
    low = 0
    if T.mask != "none":
        last_query = gl.minimum(first_query + QUERIES, seqlen_q) - 1
        last = gl.minimum(gl.maximum(last_query + (seqlen_k - seqlen_q) + right, 0), seqlen_k - 1)
        high = last // BLOCK + 1
    if T.mask == "band":
        low = gl.minimum(gl.maximum(first_query + (seqlen_k - seqlen_q) - left, 0) // BLOCK, high - 1)
    return low, high


@gluon.jit
def nought(i):
    """0, computed in step i. A tile that stays all through a loop is indexed by it there: the compiler would otherwise
    keep the address of each of its slices in two registers, and there are not so many."""
    return i >> 30
