"""The producer warp: it brings the blocks of A and B of each tile, in the order in which the consumers take them."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_matmul_ws.reduce import items_of, part_of
from registry.toolbox import scopes
from registry.toolbox.hopper import as_box, load_tile, slot_of, wait_slot_empty


@gluon.jit
def corner(tile, tiles_m, tiles_n, cfg: gl.constexpr):
    """Tile number -> (batch entry, row of tiles, first column)."""
    GROUP: gl.constexpr = cfg.GROUP
    per_z = tiles_m * tiles_n
    z = tile // per_z
    t = tile - z * per_z
    band = t // (GROUP * tiles_n)
    t = t - band * GROUP * tiles_n
    rows = gl.minimum(tiles_m - band * GROUP, GROUP)
    col = t // rows
    return z, band * GROUP + t - col * rows, col * (cfg.N0 + cfg.N1)


@gluon.jit
def row_of(tile, part: gl.constexpr, last, cfg: gl.constexpr):
    """The first row of a consumer's part of a row of tiles."""
    if cfg.FEW and not cfg.SWAP:
        return gl.minimum((tile * cfg.PARTS + part) * cfg.FEW, last)
    else:
        return (tile * cfg.PARTS + part) * cfg.GM


@gluon.jit
def _load_b(desc, b_s, s, z, col, k, bar, N: gl.constexpr, cfg: gl.constexpr):
    """One block of B into the first N columns of a stage."""
    if cfg.B_T:
        load_tile(desc, [z, col, k], bar, as_box(b_s.index(s), N, cfg.BK))
    else:
        load_tile(desc, [z, k, col], bar, as_box(b_s.index(s), cfg.BK, N))


@gluon.jit
def _load(descs, smem, stages, it, z_a, z_b, row, col, last, first, blocks, TAIL: gl.constexpr, cfg: gl.constexpr):
    """`blocks` blocks of a tile, from block `first` on; a tail tile takes the first N0 / SPLIT columns of each stage.
    Returns the next round of the ring."""
    a_desc, b0_desc, b1_desc = descs
    a_s, b0_s, b1_s = smem
    PARTS: gl.constexpr = cfg.PARTS
    width: gl.constexpr = cfg.N0 // cfg.SPLIT if TAIL else cfg.N0 + cfg.N1
    high: gl.constexpr = cfg.FEW if cfg.CUT and not cfg.SWAP else cfg.GM  # rows that a box brings
    wide: gl.constexpr = cfg.FEW if cfg.CUT and cfg.SWAP else width
    for number in range(first, first + blocks):
        s = slot_of(it, stages)
        scopes.enter("wait slot")
        bar = wait_slot_empty(stages, s, it)
        scopes.leave("wait slot")
        mbarrier.expect(bar, (PARTS * high + wide) * cfg.BK * cfg.ITEM)
        k = number * cfg.BK
        for g in gl.static_range(PARTS):
            if cfg.A_T:
                load_tile(a_desc, [z_a, k, row_of(row, g, last, cfg)], bar, a_s.index(s * PARTS + g))
            else:
                load_tile(a_desc, [z_a, row_of(row, g, last, cfg), k], bar, a_s.index(s * PARTS + g))
        if TAIL:
            _load_b(b1_desc, b0_s, s, z_b, col, k, bar, width, cfg)
        else:
            _load_b(b0_desc, b0_s, s, z_b, col, k, bar, cfg.N0, cfg)
            if cfg.N1:
                _load_b(b1_desc, b1_s, s, z_b, col + cfg.N0, k, bar, cfg.N1, cfg)
        it += 1
    return it


@gluon.jit
def producer(descs, smem, stages, sizes, z_a, z_b, cfg: gl.constexpr):
    tiles, whole, tiles_m, tiles_n, blocks, M, N, last = sizes
    it = 0
    begin, end, step = items_of(tiles, whole, blocks, 0, 1, cfg)
    for item in range(begin, end, step):
        tile, first, count = part_of(item, tiles, whole, blocks, cfg)
        z, row, col = corner(tile, tiles_m, tiles_n, cfg)
        it = _load(descs, smem, stages, it, z * z_a, z * z_b, row, col, last, first, count, False, cfg)
    if cfg.SPLIT > 1:
        for part in range(gl.program_id(0), (tiles - whole) * cfg.SPLIT, gl.num_programs(0)):
            z, row, col = corner(whole + part // cfg.SPLIT, tiles_m, tiles_n, cfg)
            col += part % cfg.SPLIT * (cfg.N0 // cfg.SPLIT)
            it = _load(descs, smem, stages, it, z * z_a, z * z_b, row, col, last, 0, blocks, True, cfg)
