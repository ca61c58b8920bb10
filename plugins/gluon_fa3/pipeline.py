"""Rings of shared-memory tiles guarded by mbarriers, and the named barriers of the ping-pong.

A ring is a tuple (tiles, full, empty). Use i of a ring takes slot i % stages in phase (i // stages) & 1, so producer
and consumers agree on slot and phase by counting alone. `full` completes when the bulk copy has delivered its bytes,
`empty` when each of the consumer groups that read the slot has let go of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

PINGPONG_FIRST = 8  # hardware barriers 0..7 are the compiler's (one per warp-specialized partition and one for all)
PINGPONG_THREADS = 256  # the group that waits and the one that hands over


@gluon.constexpr_function
def _pingpong(verb, group):
    return f"bar.{verb} {PINGPONG_FIRST + group}, {PINGPONG_THREADS}; mov.u32 $0, 0;"


@gluon.jit
def take_turn(GROUP: gl.constexpr, T: gl.constexpr):
    """Wait until it is GROUP's turn to issue its matrix products."""
    if T.pingpong != "off":
        gl.inline_asm_elementwise(_pingpong("sync", GROUP), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def give_turn(GROUP: gl.constexpr, T: gl.constexpr):
    """Let GROUP go; does not wait."""
    if T.pingpong != "off":
        gl.inline_asm_elementwise(_pingpong("arrive", GROUP), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ring(tiles, STAGES: gl.constexpr, READERS: gl.constexpr):
    """Barriers around `tiles`, whose first dimension counts the stages."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return tiles, full, empty


@gluon.jit
def slot(i, tiles):
    STAGES: gl.constexpr = tiles.shape[0]
    return i % STAGES, (i // STAGES) & 1


@gluon.jit
def wait_full(r, i):
    """Reader: wait for use i; gives its tile."""
    tiles, full, empty = r
    s, phase = slot(i, tiles)
    mbarrier.wait(full.index(s), phase)
    return tiles.index(s)


@gluon.jit
def release(r, i):
    """Reader: this group is done with use i."""
    tiles, full, empty = r
    s, _ = slot(i, tiles)
    mbarrier.arrive(empty.index(s), count=1)


@gluon.jit
def wait_empty(r, i):
    """Writer: wait until use i may be written; gives its tile and the barrier that announces it."""
    tiles, full, empty = r
    s, phase = slot(i, tiles)
    mbarrier.wait(empty.index(s), phase ^ 1)
    return tiles.index(s), full.index(s)
