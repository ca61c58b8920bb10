"""A large product for Hopper by pairs of CTAs, clusters of two that share one factor: each loads half of it, for both.

Tile facts.  A CTA computes HIGH x WIDTH tiles of a product of two factors: of a and b, or with SWAP of b's columns and
a's rows, the transpose of C. 64 rows for each of UNITS of each of CONSUMERS warp groups, two, or three where HIGH is
192; or with TURNS of the one that has the tile. WIDTH is a multiple of 8 up to 256, of 16 where columns of b are cut or
halved: rows of a can be shared out evenly, columns so that rounds over the chip are full. PAIR 2: the tiles of a pair
lie one below the other and share rows of the second factor. PAIR 1: they lie side by side and share rows of the first.
Both factors lie along K. wgmma is written out (registry.toolbox.wgmma), its accumulators are tuples of registers: 256 x
192 tiles, whose 192 columns are no power of two, take one instruction for each 64 rows and nothing beside the
accumulators.

Shared memory.  A ring of STAGES stages, each STAGE KiB: of 8 rows of 128 bytes, HIGH rows of the first factor, then
WIDTH of the second. Then 1 KiB of barriers: stage s is full at byte 16 s and empty at 16 s + 8, turns begin at 512.
Then the buffers of C. Descriptors count 16 bytes: a row is 8 of them, a KiB 64.

Roles.  Consumers, 4 warps each, the first in the default partition; one producer warp with 24 registers.

Schedule.  Persistent; pairs of tiles run in groups of GROUP rows of pairs, column by column. The producer runs ahead
across the borders of tiles, and stays until both CTAs have let go of all stages. Consumers keep one block of wgmma in
flight and release the stage before it, in both CTAs.
With TURNS each has every other tile: one stores while the other multiplies, which begins when it is told that all
blocks of the tile before are there. SPLIT: tiles of a last round that they do not fill, be it the only one, have ranges
of K, summed in float32 and added up after (parts.py). 8-bit floats sum each block of K by itself (exact.py).
Finished accumulators, with bias and activation (registry.toolbox.finish), go, STORES times PIECE columns at once (with
SWAP as so many rows), through buffers in shared memory (stmatrix) and by TMA to C; the last piece may be smaller, so
boxes of C have rows that divide both.
Programmatic dependent launch. Where not SHARED each CTA of a pair loads all for itself, by eight rows where not WHOLE,
and stores so: for launches through `kernel[grid]`.

Measured facts (H200, torch 2.11, triton 3.6.0, bf16, nt; graphs over rotated inputs, shuffled rounds; a cell's noise is
about 3%). Ratios of the best of up to ten tiles to cuBLAS / to the best of three of gluon_matmul_ws, geometric means:
- Rows that are no multiples of 128 bytes (3000^3 twice, 5000^3, 2048 x 6152 x 4104, 4096 x 4104 x 8200): 1.016 (least
  0.97) / 1.20. What is shared halves the requests to L2, of which such rows cost two for each 128 bytes.
- 257 to 511 rows (9 cells): 0.97 (0.865: 330 x 4096 x 14336, few tiles) / 1.08, by rows of a that are shared out evenly
  (SWAP): 300 rows in two tiles of 160 columns, not three of 128 rows. 512 to 1023 rows (13): 1.01 (0.94) / 1.03.
- 30 layers of models at random, 129 rows and more: 0.96 (0.75) by tiles 128 or 256 high and multiples of 16, 1.02
  (0.82) with tiles of 64 and 192, rows in eights and PAIR 2 with SWAP. Tiles 64 high without SWAP never won; of 43 more
  layers, with columns cut so that they fill the chip, 3. All tiles cut so: 0.97 of cuBLAS for 0.935 on 26 layers.
- 1024 rows and more (16): 1.03 (0.99) / 1.005. All of the card is at its power limit (690 W, 1.3 to 1.5 GHz), and fewer
  bytes from L2 do not help there: 128 x 128 tiles as pairs and alone take the same time.
- 256 rows (3): 1.08 (1.025) / gluon_matmul_rows 1.11, gluon_matmul_row_pairs 1.08: stores by TMA are worth it where a
  CTA has several tiles. 129 to 200 rows: 0.88 of cuBLAS, those two are better.
- TURNS, tiles of 128 rows by 144 to 208 columns (10 cells of 512 rows and more, means of 12 turns of 18 ms): 1.036 /
  1.022 of the best halves of tiles, 1.033 of the best of three configurations of quack (least 0.97). On 30 random
  shapes of 1024 rows and more, 1.024 of halves. Groups twice as high and a serpentine order of tiles: no gain.
- TURNS with SWAP, all of 129 to 192 rows in one tile: 148 x 28672 x 4096 71.1 us, 73.5 by gluon_matmul_rows and 75 by
  halves of the rows (cuBLAS 70.7); 148 x 43008 x 5376 139 us for 137.5 and 150 (131.5).
- 8-bit floats, row-wise scales: of torch without fast accumulation / of the best of gluon_matmul_ws, the best of 128 x
  {128, 192, 208}: 4096^3 1.007 / 1.025, 512 x 28672 x 4096 1.007 / 1.02, 2048 x 28672 x 4096 0.996 / 1.01, 2048^3 0.97
  / 0.98, 8192^3 1.04 / 0.99. 128 x {144, 160, 176} and 256 x 128 hardly ever won. Consumers with a tile, a producer and
  a ring each, that wait for nobody, so that one adds or stores while the other multiplies: slower at 25 of 26 shapes.
- SPLIT, shapes of few tiles: 512 x 512 x 16384 0.85, 384 x 640 x 20000 0.88 (0.63 without), 256 x 256 x 32768 0.98,
  1024 x 512 x 32768 1.01, 128 x 256 x 65536 0.97 of cuBLAS. Each range costs 0.4 us, so half of the chip can be faster.
  All loads of the second kernel in flight at once, by a tensor of ranges: 10% slower in all where there are 16 ranges.
- With a bias, 10 layers of more than 128 rows: 1.04 (0.93) / 1.11. gelu in 23 instructions a number had 0.92 to 1.07,
  in 11 it has 1.14 to 1.25 of torch's two kernels: code that runs once a tile is fetched once a tile.
- Buffers for all of a tile, one stage less: no gain. PAIR 2 is 1% faster than PAIR 1 where both fill the chip.
- `barrier.cluster` in a launch without clusters (kernel[grid]): illegal instruction. It becomes the hardware barrier
  0 of all threads, which is the default partition's own. A kernel that is launched alone does without.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.plugins.gluon_matmul_pairs.exact import multiplied, scaled
from registry.plugins.gluon_matmul_pairs.parts import corner_of, items_of, part_of, place_of, put
from registry.plugins.gluon_matmul_pairs.store import parameter, places_of, store, stored
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


@gluon.jit
def _barriers(cfg: gl.constexpr):
    """Behind the ring, and the buffers of C behind them."""
    return shared_memory() + cfg.STAGES * cfg.STAGE * 1024


@gluon.jit
def _turn(bars, G: gl.constexpr):
    """The barrier by which the other consumer says that all its blocks are there: behind those of the stages."""
    return bars + 512 + 16 * G + 8


@gluon.jit
def _work(sizes, cfg: gl.constexpr):
    """(begin, end, step) of the pairs of tiles, or their ranges of K, of a pair of CTAs."""
    return gl.program_id(0) // 2, items_of(sizes, cfg.SPLIT), gl.num_programs(0) // 2


@gluon.jit
def _corner(pair, sizes, cfg: gl.constexpr):
    """(first row, first column) of a pair of tiles."""
    row, column = corner_of(pair, sizes[0], sizes[1], cfg.GROUP)
    return row * (cfg.HIGH * (2 if cfg.PAIR == 2 else 1)), column * (cfg.WIDTH * (2 if cfg.PAIR == 1 else 1))


@gluon.jit
def _own(cfg: gl.constexpr):
    """(rows, columns) from the corner of a pair of tiles to that of this CTA's, and which of the two it is."""
    mine = rank() if cfg.SHARED else gl.program_id(0) % 2
    return mine * cfg.HIGH if cfg.PAIR == 2 else 0, mine * cfg.WIDTH if cfg.PAIR == 1 else 0, mine


