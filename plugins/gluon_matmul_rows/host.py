"""Host side: the compile-time switches of a kernel, and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton

from registry.ops.matmul.calls import MATMUL, VECTORS, out_of, sizes_of
from registry.toolbox.boxes import eights, in_boxes
from registry.toolbox.call import Call, Host, Operands, Zeroes
from registry.toolbox.launch import StandIn


@dataclass(frozen=True)
class TileFacts:
    """Compile-time switches of one kernel. Tile facts and schedule: see kernel.py."""

    CONSUMERS: int
    UNITS: int  # wgmmas of 64 rows of each
    WIDTH: int  # columns of a wgmma
    HIGH: int  # rows of the first factor in a stage
    STAGE: int  # groups of 8 rows, of both
    BEYOND: int  # groups of 8 rows that wgmma reads past the last stage
    TILE: int  # columns of b in a tile
    WHOLE: bool  # a box brings all rows of its factor, else 8
    STAGES: int
    SPLIT: int  # 1: of tiles; 2: of ranges of K; 0: equal stretches for all CTAs
    SWAP: bool  # columns of b are wgmma's rows
    REGS: int
    DTYPE: str
    BIAS: bool
    ACT: str


MOST = 256
"""Rows: as many as a wgmma has columns, and a box rows."""
REGS = {1: 240, 2: 240, 3: 160, 4: 112}
AT_LAUNCH = {1: 232, 2: 168, 3: 128, 4: 96}
"""Registers of a consumer's thread, by their number; and of each before they are shared out."""


def switches(problem: Any, config: Mapping[str, Any]) -> TileFacts:
    """What this config means for a problem."""
    consumers, units, swap = config["CONSUMERS"], config["UNITS"], config["SWAP"]
    rows = eights(problem.m)
    high = 64 * consumers * units if swap else rows
    width = rows if swap else config["TILE"]
    return TileFacts(
        CONSUMERS=consumers,
        UNITS=units,
        WIDTH=width,
        HIGH=high,
        STAGE=(high + width) // 8,
        BEYOND=max(0, 64 * consumers * units - high - width) // 8,
        TILE=high if swap else config["TILE"],
        WHOLE=True,
        STAGES=config["STAGES"],
        SPLIT=min(config["SPLIT"], 2),
        SWAP=swap,
        REGS=REGS[consumers],
        DTYPE={"float16": "fp16", "bfloat16": "bf16"}[problem.dtype],
        BIAS=problem.bias,
        ACT=problem.activation,
    )


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    from registry.plugins.gluon_matmul_rows.kernel import matmul_rows

    cfg = switches(problem, config)
    out = out_of(problem, given)
    m, n, k, _ = sizes_of(given)
    first, second = (given["b"], given["a"]) if cfg.SWAP else (given["a"], given["b"])
    blocks, tiles, sms = triton.cdiv(k, 64), triton.cdiv(n, cfg.TILE), problem.target.sm_count
    whole = tiles // sms * sms if cfg.SPLIT == 0 else tiles
    ways = config["SPLIT"]
    ctas = min(tiles * (ways or blocks), sms)
    sums, counters = out, out
    if cfg.SPLIT != 1:
        places = tiles * ways or 2 * ctas
        sums = StandIn((places * 64 * cfg.CONSUMERS * cfg.UNITS * cfg.WIDTH,), "float32", name="sums")
        counters = Zeroes(cfg.CONSUMERS * tiles)
    arguments = {
        "a_desc": in_boxes(first, cfg.HIGH),
        "b_desc": in_boxes(second, cfg.WIDTH),
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
        "bias_ptr": given.get("bias", out),
    }
    options = {"num_warps": 4, "launch_pdl": True, **({"maxnreg": 232} if cfg.CONSUMERS == 1 else {})}
    by_eights = {"cfg": replace(cfg, WHOLE=False)}
    return [Call(matmul_rows, (ctas,), arguments, {"cfg": cfg}, options, if_plain_maps=by_eights)]


HOST = Host(MATMUL, call, contiguous=VECTORS)
