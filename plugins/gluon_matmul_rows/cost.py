"""Which tiles are worth trying, best first: by guesses at their time on an H200, fitted to measured shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry.plugins.gluon_matmul_rows.host import MOST, eights

_ROOM, _DEEPEST = 231_000, 12
"""Bytes of shared memory for the ring, and the most stages."""
_COLUMNS = ((1, 1, 256, 232), (2, 1, 256, 232), (2, 2, 160, 0))
"""Columns of b as wgmma's rows: consumers, units of each; the most rows of a, and where K is split, for registers."""
_ROWS = ((1, 1, 64, 256, 232), (2, 1, 128, 256, 232), (3, 1, 192, 208, 136), (4, 1, 256, 104, 0), (2, 2, 256, 160, 96))
"""Rows of a as wgmma's: consumers, units of each, most rows; the most columns of a tile, and where K is split."""
_FILLING = ((1, 1), (1, 2), (2, 1), (3, 1))
"""(ranges of K, rounds over the chip) for which tiles are made as wide as fills it."""


def config(consumers: int, units: int, tile: int, stages: int, split: int, swap: bool) -> dict[str, Any]:
    return {"CONSUMERS": consumers, "UNITS": units, "TILE": tile, "STAGES": stages, "SPLIT": split, "SWAP": swap}


def candidates(problem: Any, most: int = 8) -> list[dict[str, Any]]:
    """Best first."""
    if problem.m > MOST:  # (which is refused)
        return [config(2, 1, 128, 3, 1, True)]
    return sorted(_all(problem), key=lambda one: cost(problem, one))[:most]


def _all(problem: Any) -> Iterator[dict[str, Any]]:
    rows, blocks, count = eights(problem.m), -(-problem.k // 64), problem.target.sm_count or 132
    for consumers, units, highest, highest_split in _COLUMNS:
        high = 64 * consumers * units
        tiles = -(-problem.n // high)
        for split in _splits(tiles, blocks, count):
            if rows <= (highest if split == 1 else highest_split):
                yield config(consumers, units, high, _stages(high + rows), split, True)
    fewest = min(most for _, _, most, _, _ in _ROWS if most >= rows)
    for consumers, units, most, widest, widest_split in _ROWS if rows > 32 else ():
        for ways, rounds in _FILLING if most == fewest else ():
            width = _width(problem.n, ways, rounds, count)
            if 32 <= width <= (widest if ways == 1 else widest_split) and ways * 4 <= blocks:
                yield config(consumers, units, width, _stages(rows + width), ways, False)


def _stages(rows: int) -> int:
    return min(_DEEPEST, _ROOM // (rows * 128))


def _splits(tiles: int, blocks: int, count: int) -> Iterator[int]:
    yield 1
    if tiles % count and blocks * tiles >= count:
        yield 0
    yield from (ways for ways in (2, 3, 4, 6, 8) if tiles * ways <= count and ways * 4 <= blocks)


def _width(n: int, ways: int, rounds: int, count: int) -> int:
    """The least multiple of 8 of which so many tiles are enough."""
    width = 8 * -(-n * ways // (8 * count * rounds))
    while -(-n // width) * ways > count * rounds:
        width += 8
    return width


_START, _FROM_MEMORY, _ROWS_FROM_L2 = 3.0, 3750.0, 72e3
"""Microseconds before the first block has come; bytes a nanosecond, of b, and of a for all tiles."""
_TO_ONE_SM, _SHARED, _MULTIPLY, _BLOCK = 112.0, 267.0, 2.8e3, 4.0
"""Bytes a nanosecond into an SM, and in and out of its shared memory; products likewise; nanoseconds beside."""
_ADD, _ADD_EACH = 14e-5, 5e-5
"""Microseconds for an element of a tile that is added up, and for each of its parts."""


def cost(problem: Any, config: Mapping[str, Any]) -> float:
    """Microseconds."""
    rows, count, blocks = eights(problem.m), problem.target.sm_count or 132, -(-problem.k // 64)
    units, tile, split = config["CONSUMERS"] * config["UNITS"], config["TILE"], config["SPLIT"]
    width, loaded = (rows, tile + rows) if config["SWAP"] else (tile, rows + tile)
    tiles, shared = -(-problem.n // tile), 128 * loaded + 4 * units * (2048 + 32 * width)
    products = units * width * 4096
    block = _BLOCK + max(128 * loaded / _TO_ONE_SM, shared / _SHARED, products / _MULTIPLY)
    rounds = tiles / count if split == 0 else -(-tiles * split // count) / split
    memory = 2.0 * problem.k * (problem.n / _FROM_MEMORY + rows * tiles / _ROWS_FROM_L2)
    found = _START + max(memory, rounds * blocks * block) * 1e-3
    return found + (0 if split == 1 else (_ADD + _ADD_EACH * (split or 2)) * 64 * units * width)
