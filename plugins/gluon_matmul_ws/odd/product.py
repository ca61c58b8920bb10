"""One tile's loop over K: the blocks of a ring, the first factor's through registers, into accumulators."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from registry.plugins.gluon_matmul_ws.odd.fragments import fragment
from registry.plugins.gluon_matmul_ws.product import _give_turn, _operand_b, _take_turn
from registry.toolbox import scopes
from registry.toolbox.hopper import release_slot, retyped, slot_of, wait_slot_full


@gluon.jit
def _add(acc, last, FIRST: gl.constexpr, smem, stages, it, part: gl.constexpr, begin, cfg: gl.constexpr):
    """The product of stage `it` is on its way, and that of slot `last` done with. Returns the slot of `it`."""
    a_s, b_s, _ = smem
    s = slot_of(it, stages)
    scopes.enter("wait A and B")
    wait_slot_full(stages, s, it)
    scopes.leave("wait A and B")
    layout: gl.constexpr = acc.type.layout
    SHAPE: gl.constexpr = [cfg.GM, 32]
    words: gl.constexpr = gl.NVMMASharedLayout.get_default_for(SHAPE, gl.int32)
    lines = retyped(a_s.index(s * cfg.PARTS + part), gl.int32, SHAPE, words)
    a = fragment(lines, begin, layout, a_s.dtype)
    acc = warpgroup_mma(a, _operand_b(b_s, s, cfg.N0, cfg), acc, use_acc=not FIRST, is_async=True)
    scopes.enter("wait product")
    acc = warpgroup_mma_wait(1, [acc])
    scopes.leave("wait product")
    if not FIRST:
        release_slot(stages, last)
    return acc, s


@gluon.jit
def multiply(G: gl.constexpr, smem, sync, it, own, pairs, begin, cfg: gl.constexpr):
    """Two blocks a round: wgmma still reads the registers of one while those of the other are filled. (A last block by
    itself, behind a branch, makes the compiler wait for each wgmma.)"""
    stages, turns = sync
    part: gl.constexpr = G if cfg.PARTS == 2 else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, cfg.N0, 16])
    acc = gl.full([cfg.GM, cfg.N0], 0, cfg.ACC, layout=layout)
    if cfg.PARTS == 1:
        _take_turn(turns, G, own)
    acc, s = _add(acc, it, True, smem, stages, it, part, begin, cfg)
    acc, s = _add(acc, s, False, smem, stages, it + 1, part, begin, cfg)
    for _ in range(1, pairs):
        it += 2
        acc, s = _add(acc, s, False, smem, stages, it, part, begin, cfg)
        acc, s = _add(acc, s, False, smem, stages, it + 1, part, begin, cfg)
    if cfg.PARTS == 1:
        _give_turn(turns, G)
    acc = warpgroup_mma_wait(0, [acc])
    release_slot(stages, s)
    return acc
