"""Which tiles are worth trying, best first: by guesses at their time on an H200."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry.plugins.gluon_matmul_row_pairs.host import FEWEST, MOST, rows_of
from registry.toolbox.boxes import eights

_ROOM, _DEEPEST = 229_900, 12
"""Bytes of shared memory for the ring, and the most stages."""
_WIDEST = 256
"""Columns of b in a tile, where rows of a are wgmma's."""


def config(consumers: int, tile: int, stages: int, swap: bool) -> dict[str, Any]:
    return {"CONSUMERS": consumers, "TILE": tile, "STAGES": stages, "SWAP": swap}


def candidates(problem: Any, most: int = 8) -> list[dict[str, Any]]:
    """Best first."""
    if not FEWEST <= problem.m <= MOST:  # (which is refused)
        return [config(2, 128, 3, True)]
    return sorted(_all(problem), key=lambda one: cost(problem, one))[:most]


def _all(problem: Any) -> Iterator[dict[str, Any]]:
    rows, pairs = rows_of(problem), (problem.target.sm_count or 132) // 2
    for consumers in (1, 2):
        yield config(consumers, 64 * consumers, _stages(64 * consumers + rows), True)
    for rounds in (1, 2, 3):
        width = max(32, eights(-(-problem.n // (pairs * rounds))))
        if width <= _WIDEST:
            yield config(1 if rows <= 64 else 2, width, _stages(rows + width), False)


def _stages(rows: int) -> int:
    return min(_DEEPEST, _ROOM // (rows * 128))


_START, _FROM_MEMORY, _FROM_L2, _IDLE = 0.5, 4956.0, 16.9e3, 1.58
"""Microseconds before the first block has come; bytes a nanosecond, of b, and of a for all tiles; how much longer b
takes with a part of the SMs idle."""
_SHARED, _MULTIPLY, _BLOCK = 261.0, 2707.0, 11.7
"""Bytes a nanosecond in and out of an SM's shared memory; products likewise; nanoseconds beside."""
_STORE, _STORE_AREA = 216.0, 0.0445
"""Nanoseconds of storing a tile, and an element of it. All as fitted to 270 configs of 60 shapes with 110 to 256 rows,
which they meet within 7%: the first config misses the best by 0.24% in the mean."""


def cost(problem: Any, config: Mapping[str, Any]) -> float:
    """Microseconds."""
    rows, pairs, blocks = int(rows_of(problem)), (problem.target.sm_count or 132) // 2, int(-(-problem.k // 64))
    consumers, tile = config["CONSUMERS"], config["TILE"]
    width, tiles = rows if config["SWAP"] else tile, int(-(-problem.n // tile))
    shared = 128 * (tile + rows) + 4 * consumers * (2048 + 32 * width)
    block = _BLOCK + max(shared / _SHARED, consumers * width * 4096 / _MULTIPLY)
    rounds = -(-tiles // pairs)
    idle = 1 - tiles / (pairs * rounds)
    memory = 2.0 * problem.k * (problem.n / _FROM_MEMORY * (1 + _IDLE * idle) + 2 * rows * tiles / _FROM_L2)
    return _START + max(memory, rounds * (blocks * block + _STORE + _STORE_AREA * consumers * 64 * width)) * 1e-3
