"""Which tile a block works on, in which order, and which key blocks a range of rows can see.

Persistent: one thread block per SM walks over tiles. A tile is `block_m` query rows of one head. The producer decides
and tells the consumers through a ring of two messages, so that they neither divide nor hold the problem's sizes.

static          block p takes tiles p, p + P, p + 2P, ...
dynamic         the next tile is drawn from a counter when the last V block of the running tile is due, so that a fast
                SM takes more of the tail
dynamic_early   the same, drawn when the tile begins: hides the atomic's latency where tiles are short

Causal tiles are ordered by sections of heads whose K and V fit the L2 cache, longest tile first inside a section.

Why the counter needs no reset: `atom.inc` with bound tiles - 1 wraps to zero after exactly `tiles` draws, and a launch
draws exactly that often (each block's first tile is its own number; tiles - P draws find work, and P draws end one
block each). Launches that could overlap never share a counter: see registry.toolbox.counters.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.toolbox.hopper import release, wait_empty, wait_full

FIELD = gl.constexpr(21)  # bits of a message for each of row block, head and batch (see traits.rule)

# One lane draws, the warp gets the result.
_DRAW = gl.constexpr(
    "{ .reg .pred p; .reg .u32 lane, got; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.u32 got, 0;"
    " @p atom.global.inc.u32 got, [$1], $2; shfl.sync.idx.b32 $0, got, 0, 31, 0xffffffff; }"
)


@gluon.jit
def tile_at(tile, work, heads_q, T: gl.constexpr):
    """(row block, query head, batch) of a tile."""
    tiles, row_blocks, heads, section_heads = work
    if T.longest_first:
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
    b = bh // heads_q
    return m, bh - b * heads_q, b


@gluon.jit
def key_blocks(first_row, last_row, extent, T: gl.constexpr):
    """(lowest, highest) key block that these rows can see. Rows that see nothing get one block, wholly masked."""
    seqlen_q, seqlen_k, left, right = extent
    N: gl.constexpr = T.block_n
    high = (seqlen_k - 1) // N
    low = 0
    if T.mask == "diagonal":
        high = gl.minimum(gl.maximum(last_row + (seqlen_k - seqlen_q), 0) // N, high)
    elif T.mask == "band":
        high = gl.minimum(gl.maximum(last_row + (seqlen_k - seqlen_q) + right, 0) // N, high)
        low = gl.minimum(gl.maximum(first_row + (seqlen_k - seqlen_q) - left, 0) // N, high)
    return low, high


@gluon.jit
def next_tile(tile, counter, work, T: gl.constexpr):
    """The tile after this one; `tiles` or more when there is none."""
    if T.dynamic:
        tile = gl.inline_asm_elementwise(_DRAW, "=r,l,r", [counter, work[0] - 1], dtype=gl.int32, is_pure=False, pack=1)
    return tile + gl.num_programs(0)


@gluon.jit
def announce(messages, turn, m, h, b, more):
    """Producer: pass a tile to the consumers, or the end."""
    ONE_WARP: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    place, ready = wait_empty(messages, turn)
    packed = (b.to(gl.int64) << (2 * FIELD)) | (h.to(gl.int64) << FIELD) | m.to(gl.int64)
    packed = gl.where(more, packed, -1)
    place.store(gl.full([1], 0, gl.int64, layout=ONE_WARP) + packed)
    mbarrier.arrive(ready, count=1)


@gluon.jit
def learn(messages, turn):
    """Consumer: the next tile as (row block, head, batch), and whether there is one."""
    ONE_GROUP: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    packed = gl.max(wait_full(messages, turn).load(ONE_GROUP), 0)
    release(messages, turn)
    MASK: gl.constexpr = (1 << FIELD) - 1
    m = (packed & MASK).to(gl.int32)
    h = ((packed >> FIELD) & MASK).to(gl.int32)
    return m, h, (packed >> (2 * FIELD)).to(gl.int32), packed >= 0
