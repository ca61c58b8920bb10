"""Tiles, warps and stages of the gradients of wide heads, and what they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry import Reason
from registry.ops.attention.triton_tiles import family

Config = Mapping[str, Any]
NAMES = ("WEIGHTS_M", "WEIGHTS_N", "WEIGHTS_K", "weights_warps", "weights_stages")
PRODUCT = ("COLUMNS", "INNER", "product_warps", "product_stages")
# (a tile of P and dS, slice of the head, warps, stages), (columns, rows at a time, warps, stages of the products)
TILES = {
    "wgmma": [
        ((128, 128, 64, 8, 3), (256, 64, 8, 3)),
        ((128, 128, 64, 8, 3), (128, 64, 8, 3)),
        ((64, 128, 64, 4, 3), (128, 64, 4, 3)),
    ],
    "mma": [((128, 64, 32, 8, 2), (128, 32, 8, 3)), ((64, 64, 32, 4, 2), (64, 32, 4, 2))],
}
TILES["tcgen05"] = TILES["mma"]
CHUNK = 1 << 30
MOST = 8 << 30
"""Bytes of P and dS: of the heads that go together, and of the least that can, the query heads of one key head."""


def tiles_of(problem: Any, config: Config) -> tuple[int, int]:
    """Of queries, and of keys."""
    return -(-problem.seqlen_q // config["WEIGHTS_M"]), -(-problem.seqlen_k // config["WEIGHTS_N"])


def group_bytes(problem: Any, config: Config) -> int:
    """Of P and dS of the query heads that share a key head."""
    tiles_q, tiles_k = tiles_of(problem, config)
    rows = problem.heads_q // problem.heads_kv * tiles_q * config["WEIGHTS_M"]
    return 4 * rows * tiles_k * config["WEIGHTS_N"]


def rule(problem: Any, config: Config) -> Iterator[Reason]:
    if (size := group_bytes(problem, config)) > MOST:
        allowed = f"P and dS of one key head in at most {MOST >> 30} GiB"
        yield Reason("range", "seqlen_k", problem.seqlen_k, f"{allowed}, they take {size / 2**30:.1f}")


def configs(problem: Any) -> list[dict[str, Any]]:
    found = TILES[family(problem.target.sm)]
    return [dict(zip(NAMES + PRODUCT, (*weights, *product), strict=True)) for weights, product in found]


def shared_memory(problem: Any, config: Config) -> int:
    """Of the largest kernel: its ring of slices, or P and dS on their way to memory."""
    m, n, k, _, stages = (config[name] for name in NAMES)
    columns, inner, _, ring = (config[name] for name in PRODUCT)
    return max(2 * stages * k * (m + n), 2 * m * n, 2 * ring * inner * (max(m, n) + columns)) + 1024
