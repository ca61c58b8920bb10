"""One tile's loop over K: the blocks of a ring, phase by phase; between phases accumulators move along their rows."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from registry.plugins.gluon_matmul_ws.product import _give_turn, _operand_a, _operand_b, _take_turn
from registry.toolbox import scopes
from registry.toolbox.hopper import release_slot, slot_of, wait_slot_full

QUAD: gl.constexpr = gl.constexpr(4)
"""Threads that share a row of accumulators; each has two columns of every eight."""


@gluon.jit
def _split(x, COUNT: gl.constexpr):
    """[rows, COUNT, QUAD] -> COUNT tensors [rows, QUAD]."""
    if COUNT == 1:
        return (x.reshape([x.shape[0], QUAD]),)
    else:
        lo, hi = x.reshape([x.shape[0], 2, COUNT // 2, QUAD]).permute((0, 2, 3, 1)).split()
        return _split(lo, COUNT // 2) + _split(hi, COUNT // 2)


@gluon.jit
def _joined(parts, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """The other way round."""
    if COUNT == 1:
        return parts[FIRST].reshape([parts[FIRST].shape[0], 1, QUAD])
    else:
        lo = _joined(parts, FIRST, COUNT // 2)
        hi = _joined(parts, FIRST + COUNT // 2, COUNT // 2)
        return gl.join(lo, hi).permute((0, 3, 1, 2)).reshape([lo.shape[0], COUNT, QUAD])


@gluon.jit
def _of_lane(x, lane):
    """What that thread of a quad has."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1c1f, 0xffffffff;", "=r,r,r", [x, lane], dtype=x.dtype, is_pure=False, pack=1
    )


@gluon.jit
def _after(parts, COUNT: gl.constexpr, LANES: gl.constexpr):
    """What lies so many threads further along the row, whose eights are `parts`; behind the last is what was first."""
    lane = gl.arange(0, QUAD, layout=gl.SliceLayout(0, parts[0].type.layout))[None, :]
    wraps = lane < LANES  # gives what it has of the next eight, to one that is before it in the row
    taken = (lane + LANES) % QUAD + 0 * parts[0].to(gl.int32, bitcast=True)
    found = ()
    for i in gl.static_range(COUNT):
        given = gl.where(wraps, parts[(i + 1) % COUNT], parts[i])
        found = found + (_of_lane(given, taken),)
    return found


@gluon.jit
def moved(acc, BY: gl.constexpr):
    """Columns moved 1, 2 or 4 to the left; the last ones are of no use then."""
    M: gl.constexpr = acc.shape[0]
    EIGHTS: gl.constexpr = acc.shape[1] // 8
    even, odd = acc.reshape([M, EIGHTS, QUAD, 2]).split()
    if BY == 1:
        x = odd
        y = _joined(_after(_split(even, EIGHTS), EIGHTS, 1), 0, EIGHTS)
        y = gl.convert_layout(y, x.type.layout, assert_trivial=True)
    else:
        x = _joined(_after(_split(even, EIGHTS), EIGHTS, BY // 2), 0, EIGHTS)
        y = _joined(_after(_split(odd, EIGHTS), EIGHTS, BY // 2), 0, EIGHTS)
    return gl.convert_layout(gl.join(x, y).reshape(acc.shape), acc.type.layout, assert_trivial=True)


@gluon.jit
def _add(acc, smem, stages, it, part: gl.constexpr, layout: gl.constexpr, cfg: gl.constexpr):
    """The product of stage `it` is on its way, and that before done with. Returns its slot, too."""
    a_s, b_s, _ = smem
    slot = slot_of(it, stages)
    scopes.enter("wait A and B")
    wait_slot_full(stages, slot, it)
    scopes.leave("wait A and B")
    a = _operand_a(a_s, slot * cfg.PARTS + part, layout, cfg)
    acc = warpgroup_mma(a, _operand_b(b_s, slot, cfg.N0, cfg), acc, use_acc=True, is_async=True)
    scopes.enter("wait product")
    acc = warpgroup_mma_wait(1, [acc])
    scopes.leave("wait product")
    return acc, slot


@gluon.jit
def multiply(G: gl.constexpr, smem, sync, it, own, first, count, per_phase, cfg: gl.constexpr):
    """Blocks first ... first + count of all phases, `per_phase` of each."""
    stages, turns = sync
    part: gl.constexpr = G if cfg.PARTS == 2 else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, cfg.N0, 16])
    acc = gl.full([cfg.GM, cfg.N0], 0, cfg.ACC, layout=layout)
    if cfg.PARTS == 1:
        _take_turn(turns, G, own)
    for phase in range(cfg.CLASSES):
        if phase * per_phase > first:  # (there is nothing to move before)
            acc = moved(acc, 8 // cfg.CLASSES)
        begin = gl.maximum(first, phase * per_phase)
        end = gl.minimum(first + count, (phase + 1) * per_phase)
        if begin < end:
            acc, last = _add(acc, smem, stages, it, part, layout, cfg)
            for ahead in range(it + 1, it + end - begin):
                acc, slot = _add(acc, smem, stages, ahead, part, layout, cfg)
                release_slot(stages, last)
                last = slot
            acc = warpgroup_mma_wait(0, [acc])
            release_slot(stages, last)
            it += end - begin
    if cfg.PARTS == 1:
        _give_turn(turns, G)
    return acc
