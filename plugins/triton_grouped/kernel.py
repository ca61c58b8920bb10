"""Grouped products in plain Triton, NVIDIA sm80 and newer: one program per SM walks the tiles of all groups.

Which tile.  Nobody but the device knows how many rows a group has. Every program reads all offsets at once, at its
start, puts lying ones right (into the tensor, none below the one before: a running maximum), and adds up the tiles of
the groups; a tile's group is then how many groups lie before it, one reduction over a vector of all groups. Nothing is
written for that and nothing waited for. Within a group, GROUP row tiles go together (neighbours share A and B in L2).

Tile facts.  BM x BN tiles of C; blocks of BK arrive in `num_stages` buffers, B by TMA where the config says so, A too
unless it is gathered: rows that a tile has too much are the next group's and are not stored. A gated product has two
accumulators over the same A, and no flattened loop, which would set the second to zero between wgmmas (0.79 of torch,
not 1.13). C leaves by masked stores: a box would write into the next group's rows. 16 bytes of A at a time come through
pointers only if every stride is known to be a multiple of that, the one between groups too.

The gradient of the matrices (`grouped_inner`) sums over the rows of a group: whole blocks of BK unmasked, then one
masked block through pointers, for what TMA would bring beyond the end is another group's.

Measured facts (H200, torch 2.11, triton 3.6.0, bf16; ratios to torch's grouped_mm, and torch operations around it where
something is fused, in CUDA graphs of one run, clocks not recorded).
- Groups of 1 to 16 rows (6 shapes): 16-row tiles 1.56 by geometric mean, 1.41..1.78; of 32 (4): 64-row tiles 1.21 to
  1.45.
- silu(x w1) * (x w3): 8 groups of 1024 rows 1.13, 64 of 256 1.19 (with a gather 1.20), 128 of 128 1.35, of 8 1.46.
- Plain products of large groups 0.5 (K = 768) to 1.02: gluon_grouped_ws has those. A gather with 128x256 tiles 0.81.
- The gradient of the matrices 0.89, 0.82..0.94.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.ops.grouped_mm.offsets import BAD_OFFSETS, BAD_ROWS
from registry.toolbox.arithmetic import activate, to_tf32
from registry.toolbox.groups import complain_of_offsets, group_ends, group_starts

_BAD_OFFSETS, _BAD_ROWS = tl.constexpr(BAD_OFFSETS), tl.constexpr(BAD_ROWS)
INT_ARGS = ["E", "T", "S", "N", "K", "saz", "sam", "sak", "sbz", "sbk", "sbn", "scz", "scm", "scn", "s_bias", "s_sa"]


@triton.jit
def _wide(x, WIDE: tl.constexpr):
    return x.to(tl.int64) if WIDE else x


@triton.jit
def corner(tile, tiles_m, tiles_n, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile among those of its group."""
    first = tile // (GROUP * tiles_n) * GROUP
    many = tl.minimum(tiles_m - first, GROUP)
    inside = tile % (GROUP * tiles_n)
    return (first + inside % many) * BM, inside // many * BN


@triton.jit
def _load_b(
    b_desc,
    b_ptrs,
    g,
    n0,
    k0,
    sbk,
    inside_n,
    left,
    BK: tl.constexpr,
    BN: tl.constexpr,
    B_TMA: tl.constexpr,
    B_T: tl.constexpr,
    B_BATCHED: tl.constexpr,
    K_EVEN: tl.constexpr,
):
    """[BK, BN] of the matrix of group g."""
    if B_TMA:
        if B_BATCHED:
            if B_T:
                b = b_desc.load([g, n0, k0]).reshape(BN, BK).T
            else:
                b = b_desc.load([g, k0, n0]).reshape(BK, BN)
        elif B_T:
            b = b_desc.load([n0, k0]).T
        else:
            b = b_desc.load([k0, n0])
    else:
        at = b_ptrs + k0.to(tl.int64) * sbk
        if K_EVEN:
            b = tl.load(at, mask=inside_n[None, :], other=0.0)
        else:
            b = tl.load(at, mask=(tl.arange(0, BK) < left)[:, None] & inside_n[None, :], other=0.0)
    return b


