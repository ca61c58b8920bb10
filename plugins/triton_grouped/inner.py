"""The gradient of the matrices: for each group, a product that sums over the group's rows. See kernel.py."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.plugins.triton_grouped.kernel import _BAD_OFFSETS, corner
from registry.toolbox.arithmetic import to_tf32
from registry.toolbox.groups import complain_of_offsets, group_ends

INT_ARGS = ["E", "M", "N", "T", "sam", "sak", "sbk", "sbn", "scz", "scm", "scn"]


@triton.jit(do_not_specialize=INT_ARGS)
def grouped_inner(
    a_desc,
    b_desc,
    c_desc,
    a_ptr,
    b_ptr,
    c_ptr,
    offs_ptr,
    word_ptr,
    E,
    M,
    N,
    T,  # what the groups share: columns of a, rows of b
    sam,
    sak,
    sbk,
    sbn,
    scz,
    scm,
    scn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EP: tl.constexpr,
    TMA: tl.constexpr,
    C_TMA: tl.constexpr,
    C_BATCHED: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    A_RUN: tl.constexpr,
    B_RUN: tl.constexpr,
    M_RUN: tl.constexpr,
    N_RUN: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDED: tl.constexpr,
    IMPRECISE: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    if A_T:
        sam, sak = 1, sak // A_RUN * A_RUN
    else:
        sam, sak = sam // A_RUN * A_RUN, 1
    if B_T:
        sbk, sbn = 1, sbn // B_RUN * B_RUN
    else:
        sbk, sbn = sbk // B_RUN * B_RUN, 1
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if tl.program_id(0) == 0:
        complain_of_offsets(word_ptr, _BAD_OFFSETS, offs_ptr, T, E, EP)
    ends = group_ends(offs_ptr, T, E, EP)
    groups = tl.arange(0, EP)
    rk = tl.arange(0, BK)
    kind: tl.constexpr = c_ptr.dtype.element_ty
    for number in range(tl.program_id(0), E * tiles_m * tiles_n, tl.num_programs(0)):
        g = number // (tiles_m * tiles_n)
        start = tl.max(tl.where(groups < g, ends, 0), 0)
        end = tl.max(tl.where(groups <= g, ends, 0), 0)
        m0, n0 = corner(number % (tiles_m * tiles_n), tiles_m, tiles_n, BM, BN, GROUP)
        rm = m0 + tl.arange(0, BM)
        rn = n0 + tl.arange(0, BN)
        inside_m = rm < M // M_RUN * M_RUN
        inside_n = rn < N // N_RUN * N_RUN
        a_rows = a_ptr + rm.to(tl.int64)[:, None] * sam
        b_columns = b_ptr + rn.to(tl.int64)[None, :] * sbn
        a_ptrs = a_rows + (start + rk).to(tl.int64)[None, :] * sak
        b_ptrs = b_columns + (start + rk).to(tl.int64)[:, None] * sbk

        acc = tl.zeros((BM, BN), dtype=tl.float32)
        whole = (end - start) // BK
        for block in range(whole):
            k0 = start + block * BK
            if TMA:
                a = a_desc.load([k0, m0]).T if A_T else a_desc.load([m0, k0])
                b = b_desc.load([n0, k0]).T if B_T else b_desc.load([k0, n0])
            else:
                a = tl.load(a_ptrs, mask=inside_m[:, None], other=0.0)
                b = tl.load(b_ptrs, mask=inside_n[None, :], other=0.0)
                a_ptrs += BK * sak
                b_ptrs += BK * sbk
            if PRECISION == "tf32" and not ROUNDED:
                a, b = to_tf32(a), to_tf32(b)
            acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)
        if whole * BK < end - start:
            k = start + whole * BK + rk
            a = tl.load(a_rows + k.to(tl.int64)[None, :] * sak, inside_m[:, None] & (k < end)[None, :], other=0.0)
            b = tl.load(b_columns + k.to(tl.int64)[:, None] * sbk, (k < end)[:, None] & inside_n[None, :], other=0.0)
            if PRECISION == "tf32":
                a, b = to_tf32(a), to_tf32(b)
            acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE)

        c = acc.to(kind)
        if C_TMA:
            if C_BATCHED:
                c_desc.store([g, m0, n0], c.reshape(1, BM, BN))
            else:
                c_desc.store([m0, n0], c)
        else:
            at = c_ptr + g.to(tl.int64) * scz + rm.to(tl.int64)[:, None] * scm + rn.to(tl.int64)[None, :] * scn
            tl.store(at, c, mask=(rm < M)[:, None] & (rn < N)[None, :])
