"""Host side: the compile-time switches of a kernel, and its launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import triton

from registry.ops.matmul.calls import MATMUL, VECTORS, out_of, sizes_of
from registry.toolbox.boxes import eights, in_boxes
from registry.toolbox.call import Call, Host, Operands


@dataclass(frozen=True)
class RowPairFacts:
    """Compile-time switches of one kernel. Tile facts and schedule: see kernel.py."""

    CONSUMERS: int
    WIDTH: int  # columns of a wgmma
    HIGH: int  # rows of the first factor in a stage
    STAGE: int  # groups of 8 rows, of both
    BEYOND: int  # groups of 8 rows that wgmma reads past the last stage
    STAGES: int
    SWAP: bool  # columns of b are wgmma's rows
    PAIR: bool
    HALF: int  # columns of b that one CTA of a pair brings
    DTYPE: str
    BIAS: bool
    ACT: str
    UNITS: int = 1  # wgmmas of 64 rows of each consumer


FEWEST, MOST = 65, 256
"""Rows: with fewer there is nothing to share out; and a wgmma has so many columns, a box so many rows."""
_ALONE_STAGES = 5


def rows_of(problem: Any, pair: bool = True) -> int:
    """Rows of a that a CTA multiplies."""
    return eights(-(-problem.m // 2) if pair else problem.m)


def switches(problem: Any, config: Mapping[str, Any]) -> RowPairFacts:
    """What this config means for a problem."""
    return _facts(problem, config["CONSUMERS"], config["TILE"], config["STAGES"], config["SWAP"], True)


def _facts(problem: Any, consumers: int, tile: int, stages: int, swap: bool, pair: bool) -> RowPairFacts:
    rows = rows_of(problem, pair)
    high, width = (tile, rows) if swap else (rows, tile)
    return RowPairFacts(
        CONSUMERS=consumers,
        WIDTH=width,
        HIGH=high,
        STAGE=(high + width) // 8,
        BEYOND=max(0, 64 * consumers - high - width) // 8,
        STAGES=stages,
        SWAP=swap,
        PAIR=pair,
        HALF=eights(triton.cdiv(tile, 2)),
        DTYPE={"float16": "fp16", "bfloat16": "bf16"}[problem.dtype],
        BIAS=problem.bias,
        ACT=problem.activation,
    )


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    def alone() -> Call:
        return _call(problem, _facts(problem, 1, 64, _ALONE_STAGES, True, False), given)

    return [_call(problem, switches(problem, config), given, alone)]


def _call(problem: Any, cfg: RowPairFacts, given: Operands, alone: Callable[[], Call] | None = None) -> Call:
    from registry.plugins.gluon_matmul_row_pairs.kernel import matmul_row_pairs

    out, (m, n, k, _) = out_of(problem, given), sizes_of(given)
    tiles, sms = triton.cdiv(n, cfg.HIGH if cfg.SWAP else cfg.WIDTH), problem.target.sm_count
    columns, rows = (cfg.HALF, rows_of(problem)) if cfg.PAIR else (0, 0)
    arguments = {
        "first_desc": in_boxes(given["b"], columns) if cfg.SWAP else in_boxes(given["a"], rows),
        "second_desc": in_boxes(given["a"], rows) if cfg.SWAP else in_boxes(given["b"], columns),
        "c_ptr": out,
        "rows": m,
        "columns": n,
        "pitch": out.strides[0],
        "blocks": triton.cdiv(k, 64),
        "tiles": tiles,
        "bias_ptr": given.get("bias", out),
    }
    options = {"num_warps": 4, "launch_pdl": True, **({"maxnreg": 232} if cfg.CONSUMERS == 1 else {})}
    together = 2 if cfg.PAIR else 1
    grid = (min(tiles, sms // together),)
    return Call(matmul_row_pairs, grid, arguments, {"cfg": cfg}, options, {"cfg": cfg}, together, alone)


HOST = Host(MATMUL, call, contiguous=VECTORS)
