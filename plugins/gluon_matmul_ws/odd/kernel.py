"""A warp-specialised product whose first factor has rows at odd distances, which no tensor map can have, read in place.

Tile facts.  A tensor map wants distances that are multiples of 16 bytes. Rows of odd length do not lie so, but every
eighth of them does. So rows s, s + 8, s + 16, ... are a matrix of their own, whose map begins at the factor's first
element, and its rows s distances from there. Eight maps cover the factor, and each ends where its last row and the
rows' ends are, so what lies beyond is zero, as with any map. A block of the ring is brought by eight boxes, each with
every eighth row. So rows arrive out of order, and before they are stored, the accumulators' are named anew, which moves
nothing. Matrices of a batch at a distance that no map can have are one (FLAT), in which a matrix may begin with any row
of a box: below the last row of one lies what nobody stores.

A box begins at multiples of 16 bytes, too (for another place, the card raises an illegal instruction). So lines are
shifted to where they belong on their way to registers, and wgmma takes them from there: fragments.py.

Roles, schedule, barriers and what follows the loop over K are those of `gluon_matmul_ws`.

Measured facts (H200; microseconds of this kernel with its copy, of the fastest other of ours, of torch's).
- 12106 x 97 x 1839: 23.0, 50.0, 66.1. 7460 x 89 x 2109: 22.0, 40.3, 43.8. 14768 x 107 x 730 (nt): 13.9, 22.1, 38.0.
  Large both ways, where a copy of both factors is little beside the product, it loses: 2436 x 2469 x 14837 440, 339.
- A block takes 550 to 600 ns whatever its columns are up to 128, where the memory could bring it in 400. What takes so
  long was not measured by itself. It is not how many boxes there are: 8 of 16 rows that both consumers share, not 16 of
  8, gained 1% (175 configs of 45 products).
- Tried before: both factors shifted in place by the consumers, 16 bytes of shared memory at a time, a fence and a
  barrier a block: 850 ns for 128 x 128 (shared memory alone needs 660), 0.77 of the others by geometric mean.
- Fewer boxes, of every second or fourth row, where the distance is 2 or 4 times an odd one: rows are named anew so that
  single elements are stored where the product is C's transpose, and the assembler moved their conversion before the
  last wait for products. Results were wrong (registry.toolbox.in_flight finds such code now). Not tried again.
- A last single block, in a branch behind the loop over pairs, has the compiler wait for each wgmma.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_matmul_ws.odd.fragments import UNITS, begins
from registry.plugins.gluon_matmul_ws.odd.product import multiply
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
    store_wait,
    viewed,
    wait_slot_empty,
)


@gluon.jit
def _load_rows(maps, tile, z, outer, k, pitch, bar, cfg: gl.constexpr):
    """A part of a block of A, from row `outer` (a multiple of 8, unless FLAT) and column k on."""
    LANDS: gl.constexpr = maps[0].layout
    SHAPE: gl.constexpr = [UNITS, 1, cfg.GM // UNITS, cfg.BK]
    boxes = viewed(tile, SHAPE, LANDS)
    for s in gl.static_range(UNITS):
        below = (s - outer) & (UNITS - 1) if cfg.A_FLAT else s  # of the part's rows the first of these
        first = (outer + below) // UNITS if cfg.A_FLAT else outer // UNITS
        load_tile(maps[s], [z, first, s * pitch // 8 * 8 + k], bar, boxes.index(below))


@gluon.jit
def _producer(a_maps, b_desc, smem, stages, sizes, z_a, z_b, pitch, rows, cfg: gl.constexpr):
    """The blocks of each tile, in the order in which the consumers take them: an even number."""
    tiles, whole, tiles_m, tiles_n, pairs = sizes
    a_s, b_s = smem
    PARTS: gl.constexpr = cfg.PARTS
    it = 0
    begin, end, step = items_of(tiles, whole, pairs, 0, 1, cfg)
    for item in range(begin, end, step):
        tile, first, count = part_of(item, tiles, whole, pairs, cfg)
        z, row, col = corner(tile, tiles_m, tiles_n, cfg)
        for number in range(2 * first, 2 * (first + count)):
            slot = slot_of(it, stages)
            bar = wait_slot_empty(stages, slot, it)
            mbarrier.expect(bar, (PARTS * cfg.GM + cfg.N0) * cfg.BK * cfg.ITEM)
            load_tile(b_desc, [z * z_b, col, number * cfg.BK], bar, as_box(b_s.index(slot), cfg.N0, cfg.BK))
            for g in gl.static_range(PARTS):
                outer = (row * PARTS + g) * cfg.GM
                if cfg.A_FLAT:
                    outer += z * rows
                part = a_s.index(slot * PARTS + g)
                _load_rows(a_maps, part, z * z_a, outer, number * cfg.STEP, pitch, bar, cfg)
            it += 1


@gluon.jit
def _in_order(acc):
    """Rows that came as every eighth one in their own order. Registers get other names, no more."""
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    return acc.reshape([UNITS, M // UNITS, N]).permute((1, 0, 2)).reshape([M, N])


@gluon.jit
def _consumer(G: gl.constexpr, c, smem, sync, sizes, epi, workspace, M, N, pitch, rows, cfg: gl.constexpr):
    tiles, whole, tiles_m, tiles_n, pairs = sizes
    # ping-pong: this consumer takes every other tile, and skips the rounds of the ring in between
    stride: gl.constexpr = 3 - cfg.PARTS
    first: gl.constexpr = G * (stride - 1)
    half: gl.constexpr = G * (cfg.PARTS - 1)
    it = first * pairs * 2
    buffer = 0
    own = 0
    begin, end, step = items_of(tiles, whole, pairs, first, stride, cfg)
    for item in range(begin, end, step):
        part = part_of(item, tiles, whole, pairs, cfg)
        tile, _, count = part
        z, row, col = corner(tile, tiles_m, tiles_n, cfg)
        row = (row * cfg.PARTS + half) * cfg.GM
        outer = row
        if cfg.A_FLAT:
            outer += z * rows
        acc = multiply(G, smem, sync, it, own, count, begins(outer, pitch, cfg.GM), cfg)
        if cfg.SPLIT_K != 1:
            complete = count == pairs
            if not complete:
                acc, none, complete = reduce(acc, acc, G, item, part, tiles, whole, pairs, workspace, cfg)
            if complete:
                x = _in_order(acc)
                buffer = store(x, z, row, col, buffer, M, N, c, smem[2], G, epi, cfg)
        else:
            x = _in_order(acc)
            buffer = store(x, z, row, col, buffer, M, N, c, smem[2], G, epi, cfg)
        it += stride * count * 2
        own += 1  # noqa: SIM113 (compilers of kernels have no enumerate)
    if cfg.TMA_STORE:
        store_wait(0)


INTEGERS = "M N pairs tiles whole tiles_m tiles_n z_a z_b pitch rows scz scm scn s_az s_am s_bn"


@gluon.jit(do_not_specialize=INTEGERS.split())
def matmul_odd(
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    a6,
    a7,
    b_desc,
    c_desc,
    c_ptr,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    part_ptr,
    count_ptr,
    M,
    N,
    pairs,
    tiles,
    whole,
    tiles_m,
    tiles_n,
    z_a,
    z_b,
    pitch,
    rows,
    scz,
    scm,
    scn,
    s_az,
    s_am,
    s_bn,
    cfg: gl.constexpr,
):
    STAGES: gl.constexpr = cfg.STAGES
    a_shape: gl.constexpr = [1, cfg.GM, cfg.BK]
    a_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a_shape, a0.dtype)
    a_s = gl.allocate_shared_memory(a0.dtype, [STAGES * cfg.PARTS] + a_shape, a_block)
    b_shape: gl.constexpr = [1, cfg.N0, cfg.BK]
    b_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b_shape, b_desc.dtype)
    b_s = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_shape, b_block)
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
    c = (c_desc, c_ptr, scz, scm, scn)
    epi = (bias_ptr, sa_ptr, sb_ptr, s_az, s_am, s_bn)
    sizes = (tiles, whole, tiles_m, tiles_n, pairs)
    workspace = (part_ptr, count_ptr)
    a_maps = (a0, a1, a2, a3, a4, a5, a6, a7)
    smem = (a_s, b_s, c_s)
    gl.warp_specialize(
        [
            (_consumer, (0, c, smem, sync, sizes, epi, workspace, M, N, pitch, rows, cfg)),
            (_consumer, (1, c, smem, sync, sizes, epi, workspace, M, N, pitch, rows, cfg)),
            (_producer, (a_maps, b_desc, (a_s, b_s), stages, sizes, z_a, z_b, pitch, rows, cfg)),
        ],
        [4, 1],
        [cfg.REGS, 56],
    )
