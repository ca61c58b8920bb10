"""A product with few rows of A for Hopper by pairs of CTAs: each multiplies half of them, and both share b's columns.

Tile facts.  The CTAs of a cluster of two work on the same columns of b: each loads half of a block, for both. So a CTA
has half the rows, and b still comes through L2 once. One factor is wgmma's rows, 64 for each of CONSUMERS warp groups;
the other is its columns, WIDTH of them, whatever multiple of 8. SWAP: columns of b are the rows, and a CTA's rows of a
the columns: the product is the transpose of C. Otherwise rows of a are the rows, and tiles of b are as wide as lets
them fill the chip. wgmma is written out (registry.toolbox.wgmma). Both factors lie along K. A stage of the ring is
STAGE groups of 8 rows of 128 bytes, those of the first factor, then those of the second. Where rows of a are fewer than
wgmma's (HIGH), it reads on into what follows, for sums that nobody stores.

Roles.  Consumers, 4 warps each, the first in the default partition; one producer warp with 24 registers.

Schedule.  The producer runs ahead across the borders of tiles, and stays until both CTAs have let go of all stages.
Consumers keep one block of wgmma in flight and release the stage before it, in both CTAs. Bias and activation are
applied as accumulators are stored (registry.toolbox.finish). Programmatic dependent launch. Without PAIR, the same for
single CTAs, whose loads bring eight rows each: for launches through `kernel[grid]`.

Measured facts (H200, torch 2.11, triton 3.6.0, bf16; graphs over rotated inputs, shuffled rounds, 10 projections of
models of 8 to 70 billion parameters). Best tile over cuBLAS, by rows (least), and with the first two configs of
gluon_matmul_rows beside, which alone have what is in brackets: 110 1.03 (0.98), 1.035 [1.01]; 129 0.96 (0.80), 1.015
[0.995]; 160 1.02 (0.84), 1.07 [1.02]; 200 0.99 (0.84), 1.02 [1.00]; 233 1.07 (0.90), 1.08 [1.01]; 256 1.01 (0.93),
1.02 [0.95]; all 60 cells 1.014, 1.04 [1.00].
- Where it wins: few columns (256 x 4096 x 4096 20.8 -> 15.3 us, 256 x 6144 x 4096 26.6 -> 21.0). Where it loses: halves
  of 65 to 80 rows as wgmma's 128 (129 x 10240 x 8192 49 us by gluon_matmul_rows, 61 here).
- CTAs that share rows of a and have neighbouring columns of b, and K split among pairs: 0 to 0.5% for the best of all,
  so neither is here.
- Where both CTAs met in the end instead of waiting for empty slots (registry.toolbox.clusters), 69 x 11524 x 24 of 5 us
  back to back ended in an unspecified launch failure within seconds, twice of twice; so, 8.5 million launches ran, and
  products of 3 us take 1 to 3% less.
- `mbarrier.arrive.release.cluster` flushes what was written, 1.2 us for each block of K; slots are only read, so the
  plain arrival is enough.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.plugins.gluon_matmul_row_pairs.store import store
from registry.toolbox.clusters import (
    bystander,
    expect_at,
    init_pair_barriers,
    load_box,
    meet,
    rank,
    release_in_both,
    wait_all_empty,
    wait_at,
    wait_empty,
)
from registry.toolbox.finish import bias_of
from registry.toolbox.hopper import after_previous_kernel, group_barrier
from registry.toolbox.wgmma import descriptor_of, lanes, multiply, shared_memory, waited, zeros

_FIRST: gl.constexpr = gl.constexpr("matmul_row_pairs_param_0")
_SECOND: gl.constexpr = gl.constexpr("matmul_row_pairs_param_5")
"""Where their tensor maps are among the parameters of the compiled kernel: sizes and strides of each follow it."""


@gluon.jit
def _barriers(cfg: gl.constexpr):
    """Behind the ring."""
    return shared_memory() + (cfg.STAGES * cfg.STAGE + cfg.BEYOND) * 1024


@gluon.jit
def _work(tiles, cfg: gl.constexpr):
    """(begin, end, step) of the tiles of a pair, or of a CTA that is alone."""
    EACH: gl.constexpr = 2 if cfg.PAIR else 1
    return gl.program_id(0) // EACH, tiles, gl.num_programs(0) // EACH


@gluon.jit
def _top(cfg: gl.constexpr):
    """This CTA's first row of a."""
    return rank() * (cfg.WIDTH if cfg.SWAP else cfg.HIGH) if cfg.PAIR else 0


