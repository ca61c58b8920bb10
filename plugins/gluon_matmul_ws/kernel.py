"""A warp-specialised matrix product for Hopper: a TMA producer warp, two consumer warp groups, a persistent CTA per SM.

Tile facts.  A CTA computes BM x BN tiles of C; BN = N0 + N1 is one or two powers of two (192 = 128 + 64).
Cooperative: each consumer owns GM = BM / 2 rows of every tile.  Ping-pong: each consumer owns every other tile whole
(GM = BM), so that one stores while the other multiplies.  Operands arrive through TMA in 128-byte swizzled blocks of
BK, read along whichever dimension is contiguous (wgmma takes 16-bit operands from shared memory in either order, 8-bit
and 32-bit ones along K only).

Roles.  Consumer 0 is the default partition (4 warps, 240 registers), consumer 1 four warps, the producer one warp with
24 registers.

Schedule.  A ring of STAGES blocks of A and B.  Its barriers: the bytes of a stage have landed (full), its readers are
done (empty).  The producer runs ahead across tile borders, so the next tile loads during the epilogue.  Consumers keep
one block of wgmma in flight and release the stage before it.  In ping-pong, `turns` hold the other consumer's word that
it has taken its last stage: without it a consumer would take an earlier round of the ring for its own (the two differ
by an even number of phases).  The epilogue goes through STORES buffers of 64 columns per consumer: registers -> shared
memory -> TMA store, or masked stores of whole rows where TMA cannot address C.  fp8 (EXACT): each block of K is summed
in fresh accumulators and added in fp32, since wgmma itself keeps 14 bits; where registers allow it, one block is added
while the next is multiplied.  float32: wgmma would cut operands off to tf32, so the TMA unit rounds them as it loads.
Launches without such tensor maps (ROUND) let the consumers first round each stage in place, half of B each, while the
stage before it is multiplied; `rounded` says that both have.  The first factor of float32 comes from registers where it
is not contiguous along K (A_REGS), two blocks a round of the loop; other 8- and 32-bit operands are copied (turn.py).

SPLIT: the last, incomplete round over the chip runs in tiles of BN / SPLIT columns: 160 tiles on 132 SMs then take 1.25
rounds instead of 2.  SPLIT_K: a few tiles are cut along K (reduce.py).  Tiles run in groups of GROUP row tiles, column
by column, so that one wave shares A and B in L2.  SWAP: the product of the transposes, so that columns of b are wgmma's
rows.  Few rows of A (FEW): consumers share them out evenly, by eights, and boxes of the tensor maps bring no more.
Where they do not divide, the last consumer begins early and computes some rows once more, to the same bits.

Measured facts (H200, torch 2.11, triton 3.6.0; ratios to cuBLAS of the same run, in chained graphs; a cell's run-to-run
noise is about 3%).
- Best config a cell, bf16: squares 1024..16384 1.021 by geometric mean, least 0.954 (1024^3 tn); Llama's 24 cells with
  M >= 512 1.027, least 0.946; over all 39 this kernel alone 1.022.
- Programmatic dependent launch (griddepcontrol): 1024^3 0.85 -> 0.94, 2048^3 nt 0.96 -> 1.05.
- SPLIT of the last round, M=512: 28672 x 4096 0.94 -> 1.02; 10240 x 8192 0.84 -> 0.93.
- One config for 19 shapes with M >= 2048: 128x128, 6 stages 1.017, least 0.97; 128x256 1.004..1.009; 128x192 0.97, but
  best where it alone fills the chip (512 x 6144 x 4096: 0.97 against 0.92). GROUP 4, 8, 16, 32: within 1%, 8 best.
- 128x320 loses 4%, but one round of it beats two of others: 512 x 10240 x 8192 0.948, else 0.943. 256x192 (3 stages)
  0.86..1.00; ping-pong 128x128 0.94..1.02, 64x256 0.87..1.04; 128x160 costs 10% in its narrow wgmma.
- gelu: instructions of an unrolled epilogue cost more than their count (presumably two consumers' code falls out of the
  instruction cache): with tl.erf 2048 x 16384 x 4096 took 599 us at 128x256, with a gelu of 23, not 32, 435,
  in ping-pong 499 and 410 (torch, unfused: 412). In 11, for 16 bits, it gains 1.07 more. silu, fused: 1.18..1.23.
- SPLIT_K, a few tiles and a long K: 512 x 512 x 16384 0.80, 256 x 256 x 32768 0.80, 1024 x 512 x 32768 0.90, 128 x 256
  x 65536 0.83, 384 x 640 x 20000 0.81. Stream-K (equal ranges of K for all CTAs) was slower for many rows: 2048^3 0.65,
  512 x 6144 x 4096 0.74, where whole tiles reach 1.00; and for ragged ones, but for 2048 x 6152 x 4104 (0.89 -> 0.92).
- Few rows, projections of models of 8 to 70 billion parameters: a row of a box that lies outside of A costs 2 to 4 ns a
  block of K, and several boxes of 16 rows hardly less: 96 x 6144 x 4096 with 128x48 tiles took 25.2 us with whole
  boxes, 23.7 with boxes of 16 rows, 17.9 with those of 48 rows that are there (128 rows: 18.2). Boxes that bring
  exactly as many rows as there are want one of eight byte counts for each block, which cost tiles of 32 columns 5 to
  10%. Tiles as wide as fill the chip once win, for adding up costs 4 us and more; where none does, SWAP with K split or
  in equal shares. Of the four configs declared the best / the first, 8 projections each, by rows: 19 1.025 / 1.02, 52
  1.00 / 0.99, 96 1.025 / 1.01, 150 0.94 / 0.94, 200 0.88 / 0.87; least 0.94 to 96 rows, 0.79 beyond. There cuBLAS
  shares what it loads among clusters of 2 to 4 CTAs (200 x 8192 x 8192 in tiles of 128x104, 200 x 28672 x 4096 of
  128x200; 5000^3 of 256x152), which this kernel does not, and whose widths are no two powers of two; an SM takes in 87
  bytes a ns. 256 rows high tiles never won below 257.
- M >= 512, all of an H200 at its power limit: best of 13 configs on 6 shapes 1.03 (least 1.01; 8192^3 128x192).
- Rows of 3000 and 5000 elements, no multiples of 128 bytes: 3000^3 0.71 -> 0.78 and 5000^3 0.73 -> 0.81 by 256x160
  tiles with one buffer of C, 8200 elements 0.82 -> 0.91, 2048 x 6152 x 4104 0.77 -> 0.90 (256x192); padded rows 1.01,
  0.93.
- fp8 (nt, row-wise scales, no fast accumulation on either side): 10 cells with M >= 512 0.977, least 0.90 (2048^3);
  with 6 stages of 128x128 instead of 4, 6 cells 0.95 -> 0.99 (best config; least 0.97). Without the exact sum 0.93
  against 0.90 (2048^3), 1.01 / 0.96 (4096^3), 1.01 / 0.99 (8192^3); torch gains 1.02..1.17 from fast accumulation.
  Adding one block during the next: 1.03 of adding after each (128x128); BN 192: 8192^3 1.05.
- float32 (tf32), relative error 2.94e-4 as cuBLAS, rounded by TMA: nt 1.04, 1.01 (2048^3, 4096^3; in place 0.58..0.61,
  cut off 7.7e-4). The factor across K from registers: nn 1.07, 1.04, 1.02 (2048^3, 4096^3, 8192^3), 1024 x 8192 x 4096
  1.31, 128 x 4096 x 4096 1.07..1.10 (copied 0.89, 0.91, 0.96, 0.94, 0.51), 3000^3 1.07, 1000 x 1004 x 1012 0.95; tt
  4096^3 1.10, 700 x 2500 x 1900 0.89; tn, where the other is still copied, 4096^3 1.58, 6000 x 1500 x 2200 1.71. 18
  shapes 1.13 by geometric mean, the first config 1.09; least 0.72..0.74 (33 x 308 x 1000; 60 x 4096 x 2048 tt 0.84).
  One block a round instead of two, or a block left over, and ptxas makes every wgmma wait.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.plugins.gluon_matmul_ws.epilogue import store, store_both
from registry.plugins.gluon_matmul_ws.producer import corner, producer, row_of
from registry.plugins.gluon_matmul_ws.product import multiply
from registry.plugins.gluon_matmul_ws.reduce import items_of, part_of, reduce
from registry.toolbox import scopes
from registry.toolbox.hopper import after_previous_kernel, barriers, init_barriers, ring_over, store_wait


@gluon.jit
def _consumer(G: gl.constexpr, c, smem, sync, sizes, epi, workspace, cfg: gl.constexpr):
    tiles, whole, tiles_m, tiles_n, blocks, M, N, last = sizes
    c_s = smem[3]
    # ping-pong: this consumer takes every other tile, and skips the rounds of the ring in between
    stride: gl.constexpr = 3 - cfg.PARTS
    first: gl.constexpr = G * (stride - 1)
    half: gl.constexpr = G * (cfg.PARTS - 1)
    P = gl.num_programs(0)
    it = first * blocks
    buffer = 0
    own = 0
    begin, end, step = items_of(tiles, whole, blocks, first, stride, cfg)
    for item in range(begin, end, step):
        part = part_of(item, tiles, whole, blocks, cfg)
        tile, _, count = part
        scopes.enter("async product")
        acc0, acc1 = multiply(G, smem, sync, it, own, count, cfg.N0, cfg.N1, cfg)
        scopes.leave("async product")
        z, row, col = corner(tile, tiles_m, tiles_n, cfg)
        row = row_of(row, half, last, cfg)
        if cfg.SPLIT_K != 1:
            complete = count == blocks
            if not complete:
                scopes.enter("reduce")
                acc0, acc1, complete = reduce(acc0, acc1, G, item, part, tiles, whole, blocks, workspace, cfg)
                scopes.leave("reduce")
            if complete:
                scopes.enter("store")
                buffer = store_both(acc0, acc1, z, row, col, buffer, M, N, c, c_s, G, epi, cfg)
                scopes.leave("store")
        else:
            scopes.enter("store")
            buffer = store_both(acc0, acc1, z, row, col, buffer, M, N, c, c_s, G, epi, cfg)
            scopes.leave("store")
        it += stride * count
        own += 1
    if cfg.SPLIT > 1:
        width: gl.constexpr = cfg.N0 // cfg.SPLIT
        for part in range(gl.program_id(0), (tiles - whole) * cfg.SPLIT, P):
            z, row, col = corner(whole + part // cfg.SPLIT, tiles_m, tiles_n, cfg)
            row = row_of(row, half, last, cfg)
            col += part % cfg.SPLIT * width
            scopes.enter("async product")
            acc0, acc1 = multiply(G, smem, sync, it, own, blocks, width, 0, cfg)
            scopes.leave("async product")
            scopes.enter("store")
            buffer = store(acc0, width, z, row, col, buffer, M, N, c, c_s, G, epi, cfg)
            scopes.leave("store")
            it += blocks
    if cfg.TMA_STORE:
        store_wait(0)


INTEGERS = "M N last blocks tiles whole tiles_m tiles_n z_a z_b scz scm scn s_az s_am s_bn"


@gluon.jit(do_not_specialize=INTEGERS.split())
def matmul_ws(
    a_desc,
    b0_desc,
    b1_desc,
    c_desc,
    c_ptr,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    part_ptr,
    count_ptr,
    M,
    N,
    last,
    blocks,
    tiles,
    whole,
    tiles_m,
    tiles_n,
    z_a,
    z_b,
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
    a_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a_shape, a_desc.dtype)
    a_s = gl.allocate_shared_memory(a_desc.dtype, [STAGES * cfg.PARTS] + a_shape, a_block)
    b0_s = gl.allocate_shared_memory(b0_desc.dtype, [STAGES] + b0_desc.block_type.shape, b0_desc.layout)
    if cfg.N1:  # (where N1 is 0, b1_desc is the tail's narrower view of B)
        b1_s = gl.allocate_shared_memory(b1_desc.dtype, [STAGES] + b1_desc.block_type.shape, b1_desc.layout)
    else:
        b1_s = b0_s
    c_shape: gl.constexpr = [1, cfg.EN, cfg.GM] if cfg.SWAP else [1, cfg.GM, cfg.EN]
    c_block: gl.constexpr = gl.NVMMASharedLayout.get_default_for(c_shape, c_ptr.dtype.element_ty)
    c_s = gl.allocate_shared_memory(c_ptr.dtype.element_ty, [2 * cfg.STORES] + c_shape, c_block)
    full, empty = barriers(STAGES), barriers(STAGES)
    turns = full
    if cfg.PARTS == 1:  # for nobody waits for one in the other mode: see toolbox.hopper
        turns = barriers(2)
        init_barriers(turns, 1)
    stages = ring_over(b0_s, full, empty, cfg.PARTS)
    if cfg.ROUND:
        rounded = barriers(STAGES)
        init_barriers(rounded, cfg.PARTS)
    else:
        rounded = turns
    if cfg.PDL:
        after_previous_kernel()
    sync = (stages, turns, rounded)
    c = (c_desc, c_ptr, scz, scm, scn)
    epi = (bias_ptr, sa_ptr, sb_ptr, s_az, s_am, s_bn)
    sizes = (tiles, whole, tiles_m, tiles_n, blocks, M, N, last)
    smem = (a_s, b0_s, b1_s, c_s)
    workspace = (part_ptr, count_ptr)
    gl.warp_specialize(
        [
            (_consumer, (0, c, smem, sync, sizes, epi, workspace, cfg)),
            (_consumer, (1, c, smem, sync, sizes, epi, workspace, cfg)),
            (producer, ((a_desc, b0_desc, b1_desc), (a_s, b0_s, b1_s), stages, sizes, z_a, z_b, cfg)),
        ],
        [4, 1],
        [cfg.REGS, 24],
    )
