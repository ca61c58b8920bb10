"""One tile's loop over K: the blocks of a ring, as wgmma takes them, into accumulators.

A comes from shared memory, or of 32 bits from registers where it does not lie along K (A_REGS): wgmma reads such
operands along K only, but threads take what they need from any order. The second factor always lies along K then.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from registry.toolbox import scopes
from registry.toolbox.arithmetic import to_tf32
from registry.toolbox.hopper import as_matrix, group_barrier, release_slot, slot_of, wait_slot_full


@gluon.jit
def _operand_a(a_s, index, acc: gl.constexpr, cfg: gl.constexpr):
    if cfg.A_REGS:
        layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc, k_width=1)
        x = as_matrix(a_s.index(index), cfg.BK, cfg.GM).permute((1, 0)).load(layout)
        if cfg.ROUND:
            x = to_tf32(x)
        return x
    elif cfg.A_T:
        return as_matrix(a_s.index(index), cfg.BK, cfg.GM).permute((1, 0))
    else:
        return as_matrix(a_s.index(index), cfg.GM, cfg.BK)


@gluon.jit
def _operand_b(b_s, index, N: gl.constexpr, cfg: gl.constexpr):
    if cfg.B_T:
        return as_matrix(b_s.index(index), N, cfg.BK).permute((1, 0))
    else:
        return as_matrix(b_s.index(index), cfg.BK, N)


@gluon.jit
def _fresh(acc, smem, stages, it, part: gl.constexpr, N: gl.constexpr, which: gl.constexpr, cfg: gl.constexpr):
    """One block of K on its way into accumulators of its own."""
    s = slot_of(it, stages)
    if which == 0:  # (the second half of B comes with the first)
        scopes.enter("wait A and B")
        wait_slot_full(stages, s, it)
        scopes.leave("wait A and B")
    zero = gl.full([cfg.GM, N], 0, cfg.ACC, layout=acc.type.layout)
    layout: gl.constexpr = acc.type.layout
    a = _operand_a(smem[0], s * cfg.PARTS + part, layout, cfg)
    return warpgroup_mma(a, _operand_b(smem[1 + which], s, N, cfg), zero, use_acc=False, is_async=True)


@gluon.jit
def _exact(
    acc0,
    acc1,
    smem,
    stages,
    it,
    part: gl.constexpr,
    BLOCKS: gl.constexpr,
    N0: gl.constexpr,
    N1: gl.constexpr,
    cfg: gl.constexpr,
):
    """One block of fp8 summed by itself and added in fp32, or two: one is added while the other is multiplied."""
    one = _fresh(acc0, smem, stages, it, part, N0, 0, cfg)
    if BLOCKS == 2:
        two = _fresh(acc0, smem, stages, it + 1, part, N0, 0, cfg)
        scopes.enter("wait product")
        one = warpgroup_mma_wait(1, [one])
        scopes.leave("wait product")
        release_slot(stages, slot_of(it, stages))
        acc0 += one
        scopes.enter("wait product")
        two = warpgroup_mma_wait(0, [two])
        scopes.leave("wait product")
        release_slot(stages, slot_of(it + 1, stages))
        acc0 += two
    elif N1:
        two = _fresh(acc1, smem, stages, it, part, N1, 1, cfg)
        scopes.enter("wait product")
        one, two = warpgroup_mma_wait(0, [one, two])
        scopes.leave("wait product")
        release_slot(stages, slot_of(it, stages))
        acc0 += one
        acc1 += two
    else:
        scopes.enter("wait product")
        one = warpgroup_mma_wait(0, [one])
        scopes.leave("wait product")
        release_slot(stages, slot_of(it, stages))
        acc0 += one
    return acc0, acc1


@gluon.jit
def _round(tile):
    """float32 in shared memory to the nearest tf32."""
    rows: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    tile.store(to_tf32(tile.load(rows)))


@gluon.jit
def _arrived(
    G: gl.constexpr, smem, sync, it, part: gl.constexpr, N0: gl.constexpr, N1: gl.constexpr, cfg: gl.constexpr
):
    """Waits until stage `it` of the ring is there, as wgmma can take it. Returns its index."""
    a_s, b0_s, b1_s, _ = smem
    stages, _, rounded = sync
    s = slot_of(it, stages)
    scopes.enter("wait A and B")
    wait_slot_full(stages, s, it)
    scopes.leave("wait A and B")
    if cfg.ROUND:
        mine: gl.constexpr = G * (cfg.PARTS - 1)
        if not cfg.A_REGS:
            _round(as_matrix(a_s.index(s * cfg.PARTS + part), cfg.GM, cfg.BK))
        _round(as_matrix(b0_s.index(s), N0, cfg.BK).slice(mine * (N0 // cfg.PARTS), N0 // cfg.PARTS))
        if N1:
            _round(as_matrix(b1_s.index(s), N1, cfg.BK).slice(mine * (N1 // cfg.PARTS), N1 // cfg.PARTS))
        fence_async_shared()
        group_barrier()
        if cfg.PARTS == 2:
            mbarrier.arrive(rounded.index(s), count=1)
            scopes.enter("wait rounded")
            mbarrier.wait(rounded.index(s), (it // cfg.STAGES) & 1)
            scopes.leave("wait rounded")
    return s


@gluon.jit
def _take_turn(turns, G: gl.constexpr, own):
    """Ping-pong: until the other consumer has taken the last stage of its tile."""
    scopes.enter("wait turn")
    mbarrier.wait(turns.index(G), (own & 1) ^ (1 - G))
    scopes.leave("wait turn")


@gluon.jit
def _give_turn(turns, G: gl.constexpr):
    mbarrier.arrive(turns.index(1 - G), count=1)


@gluon.jit
def _add(
    acc0,
    acc1,
    last,
    FIRST: gl.constexpr,
    G: gl.constexpr,
    smem,
    sync,
    it,
    part: gl.constexpr,
    N0: gl.constexpr,
    N1: gl.constexpr,
    cfg: gl.constexpr,
):
    """The product of stage `it` is on its way, and that of slot `last` done with. Returns the slot of `it`."""
    a_s, b0_s, b1_s, _ = smem
    s = _arrived(G, smem, sync, it, part, N0, N1, cfg)
    layout: gl.constexpr = acc0.type.layout
    a = _operand_a(a_s, s * cfg.PARTS + part, layout, cfg)
    acc0 = warpgroup_mma(a, _operand_b(b0_s, s, N0, cfg), acc0, use_acc=not FIRST, is_async=True)
    if N1:
        acc1 = warpgroup_mma(a, _operand_b(b1_s, s, N1, cfg), acc1, use_acc=not FIRST, is_async=True)
    acc0, acc1 = _waited(acc0, acc1, 1, N1)
    if not FIRST:
        release_slot(sync[0], last)
    return acc0, acc1, s


@gluon.jit
def _waited(acc0, acc1, BLOCKS: gl.constexpr, N1: gl.constexpr):
    """Until no more than so many blocks are on their way."""
    scopes.enter("wait product")
    if N1:
        acc0, acc1 = warpgroup_mma_wait(2 * BLOCKS, [acc0, acc1])
    else:
        acc0 = warpgroup_mma_wait(BLOCKS, [acc0])
    scopes.leave("wait product")
    return acc0, acc1


@gluon.jit
def multiply(G: gl.constexpr, smem, sync, it, own, blocks, N0: gl.constexpr, N1: gl.constexpr, cfg: gl.constexpr):
    """One tile's loop over K; the second accumulator is a dummy where N1 is 0."""
    stages, turns, _ = sync
    part: gl.constexpr = G if cfg.PARTS == 2 else 0
    l0: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N0, 32 // cfg.ITEM]
    )
    l1: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N1 if N1 else 8, 32 // cfg.ITEM]
    )
    acc0 = gl.full([cfg.GM, N0], 0, cfg.ACC, layout=l0)
    acc1 = gl.full([cfg.GM, N1 if N1 else 8], 0, cfg.ACC, layout=l1)
    if cfg.PARTS == 1:
        _take_turn(turns, G, own)
    if cfg.EXACT:
        for _ in range(blocks // cfg.EXACT):
            acc0, acc1 = _exact(acc0, acc1, smem, stages, it, part, cfg.EXACT, N0, N1, cfg)
            it += cfg.EXACT
        if cfg.EXACT == 2 and blocks % 2 != 0:
            acc0, acc1 = _exact(acc0, acc1, smem, stages, it, part, 1, N0, N1, cfg)
        if cfg.PARTS == 1:
            _give_turn(turns, G)
    else:
        acc0, acc1, s = _add(acc0, acc1, it, True, G, smem, sync, it, part, N0, N1, cfg)
        if cfg.A_REGS:  # two blocks a round: wgmma still reads the registers of one while those of the other are filled
            acc0, acc1, s = _add(acc0, acc1, s, False, G, smem, sync, it + 1, part, N0, N1, cfg)
            for _ in range(1, blocks // 2):
                it += 2
                acc0, acc1, s = _add(acc0, acc1, s, False, G, smem, sync, it, part, N0, N1, cfg)
                acc0, acc1, s = _add(acc0, acc1, s, False, G, smem, sync, it + 1, part, N0, N1, cfg)
        else:
            for _ in range(1, blocks):
                it += 1
                acc0, acc1, s = _add(acc0, acc1, s, False, G, smem, sync, it, part, N0, N1, cfg)
        if cfg.PARTS == 1:
            _give_turn(turns, G)
        acc0, acc1 = _waited(acc0, acc1, 0, N1)
        release_slot(stages, s)
    return acc0, acc1
