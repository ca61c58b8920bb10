"""Host side: the compile-time switches of a kernel, and its launch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import triton

from registry.ops.matmul.calls import MATMUL, VECTORS, out_of, scale_strides, sizes_of
from registry.toolbox.boxes import in_boxes
from registry.toolbox.call import Call, Host, Operands
from registry.toolbox.launch import StandIn


@dataclass(frozen=True)
class PairFacts:
    """Compile-time switches of one kernel. Tile facts and schedule: see kernel.py."""

    CONSUMERS: int
    UNITS: int  # wgmmas of 64 rows of each of them
    WIDTH: int
    HIGH: int
    STAGE: int  # groups of 8 rows, of both factors
    STAGES: int
    STORES: int  # buffers of C for each consumer
    PIECE: int  # columns of an accumulator in each
    STORED: int  # rows of a box of C
    GROUP: int
    SPLIT: bool  # of K, into ranges
    TURNS: bool  # consumers have whole tiles by turns, not a half of each
    SWAP: bool  # columns of b are wgmma's rows
    PAIR: int  # how the tiles of two CTAs lie, and what they share: 1: rows of the first factor; 2: of the second
    SHARED: bool  # or neither brings anything for the other
    WHOLE: bool  # a box brings all rows of its factor, else 8
    DTYPE: str
    OUT: str
    BIAS: bool
    ACT: str
    EXACT: ClassVar[bool] = False
    DEPTH: ClassVar[int] = 64  # elements of K in a block: 128 bytes


@dataclass(frozen=True)
class ExactFacts(PairFacts):
    """Of 8-bit floats: blocks of K are summed by themselves before they are added."""

    AHEAD: bool  # one of them is added while the next is multiplied
    SCALED: bool
    EXACT: ClassVar[bool] = True
    DEPTH: ClassVar[int] = 128


_KINDS = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_WIDEST_AHEAD = 144
"""Columns of which accumulators and the sums of two blocks of K fit into registers."""


def exact(problem: Any) -> bool:
    return bool(problem.dtype.startswith("float8"))


def depth(problem: Any) -> int:
    """Elements of K in a block."""
    return 128 if exact(problem) else 64


def consumers_of(config: Mapping[str, Any]) -> int:
    return 3 if config["HIGH"] == 192 else 2


def piece(high: int, width: int, swap: bool) -> int:
    """Columns of an accumulator that go through a buffer at once."""
    if swap:
        most = 112 if high <= 128 else 48
        parts = triton.cdiv(width, most)
        even = 8 * triton.cdiv(width, 8 * parts)
        return max((rows for rows in range(32, most + 1, 16) if width % rows == 0), default=even)
    return next(columns for columns in (64, 32, 16) if width % columns == 0)


def switches(problem: Any, config: Mapping[str, Any]) -> PairFacts:
    """What this config means for a problem."""
    high, width, pair, swap = (config[name] for name in ("HIGH", "WIDTH", "PAIR", "SWAP"))
    consumers, columns = consumers_of(config), piece(high, width, swap)
    facts = PairFacts(
        CONSUMERS=consumers,
        UNITS=high // (64 if config["TURNS"] else 64 * consumers),
        WIDTH=width,
        HIGH=high,
        STAGE=(high + width) // 8,
        STAGES=config["STAGES"],
        STORES=config["STORES"],
        PIECE=columns,
        STORED=math.gcd(columns, width) if swap else high // (1 if config["TURNS"] else consumers),
        GROUP=config["GROUP"],
        SPLIT=config["WAYS"] > 1,
        TURNS=config["TURNS"],
        SWAP=swap,
        PAIR=pair,
        SHARED=True,
        WHOLE=True,
        DTYPE=_KINDS[problem.dtype],
        OUT=_KINDS[problem.out_dtype],
        BIAS=problem.bias,
        ACT=problem.activation,
    )
    if exact(problem):
        ahead = facts.UNITS == 1 and width <= _WIDEST_AHEAD
        return ExactFacts(**asdict(facts), AHEAD=ahead, SCALED=bool(problem.scaling))
    return facts


def pairs(problem: Any, config: Mapping[str, Any]) -> tuple[int, int]:
    """Of tiles: one below the other, and side by side."""
    pair, (rows, columns) = config["PAIR"], (problem.m, problem.n)
    if config["SWAP"]:
        rows, columns = columns, rows
    high, width = config["HIGH"] * (1 + (pair == 2)), config["WIDTH"] * (1 + (pair == 1))
    return triton.cdiv(rows, high), triton.cdiv(columns, width)


def rounds(problem: Any, config: Mapping[str, Any]) -> tuple[int, int]:
    """Pairs of tiles in full rounds over the chip, which have no ranges of K, and in the last one."""
    down, across = pairs(problem, config)
    slots = (problem.target.sm_count or 132) // 2
    rest = down * across % slots
    return down * across - rest, rest


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    cfg = switches(problem, config)
    if not cfg.SPLIT:
        return [_product(problem, config, cfg, given, StandIn((1,), "float32"))]
    _, rest = rounds(problem, config)
    sums = StandIn((config["WAYS"] * rest * 2 * cfg.HIGH * cfg.WIDTH,), "float32", name="sums")
    return [_product(problem, config, cfg, given, sums), _sum(problem, config, cfg, given, sums)]


def _product(problem: Any, config: Mapping[str, Any], cfg: PairFacts, given: Operands, sums: StandIn) -> Call:
    from registry.plugins.gluon_matmul_pairs.kernel import matmul_exact_pairs, matmul_pairs_of_tiles

    m, n, k, _ = sizes_of(given)
    high, wide = pairs(problem, config)
    first, second = (given["b"], given["a"]) if cfg.SWAP else (given["a"], given["b"])
    out = out_of(problem, given)
    arguments = {
        "first_desc": in_boxes(first, cfg.HIGH // 2 if cfg.SHARED and cfg.PAIR == 1 else cfg.HIGH, cfg.DEPTH),
        "second_desc": in_boxes(second, cfg.WIDTH // 2 if cfg.SHARED and cfg.PAIR == 2 else cfg.WIDTH, cfg.DEPTH),
        "c_desc": in_boxes(out, cfg.STORED, 64 if cfg.SWAP else cfg.PIECE),
        "high": high,
        "wide": wide,
        "blocks": triton.cdiv(k, cfg.DEPTH),
        "bias_ptr": given.get("bias", out),
        "columns": n,
    }
    items = high * wide
    if cfg.EXACT:
        steps = dict(zip(("s_am", "s_bn"), scale_strides(given), strict=True))
        scales = {"sa_ptr": given.get("scale_a", out), "sb_ptr": given.get("scale_b", out)}
        arguments |= {**scales, **steps, "rows": m}
    else:
        arguments |= {"ways": config["WAYS"], "sums_ptr": sums}
        full, rest = rounds(problem, config)
        items = full + rest * config["WAYS"]
    options = {"num_warps": 4, "launch_pdl": True}
    programs, together = min(items, problem.target.sm_count // 2), 2 if cfg.SHARED else 1
    by_eights = {"cfg": cfg if cfg.SHARED else replace(cfg, WHOLE=False)}

    def alone() -> Call:
        return _product(problem, config, replace(cfg, SHARED=False), given, sums)

    more = (together, alone) if cfg.SHARED else ()
    kernel = matmul_exact_pairs if cfg.EXACT else matmul_pairs_of_tiles
    return Call(kernel, (programs * 2 // together,), arguments, {"cfg": cfg}, options, by_eights, *more)


def _sum(problem: Any, config: Mapping[str, Any], cfg: PairFacts, given: Operands, sums: StandIn) -> Call:
    from registry.plugins.gluon_matmul_pairs.parts import COLUMNS, MOST_AT_ONCE, ROWS, add_parts

    m, n, _, _ = sizes_of(given)
    high, wide = pairs(problem, config)
    (full, rest), ways = rounds(problem, config), config["WAYS"]
    out = out_of(problem, given)
    arguments = {
        "sums_ptr": sums,
        "c_ptr": out,
        "bias_ptr": given.get("bias", out),
        "m": m,
        "eights": n // 8,
        "high": high,
        "wide": wide,
        "together": cfg.GROUP,
        "whole": full,
        "ways": ways,
        "tall": cfg.HIGH * (2 if cfg.PAIR == 2 else 1),
        "broad": cfg.WIDTH * (2 if cfg.PAIR == 1 else 1),
    }
    constants = {"SWAP": cfg.SWAP, "AT_ONCE": min(triton.next_power_of_2(ways), MOST_AT_ONCE), "PDL": True}
    constants |= {"BIAS": cfg.BIAS, "ACT": cfg.ACT}
    grid = (2 * cfg.HIGH * cfg.WIDTH // (ROWS.value * COLUMNS.value), rest)
    return Call(add_parts, grid, arguments, constants, {"num_warps": 4, "launch_pdl": True})


HOST = Host(MATMUL, call, contiguous=VECTORS)
