"""Matrix product in plain Triton over tensor descriptors: TMA loads and stores, persistent, NVIDIA sm90 and newer.

Tile facts.  One program per SM walks BM x BN tiles of C in groups of GROUP row tiles (neighbours share A and B in L2).
Blocks of BK arrive by TMA into `num_stages` buffers, read along whichever dimension of an operand is contiguous; what
lies outside a matrix arrives as zeros, so no ragged size needs a mask.  A batch is a third dimension of the
descriptors; a broadcast one has a single entry.

Schedule.  One loop over tiles with a pipelined loop over K inside; the compiler keeps a wgmma in flight and issues the
next TMA loads.  C leaves by TMA where its rows are 16-byte multiples, else by masked stores.
float32 becomes tf32 in the TMA unit, or in registers where a launch has no such tensor maps.
TMA's rules.  Base and every stride but the unit one must be multiples of 16 bytes.

Measured facts (H200, ratios to cuBLAS of the same run).  bf16, M >= 512: 0.96 by geometric mean, least 0.77 (1.2 rounds
over the chip); fp8 0.68 (the exact sum); tf32 (nt) rounded in registers 0.38, for B goes back to shared memory; ieee is
not claimed: its FMA products spill (in triton 3.6 all but nn, in 3.9 all).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.matmul.calls import (
    MATMUL,
    VECTORS,
    int32_reasons,
    out_of,
    scale_strides,
    sizes_of,
    strides_of,
    tma_can_store,
    turned,
)
from registry.ops.matmul.claims import EVERYTHING, MAPS
from registry.toolbox.arithmetic import activate, to_tf32
from registry.toolbox.blocks import in_blocks
from registry.toolbox.call import Call, Host, Operands
from registry.toolbox.designs import tiled


@triton.jit
def _epilogue(
    acc,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    rm,
    rn,
    M,
    N,
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
        sa = tl.load(sa_ptr + rm * s_am, mask=rm < M, other=0.0)
        sb = tl.load(sb_ptr + rn * s_bn, mask=rn < N, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(acc.dtype)[None, :]
    return activate(acc, ACT).to(kind)


@triton.jit(do_not_specialize=["M", "N", "K", "tiles", "scz", "scm", "scn", "s_am", "s_bn"])
def _matmul_tma(
    a_desc,
    b_desc,
    c_desc,
    c_ptr,
    bias_ptr,
    sa_ptr,
    sb_ptr,
    M,
    N,
    K,
    tiles,
    scz,
    scm,
    scn,
    s_am,
    s_bn,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    A_BATCHED: tl.constexpr,
    B_BATCHED: tl.constexpr,
    C_BATCHED: tl.constexpr,
    TMA_STORE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUNDED: tl.constexpr,  # by the tensor maps
    IMPRECISE: tl.constexpr,
    ACC: tl.constexpr,
    BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    ACT: tl.constexpr,
    FLATTEN: tl.constexpr,
    PDL: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    blocks = tl.cdiv(K, BK)
    if PDL:  # what came before overlapped the previous kernel's tail
        gdc_wait()
        gdc_launch_dependents()
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        # --- which tile
        z = number // (tiles_m * tiles_n)
        tile = number % (tiles_m * tiles_n)
        first = (tile // (GROUP * tiles_n)) * GROUP
        rows = min(tiles_m - first, GROUP)
        m0 = (first + (tile % (GROUP * tiles_n)) % rows) * BM
        n0 = (tile % (GROUP * tiles_n)) // rows * BN

        # --- the pipelined loop
        acc = tl.zeros((BM, BN), dtype=ACC)
        for block in range(blocks):
            k0 = block * BK
            if A_BATCHED:
                if A_T:
                    a = a_desc.load([z, k0, m0]).reshape(BK, BM).T
                else:
                    a = a_desc.load([z, m0, k0]).reshape(BM, BK)
            elif A_T:
                a = a_desc.load([k0, m0]).T
            else:
                a = a_desc.load([m0, k0])
            if B_BATCHED:
                if B_T:
                    b = b_desc.load([z, n0, k0]).reshape(BN, BK).T
                else:
                    b = b_desc.load([z, k0, n0]).reshape(BK, BN)
            elif B_T:
                b = b_desc.load([n0, k0]).T
            else:
                b = b_desc.load([k0, n0])
            if PRECISION == "tf32" and not ROUNDED:
                a, b = to_tf32(a), to_tf32(b)
            acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACC)

        # --- epilogue
        rm = m0 + tl.arange(0, BM)
        rn = n0 + tl.arange(0, BN)
        kind: tl.constexpr = c_ptr.dtype.element_ty
        c = _epilogue(acc, bias_ptr, sa_ptr, sb_ptr, rm, rn, M, N, s_am, s_bn, kind, BIAS, SCALED, ACT)
        if TMA_STORE:
            if C_BATCHED:
                c_desc.store([z, m0, n0], c.reshape(1, BM, BN))
            else:
                c_desc.store([m0, n0], c)
        else:
            at = c_ptr + z.to(tl.int64) * scz + rm.to(tl.int64)[:, None] * scm + rn.to(tl.int64)[None, :] * scn
            tl.store(at, c, mask=(rm < M)[:, None] & (rn < N)[None, :])


# ---------------------------------------------------------------- host side
def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    a, b, out = given["a"], given["b"], out_of(problem, given)
    m, n, k, z = sizes_of(given)
    bm, bn, bk = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    tf32 = problem.dtype == "float32" and not problem.ieee
    a_desc, b_desc = in_blocks(a, bm, bk, tf32), in_blocks(b, bk, bn, tf32)
    stores = tma_can_store(out)
    c_desc = in_blocks(out, bm, bn) if stores else a_desc
    tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn) * z
    vectors = (given.get(name, out) for name in ("bias", "scale_a", "scale_b"))
    values = (a_desc, b_desc, c_desc, out, *vectors, m, n, k, tiles, *strides_of(out), *scale_strides(given))
    pdl = problem.target.sm >= 90
    constants = {
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "GROUP": config["GROUP"],
        "FLATTEN": config["FLATTEN"],
        "A_T": turned(a),
        "A_BATCHED": len(a_desc.shape) == 3,
        "B_T": turned(b),
        "B_BATCHED": len(b_desc.shape) == 3,
        "TMA_STORE": stores,
        "C_BATCHED": z > 1,
        "PRECISION": "ieee" if problem.ieee else "tf32",
        "ROUNDED": tf32,
        "IMPRECISE": min(bk, 128) if problem.dtype.startswith("float8") else 0,
        "ACC": tl.int32 if problem.dtype == "int8" else tl.float32,
        "BIAS": problem.bias,
        "SCALED": bool(problem.scaling),
        "ACT": problem.activation,
        "PDL": pdl,
    }
    options = {
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
        **({"launch_pdl": True} if pdl else {}),
    }
    grid = (min(tiles, problem.target.sm_count or 4),)
    arguments = dict(zip(_matmul_tma.arg_names, values, strict=False))
    return [Call(_matmul_tma, grid, arguments, constants, options, if_plain_maps={"ROUNDED": False})]


HOST = Host(MATMUL, call, contiguous=VECTORS)


# ---------------------------------------------------------------- what it can run
def _rule(problem, config) -> Iterable[Reason]:
    return int32_reasons(problem)


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def _shared_memory(problem, config) -> int:
    """Buffers, their barriers, the staging of C (which reuses nothing in a flattened loop), a row of bias or scales."""
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    stage = (m + n) * config["BLOCK_K"] * _itemsize(problem.dtype)
    row = 4 * n if problem.bias or problem.scaling else 0
    ring = config["num_stages"] * (stage + 16)
    if problem.dtype == "float32" and problem.target.sm >= 100:  # tcgen05 wants tf32 along K: others are turned, twice
        across = m * (problem.layout[0] == "t") + n * (problem.layout[1] == "n")
        ring += 2 * across * config["BLOCK_K"] * 4 + 64
    return ring + 16 + m * n * _itemsize(problem.out_dtype) + row


def _registers(problem, config) -> int:
    """The accumulators plus 48 per thread for addresses and the epilogue."""
    return config["BLOCK_M"] * config["BLOCK_N"] + config["num_warps"] * 32 * 48


def _config(m, n, k, warps, stages, group=8, flatten=True) -> dict[str, Any]:
    return {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "GROUP": group,
        "FLATTEN": flatten,
        "num_warps": warps,
        "num_stages": stages,
    }


def configs(problem) -> list[dict[str, Any]]:
    """Best first: the largest tile that still fills the chip. Others were never within 2% of the fastest on an H200."""
    bk = 128 // _itemsize(problem.dtype)
    busy = problem.activation or problem.n * _itemsize(problem.out_dtype) % 16  # an epilogue that would spill
    exact = problem.dtype.startswith("float8") or problem.dtype == "float32"  # two sets of accumulators
    wide = [] if exact or busy else [_config(128, 256, bk, 8, 3)]
    low = _config(64, 128, bk, 4, 4)
    found = [*wide, _config(128, 128, bk, 8, 4), low][:2]
    if problem.m <= 64:
        found = [low]
    elif -(-problem.m // 128) * -(-problem.n // 256) * problem.batch < problem.target.sm_count // 2:
        found = found[len(wide) :] + wide
    return found if problem.target.shared_memory > 1 << 17 else [*found, low, _config(64, 64, bk, 4, 5)]


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm90+",),
        **MAPS,
        **EVERYTHING,
        scaling=("scalar", "rowwise"),
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    return [
        HOST.variant(
            "triton_matmul_tma",
            op="matmul",
            requires=requires,
            configs=configs,
            design_of=lambda config: tiled(config, persistent=True),
            summary="tensor descriptors, persistent, pipelined TMA loads",
            design=Design(warp_groups=2, pipeline_stages=3, tile=(128, 256, 64), persistent=True),
        )
    ]
