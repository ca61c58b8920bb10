"""What the tiles that a config names make of a product: how well they fill the GPU, and how much they load.

Configs call their tile BLOCK_M, BLOCK_N and BLOCK_K, the parts of a long inner dimension SPLIT_K or SPLIT, and say SWAP
where the operands change places. One that uses other names says nothing here. All that hangs on it is which contestants
a guided sweep measures first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from registry.contract.target import Target


class Tiling(NamedTuple):
    """Logarithms: of both, less is better."""

    rounds: float
    """Of how much longer whole rounds of whole tiles over the SMs take than the work shared out evenly."""
    traffic: float
    """Of the elements that a tile loads for each of its products: bytes per FLOP, but for a factor."""


def product_tiling(
    target: Target, sizes: tuple[int, int, int], config: Mapping[str, Any], *, batch: int = 1, groups: int = 1
) -> Tiling | None:
    """Of `batch` products of (m, n, k), or of one whose rows lie in so many groups, each of which begins new tiles."""
    if not config.get("BLOCK_M") or not config.get("BLOCK_N"):
        return None
    m, n, k = sizes
    m, n = (n, m) if config.get("SWAP") else (m, n)
    parts = max(int(config.get("SPLIT_K", config.get("SPLIT", 1))), 1)
    high, wide, deep = config["BLOCK_M"], config["BLOCK_N"], config.get("BLOCK_K", 1)
    groups, sms = max(min(groups, m), 1), max(target.sm_count, 1)
    tiles = batch * groups * _covering(m // groups, high) * _covering(n, wide) * parts
    inner = _covering(_covering(k, deep), parts) * deep
    taken = _covering(tiles, sms) * high * wide * inner
    return Tiling(math.log(taken * sms / max(batch * m * n * k, 1)), math.log(1 / high + 1 / wide))


def _covering(size: int, tile: int) -> int:
    """How many tiles cover a size."""
    return max(-(-size // tile), 1)