@triton.jit
def _finish(
    acc,
    g,
    source,
    rn,
    inside_m,
    inside_n,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    s_bias,
    s_sa,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    ACT: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Scales, bias and activation of one accumulator, in fp32; `rn` counts columns of b."""
    if SCALED:
        row = source if RAGGED else g.to(tl.int64) * s_sa + source
        sa = tl.load(sa_ptr + row, mask=inside_m, other=0.0)
        sb = tl.load(sb_ptr + g.to(tl.int64) * s_bias + rn, mask=inside_n, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + g.to(tl.int64) * s_bias + rn, mask=inside_n, other=0.0).to(tl.float32)[None, :]
    return activate(acc, ACT)


@triton.jit(do_not_specialize=INT_ARGS)
def grouped_rows(
    a_desc,
    b_desc,
    c_desc,
    a_ptr,
    b_ptr,
    c_ptr,
    offs_ptr,
    rows_ptr,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    word_ptr,
    E,  # groups
    T,  # rows of the result, of each group where they are a dimension
    S,  # rows of a
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
    s_bias,
    s_sa,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EP: tl.constexpr,  # a power of two above the number of groups
    RAGGED: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    C_TMA: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    A_BATCHED: tl.constexpr,
    B_BATCHED: tl.constexpr,
    C_BATCHED: tl.constexpr,
    A_RUN: tl.constexpr,  # elements that are aligned together
    B_RUN: tl.constexpr,
    C_RUN: tl.constexpr,
    N_RUN: tl.constexpr,  # what divides N
    WIDE: tl.constexpr,
    K_EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    A_ROUNDED: tl.constexpr,  # by the tensor maps
    B_ROUNDED: tl.constexpr,
    IMPRECISE: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    ACT: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BN)
    blocks = tl.cdiv(K, BK)
    if not A_TMA:
        saz = saz // A_RUN * A_RUN
        if A_T:
            sam, sak = 1, sak // A_RUN * A_RUN
        else:
            sam, sak = sam // A_RUN * A_RUN, 1
    if not B_TMA:
        sbz = sbz // B_RUN * B_RUN
        if B_T:
            sbk, sbn = 1, sbn // B_RUN * B_RUN
        else:
            sbk, sbn = sbk // B_RUN * B_RUN, 1
    if C_RUN > 1:
        scz, scm, scn = scz // C_RUN * C_RUN, scm // C_RUN * C_RUN, 1
    if PDL:  # what came before overlapped the previous kernel's tail
        gdc_wait()
        gdc_launch_dependents()

    # --- how many tiles: of the groups, and of the rows behind the last one
    if RAGGED:
        if tl.program_id(0) == 0:
            complain_of_offsets(word_ptr, _BAD_OFFSETS, offs_ptr, T, E, EP)
        ends = group_ends(offs_ptr, T, E, EP)
        upto = tl.cumsum(tl.cdiv(ends - group_starts(offs_ptr, T, E, EP), BM), 0)
        total = tl.max(upto, 0) * tiles_n
        last = tl.max(ends, 0)
    else:
        tiles_each = tl.cdiv(T, BM)
        total = E * tiles_each * tiles_n
    rk = tl.arange(0, BK)
    kind: tl.constexpr = c_ptr.dtype.element_ty

    for number in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        # --- which tile, of which group
        if RAGGED:
            earlier = upto * tiles_n <= number
            g = tl.sum(earlier.to(tl.int32), 0)
            before = tl.max(tl.where(earlier, upto, 0), 0)
            start = tl.max(tl.where(earlier, ends, 0), 0)
            end = tl.min(tl.where(earlier, T, ends), 0)
        else:
            g = number // (tiles_each * tiles_n)
            before = g * tiles_each
            start = 0
            end = T
        m0, n0 = corner(number - before * tiles_n, tl.cdiv(end - start, BM), tiles_n, BM, BN, GROUP)
        m0 += start
        rm = m0 + tl.arange(0, BM)
        rn = n0 + tl.arange(0, BN)
        inside_m = rm < end
        inside_n = rn < N // N_RUN * N_RUN
        if GATHER:
            source = tl.load(rows_ptr + rm, mask=inside_m, other=0)
            source = tl.minimum(tl.maximum(source, 0), S - 1).to(tl.int64)
        else:
            source = rm
        # offsets inside a tile take 32 bits, unless strides are very long
        a_ptrs = a_ptr + g.to(tl.int64) * saz
        b_ptrs = b_ptr + g.to(tl.int64) * sbz + n0.to(tl.int64) * sbn
        if GATHER:
            a_ptrs = a_ptrs + source[:, None] * sam + _wide(rk, WIDE)[None, :] * sak
        else:
            a_ptrs = a_ptrs + m0.to(tl.int64) * sam
            a_ptrs = a_ptrs + _wide(tl.arange(0, BM), WIDE)[:, None] * sam + _wide(rk, WIDE)[None, :] * sak
        b_ptrs = b_ptrs + _wide(rk, WIDE)[:, None] * sbk + _wide(tl.arange(0, BN), WIDE)[None, :] * sbn

        # --- the pipelined loop
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        up = tl.zeros((BM, BN if GATED else 1), dtype=tl.float32)
        for block in range(blocks):
            k0 = block * BK
            if A_TMA:
                if A_BATCHED:
                    if A_T:
                        a = a_desc.load([g, k0, m0]).reshape(BK, BM).T
                    else:
                        a = a_desc.load([g, m0, k0]).reshape(BM, BK)
                elif A_T:
                    a = a_desc.load([k0, m0]).T
                else:
                    a = a_desc.load([m0, k0])
            else:
                at = a_ptrs + k0.to(tl.int64) * sak
                if K_EVEN:
                    a = tl.load(at, mask=inside_m[:, None], other=0.0)
                else:
                    a = tl.load(at, mask=inside_m[:, None] & (rk < K - k0)[None, :], other=0.0)
            b = _load_b(b_desc, b_ptrs, g, n0, k0, sbk, inside_n, K - k0, BK, BN, B_TMA, B_T, B_BATCHED, K_EVEN)
            if PRECISION == "tf32":
                a = a if A_ROUNDED else to_tf32(a)
                b = b if B_ROUNDED else to_tf32(b)
            acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
            if GATED:
                more = b_ptrs if B_TMA else b_ptrs + N.to(tl.int64) * sbn
                b = _load_b(b_desc, more, g, N + n0, k0, sbk, inside_n, K - k0, BK, BN, B_TMA, B_T, B_BATCHED, K_EVEN)
                if PRECISION == "tf32":
                    b = b if B_ROUNDED else to_tf32(b)
                up = tl.dot(a, b, up, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)

        # --- epilogue
        inside_n = rn < N
        c = _finish(
            acc, g, source, rn, inside_m, inside_n, bias_ptr, sa_ptr, sb_ptr, s_bias, s_sa, BIAS, SCALED, ACT, RAGGED
        )
        if GATED:
            c *= _finish(
                up,
                g,
                source,
                N + rn,
                inside_m,
                inside_n,
                bias_ptr,
                sa_ptr,
                sb_ptr,
                s_bias,
                s_sa,
                BIAS,
                SCALED,
                "",
                RAGGED,
            )
        c = c.to(kind)
        if C_TMA:
            if C_BATCHED:
                c_desc.store([g, m0, n0], c.reshape(1, BM, BN))
            else:
                c_desc.store([m0, n0], c)
        else:
            tile = c_ptr + g.to(tl.int64) * scz + m0.to(tl.int64) * scm + n0.to(tl.int64) * scn
            at = tile + _wide(tl.arange(0, BM), WIDE)[:, None] * scm + _wide(tl.arange(0, BN), WIDE)[None, :] * scn
            tl.store(at, c, mask=inside_m[:, None] & inside_n[None, :])

    # --- what nobody waits for: rows that are not there, and rows of no group
    if GATHER:
        for first in range(tl.program_id(0) * BM, T, tl.num_programs(0) * BM):
            at = first + tl.arange(0, BM)
            given = tl.load(rows_ptr + at, mask=at < T, other=0)
            if tl.max(((given < 0) | (given >= S)).to(tl.int32), 0) != 0:
                tl.atomic_or(word_ptr, _BAD_ROWS)
    if RAGGED:
        for number in range(tl.program_id(0), tl.cdiv(T - last, BM) * tiles_n, tl.num_programs(0)):
            rm = last + number // tiles_n * BM + tl.arange(0, BM)
            rn = number % tiles_n * BN + tl.arange(0, BN)
            tile = c_ptr + rm.to(tl.int64)[:, None] * scm
            tl.store(
                tile + rn.to(tl.int64)[None, :] * scn,
                tl.zeros((BM, BN), dtype=kind),
                mask=(rm < T)[:, None] & (rn < N)[None, :],
            )
