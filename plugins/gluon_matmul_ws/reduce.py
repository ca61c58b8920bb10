"""Split-K: which CTA multiplies which range of K, and how the partial sums of a tile become one.

Every CTA writes its sums to the workspace and counts itself in; the last to arrive adds all of them up in the order of
their ranges, so the result does not depend on who was last, and sets the counter back to zero. Nobody waits, so nothing
can hang. The two consumers have counters of their own and never meet.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.hopper import group_barrier


@gluon.jit
def part_of(item, tiles, blocks, cfg: gl.constexpr):
    """A piece of work: (tile, first block of K, number of blocks). Neighbours share operands, not the tile."""
    if cfg.SPLIT_K == 1:
        return item, item * 0, blocks
    else:
        part = item // tiles
        first = part * blocks // cfg.SPLIT_K
        return item - part * tiles, first, (part + 1) * blocks // cfg.SPLIT_K - first


@gluon.jit
def _places(base, like):
    """Addresses for a tensor of this shape and layout. Who writes and who reads have the same, so any order does."""
    rows = gl.arange(0, like.shape[0], layout=gl.SliceLayout(1, like.type.layout))
    columns = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, like.type.layout))
    return base + rows[:, None] * like.shape[1] + columns[None, :]


@gluon.jit
def reduce(acc0, acc1, G: gl.constexpr, item, tiles, workspace, cfg: gl.constexpr):
    """(accumulators, whether they now are the whole sum, for this consumer to store)."""
    part_ptr, count_ptr = workspace
    span: gl.constexpr = cfg.GM * (cfg.N0 + cfg.N1)
    at_once: gl.constexpr = cfg.AT_ONCE
    own = item * 2 + G
    tile = item % tiles
    base = part_ptr + own.to(gl.int64) * span
    gl.store(_places(base, acc0), acc0)
    if cfg.N1:
        gl.store(_places(base + cfg.GM * cfg.N0, acc1), acc1)
    group_barrier()
    arrived = gl.atomic_add(count_ptr + tile * 2 + G, 1, sem="acq_rel", scope="gpu")
    last = arrived == cfg.SPLIT_K - 1
    if last:
        gl.atomic_xchg(count_ptr + tile * 2 + G, 0, sem="relaxed", scope="gpu")
        acc0 = gl.full(acc0.shape, 0, acc0.dtype, layout=acc0.type.layout)
        acc1 = gl.full(acc1.shape, 0, acc1.dtype, layout=acc1.type.layout)
        step = tiles.to(gl.int64) * 2 * span
        base = part_ptr + (tile * 2 + G).to(gl.int64) * span
        for _ in range(0, cfg.SPLIT_K, at_once):
            for i in gl.static_range(at_once):
                acc0 += gl.load(_places(base + i * step, acc0), cache_modifier=".cg")
                if cfg.N1:
                    acc1 += gl.load(_places(base + i * step + cfg.GM * cfg.N0, acc1), cache_modifier=".cg")
            base += at_once * step
    return acc0, acc1, last
