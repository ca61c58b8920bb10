"""Who waits for whom among the matrix groups and the senders, by hardware barriers.

Among thread blocks, where dQ is added up in a fixed order, by a counter in memory for each part of it: `await_turn` and
`pass_turn`.

A group that has written its part of dS tells the other and goes on; each waits for the other's part only where its
product of dQ reads it. Each waiter has a barrier of its own, so that telling never blocks, and two of them by turns: a
group may be told of step i + 1 before it has come to wait for step i, and one barrier would count both for one step.
"""

import enum

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.toolbox.hopper import FREE_BARRIERS, barrier_asm, barriers, init_barriers


class Signal(enum.IntEnum):
    """What a hardware barrier announces, and to or from which group; of DS, in even steps and in odd ones."""

    DS_0, DS_0_ODD, DS_1, DS_1_ODD, READY_0, READY_1, FREE_0, FREE_1 = FREE_BARRIERS


GROUP_THREADS, WARP_THREADS = 128, 32


@gluon.constexpr_function
def _ds_asm(verb, group):
    """Of step $1."""
    first = int(Signal[f"DS_{int(group)}"])
    return (
        f"{{ .reg .u32 own; and.b32 own, $1, 1; add.u32 own, own, {first}; bar.{verb} own, {2 * GROUP_THREADS};"
        " mov.u32 $0, 0; }"
    )


@gluon.constexpr_function
def _with_sender(verb, name, group):
    return barrier_asm(verb, Signal[f"{name}_{int(group)}"], GROUP_THREADS + WARP_THREADS)


@gluon.constexpr_function
def _other(group):
    return 1 - int(group)


@gluon.jit
def _do(ASM: gl.constexpr):
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def emptied(tiles):
    """A ring of tiles that a hardware barrier announces, each for one reader: `empty` alone is set up, for one that
    nobody waits for must not be (toolbox.hopper)."""
    empty = barriers(tiles.shape[0])
    init_barriers(empty, 1)
    return tiles, empty, empty


@gluon.jit
def tell_ds(GROUP: gl.constexpr, i):
    """GROUP's part of dS of step i is in shared memory."""
    ASM: gl.constexpr = _ds_asm("arrive", _other(GROUP))
    gl.inline_asm_elementwise(ASM, "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_ds(GROUP: gl.constexpr, i):
    """GROUP waits for the other group's part of dS of step i, and for all of its own warps."""
    ASM: gl.constexpr = _ds_asm("sync", GROUP)
    gl.inline_asm_elementwise(ASM, "=r,r", [i], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_free_tile(GROUP: gl.constexpr):
    """GROUP waits until its tile may be written."""
    _do(_with_sender("sync", "FREE", GROUP))


@gluon.jit
def hand_tile(GROUP: gl.constexpr):
    """GROUP has written its tile."""
    _do(_with_sender("arrive", "READY", GROUP))


@gluon.jit
def tile_is_free(GROUP: gl.constexpr):
    """Sender: GROUP's tile may be written."""
    _do(_with_sender("arrive", "FREE", GROUP))


@gluon.jit
def take_tile(GROUP: gl.constexpr):
    """Sender: wait for GROUP's tile."""
    _do(_with_sender("sync", "READY", GROUP))


_AWAIT_TURN = gl.constexpr(
    "{ .reg .pred p; .reg .s32 now; mov.s32 now, $3; AGAIN: setp.eq.s32 p, now, $2; @p bra DONE;"
    " ld.acquire.gpu.global.s32 now, [$1]; bra AGAIN; DONE: mov.u32 $0, 0; }"
)
# Not the `.read` form, and a release: the sums must have arrived before another block may add its own. With a relaxed
# addition after the same wait, 8 of 14 shapes had other bits within 200 repeats (H200).
_PASS_TURN = gl.constexpr(
    "{ .reg .pred p; .reg .u32 lane; ld.relaxed.gpu.global.s32 $0, [$2]; cp.async.bulk.wait_group 0;"
    " bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0;"
    " @p red.release.gpu.global.add.s32 [$1], 1; }"
)


@gluon.jit
def await_turn(place, turn, seen):
    """Sender: wait until `turn` tiles have added theirs; `seen` of them had when it was last looked at."""
    gl.inline_asm_elementwise(_AWAIT_TURN, "=r,l,r,r", [place, turn, seen], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(place, following):
    """Sender: what it has issued is in memory, and the next tile may add its own. Gives how many have added theirs
    where the sender's next part goes: that look-up takes place beside the wait."""
    return gl.inline_asm_elementwise(_PASS_TURN, "=&r,l,l", [place, following], dtype=gl.int32, is_pure=False, pack=1)
