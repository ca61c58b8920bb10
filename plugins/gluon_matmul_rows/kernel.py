import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_matmul_rows.reduce import items_of, part_of, reduce
from registry.plugins.gluon_matmul_rows.store import store
from registry.plugins.gluon_matmul_rows.wgmma import descriptor_of, multiply, shared_memory, waited, zeros
from registry.toolbox.hopper import (
    after_previous_kernel,
    as_matrix,
    barriers,
    load_tile,
    release_slot,
    ring_over,
    slot_of,
    wait_slot_empty,
    wait_slot_full,
)


@gluon.jit
def _consumer(G: gl.constexpr, stages, sizes, c, workspace, cfg: gl.constexpr):
    tiles, whole, blocks, ways, rows, columns = sizes
    own: gl.constexpr = cfg.UNITS * 64  # rows of the first factor
    first = descriptor_of(shared_memory() + cfg.RING) + G * own * 8
    it = 0
    begin, end, step = items_of(tiles, whole, blocks, ways, cfg)
    for item in range(begin, end, step):
        part = part_of(item, tiles, whole, blocks, ways, cfg)
        tile, _, count = part
        acc = zeros(cfg.UNITS, cfg.WIDTH)
        s = slot_of(it, stages)
        last = s
        for i in range(count):
            s = slot_of(it, stages)
            wait_slot_full(stages, s, it)
            a = first + s * (cfg.STAGE * 64)
            acc = multiply(acc, a, a - G * own * 8 + cfg.HIGH * 8, cfg)
            acc = waited(acc, 1, cfg.UNITS, cfg.WIDTH)
            if i > 0:
                release_slot(stages, last)
            last = s
            it += 1
        acc = waited(acc, 0, cfg.UNITS, cfg.WIDTH)
        release_slot(stages, last)
        complete = count == blocks
        if cfg.SPLIT != 1:
            if not complete:
                acc, complete = reduce(acc, G, item, part, tiles, whole, blocks, ways, workspace, cfg)
        if complete:
            store(acc, G, tile, rows, columns, c, cfg)


@gluon.jit
def _producer(a_desc, b_desc, ring, stages, sizes, cfg: gl.constexpr):
    tiles, whole, blocks, ways, rows, columns = sizes
    it = 0
    begin, end, step = items_of(tiles, whole, blocks, ways, cfg)
    for item in range(begin, end, step):
        tile, start, count = part_of(item, tiles, whole, blocks, ways, cfg)
        row = tile * cfg.TILE
        for number in range(start, start + count):
            s = slot_of(it, stages)
            bar = wait_slot_empty(stages, s, it)
            mbarrier.expect(bar, (cfg.A_ROWS + cfg.B_ROWS) * 128)
            a = as_matrix(ring.index(s * cfg.STAGE), cfg.A_BOX, 64)
            b = as_matrix(ring.index(s * cfg.STAGE + cfg.HIGH // 8), cfg.B_BOX, 64)
            if cfg.SWAP:
                load_tile(a_desc, [row, number * 64], bar, a)
                load_tile(b_desc, [0, number * 64], bar, b)
            else:
                load_tile(a_desc, [0, number * 64], bar, a)
                load_tile(b_desc, [row, number * 64], bar, b)
            it += 1


@gluon.jit(do_not_specialize="rows columns pitch blocks tiles whole ways".split())
def matmul_rows(
    a_desc, b_desc, c_ptr, part_ptr, count_ptr, rows, columns, pitch, blocks, tiles, whole, ways, cfg: gl.constexpr
):
    unit: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], a_desc.dtype)
    ring = gl.allocate_shared_memory(a_desc.dtype, [cfg.STAGES * cfg.STAGE, 8, 64], unit)
    full, empty = barriers(cfg.STAGES), barriers(cfg.STAGES)
    stages = ring_over(ring, full, empty, cfg.CONSUMERS)
    if cfg.PDL:
        after_previous_kernel()
    sizes = (tiles, whole, blocks, ways, rows, columns)
    c = (c_ptr, pitch)
    workspace = (part_ptr, count_ptr)
    if cfg.CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consumer, (0, stages, sizes, c, workspace, cfg)),
                (_producer, (a_desc, b_desc, ring, stages, sizes, cfg)),
            ],
            [1],
            [24],
        )
    elif cfg.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, stages, sizes, c, workspace, cfg)),
                (_consumer, (1, stages, sizes, c, workspace, cfg)),
                (_producer, (a_desc, b_desc, ring, stages, sizes, cfg)),
            ],
            [4, 1],
            [cfg.REGS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, stages, sizes, c, workspace, cfg)),
                (_consumer, (1, stages, sizes, c, workspace, cfg)),
                (_consumer, (2, stages, sizes, c, workspace, cfg)),
                (_producer, (a_desc, b_desc, ring, stages, sizes, cfg)),
            ],
            [4, 4, 1],
            [cfg.REGS, cfg.REGS, 24],
        )
