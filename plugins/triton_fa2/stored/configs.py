"""Tiles, warps and stages of gradients by way of memory, and what they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from registry.ops.attention.triton_tiles import family

Config = Mapping[str, Any]
TILE = ("WEIGHTS_M", "WEIGHTS_N")
WEIGHTS = (*TILE, "WEIGHTS_K", "weights_warps", "weights_stages")
SPECIALISED = (*TILE, "weights_stages")
PRODUCT = ("COLUMNS", "INNER", "product_warps", "product_stages")
# (a tile of P and dS, slice of the head, warps, stages), (columns, rows at a time, warps, stages of the products). On
# 59 shapes of an H200 the first of wgmma's lost 1.9% to the best of the three in the mean, the others 11 and 6.
TILES = {
    "wgmma": [
        ((64, 128, 64, 4, 3), (128, 64, 4, 3)),
        ((128, 128, 64, 8, 3), (256, 64, 8, 3)),
        ((128, 128, 64, 8, 3), (128, 64, 8, 3)),
    ],
    "mma": [((128, 64, 32, 8, 2), (128, 32, 8, 3)), ((64, 64, 32, 4, 2), (64, 32, 4, 2))],
}
TILES["tcgen05"] = TILES["mma"]
SPECIALISED_TILES = [((128, 256, 3), (256, 64, 8, 3)), ((128, 256, 3), (128, 64, 4, 3))]
CHUNK = 1 << 30
"""Bytes of P and dS that are in memory at a time. Less leaves products too few blocks: see specialised.py."""
OUTER = 128  # rows or keys that a block of a product writes, unless a tile of P and dS has fewer
SLICE = 64  # columns of a head at a time, in specialised.py
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24  # per thread
GROUPS = 2


def tiles_of(problem: Any, config: Config) -> tuple[int, int]:
    """Of queries, and of keys."""
    return -(-problem.seqlen_q // config["WEIGHTS_M"]), -(-problem.seqlen_k // config["WEIGHTS_N"])


def triton_configs(problem: Any) -> list[dict[str, Any]]:
    found = TILES[family(problem.target.sm)]
    return [dict(zip(WEIGHTS + PRODUCT, (*weights, *product), strict=True)) for weights, product in found]


def gluon_configs(problem: Any) -> list[dict[str, Any]]:
    return [dict(zip(SPECIALISED + PRODUCT, (*w, *product), strict=True)) for w, product in SPECIALISED_TILES]


def _product_memory(config: Config) -> int:
    columns, inner, _, ring = (config[name] for name in PRODUCT)
    outer = min(OUTER, max(config[name] for name in TILE))
    return 2 * ring * inner * (outer + columns) + 1024


def triton_shared_memory(problem: Any, config: Config) -> int:
    """Of the largest kernel: its ring of slices, or P and dS on their way to memory."""
    m, n, k, _, stages = (config[name] for name in WEIGHTS)
    return max(2 * stages * k * (m + n) + 1024, 2 * m * n + 1024, _product_memory(config))


def gluon_shared_memory(problem: Any, config: Config) -> int:
    """Of the largest kernel: a ring of slices and a tile on its way out, or a product's ring."""
    m, n, stages = (config[name] for name in SPECIALISED)
    return max(2 * (stages * SLICE * (m + n) + m * n) + 1024, _product_memory(config))


def gluon_registers(problem: Any, config: Config) -> int:
    """Of a block of the specialised kernel, as it is launched: before warps change theirs."""
    each = (GROUPS * CONSUMER_REGISTERS + PRODUCER_REGISTERS) // (GROUPS + 1)
    return 128 * (GROUPS + 1) * each


@dataclass(frozen=True)
class SpecialisedTraits:
    """The constants of specialised.py."""

    BLOCK_N: int
    STAGES: int
    SLICES: int
    """Of a row of Q or K."""
    SLICES_V: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    CONSUMER_REGISTERS: int = CONSUMER_REGISTERS
    PRODUCER_REGISTERS: int = PRODUCER_REGISTERS
