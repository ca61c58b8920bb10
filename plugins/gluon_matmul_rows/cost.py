"""Which tiles are worth trying, best first: by guesses at their time on an H200, fitted to measured shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry.plugins.gluon_matmul_rows.host import MOST
from registry.toolbox.boxes import eights

_ROOM, _DEEPEST = 231_000, 12
"""Bytes of shared memory for the ring, and the most stages."""
_COLUMNS = ((1, 1, 256, 232), (2, 1, 256, 232), (3, 1, 176, 0), (2, 2, 160, 0))
"""Columns of b as wgmma's rows: consumers, units of each; the most rows of a, and where K is split, for registers."""
_ROWS = ((1, 1, 64, 256, 232), (2, 1, 128, 256, 232), (3, 1, 192, 176, 136), (4, 1, 256, 104, 0), (2, 2, 256, 160, 96))
"""Rows of a as wgmma's: consumers, units of each, most rows; the most columns of a tile, and where K is split."""
_FILLING = ((1, 1), (1, 2), (1, 3), (2, 1), (3, 1))
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
        for split in _splits(tiles, blocks, count, units * consumers > 1):
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


def _splits(tiles: int, blocks: int, count: int, equal: bool) -> Iterator[int]:
    yield 1
    if equal and tiles % count and blocks * tiles >= count:
        yield 0
    yield from (ways for ways in (2, 3, 4, 6, 8) if tiles * ways <= count and ways * 4 <= blocks)


def _width(n: int, ways: int, rounds: int, count: int) -> int:
    """The least multiple of 8 of which so many tiles are enough."""
    width = 8 * -(-n * ways // (8 * count * rounds))
    while -(-n // width) * ways > count * rounds:
        width += 8
    return width


_START, _FROM_MEMORY, _ROWS_FROM_L2, _IDLE = 1.6, 3975.0, 53e3, 0.2
"""Microseconds before the first block has come; bytes a nanosecond, of b, and of a for all tiles; how much longer b
takes with a part of the SMs idle."""
_SHARED, _MULTIPLY, _BLOCK, _EQUAL = 276.0, 2855.0, 3.6, 1.14
"""Bytes a nanosecond in and out of an SM's shared memory; products likewise; nanoseconds beside; and equal shares."""
_ADD, _ADD_AREA, _ADD_EACH = 1.0, 24e-5, 4.7e-5
"""Microseconds of adding up, for each element of a tile, and for each of its parts. All as fitted to 150 shapes with up
to 256 rows: of their configs the first misses the best by 1.2% in the mean, the best of four by 0.1%."""


def cost(problem: Any, config: Mapping[str, Any]) -> float:
    """Microseconds."""
    rows, count, blocks = eights(problem.m), problem.target.sm_count or 132, -(-problem.k // 64)
    units, tile, split = config["CONSUMERS"] * config["UNITS"], config["TILE"], config["SPLIT"]
    width, tiles = rows if config["SWAP"] else tile, -(-problem.n // tile)
    shared = 128 * (tile + rows) + 4 * units * (2048 + 32 * width)
    block = _BLOCK + max(shared / _SHARED, units * width * 4096 / _MULTIPLY)
    parts = tiles * (split or 1)
    rounds = -(-parts // count)
    busy = parts / (count * rounds) if split else 1.0
    shares = rounds / split if split else tiles / count  # of a tile's blocks, that a CTA multiplies
    memory = 2.0 * problem.k * (problem.n / _FROM_MEMORY * (1 + _IDLE * (1 - busy)) + rows * tiles / _ROWS_FROM_L2)
    found = _START + max(memory, shares * blocks * block) * 1e-3 * (1 if split else _EQUAL)
    return found + (0 if split == 1 else _ADD + (_ADD_AREA + _ADD_EACH * (split or 2)) * 64 * units * width)
