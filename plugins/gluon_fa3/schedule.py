"""Which tile a block works on, in which order, and which key blocks a range of rows can see.

Persistent: one thread block per SM walks over tiles. A tile is `block_m` queries of one head, or of some that share
keys. The producer decides and tells the consumers through a ring of two messages, so that they neither divide nor hold
the problem's sizes.

static          block p takes tiles p, p + P, p + 2P, ...
dynamic         the next tile is drawn from a counter when the last V block of the running tile is due, so that a fast
                SM takes more of the tail
dynamic_early   the same, drawn when the tile begins: hides the atomic's latency where tiles are short

Causal tiles are ordered by sections of heads whose K and V fit the L2 cache, longest tile first inside a section.

Packed sequences come as a list of row blocks, the longest sequence first, its longest row block first; as long as the
device finds it to be. Each block of the list stands for one tile a head, by the same sections.

The counter needs no reset: see registry.toolbox.drawn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3 import traits
from registry.plugins.gluon_fa3.places import extent_of
from registry.toolbox.drawn import draw
from registry.toolbox.hopper import release, wait_empty, wait_full

WORDS = gl.constexpr(8)  # 32-bit words of an entry in a list of row blocks, the first of which says how many there are
SHARE_BITS = gl.constexpr(traits.SHARE_BITS)
FIELD = gl.constexpr(21)  # bits of a message for each of row block, head and batch (see traits.rule)


@gluon.jit
def tile_at(tile, work, heads_q, T: gl.constexpr):
    """The place of a tile (see places.py); `work` ends with the list of row blocks, where there is one."""
    row_blocks = work[1]
    heads = work[2]
    section_heads = work[3]
    if T.longest_first or T.packed:
        section = tile // (section_heads * row_blocks)
        first = section * section_heads
        within = tile - first * row_blocks
        here = gl.minimum(section_heads, heads - first)
        step = within // here
        m = row_blocks - 1 - step
        bh = first + within - step * here
    else:
        bh = tile // row_blocks
        m = tile - bh * row_blocks
    if T.packed:
        return listed(work[4], step, bh, T)
    else:
        b = bh // heads_q
        return m, bh - b * heads_q, b


@gluon.jit
def listed(row_blocks, step, h, T: gl.constexpr):
    """The place of a row block of one head out of a list that varlen/tile_list.py made, or varlen/share_list.py."""
    entry = row_blocks + (step + 1) * WORDS
    m = gl.load(entry)
    q_end = gl.load(entry + 1)
    queries = gl.load(entry + 2)
    keys = gl.load(entry + 3)
    k_end = gl.load(entry + 4)
    if T.shared_out:
        return m, h, q_end, queries, keys, gl.load(entry + 6), k_end, gl.load(entry + 7)
    else:
        return m, h, q_end, queries, keys, 0, k_end, 0


@gluon.jit
def key_blocks(first_row, last_row, extent, T: gl.constexpr):
    """(lowest, highest) key block that these rows can see. Rows that see nothing get one block, wholly masked."""
    seqlen_q, seqlen_k, left, right = extent
    N: gl.constexpr = T.block_n
    high = (seqlen_k - 1) // N
    low = 0
    if T.mask == "diagonal" or T.mask == "shifted":
        high = gl.minimum(gl.maximum(last_row + (seqlen_k - seqlen_q), 0) // N, high)
    elif T.mask == "band":
        high = gl.minimum(gl.maximum(last_row + (seqlen_k - seqlen_q) + right, 0) // N, high)
        low = gl.minimum(gl.maximum(first_row + (seqlen_k - seqlen_q) - left, 0) // N, high)
    return low, high


@gluon.jit
def tile_blocks(place, extent, T: gl.constexpr):
    """The same of a whole tile; of its share, where keys are shared out."""
    m = place[0]
    low, high = key_blocks(m * T.block_m, m * T.block_m + T.block_m - 1, extent_of(place, extent, T), T)
    if T.shared_out:
        shares = place[5] >> SHARE_BITS
        each = (high - low + shares) // shares
        first = low + (place[5] & ((1 << SHARE_BITS) - 1)) * each
        return gl.minimum(first, high + 1), gl.where(first > high, high + 1, gl.minimum(first + each - 1, high))
    else:
        return low, high


@gluon.jit
def group_blocks(place, GROUP: gl.constexpr, extent, T: gl.constexpr):
    """The same of one group's rows; of the tile's, where the groups skip nothing for themselves."""
    if T.packed and not T.skips:
        return tile_blocks(place, extent, T)
    else:
        row = place[0] * T.block_m + GROUP * T.rows
        low, high = key_blocks(row, row + T.rows - 1, extent_of(place, extent, T), T)
        if T.shared_out:
            first, last = tile_blocks(place, extent, T)
            return gl.maximum(gl.minimum(low, last), first), gl.maximum(gl.minimum(high, last), first)
        else:
            return low, high


@gluon.jit
def next_tile(tile, counter, work, T: gl.constexpr):
    """The tile after this one; `tiles` or more when there is none."""
    if T.dynamic:
        return draw(counter, work[0])
    else:
        return tile + gl.num_programs(0)


@gluon.jit
def announce(messages, turn, place, more, T: gl.constexpr):
    """Producer: pass a tile to the consumers, or the end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([T.message_words], [32], [1], [0])
    words, ready = wait_empty(messages, turn)
    if T.packed:
        m, h, q_end, queries, keys, share, _, part_row = place
        word = gl.arange(0, T.message_words, layout=LAYOUT)
        third = _pair(share, keys) if T.shared_out else keys.to(gl.int64)
        packed = gl.where(word == 1, _pair(q_end, queries), gl.where(word == 2, third, _pair(h, m)))
        if T.shared_out:
            packed = gl.where(word == 3, part_row.to(gl.int64), packed)
    else:
        m, h, b = place
        packed = (b.to(gl.int64) << (2 * FIELD)) | (h.to(gl.int64) << FIELD) | m.to(gl.int64)
    packed = gl.where(more, packed, -1)
    words.store(gl.full([T.message_words], 0, gl.int64, layout=LAYOUT) + packed)
    mbarrier.arrive(ready, count=1)


@gluon.jit
def learn(messages, turn, T: gl.constexpr):
    """Consumer: the place of the next tile, and whether there is one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([T.message_words], [32], [4], [0])
    words = wait_full(messages, turn).load(LAYOUT)
    if T.packed:
        release(messages, turn)
        word = gl.arange(0, T.message_words, layout=LAYOUT)
        first = gl.max(gl.where(word == 0, words, -1), 0)
        second = gl.max(gl.where(word == 1, words, -1), 0)
        third = gl.max(gl.where(word == 2, words, -1), 0)
        part_row = gl.max(gl.where(word == 3, words, -1), 0).to(gl.int32) if T.shared_out else 0
        return (
            first.to(gl.int32),
            (first >> 32).to(gl.int32),
            (second >> 32).to(gl.int32),
            second.to(gl.int32),
            third.to(gl.int32),
            (third >> 32).to(gl.int32),
            0,
            part_row,
        ), first >= 0
    else:
        packed = gl.max(words, 0)
        release(messages, turn)
        MASK: gl.constexpr = (1 << FIELD) - 1
        m = (packed & MASK).to(gl.int32)
        h = ((packed >> FIELD) & MASK).to(gl.int32)
        return (m, h, (packed >> (2 * FIELD)).to(gl.int32)), packed >= 0


@gluon.jit
def _pair(high, low):
    return (high.to(gl.int64) << 32) | low.to(gl.int64)
