"""A warp-specialised product whose second factor lies across K in rows at odd distances, which no tensor map can have,
read in place.

Tile facts.  A tensor map wants distances that are multiples of 16 bytes. Rows of odd length do not lie so, but every
eighth of them does (every fourth or second, where 2 or 4 divide them). So K is taken in classes: rows t, t + 8, ... are
a matrix of their own, whose map begins at the factor's first element, and its rows t distances from there. Boxes begin
at multiples of 16 bytes, too, so a row's first element is somewhere in the first eight of its box: in all rows of a
class at the same place. So a class of K is multiplied as any product, but for columns that lie a few places further
right than they should. The classes come in the order of these places, and from one to the next the accumulators move
along their rows by as much as the places differ: a shuffle for each, once a class. Eight columns of a tile are lost to
that.

The first factor is copied, K by classes (copy.py), unless it lies across K, too, at distances that a map can have: then
its rows are taken by classes in the same way.

Roles, barriers and what follows the loop over K are those of `gluon_matmul_ws`.

Measured facts (H200, torch 2.11, triton 3.6.0; replayed graphs; docs/measured/matmul.md).
- Few rows by a large factor across K, which nothing else reads in place: 120 x 15329 x 10031 takes 93 us (the fastest
  other of ours 257, cuBLAS 325), 11439 x 112 x 10069 tn 84 (209, 260), 38 x 11753 x 5532 tn 42 (117, 125).
- It loses where K is short (below 256 mostly: each class has a block of its own), where C is large beside K, and to
  `triton_matmul` on small products.
- Moving accumulators takes 1.35 ns for a column of a tile between two phases (fitted: cost.py), 2.4 us for a tile of
  256 columns and eight classes.
- The compiler waits for each wgmma (C7515) where, for all that it sees, a phase may have no block. With a branch around
  each phase, and its first block apart, it does not: 0.93 of the time (431 configs of 37 products; 0.64 to 1.13).
- Ranges of K that all CTAs share (SPLIT_K=0) seldom pay: a range has parts of several phases, and moves for each.
- The first factor across K, too: copied to K by classes it costs what a copy to other distances and boxes of that would
  (73 configs: 0.99), with rows shorter than a line less (43: 1.08, up to 1.7). Read where it is, without any copy, it
  takes 0.84 of the time (26).
- C's rows shifted in registers so that 16 bytes are stored at a time, wherever rows begin: 2% slower by geometric mean
  (120 configs), up to 11% where tiles have few blocks. Stores of single elements are not what takes the time.
- Rows along K by classes, each multiplied by a copy of the other factor that is moved down as far as its rows begin
  inside their boxes: 0.31 of the fastest other kernel (44 products, across_rows.jsonl). Eight copies are too many.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_matmul_ws.across.product import multiply
from registry.plugins.gluon_matmul_ws.producer import corner
from registry.plugins.gluon_matmul_ws.reduce import items_of, part_of, reduce
from registry.plugins.gluon_matmul_ws.rows import store
from registry.toolbox.hopper import (
    after_previous_kernel,
    as_box,
    barriers,
    init_barriers,
    load_tile,
    ring_over,
    slot_of,
    wait_slot_empty,
)

LOST: gl.constexpr = gl.constexpr(8)
"""Columns of a tile that another one stores."""


@gluon.jit
def _corner(tile, tiles_m, tiles_n, cfg: gl.constexpr):
    """(batch entry, row of tiles, first column)."""
    z, row, col = corner(tile, tiles_m, tiles_n, cfg)
    return z, row, col // cfg.N0 * (cfg.N0 - LOST)


@gluon.jit
def _producer(a_maps, b_maps, smem, stages, sizes, z_a, z_b, pitches, cfg: gl.constexpr):
    """The blocks of each tile, in the order in which the consumers take them."""
    tiles, whole, tiles_m, tiles_n, per_phase = sizes
    a_s, b_s = smem
    a_pitch, pitch = pitches
    PARTS: gl.constexpr = cfg.PARTS
    CLASSES: gl.constexpr = cfg.CLASSES
    it = 0
    begin, end, step = items_of(tiles, whole, CLASSES * per_phase, 0, 1, cfg)
    for item in range(begin, end, step):
        tile, first, count = part_of(item, tiles, whole, CLASSES * per_phase, cfg)
        z, row, col = _corner(tile, tiles_m, tiles_n, cfg)
        for phase in gl.static_range(CLASSES):
            t = (CLASSES - 1 - phase) * (pitch // (8 // CLASSES)) % CLASSES  # the class whose turn it is
            left = t * pitch // 8 * 8 + col
            a_left = t * a_pitch
            lower = gl.maximum(first, phase * per_phase)
            upper = gl.minimum(first + count, (phase + 1) * per_phase)
            for number in range(lower, upper):
                slot = slot_of(it, stages)
                bar = wait_slot_empty(stages, slot, it)
                mbarrier.expect(bar, (PARTS * cfg.GM + cfg.N0) * cfg.BK * cfg.ITEM)
                down = (number - phase * per_phase) * cfg.BK
                for g in gl.static_range(PARTS):
                    top = (row * PARTS + g) * cfg.GM
                    if cfg.A_T:
                        load_tile(a_maps[phase], [z * z_a, down, a_left + top], bar, a_s.index(slot * PARTS + g))
                    else:
                        load_tile(a_maps[0], [z * z_a, top, number * cfg.BK], bar, a_s.index(slot * PARTS + g))
                load_tile(b_maps[phase], [z * z_b, down, left], bar, as_box(b_s.index(slot), cfg.BK, cfg.N0))
                it += 1


@gluon.jit
def _consumer(G: gl.constexpr, c, smem, sync, sizes, epi, workspace, M, N, cfg: gl.constexpr):
    tiles, whole, tiles_m, tiles_n, per_phase = sizes
    blocks = cfg.CLASSES * per_phase
    # ping-pong: this consumer takes every other tile, and skips the rounds of the ring in between
    stride: gl.constexpr = 3 - cfg.PARTS
    skipped: gl.constexpr = G * (stride - 1)
    half: gl.constexpr = G * (cfg.PARTS - 1)
    it = skipped * blocks
    buffer = 0
    own = 0
    begin, end, step = items_of(tiles, whole, blocks, skipped, stride, cfg)
    for item in range(begin, end, step):
        part = part_of(item, tiles, whole, blocks, cfg)
        tile, first, count = part
        z, row, col = _corner(tile, tiles_m, tiles_n, cfg)
        row = (row * cfg.PARTS + half) * cfg.GM
        end_of_tile = gl.minimum(N, col + cfg.N0 - LOST)
        acc = multiply(G, smem, sync, it, own, first, count, per_phase, cfg)
        if cfg.SPLIT_K != 1:
            complete = count == blocks
            if not complete:
                acc, none, complete = reduce(acc, acc, G, item, part, tiles, whole, blocks, workspace, cfg)
            if complete:
                buffer = store(acc, z, row, col, buffer, M, end_of_tile, c, smem[2], G, epi, cfg)
        else:
            buffer = store(acc, z, row, col, buffer, M, end_of_tile, c, smem[2], G, epi, cfg)
        it += stride * count
        own += 1  # noqa: SIM113 (compilers of kernels have no enumerate)


INTEGERS = "M N per_phase tiles whole tiles_m tiles_n z_a z_b a_pitch pitch scz scm scn s_az s_am s_bn"


@gluon.jit(do_not_specialize=INTEGERS.split())
def matmul_across(
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    a6,
    a7,
    b0,
    b1,
    b2,
    b3,
    b4,
    b5,
    b6,
    b7,
    c_ptr,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    part_ptr,
    count_ptr,
    M,
    N,
    per_phase,
    tiles,
    whole,
    tiles_m,
    tiles_n,
    z_a,
    z_b,
    a_pitch,
    pitch,
    scz,
    scm,
    scn,
    s_az,
    s_am,
    s_bn,
    cfg: gl.constexpr,
):
    STAGES: gl.constexpr = cfg.STAGES
    a_shape: gl.constexpr = [1, cfg.BK, cfg.GM] if cfg.A_T else [1, cfg.GM, cfg.BK]
    a_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a_shape, a0.dtype)
    a_s = gl.allocate_shared_memory(a0.dtype, [STAGES * cfg.PARTS] + a_shape, a_block)
    b_shape: gl.constexpr = [1, cfg.BK, cfg.N0]
    b_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_shape, b0.dtype)
    b_s = gl.allocate_shared_memory(b0.dtype, [STAGES] + b_shape, b_block)
    c_shape: gl.constexpr = [1, cfg.EN, cfg.GM] if cfg.SWAP else [1, cfg.GM, cfg.EN]
    c_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for(c_shape, c_ptr.dtype.element_ty)
    c_s = gl.allocate_shared_memory(c_ptr.dtype.element_ty, [2 * cfg.STORES] + c_shape, c_block)
    full, empty = barriers(STAGES), barriers(STAGES)
    turns = full
    if cfg.PARTS == 1:  # for nobody waits for one in the other mode: see toolbox.hopper
        turns = barriers(2)
        init_barriers(turns, 1)
    stages = ring_over(b_s, full, empty, cfg.PARTS)
    if cfg.PDL:
        after_previous_kernel()
    sync = (stages, turns)
    c = (a0, c_ptr, scz, scm, scn)
    epi = (bias_ptr, sa_ptr, sb_ptr, s_az, s_am, s_bn)
    sizes = (tiles, whole, tiles_m, tiles_n, per_phase)
    workspace = (part_ptr, count_ptr)
    a_maps = (a0, a1, a2, a3, a4, a5, a6, a7)
    b_maps = (b0, b1, b2, b3, b4, b5, b6, b7)
    smem = (a_s, b_s, c_s)
    gl.warp_specialize(
        [
            (_consumer, (0, c, smem, sync, sizes, epi, workspace, M, N, cfg)),
            (_consumer, (1, c, smem, sync, sizes, epi, workspace, M, N, cfg)),
            (_producer, (a_maps, b_maps, (a_s, b_s), stages, sizes, z_a, z_b, (a_pitch, pitch), cfg)),
        ],
        [4, 1],
        [cfg.REGS, 40],
    )
