"""Host side of products of few rows or columns: which operand is the long one, how it lies, and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton.language as tl

from registry.ops.matmul.calls import MATMUL, VECTORS, out_of, sizes_of, strides_of
from registry.toolbox.call import Call, Host, Operands, Zeroes
from registry.toolbox.integers import gcd
from registry.toolbox.launch import StandIn

MOST = 4
"""Rows, or columns."""


class Sides(NamedTuple):
    """A product as few rows x times b: the transposed one, where columns are few."""

    x: StandIn
    b: StandIn
    rows: int
    columns: int
    k: int
    batch: int
    turned: bool
    x_strides: tuple[int, int, int]
    """Of batch, row and K."""
    b_strides: tuple[int, int, int]
    """Of batch, K and column."""
    along_k: bool
    """Whether b is contiguous along K."""
    shift: bool
    """Whether what is read of b may start or end inside a unit of 16 bytes."""
    alike: int
    """Columns (along K) that far apart start at the same place of a unit."""

    @property
    def unit(self) -> int:
        return 16 // self.b.dtype.itemsize

    @property
    def pitch(self) -> int:
        return self.b_strides[2 if self.along_k else 1]


def sides(given: Operands) -> Sides:
    a, b = given["a"], given["b"]
    m, n, k, z = sizes_of(given)
    a_strides, b_strides = strides_of(a), strides_of(b)
    turned = m > n
    if turned:
        a, b, m, n = b, a, n, m
        a_strides, b_strides = [(s[0], s[2], s[1]) for s in (b_strides, a_strides)]
    along_k = not (b_strides[2] == 1 or n == 1)
    unit = 16 // b.dtype.itemsize
    pitch, others = (b_strides[2], n) if along_k else (b_strides[1], k)
    pitch = pitch if others > 1 else 0
    apart = b_strides[0] if z > 1 else 0
    shift = b.alignment % 16 != 0 or pitch % unit != 0 or apart % unit != 0 or (along_k and k % unit != 0)
    alike = unit // gcd(pitch, unit) if along_k else 1
    return Sides(a, b, m, n, k, z, turned, a_strides, b_strides, along_k, shift, alike)


def tiles_of(side: Sides, width: int) -> int:
    """Tiles of a batch entry."""
    if side.along_k:
        each = -(-side.columns // side.alike)
        return -(-each // width) * side.alike
    return -(-side.columns // (width - side.unit if side.shift else width))


def pass_of(side: Sides, width: int, warps: int) -> int:
    """Rows of K that all threads read at once, where b is contiguous along N."""
    return warps * 32 * side.unit // width


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    """The launch of this config; ranges of K add the sums and one arrival counter per tile."""
    from registry.plugins.triton_gemv.kernel import few_rows

    side, out, bias = sides(given), out_of(problem, given), given.get("bias")
    width, depth, split, warps = (config[name] for name in ("WIDTH", "DEPTH", "SPLIT", "num_warps"))
    tiles = tiles_of(side, width)
    sums = "int32" if problem.dtype == "int8" else "float32"
    pdl = problem.target.sm >= 90
    sxz, sxi, sxk = side.x_strides
    scz, sci, scj = strides_of(out)
    bias_i, bias_j = 0, bias.strides[-1] if bias else 0
    if side.turned:
        sci, scj, bias_i, bias_j = scj, sci, bias_j, bias_i
    programs = tiles * side.batch
    run = side.unit
    for extent, stride in ((side.batch, sxz), (side.rows, sxi)):
        run = gcd(run, stride) if extent > 1 else run
    run = min(run, max(side.x.alignment // side.x.dtype.itemsize, 1))
    arguments = {
        "x_ptr": side.x,
        "b_ptr": side.b,
        "c_ptr": out,
        "bias_ptr": bias or out,
        "part_ptr": StandIn((programs * split * side.rows * width,), sums, name="sums") if split > 1 else out,
        "count_ptr": Zeroes(programs) if split > 1 else out,
        "N": side.columns,
        "K": side.k,
        "splits": split,
        "alike": side.alike,
        "sxz": sxz,
        "sxi": sxi,
        "sxk": sxk,
        "sbz": side.b_strides[0],
        "pitch": side.pitch,
        "scz": scz,
        "sci": sci,
        "scj": scj,
        "s_bias_i": bias_i,
        "s_bias_j": bias_j,
    }
    x_unit = sxk == 1 or side.k == 1
    constants = {
        "ROWS": side.rows,
        "ALONG_K": side.along_k,
        "WIDTH": width,
        "DEPTH": depth,
        "PASS": 1 if side.along_k else pass_of(side, width, warps),
        "UNIT": side.unit,
        "SHIFT": side.shift,
        "X_UNIT": x_unit,
        "X_RUN": run if x_unit else 1,
        "SPLITS": next(most for most in (1, 8, 32, 128) if split <= most),
        "ACC": getattr(tl, sums),
        "BIAS": bias is not None,
        "ACT": problem.activation,
        "PDL": pdl,
    }
    options = {"num_warps": warps, "num_stages": 1, **({"launch_pdl": True} if pdl else {})}
    return [Call(few_rows, (programs * split,), arguments, constants, options)]


HOST = Host(MATMUL, call, contiguous=VECTORS)
