"""Host side: the compile-time switches of a kernel, and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.ops.matmul.calls import MATMUL, out_of, sizes_of, tma_geometry
from registry.plugins.gluon_matmul_pairs.kernel import matmul_pairs_of_tiles
from registry.toolbox.call import Call, Host, Operands
from registry.toolbox.hopper import swizzled
from registry.toolbox.launch import StandIn
from registry.toolbox.tensor_maps import with_base


@dataclass(frozen=True)
class TileFacts:
    """Compile-time switches of one kernel. Tile facts and schedule: see kernel.py."""

    UNITS: int  # wgmmas of 64 rows of each consumer
    WIDTH: int
    HIGH: int
    STAGE: int  # groups of 8 rows, of both factors
    STAGES: int
    STORES: int  # buffers of C for each consumer
    PIECE: int  # columns of each
    GROUP: int
    PAIR: int  # what two CTAs share: 1: rows of a; 2: columns of b; 0: none
    HALF: int  # rows of that factor that one of them brings
    WHOLE: bool  # a box brings all rows of its factor, else 8
    DTYPE: str
    OUT: str


_KINDS = {"float16": "fp16", "bfloat16": "bf16"}


def switches(problem: Any, config: Mapping[str, Any]) -> TileFacts:
    """What this config means for a problem."""
    high, width, pair = config["BLOCK_M"], config["BLOCK_N"], config["PAIR"]
    return TileFacts(
        UNITS=high // 128,
        WIDTH=width,
        HIGH=high,
        STAGE=(high + width) // 8,
        STAGES=config["STAGES"],
        STORES=config["STORES"],
        PIECE=piece(width),
        GROUP=config["GROUP"],
        PAIR=pair,
        HALF=(high if pair == 1 else width) // 2,
        WHOLE=True,
        DTYPE=_KINDS[problem.dtype],
        OUT=_KINDS[problem.out_dtype],
    )


def pairs(problem: Any, config: Mapping[str, Any]) -> tuple[int, int]:
    """Of tiles: one below the other, and side by side."""
    pair = config["PAIR"]
    high, width = config["BLOCK_M"] * (1 + (pair == 2)), config["BLOCK_N"] * (1 + (pair == 1))
    return triton.cdiv(problem.m, high), triton.cdiv(problem.n, width)


def piece(width: int) -> int:
    """Columns of a box of C."""
    return 32 if width % 64 else 64


def _map(operand: StandIn, rows: int, columns: int = 64) -> TensorDescriptor:
    """Boxes of so many rows, whatever power of two Triton takes them for."""
    shape, strides = tma_geometry(operand)
    block = [8, columns]
    found = TensorDescriptor(operand, shape[1:], strides[1:], block, swizzled(block, operand.dtype))
    return with_base(found, operand, box_rows=rows)


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    cfg = switches(problem, config)
    _, _, k, _ = sizes_of(given)
    high, wide = pairs(problem, config)
    together, sms = 2 if cfg.PAIR else 1, problem.target.sm_count
    arguments = {
        "a_desc": _map(given["a"], cfg.HALF if cfg.PAIR == 1 else cfg.HIGH),
        "b_desc": _map(given["b"], cfg.HALF if cfg.PAIR == 2 else cfg.WIDTH),
        "c_desc": _map(out_of(problem, given), 64 * cfg.UNITS, cfg.PIECE),
        "high": high,
        "wide": wide,
        "blocks": triton.cdiv(k, 64),
    }
    options = {"num_warps": 4, "launch_pdl": True}
    grid = (min(high * wide, sms // together),)
    alone = None
    if cfg.PAIR:
        (alone,) = call(problem, {**config, "PAIR": 0}, given, scale)
    by_eights = {"cfg": cfg if cfg.PAIR else replace(cfg, WHOLE=False)}
    return [Call(matmul_pairs_of_tiles, grid, arguments, {"cfg": cfg}, options, by_eights, together, alone)]


HOST = Host(MATMUL, call)
