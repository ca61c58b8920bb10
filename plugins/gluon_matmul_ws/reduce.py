"""Split-K: which CTA multiplies which range of K, and how the partial sums of a tile become one.

SPLIT_K ranges of K for each tile. Or 0, for equal shares: the blocks of those tiles that are too few for a round over
the chip, laid end to end, are cut into a stretch for each CTA, so that a stretch may end one tile and begin the next;
they come first, and the whole tiles of the complete rounds hide what adding up takes.

Every CTA writes its sums to the workspace and counts itself in; the last to arrive adds all of them up in the order of
their ranges, so the result does not depend on who was last, and sets the counter back to zero. Nobody waits, so nothing
can hang. The two consumers have counters of their own and never meet.

Sums lie in the workspace as the threads hold them, 16 bytes of each side by side.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.hopper import group_barrier
from registry.toolbox.stretches import cta_of, stretch


@gluon.jit
def items_of(tiles, whole, blocks, first: gl.constexpr, stride: gl.constexpr, cfg: gl.constexpr):
    """(begin, end, step) of what a CTA works on, for `part_of`. Of `tiles`, `whole` are those of complete rounds."""
    P = gl.num_programs(0)
    if cfg.SPLIT_K == 0:
        _, _, touched = stretch(tiles - whole, blocks)
        return 0, touched + whole // P, 1
    else:
        return gl.program_id(0) + first * P, whole * cfg.SPLIT_K, stride * P


@gluon.jit
def part_of(item, tiles, whole, blocks, cfg: gl.constexpr):
    """A piece of work: (tile, first block of K, number of blocks). Neighbours share operands, not the tile."""
    if cfg.SPLIT_K == 1:
        return item, item * 0, blocks
    elif cfg.SPLIT_K == 0:
        begin, end, touched = stretch(tiles - whole, blocks)
        tile = begin // blocks + item
        first = gl.maximum(begin - tile * blocks, 0)
        count = gl.minimum(end - tile * blocks, blocks) - first
        later = tiles - whole + gl.program_id(0) + (item - touched) * gl.num_programs(0)
        shared = item < touched
        return gl.where(shared, tile, later), gl.where(shared, first, 0), gl.where(shared, count, blocks)
    else:
        part = item // whole
        UNIT: gl.constexpr = 2 if cfg.A_REGS else 1
        first = part * (blocks // UNIT) // cfg.SPLIT_K * UNIT
        return item - part * whole, first, (part + 1) * (blocks // UNIT) // cfg.SPLIT_K * UNIT - first


@gluon.jit
def _as_held(acc):
    """[rows, columns] of wgmma as [pieces, 4]: two rows of two columns lie in one thread, and threads in a row."""
    R: gl.constexpr = acc.shape[0] // 64
    C: gl.constexpr = acc.shape[1] // 8
    x = acc.reshape([R, 4, 2, 8, C, 4, 2]).permute((0, 4, 1, 3, 5, 2, 6))
    return x.reshape([R * C * 128, 4])


@gluon.jit
def _as_matrix(x, like):
    R: gl.constexpr = like.shape[0] // 64
    C: gl.constexpr = like.shape[1] // 8
    x = x.reshape([R, C, 4, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6))
    return gl.convert_layout(x.reshape(like.shape), like.type.layout)


@gluon.jit
def _places(base, like):
    pieces = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, like.type.layout))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, like.type.layout))
    return base + pieces[:, None] * 4 + four[None, :]


@gluon.jit
def _contributors(item, tile, first, tiles, whole, blocks, cfg: gl.constexpr):
    """(own place in the workspace, the tile's first place, its second, from there to the next, how many)."""
    if cfg.SPLIT_K == 0:
        P = gl.num_programs(0)
        total = (tiles - whole) * blocks
        head = cta_of(tile * blocks, total)
        count = cta_of((tile + 1) * blocks - 1, total) - head + 1
        own = gl.program_id(0) + gl.where(first == 0, P, 0)  # a stretch has at most one of either kind
        return own, P + head, head + 1, 1, count
    else:
        return item, tile, tile + whole, whole, whole * 0 + cfg.SPLIT_K


@gluon.jit
def reduce(acc0, acc1, G: gl.constexpr, item, part, tiles, whole, blocks, workspace, cfg: gl.constexpr):
    """(accumulators, whether they now are the whole sum, for this consumer to store)."""
    part_ptr, count_ptr = workspace
    span: gl.constexpr = cfg.GM * (cfg.N0 + cfg.N1)
    at_once: gl.constexpr = cfg.AT_ONCE
    tile, first, _ = part
    own, head, second, step, count = _contributors(item, tile, first, tiles, whole, blocks, cfg)
    x0 = _as_held(acc0)
    base = part_ptr + (own * 2 + G).to(gl.int64) * span
    gl.store(_places(base, x0), x0)
    if cfg.N1:
        x1 = _as_held(acc1)
        gl.store(_places(base + cfg.GM * cfg.N0, x1), x1)
    group_barrier()
    arrived = gl.atomic_add(count_ptr + tile * 2 + G, 1, sem="acq_rel", scope="gpu")
    last = arrived == count - 1
    if last:
        gl.atomic_xchg(count_ptr + tile * 2 + G, 0, sem="relaxed", scope="gpu")
        x0 = gl.full(x0.shape, 0, x0.dtype, layout=x0.type.layout)
        if cfg.N1:
            x1 = gl.full(x1.shape, 0, x1.dtype, layout=x1.type.layout)
        for number in range(0, count, at_once):
            for i in gl.static_range(at_once):
                place = gl.where(number + i == 0, head, second + (number + i - 1) * step)
                base = part_ptr + (place * 2 + G).to(gl.int64) * span
                there = number + i < count
                x0 += gl.load(_places(base, x0), mask=there, other=0, cache_modifier=".cg")
                if cfg.N1:
                    x1 += gl.load(_places(base + cfg.GM * cfg.N0, x1), mask=there, other=0, cache_modifier=".cg")
        acc0 = _as_matrix(x0, acc0)
        if cfg.N1:
            acc1 = _as_matrix(x1, acc1)
    return acc0, acc1, last