@gluon.jit
def _consumer(G: gl.constexpr, sizes, c, bias_ptr, cfg: gl.constexpr):
    tiles, blocks, rows, columns = sizes
    c_ptr, pitch = c
    FIRST: gl.constexpr = G * 64 * 8  # this consumer's rows of a stage, in units of 16 bytes
    SECOND: gl.constexpr = cfg.HIGH * 8
    STAGES: gl.constexpr = cfg.STAGES
    base = descriptor_of(shared_memory())
    bars = _barriers(cfg)
    lane = lanes() % 32
    top = _top(cfg)
    there = gl.minimum(rows - top, cfg.WIDTH if cfg.SWAP else cfg.HIGH)
    to = c_ptr + top.to(gl.int64) * pitch
    meet(cfg.PAIR)
    it = 0
    begin, end, step = _work(tiles, cfg)
    gl.assume(blocks > 0)  # or ptxas sees accumulators that no wgmma began, and makes every one wait
    for tile in range(begin, end, step):
        left = tile * (cfg.HIGH if cfg.SWAP else cfg.WIDTH)
        held = bias_of((bias_ptr, columns), left + G * 64, left, cfg)
        acc = zeros(1, cfg.WIDTH)
        last = it % STAGES
        for i in range(blocks):
            s = it % STAGES
            wait_at(bars + 16 * s, (it // STAGES) & 1)
            stage = base + s * (cfg.STAGE * 64)
            acc = multiply(acc, stage + FIRST, stage + SECOND, cfg)
            acc = waited(acc, 1, 1, cfg.WIDTH)
            if i > 0:
                release_in_both(bars + 16 * last + 8, lane, cfg.PAIR)
            last = s
            it += 1
        acc = waited(acc, 0, 1, cfg.WIDTH)
        release_in_both(bars + 16 * last + 8, lane, cfg.PAIR)
        store(acc, G, tile, there, columns, held, to, pitch, cfg)


@gluon.jit
def _load(to, column, row, bar, PARAMETER: gl.constexpr, ROWS: gl.constexpr, cfg: gl.constexpr):
    """So many rows of a block that only this CTA uses."""
    if cfg.PAIR:
        load_box(to, column, row, bar, PARAMETER, False)
    else:
        for i in range(ROWS // 8):
            load_box(to + i * 1024, column, row + 8 * i, bar, PARAMETER, False)


@gluon.jit
def _producer(sizes, cfg: gl.constexpr):
    tiles, blocks, rows, columns = sizes
    STAGES: gl.constexpr = cfg.STAGES
    SECOND: gl.constexpr = cfg.HIGH * 128
    SHARED: gl.constexpr = cfg.HIGH if cfg.SWAP else cfg.WIDTH  # rows of the factor that is
    BYTES: gl.constexpr = (cfg.STAGE * 8 + (2 * cfg.HALF - SHARED if cfg.PAIR else 0)) * 128
    ring = shared_memory()
    bars = _barriers(cfg)
    top = _top(cfg)
    half = rank() * (SHARED - cfg.HALF) if cfg.PAIR else 0  # in the middle both may load eight rows
    meet(cfg.PAIR)
    it = 0
    begin, end, step = _work(tiles, cfg)
    for tile in range(begin, end, step):
        column = tile * SHARED
        for number in range(blocks):
            s = it % STAGES
            bar = bars + 16 * s
            wait_empty(bars, it, STAGES)
            expect_at(bar, BYTES)
            stage = ring + s * (cfg.STAGE * 1024)
            at = number * 64
            if cfg.SWAP:
                _load(stage + SECOND, at, top, bar, _SECOND, cfg.WIDTH, cfg)
                if cfg.PAIR:
                    load_box(stage + half * 128, at, column + half, bar, _FIRST, True)
                else:
                    _load(stage, at, column, bar, _FIRST, cfg.HIGH, cfg)
            else:
                _load(stage, at, top, bar, _FIRST, cfg.HIGH, cfg)
                load_box(stage + SECOND + half * 128, at, column + half, bar, _SECOND, True)
            it += 1
    wait_all_empty(bars, it, STAGES, cfg.PAIR)


@gluon.jit(do_not_specialize=["rows", "columns", "pitch", "blocks", "tiles"])
def matmul_row_pairs(first_desc, second_desc, c_ptr, rows, columns, pitch, blocks, tiles, bias_ptr, cfg: gl.constexpr):
    eight: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], first_desc.dtype)
    GROUPS: gl.constexpr = cfg.STAGES * cfg.STAGE + cfg.BEYOND
    ring = gl.allocate_shared_memory(first_desc.dtype, [GROUPS + 1, 8, 64], eight)
    held: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    zero = gl.full([8, 64], 0, first_desc.dtype, layout=held)
    ring.index(GROUPS).store(zero)  # or triton drops what it sees nobody use
    group_barrier()
    init_pair_barriers(_barriers(cfg), cfg.STAGES, (8 if cfg.PAIR else 4) * cfg.CONSUMERS)
    after_previous_kernel()
    sizes = (tiles, blocks, rows, columns)
    c = (c_ptr, pitch)
    if not cfg.PAIR:
        gl.warp_specialize([(_consumer, (0, sizes, c, bias_ptr, cfg)), (_producer, (sizes, cfg))], [1], [24])
    elif cfg.CONSUMERS == 1:
        gl.warp_specialize(
            [(_consumer, (0, sizes, c, bias_ptr, cfg)), (_producer, (sizes, cfg)), (bystander, ()), (bystander, ())],
            [1, 1, 2],
            [24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, sizes, c, bias_ptr, cfg)),
                (_consumer, (1, sizes, c, bias_ptr, cfg)),
                (_producer, (sizes, cfg)),
                (bystander, ()),
                (bystander, ()),
            ],
            [4, 1, 1, 2],
            [240, 24, 24, 24],
        )
