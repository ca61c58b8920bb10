"""Host side of the pointer product: memory facts of the operands, the kernel's arguments, and its launches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from registry.ops.matmul.calls import MATMUL, VECTORS, out_of, scale_strides, sizes_of, strides_of
from registry.toolbox.call import Call, Host, Operands, Zeroes
from registry.toolbox.launch import StandIn


def _pow2(value: int, limit: int = 16) -> int:
    """The largest power of two up to `limit` that divides `value` (0 is divided by all)."""
    return math.gcd(value, limit)


def _run(extents, strides, unit, base, item) -> int:
    """Elements of one operand that are always aligned together: what its outer strides and base allow."""
    run = _pow2(max(base // item, 1))
    for extent, stride, name in zip(extents, strides, ("z", "outer", "inner"), strict=True):
        if extent > 1 and not (name == "inner" and unit):
            run = min(run, _pow2(stride))
    return run


def runs_of(given: Operands) -> tuple[str, int, str, int]:
    """Of a, then of b: along which dimension it is contiguous, if any, and elements that are aligned together there."""
    m, n, k, z = sizes_of(given)
    (azs, a_base, a_item), (bzs, b_base, b_item) = (
        (strides_of(t), t.alignment, t.dtype.itemsize) for t in (given["a"], given["b"])
    )
    a_unit = "k" if azs[2] == 1 or k == 1 else "m" if azs[1] == 1 or m == 1 else ""
    b_unit = "n" if bzs[2] == 1 or n == 1 else "k" if bzs[1] == 1 or k == 1 else ""
    a_outer = (azs[0], azs[1], 1) if a_unit == "k" else (azs[0], azs[2], 1)
    b_outer = (bzs[0], bzs[1], 1) if b_unit == "n" else (bzs[0], bzs[2], 1)
    a_run = _run((z, m if a_unit == "k" else k, 1), a_outer, a_unit, a_base, a_item) if a_unit else 1
    b_run = _run((z, k if b_unit == "n" else n, 1), b_outer, b_unit, b_base, b_item) if b_unit else 1
    return a_unit, a_run, b_unit, b_run


def memory_facts(given: Operands, out: StandIn) -> dict[str, Any]:
    """Compile-time memory facts."""
    m, n, _, z = sizes_of(given)
    a_unit, a_run, b_unit, b_run = runs_of(given)
    azs, bzs, czs = (strides_of(t) for t in (given["a"], given["b"], out))
    c_unit = "n" if czs[2] == 1 or n == 1 else ""
    c_run = _run((z, m, 1), (czs[0], czs[1], 1), c_unit, out.alignment, out.dtype.itemsize) if c_unit else 1
    longest = max(abs(s) for t in (azs, bzs, czs) for s in t[1:])
    return {
        "A_UNIT": a_unit,
        "B_UNIT": b_unit,
        "C_UNIT": c_unit,
        "A_RUN": a_run,
        "B_RUN": b_run,
        "C_RUN": c_run,
        "M_RUN": _pow2(m) if a_unit == "m" else 1,
        "N_RUN": _pow2(n),
        "WIDE": longest >= 1 << 22,
    }


def _at_once(config) -> int:
    """Partials in flight while they are added up: at most 64 registers of a thread."""
    each = config["BLOCK_M"] * config["BLOCK_N"] // (32 * config["num_warps"])
    return max(d for d in range(1, max(64 // max(each, 1), 1) + 1) if config["SPLIT"] % d == 0)


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    """The launch of this config; split-K adds the partial sums and one arrival counter per tile."""
    from registry.plugins.triton_matmul.kernel import matmul_tiles

    a, b, out, bias = given["a"], given["b"], out_of(problem, given), given.get("bias")
    m, n, k, z = sizes_of(given)
    bm, bn, bk, split = (config[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "SPLIT"))
    tiles = triton.cdiv(m, bm) * triton.cdiv(n, bn) * z
    sums = "int32" if problem.dtype == "int8" else "float32"
    pdl = problem.target.sm >= 90
    pointers = (
        a,
        b,
        out,
        bias or out,
        given.get("scale_a", out),
        given.get("scale_b", out),
        StandIn((tiles * split * bm * bn,), sums, name="sums") if split > 1 else out,
        Zeroes(tiles) if split > 1 else out,
    )
    strides = (*strides_of(a), *strides_of(b), *strides_of(out), bias.strides[-1] if bias else 0)
    values = (*pointers, m, n, k, *strides, 0, *scale_strides(given))
    constants = {
        **memory_facts(given, out),
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "GROUP": config["GROUP"],
        "SPLIT": split,
        "K_TAIL": k % bk != 0 and (_pow2(k) if a.dtype.itemsize == 1 else True),
        "FEW_M": m < bm,
        "FEW_N": n < bn,
        "PRECISION": "ieee" if problem.ieee else "tf32",
        "IMPRECISE": min(bk, 128) if problem.dtype.startswith("float8") else 0,
        "ACC": getattr(tl, sums),
        "BIAS": bias is not None,
        "SCALED": bool(problem.scaling),
        "ACT": problem.activation,
        "PDL": pdl,
        "AT_ONCE": _at_once(config),
        "AHEAD": config["num_stages"] == 1 and a.dtype.itemsize > 1 and not problem.ieee,
    }
    options = {
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
        **({"launch_pdl": True} if pdl else {}),
    }
    arguments = dict(zip(matmul_tiles.arg_names, values, strict=False))
    return [Call(matmul_tiles, (tiles * split,), arguments, constants, options)]


HOST = Host(MATMUL, call, contiguous=VECTORS)
