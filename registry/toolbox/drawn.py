"""Tiles drawn from a counter: a persistent Gluon kernel takes the next one when it is through, whatever others take.

The producer draws and tells the consumers, through a ring of single words (`messages`). The counter needs no reset:
`atom.inc` with bound tiles - 1 wraps to zero after exactly `tiles` draws, and a launch draws exactly that often (each
block's first tile is its own number; tiles - P draws find work, and P draws end one block each). Launches that could
overlap never share a counter: see registry.toolbox.counters.

Where a tile waits for those before it, IN_ORDER, a block draws its first one, too: of P blocks only some may have an SM
while others' work holds the rest, and none may begin with a tile behind one that no block has begun. All blocks but
those beyond the tiles draw, so there are tiles + min(P, tiles) draws then.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.toolbox.hopper import release, ring, wait_empty, wait_full

# One lane draws, the warp gets the result.
DRAW: gl.constexpr = gl.constexpr(
    "{ .reg .pred p; .reg .u32 lane, got; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.u32 got, 0;"
    " @p atom.global.inc.u32 got, [$1], $2; shfl.sync.idx.b32 $0, got, 0, 31, 0xffffffff; }"
)
_SAME: gl.constexpr = gl.constexpr("redux.sync.max.s32 $0, $1, 0xffffffff;")


@gluon.jit
def messages_for(READERS: gl.constexpr):
    """The ring, for so many groups that are told."""
    return ring(gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), 2, READERS)


@gluon.jit
def draw(counter, tiles, IN_ORDER: gl.constexpr = False):
    """The next of so many tiles, `tiles` or more when there is none. Of one warp."""
    if IN_ORDER:
        last = tiles + gl.minimum(gl.num_programs(0), tiles) - 1
        return gl.inline_asm_elementwise(DRAW, "=r,l,r", [counter, last], dtype=gl.int32, is_pure=False, pack=1)
    else:
        tile = gl.inline_asm_elementwise(DRAW, "=r,l,r", [counter, tiles - 1], dtype=gl.int32, is_pure=False, pack=1)
        return tile + gl.num_programs(0)


@gluon.jit
def announce_drawn(messages, turn, counter, tiles, IN_ORDER: gl.constexpr = False):
    """Producer: draw a tile, tell the others in the `turn`-th message, and give it."""
    tile = draw(counter, tiles, IN_ORDER)
    word, ready = wait_empty(messages, turn)
    word.store(gl.full([1], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [1], [0])) + tile)
    mbarrier.arrive(ready, count=1)
    return tile


@gluon.jit
def learn_drawn(messages, turn, WARPS: gl.constexpr):
    """The others, groups of so many warps: the tile of that message."""
    word = wait_full(messages, turn).load(gl.BlockedLayout([1], [32], [WARPS], [0]))
    tile = gl.max(word, 0)
    release(messages, turn)
    return same(tile)


@gluon.jit
def same(x):
    """x, of which ptxas then knows that all of a warp has the same: it keeps what follows in uniform registers."""
    return gl.inline_asm_elementwise(_SAME, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