@gluon.jit
def _consumer(G: gl.constexpr, sizes, sums, scales, bias, cfg: gl.constexpr):
    blocks = sizes[2]
    ROWS: gl.constexpr = 0 if cfg.TURNS else G * cfg.UNITS * 64  # this consumer's first of a tile
    FIRST: gl.constexpr = ROWS * 8  # of a stage, in units of 16 bytes
    SECOND: gl.constexpr = cfg.HIGH * 8
    STAGES: gl.constexpr = cfg.STAGES
    base = descriptor_of(shared_memory())
    bars = _barriers(cfg)
    buffers = bars + 1024 + G * (cfg.STORES * cfg.UNITS * 128 * cfg.PIECE)
    places = places_of(cfg)
    lane = lanes() % 32
    down, across, _ = _own(cfg)
    down += ROWS
    meet(cfg.SHARED)
    it = 0
    own = 0
    begin, end, step = _work(sizes, cfg)
    if cfg.TURNS:
        if G:  # what the other multiplies is passed over
            it += part_of(begin, sizes, cfg.SPLIT)[2]
        begin += G * step
        step *= 2
    gl.assume(blocks > 0)  # or ptxas sees accumulators that no wgmma began, and makes every one wait
    for item in range(begin, end, step):
        pair, _, count, part = part_of(item, sizes, cfg.SPLIT)
        gl.assume(count > 0)
        if cfg.TURNS:  # or the parity of a stage's barrier would be that of an earlier round
            wait_at(_turn(bars, G), (own & 1) ^ (1 - G))
            own += 1
        row, column = _corner(pair, sizes, cfg)
        held = bias_of(bias, row + down, column + across, cfg)  # long before it is asked for
        acc = zeros(cfg.UNITS, cfg.WIDTH)
        if cfg.EXACT:
            acc, it = multiplied(acc, it, count, (bars, base, lane), FIRST, SECOND, cfg)
        else:
            last = it % STAGES
            for i in range(count):
                s = it % STAGES
                wait_at(bars + 16 * s, (it // STAGES) & 1)
                stage = base + s * (cfg.STAGE * 64)
                acc = multiply(acc, stage + FIRST, stage + SECOND, cfg)
                acc = waited(acc, 1, cfg.UNITS, cfg.WIDTH)
                if i > 0:
                    release_in_both(bars + 16 * last + 8, lane, cfg.SHARED)
                last = s
                it += 1
            if cfg.TURNS:
                release_in_both(_turn(bars, 1 - G), lane, False)
            acc = waited(acc, 0, cfg.UNITS, cfg.WIDTH)
            release_in_both(bars + 16 * last + 8, lane, cfg.SHARED)
        row, column = _corner(pair, sizes, cfg)  # again: where there is no bias, none of it lives through the product
        if cfg.SPLIT and cfg.STORES:
            if part < 0:
                store(acc, row + down, column + across, held, buffers, places, cfg)
            else:
                put(acc, down, across, place_of(pair, part, sizes), sums, cfg)
        elif cfg.SPLIT:
            put(acc, down, across, place_of(pair, part, sizes), sums, cfg)
        else:
            if cfg.EXACT:
                acc = scaled(acc, row + down, column + across, scales, cfg)
            store(acc, row + down, column + across, held, buffers, places, cfg)
        if cfg.TURNS:
            it += part_of(item + step // 2, sizes, cfg.SPLIT)[2]
    if cfg.STORES:
        stored(places[0], 0, "")


@gluon.jit
def _load(to, column, row, bar, PARAMETER: gl.constexpr, ROWS: gl.constexpr, BOTH: gl.constexpr, cfg: gl.constexpr):
    """So many rows of a block: as one box, whatever Triton takes it for, or by eights."""
    if cfg.WHOLE:
        load_box(to, column, row, bar, PARAMETER, BOTH)
    else:
        for i in range(ROWS // 8):
            load_box(to + i * 1024, column, row + 8 * i, bar, PARAMETER, BOTH)


@gluon.jit
def _producer(sizes, cfg: gl.constexpr):
    STAGES: gl.constexpr = cfg.STAGES
    BOTH_A: gl.constexpr = cfg.SHARED and cfg.PAIR == 1
    BOTH_B: gl.constexpr = cfg.SHARED and cfg.PAIR == 2
    A: gl.constexpr = cfg.HIGH // 2 if BOTH_A else cfg.HIGH
    B: gl.constexpr = cfg.WIDTH // 2 if BOTH_B else cfg.WIDTH
    A_MAP: gl.constexpr = parameter(0, cfg)
    B_MAP: gl.constexpr = parameter(5, cfg)
    ring = shared_memory()
    bars = _barriers(cfg)
    down, across, mine = _own(cfg)
    half_a = mine * A if BOTH_A else 0  # where this CTA's half of what is shared begins
    half_b = mine * B if BOTH_B else 0
    meet(cfg.SHARED)
    it = 0
    begin, end, step = _work(sizes, cfg)
    for item in range(begin, end, step):
        pair, first, count, _ = part_of(item, sizes, cfg.SPLIT)
        row, column = _corner(pair, sizes, cfg)
        for number in range(first, first + count):
            s = it % STAGES
            bar = bars + 16 * s
            wait_empty(bars, it, STAGES)
            expect_at(bar, cfg.STAGE * 1024)
            stage = ring + s * (cfg.STAGE * 1024)
            at = number * cfg.DEPTH
            _load(stage + half_a * 128, at, row + down + half_a, bar, A_MAP, A, BOTH_A, cfg)
            second = stage + cfg.HIGH * 128 + half_b * 128
            _load(second, at, column + across + half_b, bar, B_MAP, B, BOTH_B, cfg)
            it += 1
    wait_all_empty(bars, it, STAGES, cfg.SHARED)


@gluon.jit
def _run(KIND: gl.constexpr, sizes, sums, scales, bias, cfg: gl.constexpr):
    eight: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, cfg.DEPTH], KIND)
    RING: gl.constexpr = cfg.STAGES * cfg.STAGE
    BUFFERS: gl.constexpr = cfg.CONSUMERS * cfg.UNITS * cfg.STORES * cfg.PIECE // 8
    memory = gl.allocate_shared_memory(KIND, [RING + 1 + BUFFERS, 8, cfg.DEPTH], eight)
    held: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    zero = gl.full([8, cfg.DEPTH], 0, KIND, layout=held)
    memory.index(RING).store(zero)  # or triton drops what it sees nobody use
    group_barrier()
    init_pair_barriers(_barriers(cfg), cfg.STAGES, (4 if cfg.TURNS else 4 * cfg.CONSUMERS) * (2 if cfg.SHARED else 1))
    if cfg.TURNS:
        init_pair_barriers(_barriers(cfg) + 512, 2, 4)
    after_previous_kernel()
    if cfg.SHARED and cfg.CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (0, sizes, sums, scales, bias, cfg)),
                (_consumer, (1, sizes, sums, scales, bias, cfg)),
                (_consumer, (2, sizes, sums, scales, bias, cfg)),
                (_producer, (sizes, cfg)),
                (bystander, ()),
                (bystander, ()),
            ],
            [4, 4, 1, 1, 2],
            [160, 160, 24, 24, 24],
        )
    elif cfg.CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_consumer, (0, sizes, sums, scales, bias, cfg)),
                (_consumer, (1, sizes, sums, scales, bias, cfg)),
                (_consumer, (2, sizes, sums, scales, bias, cfg)),
                (_producer, (sizes, cfg)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    elif cfg.SHARED:
        gl.warp_specialize(
            [
                (_consumer, (0, sizes, sums, scales, bias, cfg)),
                (_consumer, (1, sizes, sums, scales, bias, cfg)),
                (_producer, (sizes, cfg)),
                (bystander, ()),
                (bystander, ()),
            ],
            [4, 1, 1, 2],
            [240, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, sizes, sums, scales, bias, cfg)),
                (_consumer, (1, sizes, sums, scales, bias, cfg)),
                (_producer, (sizes, cfg)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit(do_not_specialize=["high", "wide", "blocks", "ways", "columns"])
def matmul_pairs_of_tiles(
    first_desc, second_desc, c_desc, high, wide, blocks, ways, sums_ptr, bias_ptr, columns, cfg: gl.constexpr
):
    pairs = gl.num_programs(0) // 2  # of CTAs: all that run at once, where there are full rounds
    sizes = (high, wide, blocks, high * wide // pairs * pairs, ways)
    _run(first_desc.dtype, sizes, sums_ptr, (), (bias_ptr, columns), cfg)


@gluon.jit(do_not_specialize=["high", "wide", "blocks", "s_am", "s_bn", "rows", "columns"])
def matmul_exact_pairs(
    first_desc,
    second_desc,
    c_desc,
    high,
    wide,
    blocks,
    sa_ptr,
    sb_ptr,
    s_am,
    s_bn,
    rows,
    columns,
    bias_ptr,
    cfg: gl.constexpr,
):
    """Of 8-bit floats, with scales."""
    scales = (sa_ptr, sb_ptr, s_am, s_bn, rows, columns)
    _run(gl.int8, (high, wide, blocks, 0, 1), (), scales, (bias_ptr, columns), cfg)
