"""Host side: the compile-time switches of a kernel, and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.ops.matmul.calls import MATMUL, out_of, sizes_of
from registry.plugins.gluon_matmul_rows.kernel import matmul_rows
from registry.toolbox.call import Call, Host, Operands, Zeroes
from registry.toolbox.hopper import swizzled
from registry.toolbox.launch import StandIn
from registry.toolbox.tensor_maps import boxed


@dataclass(frozen=True)
class Switches:
    """Compile-time switches of one kernel. Tile facts and schedule: see kernel.py."""

    CONSUMERS: int
    UNITS: int  # wgmmas of 64 rows of each
    WIDTH: int  # columns of a wgmma
    HIGH: int  # rows of the first factor in a stage
    STAGE: int  # groups of 8 rows, of both
    TILE: int  # columns of b in a tile
    A_ROWS: int  # rows that a box brings
    B_ROWS: int
    A_BOX: int  # the power of two that Triton takes it for
    B_BOX: int
    STAGES: int
    SPLIT: int  # 1: of tiles; 2: of ranges of K; 0: equal stretches for all CTAs
    SWAP: bool  # columns of b are wgmma's rows
    REGS: int
    RING: int  # where the ring begins
    PDL: bool
    DTYPE: str


def eights(number: int) -> int:
    return 8 * triton.cdiv(number, 8)


def power(number: int) -> int:
    return max(8, 1 << (number - 1).bit_length())


REGS = {1: 240, 2: 240, 3: 160}


def switches(problem: Any, config: Mapping[str, Any]) -> Switches:
    """What this config means for a problem."""
    consumers, units, swap = config["CONSUMERS"], config["UNITS"], config["SWAP"]
    high, rows = 64 * consumers * units, eights(problem.m)
    width = rows if swap else config["TILE"]
    tile = high if swap else config["TILE"]
    return Switches(
        CONSUMERS=consumers,
        UNITS=units,
        WIDTH=width,
        HIGH=high,
        STAGE=(high + width) // 8,
        TILE=tile,
        A_ROWS=high if swap else rows,
        B_ROWS=width,
        A_BOX=power(high if swap else rows),
        B_BOX=power(width),
        STAGES=config["STAGES"],
        SPLIT=min(config["SPLIT"], 2),
        SWAP=swap,
        REGS=REGS[consumers],
        RING=0,
        PDL=True,
        DTYPE={"float16": "fp16", "bfloat16": "bf16"}[problem.dtype],
    )


def _map(operand: StandIn, rows: int, columns: int, pitch: int, box: int) -> TensorDescriptor:
    """Rows along K; boxes of so many of them."""
    block = [power(box), 64]
    found = TensorDescriptor(operand, [rows, columns], [pitch, 1], block, swizzled(block, operand.dtype))
    return boxed(found, box)


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    cfg = switches(problem, config)
    out = out_of(problem, given)
    m, n, k, _ = sizes_of(given)
    a, b = given["a"], given["b"]
    rows = _map(a, m, k, a.strides[0], cfg.B_ROWS if cfg.SWAP else cfg.A_ROWS)
    weights = _map(b, n, k, b.strides[1], cfg.A_ROWS if cfg.SWAP else cfg.B_ROWS)
    blocks, tiles, sms = triton.cdiv(k, 64), triton.cdiv(n, cfg.TILE), problem.target.sm_count
    whole = tiles // sms * sms if cfg.SPLIT == 0 else tiles
    ways = config["SPLIT"]
    ctas = min(tiles * (ways or blocks), sms)
    sums, counters = out, out
    if cfg.SPLIT != 1:
        places = tiles * ways or 2 * ctas
        sums = StandIn((places * cfg.HIGH * cfg.WIDTH,), "float32", name="sums")
        counters = Zeroes(cfg.CONSUMERS * tiles)
    arguments = {
        "a_desc": weights if cfg.SWAP else rows,
        "b_desc": rows if cfg.SWAP else weights,
        "c_ptr": out,
        "part_ptr": sums,
        "count_ptr": counters,
        "rows": m,
        "columns": n,
        "pitch": out.strides[0],
        "blocks": blocks,
        "tiles": tiles,
        "whole": whole,
        "ways": ways,
    }
    options = {"num_warps": 4, "launch_pdl": cfg.PDL, **({"maxnreg": 232} if cfg.CONSUMERS == 1 else {})}
    return [Call(matmul_rows, (ctas,), arguments, {"cfg": cfg}, options, if_plain_maps={"cfg": plain(cfg)})]


def plain(cfg: Switches) -> Switches:
    """Whole boxes take more room."""
    first, second = power(cfg.A_ROWS), power(cfg.B_ROWS)
    high = max(first, cfg.HIGH)
    stage = (high + second) // 8
    return replace(cfg, A_ROWS=first, B_ROWS=second, HIGH=high, STAGE=stage, STAGES=min(cfg.STAGES, 220 // stage))


HOST = Host(MATMUL, call)
