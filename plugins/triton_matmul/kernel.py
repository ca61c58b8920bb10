"""Matrix product in plain Triton: pointer loads, a software pipeline of `num_stages`, split-K, NVIDIA sm80 and newer.

Tile facts.  One program computes one BM x BN tile of one batch entry over one of SPLIT ranges of K.  Programs are
ordered in groups of GROUP row tiles so that the programs of one wave share rows of `a` and columns of `b` in L2.
Each operand is read along its own unit-stride dimension, so nn, nt, tn and tt run without copies.

Schedule.  Whole BK blocks run unmasked along K (a mask whose edge is not a multiple of 16 bytes would cost the wide
asynchronous copies); one masked block finishes a ragged K, of 8 bits by as many bytes at once as divide it (byte by
byte 3 x 576 x 2880 took 195 us on an H100, not 10).  Rows that stick out are masked where the operand is contiguous
along M or N.  Where it is contiguous along K they are clamped, which costs nothing in the loop, but masked where a tile
is mostly padding: all SMs would read the same row many times.

Where copies would be shorter than 8 bytes there is no pipeline (`num_stages=1`), and a block of each operand is loaded
into registers while the one before is multiplied; the ragged block comes first, with the others behind it.

Split-K is deterministic: every program of a tile writes an fp32 (int32) partial, the last one to arrive adds them up
in the order of their index, applies the epilogue and resets the tile's counter.  No atomics touch the output.

Ampere's rule (`cp_async_rule`).  cp.async copies 4, 8 or 16 bytes per thread.  An operand whose contiguous run is
shorter than 4 bytes, because of its strides, base or ragged edge, can not go through it, so there only configs with
num_stages=1 are legal.  On Hopper runs shorter than 16 bytes put those first: a pipeline of 4-byte copies took 2762 us
for 16 x 10686 x 13822 (nn) where cuBLAS takes 137.

Measured facts (H200, torch 2.11, triton 3.6.0, bf16; ratios to cuBLAS of the same run, in graphs).
- Llama projections, best config: M = 1 1.06 by geometric mean, least 1.00; M = 16 1.04, least 0.99; cuBLAS itself reads
  2.6 (4096 x 4096) to 4.4 TB/s (57344 x 8192) of 4.8.  fp8, row-wise scales, at M = 16 1.5..2.0 of torch._scaled_mm.
- M = 1: rows that are not there, masked instead of clamped: 6144 x 4096 0.90 -> 1.05, 4096 x 4096 1.02 -> 1.12, 57344 x
  8192 1.01 -> 1.10.  Clamped, all SMs read one row of `a` sixteen times over.
- Few rows: a round over the chip without split-K beats narrower or wider tiles with it (16 x 6144 x 4096: 64 columns, 6
  stages 1.02; 128 columns, split in two 0.95); at 4096 columns 64 wide tiles split in two do.
- Counters that a captured graph need not zero: 1 x 4096 x 4096 0.92 -> 1.00.
- 2048^3 .. 16384^3: nn and tn 0.96..1.03 with 128x256x64 tiles, nt 0.73..0.80 only (with b contiguous along K the
  128x256 tile's wgmma is serialised, ptxas C7515, and 128x128 is no better; not understood).
- Split-K, nt: 64 x 64 x 65536 0.91..1.10, 128 x 128 x 32768 0.67..0.75, 256 x 256 x 16384 0.77..0.84 (64x64 tiles;
  64x128 0.42), 512 x 512 x 16384 0.69.
- Blocks loaded ahead.  Left to the compiler, a loop without a pipeline waits for memory up to three times a block: `a`
  is stored to shared memory behind its load, with a barrier, before `b` is asked for, half of which waits again
  (16 x 32 tiles).  Ahead, the same configs of 2,228 are 1.18 times as fast, of tf32 1.37; with tiles of eight warps the
  best of 1,502 products is 1.30 times as fast (95th percentile 2.07), the fastest of all kernels 1.13.  Two blocks
  ahead: 1.09 instead of 1.16 on 86 products.  Of 8 bits it halves the speed (rows are long there, and many programs
  hide what one waits for), and full float32 spills (0.07 to 0.7), so neither does it.
- float32 rounded to tf32: nt 0.40, nn 0.17 (wgmma wants it turned), relative error 2.9e-4 as cuBLAS.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.toolbox.arithmetic import activate, to_tf32

INT_ARGS = [
    "M",
    "N",
    "K",
    "saz",
    "sam",
    "sak",
    "sbz",
    "sbk",
    "sbn",
    "scz",
    "scm",
    "scn",
    "sbias",
    "s_az",
    "s_am",
    "s_bn",
]


@triton.jit
def _epilogue(
    acc,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    z,
    rm,
    rn,
    M,
    N,
    sbias,
    s_az,
    s_am,
    s_bn,
    kind: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    ACT: tl.constexpr,
):
    if kind != tl.int32:  # all in fp32, rounded once; integers stay integers
        acc = acc.to(tl.float32)
    if SCALED:
        sa = tl.load(sa_ptr + z * s_az + rm * s_am, mask=rm < M, other=0.0)
        sb = tl.load(sb_ptr + rn * s_bn, mask=rn < N, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + rn * sbias, mask=rn < N, other=0.0).to(acc.dtype)[None, :]
    return activate(acc, ACT).to(kind)


@triton.jit
def _whole(
    a_ptrs,
    b_ptrs,
    m0,
    rm,
    M,
    edge_m,
    n0,
    rn,
    N,
    edge_n,
    A_UNIT: tl.constexpr,
    B_UNIT: tl.constexpr,
    FEW_M: tl.constexpr,
    FEW_N: tl.constexpr,
):
    if A_UNIT == "m":
        a = tl.load(a_ptrs, mask=(m0 + rm < edge_m)[:, None], other=0.0)
    elif FEW_M:
        a = tl.load(a_ptrs, mask=(m0 + rm < M)[:, None], other=0.0)
    else:
        a = tl.load(a_ptrs)
    if B_UNIT == "n":
        b = tl.load(b_ptrs, mask=(n0 + rn < edge_n)[None, :], other=0.0)
    elif FEW_N:
        b = tl.load(b_ptrs, mask=(n0 + rn < N)[None, :], other=0.0)
    else:
        b = tl.load(b_ptrs)
    return a, b


@triton.jit
def _ragged(a_ptrs, b_ptrs, m0, rm, M, n0, rn, N, rk, left):
    a = tl.load(a_ptrs, mask=(m0 + rm < M)[:, None] & (rk < left)[None, :], other=0.0)
    b = tl.load(b_ptrs, mask=(rk < left)[:, None] & (n0 + rn < N)[None, :], other=0.0)
    return a, b


@triton.jit
def _multiplied(acc, a, b, PRECISION: tl.constexpr, IMPRECISE: tl.constexpr):
    if PRECISION == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=acc.dtype)


@triton.jit(do_not_specialize=INT_ARGS)
def matmul_tiles(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    part_ptr,
    count_ptr,
    M,
    N,
    K,
    saz,
    sam,
    sak,
    sbz,
    sbk,
    sbn,
    scz,
    scm,
    scn,
    sbias,
    s_az,
    s_am,
    s_bn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    A_UNIT: tl.constexpr,
    B_UNIT: tl.constexpr,
    C_UNIT: tl.constexpr,  # which dimension has stride 1
    A_RUN: tl.constexpr,
    B_RUN: tl.constexpr,
    C_RUN: tl.constexpr,  # elements known to be aligned together
    M_RUN: tl.constexpr,
    N_RUN: tl.constexpr,
    K_TAIL: tl.constexpr,  # of the masked block, if there is one: elements known to be there together
    WIDE: tl.constexpr,
    FEW_M: tl.constexpr,
    FEW_N: tl.constexpr,  # whether one tile has room for more rows or columns than there are
    PRECISION: tl.constexpr,
    IMPRECISE: tl.constexpr,
    ACC: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    ACT: tl.constexpr,
    PDL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,  # whether a block of each operand is loaded while the one before is multiplied
):
    # --- which tile: (batch, split, grouped row tiles, column tiles)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    tile = pid % (tiles_m * tiles_n)
    rest = pid // (tiles_m * tiles_n)
    split = rest % SPLIT
    z = rest // SPLIT
    first = (tile // (GROUP * tiles_n)) * GROUP
    rows = min(tiles_m - first, GROUP)
    m0 = (first + (tile % (GROUP * tiles_n)) % rows) * BM
    n0 = (tile % (GROUP * tiles_n)) // rows * BN

    # --- operand pointers, with what is known of their alignment
    # (x // RUN * RUN tells the compiler that RUN divides x: hints on arguments themselves are dropped)
    if A_UNIT == "k":
        sam = sam // A_RUN * A_RUN
        sak = 1
    else:
        sak = sak // A_RUN * A_RUN
        if A_UNIT == "m":
            sam = 1
    if B_UNIT == "k":
        sbn = sbn // B_RUN * B_RUN
        sbk = 1
    else:
        sbk = sbk // B_RUN * B_RUN
        if B_UNIT == "n":
            sbn = 1
    edge_m = M // M_RUN * M_RUN
    edge_n = N // N_RUN * N_RUN
    blocks = tl.cdiv(K, BK)
    per = tl.cdiv(blocks, SPLIT)
    lo = split * per
    hi = min(lo + per, blocks)
    whole = min(hi, K // BK)  # blocks below `whole` need no mask along K
    rm = tl.arange(0, BM)
    rn = tl.arange(0, BN)
    rk = tl.arange(0, BK)
    am = rm if A_UNIT == "m" else tl.where(m0 + rm < M, rm, 0)
    bn = rn if B_UNIT == "n" else tl.where(n0 + rn < N, rn, 0)
    ak = rk
    bk = rk
    if WIDE:  # strides so long that offsets inside a tile need 64 bits
        am = am.to(tl.int64)
        bn = bn.to(tl.int64)
        ak = ak.to(tl.int64)
        bk = bk.to(tl.int64)
    k0 = (lo * BK).to(tl.int64)
    a_tile = a_ptr + z.to(tl.int64) * saz + m0.to(tl.int64) * sam + k0 * sak
    b_tile = b_ptr + z.to(tl.int64) * sbz + n0.to(tl.int64) * sbn + k0 * sbk
    a_ptrs = a_tile + am[:, None] * sam + ak[None, :] * sak
    b_ptrs = b_tile + bk[:, None] * sbk + bn[None, :] * sbn
    a_bytes: tl.constexpr = A_RUN * a_ptr.dtype.element_ty.primitive_bitwidth // 8
    b_bytes: tl.constexpr = B_RUN * b_ptr.dtype.element_ty.primitive_bitwidth // 8
    a_ptrs = tl.multiple_of(a_ptrs, (a_bytes, a_bytes))
    b_ptrs = tl.multiple_of(b_ptrs, (b_bytes, b_bytes))

    if PDL:  # what came before overlapped the previous kernel's tail
        gdc_wait()
        gdc_launch_dependents()

    # --- blocks of K: `whole` of them unmasked along K, then a ragged one, for the range that owns it
    acc = tl.zeros((BM, BN), dtype=ACC)
    if AHEAD:  # the next one in registers while one is multiplied; the ragged one comes first
        if WIDE:
            step_a = sak.to(tl.int64) * BK if A_UNIT != "k" else BK
            step_b = sbk.to(tl.int64) * BK if B_UNIT != "k" else BK
        else:
            step_a = BK * sak
            step_b = BK * sbk
        if K_TAIL:
            skip = tl.maximum(whole - lo, 0).to(tl.int64)
            left = tl.where((lo <= whole) & (whole < hi), K - whole * BK, 0)
            a, b = _ragged(a_ptrs + skip * step_a, b_ptrs + skip * step_b, m0, rm, M, n0, rn, N, rk, left)
        else:
            a = tl.load(a_ptrs, mask=(m0 + rm < edge_m)[:, None] & (lo < whole), other=0.0)
            b = tl.load(b_ptrs, mask=(n0 + rn < edge_n)[None, :] & (lo < whole), other=0.0)
            a_ptrs += step_a
            b_ptrs += step_b
            lo += 1
        for _ in range(lo, whole):
            a_next, b_next = _whole(a_ptrs, b_ptrs, m0, rm, M, edge_m, n0, rn, N, edge_n, A_UNIT, B_UNIT, FEW_M, FEW_N)
            acc = _multiplied(acc, a, b, PRECISION, IMPRECISE)
            a = a_next
            b = b_next
            a_ptrs += step_a
            b_ptrs += step_b
        acc = _multiplied(acc, a, b, PRECISION, IMPRECISE)
    else:  # in shared memory, as many as the pipeline has stages
        for _ in range(lo, whole):
            a, b = _whole(a_ptrs, b_ptrs, m0, rm, M, edge_m, n0, rn, N, edge_n, A_UNIT, B_UNIT, FEW_M, FEW_N)
            acc = _multiplied(acc, a, b, PRECISION, IMPRECISE)
            if WIDE:
                a_ptrs += sak.to(tl.int64) * BK if A_UNIT != "k" else BK
                b_ptrs += sbk.to(tl.int64) * BK if B_UNIT != "k" else BK
            else:
                a_ptrs += BK * sak
                b_ptrs += BK * sbk
        if K_TAIL:  # noqa: SIM102 (one is for the compiler)
            if (lo <= whole) & (whole < hi):
                left = K - whole * BK
                if K_TAIL > 1:
                    left = left // K_TAIL * K_TAIL
                a, b = _ragged(a_ptrs, b_ptrs, m0, rm, M, n0, rn, N, rk, left)
                acc = _multiplied(acc, a, b, PRECISION, IMPRECISE)

    # --- epilogue
    gm = m0 + rm
    gn = n0 + rn
    inside = (gm < M)[:, None] & (gn < edge_n)[None, :]
    if SPLIT > 1:
        span = BM * BN  # partials lie tile by tile, so their addresses need no masks
        tiles = tiles_m * tiles_n
        slot = rm[:, None] * BN + rn[None, :]
        own = (z.to(tl.int64) * tiles + tile) * SPLIT
        tl.store(part_ptr + (own + split) * span + slot, acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(count_ptr + z * tiles + tile, 1, sem="acq_rel", scope="gpu")
        if arrived < SPLIT - 1:
            return
        acc = tl.zeros((BM, BN), dtype=ACC)
        for s in range(0, SPLIT, AT_ONCE):  # in order, so each run adds the same way; several loads in flight
            for i in tl.static_range(AT_ONCE):
                acc += tl.load(part_ptr + (own + s + i) * span + slot, cache_modifier=".cg")
        tl.atomic_xchg(count_ptr + z * tiles + tile, 0, sem="relaxed", scope="gpu")
    kind: tl.constexpr = c_ptr.dtype.element_ty
    c = _epilogue(acc, bias_ptr, sa_ptr, sb_ptr, z, gm, gn, M, N, sbias, s_az, s_am, s_bn, kind, BIAS, SCALED, ACT)
    if C_UNIT == "n":
        scm = scm // C_RUN * C_RUN
        scn = 1
    c_tile = c_ptr + z.to(tl.int64) * scz + m0.to(tl.int64) * scm + n0.to(tl.int64) * scn
    if WIDE:
        rm = rm.to(tl.int64)
        rn = rn.to(tl.int64)
    c_bytes: tl.constexpr = C_RUN * kind.primitive_bitwidth // 8
    c_ptrs = tl.multiple_of(c_tile + rm[:, None] * scm + rn[None, :] * scn, (c_bytes, c_bytes))
    tl.store(c_ptrs, c, mask=inside)
