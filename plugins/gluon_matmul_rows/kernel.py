"""A product with few rows of A for Hopper: wgmma of any multiple of 8 columns, so that 150 rows cost what 152 do.

Tile facts.  One factor is wgmma's rows, 64 for each of UNITS of each of CONSUMERS warp groups; the other is its
columns, WIDTH of them, whatever multiple of 8. SWAP: columns of b are the rows, and all rows of a, up to 256, the
columns: the product is the transpose of C. Otherwise rows of a are the rows, and tiles of b are as wide as lets them
fill the chip once: 10240 columns in 128 tiles of 80. Gluon's tensors, and so its wgmma, are powers of two: here the
instructions are written out (registry.toolbox.wgmma) and accumulators are tuples of registers. Both factors lie along
K. A stage of the ring is STAGE groups of 8 rows of 128 bytes, those of the first factor, then those of the second.
Boxes bring no row that is not there; where rows of a are fewer than wgmma's (HIGH), it reads on into what follows, for
sums that nobody stores.

Roles.  Consumers, 4 warps each, the first in the default partition; one producer warp with 24 registers.

Schedule.  The producer runs ahead across the borders of tiles. Consumers keep one block of wgmma in flight and release
the stage before it. K may be cut (reduce.py) by SPLIT: 1 is not, 2 and more are ranges of K, 0 equal shares of all
tiles. Bias and activation are applied as accumulators are stored (registry.toolbox.finish). Programmatic dependent
launch.

Measured facts (H200, torch 2.11, triton 3.6.0, bf16; ratios to cuBLAS of the same run, replayed graphs over rotated
inputs, 10 projections of models of 8 to 70 billion parameters for each number of rows).
- Best config: 72 rows 1.08 (least 1.00), 96 1.07 (0.95), 129 0.985 (0.91), 137 0.96 (0.88), 150 1.00 (0.96), 160 1.04
  (0.94), 176 1.07 (0.94), 192 1.085 (1.00), 200 1.025 (0.93), 211 1.06 (0.97), 224 1.07 (0.91), 240 1.02 (0.89), 256
  0.93 (0.79: 4096 x 4096). gluon_matmul_ws had 0.94 at 150 rows and 0.88 at 200. What cuBLAS keeps is by clusters
  that share what they load, which gluon_matmul_row_pairs does, not this kernel.
- One consumer with 64 columns of b against all rows, unsplit, is the best tile of many: 64 x 256 takes in 112 bytes a
  ns, all that an SM can. A block takes as long as shared memory does to take it in and to give it to wgmma (2 KB of
  rows for each 64 of them, and all columns again): 276 bytes a ns fit all tiles here.
- Adding up two parts costs 5 to 7 us for tiles of 128 x 200, 2 to 3 for 64 x 200. Sums that stay in registers, instead
  of all of them from memory: 0 to 1 us. Equal shares of K for tiles of one consumer: 10 to 40% slower than none.
- No gain: to go through the epilogue once without touching memory, while the first blocks come, so that its code is
  there. Loss: to begin K at another block in each CTA (3 to 16%).
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_matmul_rows.reduce import items_of, part_of, reduce
from registry.plugins.gluon_matmul_rows.store import store
from registry.toolbox.finish import bias_of
from registry.toolbox.hopper import (
    after_previous_kernel,
    barriers,
    load_tile,
    release_slot,
    ring_over,
    slot_of,
    wait_slot_empty,
    wait_slot_full,
)
from registry.toolbox.wgmma import descriptor_of, multiply, shared_memory, waited, zeros


@gluon.jit
def _consumer(G: gl.constexpr, state, cfg: gl.constexpr):
    stages, sizes, c, workspace, bias_ptr = state
    tiles, whole, blocks, ways, rows, columns = sizes
    FIRST: gl.constexpr = G * cfg.UNITS * 64 * 8  # this consumer's rows of a stage, in units of 16 bytes
    SECOND: gl.constexpr = cfg.HIGH * 8
    base = descriptor_of(shared_memory())  # the ring comes first: tests hold that
    it = 0
    begin, end, step = items_of(tiles, whole, blocks, ways, cfg)
    for item in range(begin, end, step):
        part = part_of(item, tiles, whole, blocks, ways, cfg)
        tile, _, count = part
        left = tile * cfg.TILE
        held = bias_of((bias_ptr, columns), left + G * cfg.UNITS * 64, left, cfg)
        acc = zeros(cfg.UNITS, cfg.WIDTH)
        last = slot_of(it, stages)
        for i in range(count):
            s = slot_of(it, stages)
            wait_slot_full(stages, s, it)
            stage = base + s * (cfg.STAGE * 64)
            acc = multiply(acc, stage + FIRST, stage + SECOND, cfg)
            acc = waited(acc, 1, cfg.UNITS, cfg.WIDTH)
            if i > 0:
                release_slot(stages, last)
            last = s
            it += 1
        acc = waited(acc, 0, cfg.UNITS, cfg.WIDTH)
        release_slot(stages, last)
        complete = True
        if cfg.SPLIT != 1:
            complete = count == blocks
            if not complete:
                acc, complete = reduce(acc, G, item, part, tiles, whole, blocks, ways, workspace, cfg)
        if complete:
            store(acc, G, tile, rows, columns, held, c, cfg)


@gluon.jit
def _load(desc, row, number, bar, ring, unit, ROWS: gl.constexpr, cfg: gl.constexpr):
    """So many rows of a block: as one box, whatever Triton takes it for, or by eights."""
    if cfg.WHOLE:
        load_tile(desc, [row, number * 64], bar, ring.index(unit))
    else:
        for i in range(ROWS // 8):
            load_tile(desc, [row + 8 * i, number * 64], bar, ring.index(unit + i))


@gluon.jit
def _producer(loaded, stages, sizes, cfg: gl.constexpr):
    a_desc, b_desc, ring = loaded
    tiles, whole, blocks, ways, rows, columns = sizes
    it = 0
    begin, end, step = items_of(tiles, whole, blocks, ways, cfg)
    for item in range(begin, end, step):
        tile, start, count = part_of(item, tiles, whole, blocks, ways, cfg)
        row = tile * cfg.TILE
        for number in range(start, start + count):
            s = slot_of(it, stages)
            bar = wait_slot_empty(stages, s, it)
            mbarrier.expect(bar, cfg.STAGE * 1024)
            unit = s * cfg.STAGE
            if cfg.SWAP:
                _load(a_desc, row, number, bar, ring, unit, cfg.HIGH, cfg)
                _load(b_desc, 0, number, bar, ring, unit + cfg.HIGH // 8, cfg.WIDTH, cfg)
            else:
                _load(a_desc, 0, number, bar, ring, unit, cfg.HIGH, cfg)
                _load(b_desc, row, number, bar, ring, unit + cfg.HIGH // 8, cfg.WIDTH, cfg)
            it += 1


@gluon.jit(do_not_specialize=["rows", "columns", "pitch", "blocks", "tiles", "whole", "ways"])
def matmul_rows(
    a_desc,
    b_desc,
    c_ptr,
    part_ptr,
    count_ptr,
    rows,
    columns,
    pitch,
    blocks,
    tiles,
    whole,
    ways,
    bias_ptr,
    cfg: gl.constexpr,
):
    eight: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], a_desc.dtype)
    ring = gl.allocate_shared_memory(a_desc.dtype, [cfg.STAGES * cfg.STAGE + cfg.BEYOND, 8, 64], eight)
    full, empty = barriers(cfg.STAGES), barriers(cfg.STAGES)
    stages = ring_over(ring, full, empty, cfg.CONSUMERS)
    after_previous_kernel()
    sizes = (tiles, whole, blocks, ways, rows, columns)
    loaded = (a_desc, b_desc, ring)
    state = (stages, sizes, (c_ptr, pitch), (part_ptr, count_ptr), bias_ptr)
    if cfg.CONSUMERS == 1:
        gl.warp_specialize([(_consumer, (0, state, cfg)), (_producer, (loaded, stages, sizes, cfg))], [1], [24])
    elif cfg.CONSUMERS == 2:
        gl.warp_specialize(
            [(_consumer, (0, state, cfg)), (_consumer, (1, state, cfg)), (_producer, (loaded, stages, sizes, cfg))],
            [4, 1],
            [cfg.REGS, 24],
        )
    elif cfg.CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (0, state, cfg)),
                (_consumer, (1, state, cfg)),
                (_consumer, (2, state, cfg)),
                (_producer, (loaded, stages, sizes, cfg)),
            ],
            [4, 4, 1],
            [cfg.REGS, cfg.REGS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, state, cfg)),
                (_consumer, (1, state, cfg)),
                (_consumer, (2, state, cfg)),
                (_consumer, (3, state, cfg)),
                (_producer, (loaded, stages, sizes, cfg)),
            ],
            [4, 4, 4, 1],
            [cfg.REGS, cfg.REGS, cfg.REGS, 24],
        )
