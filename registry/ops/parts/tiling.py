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

Products = Mapping[tuple[int, int, int], int]
"""How many there are of each (m, n, k)."""


class Tiling(NamedTuple):
    """Logarithms: of both, less is better."""

    rounds: float
    """Of how much longer whole rounds of whole tiles over the SMs take than the work shared out evenly."""
    traffic: float
    """Of the elements that a tile loads for each of its products: bytes per FLOP, but for a factor."""


def product_tiling(target: Target, products: Products, config: Mapping[str, Any]) -> Tiling | None:
    """Of products that are computed at once, which may differ in size as those of groups do."""
    if not config.get("BLOCK_M") or not config.get("BLOCK_N"):
        return None
    parts = max(int(config.get("SPLIT_K", config.get("SPLIT", 1))), 1)
    high, wide, deep = config["BLOCK_M"], config["BLOCK_N"], config.get("BLOCK_K", 1)
    tiles = steps = longest = work = 0
    for (m, n, k), count in products.items():
        rows, columns = (n, m) if config.get("SWAP") else (m, n)
        here = count * _covering(rows, high) * _covering(columns, wide) * parts
        inner = _covering(_covering(k, deep), parts) * deep
        tiles, steps, longest = tiles + here, steps + here * inner, max(longest, inner)
        work += count * m * n * k
    sms = max(target.sm_count, 1)
    rounds = _covering(tiles, sms) * steps / max(tiles, 1)
    taken = max(rounds, longest, 1) * high * wide
    return Tiling(math.log(taken * sms / max(work, 1)), math.log(1 / high + 1 / wide))


def _covering(size: int, tile: int) -> int:
    """How many tiles cover a size."""
    return max(-(-size // tile), 1)
