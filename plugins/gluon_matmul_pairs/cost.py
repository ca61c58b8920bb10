"""Which tiles are worth trying, best first: by guesses at their time on an H200, fitted to measured shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from registry.plugins.gluon_matmul_pairs import host

_ROOM, _DEEPEST = 231_424, 8
"""Bytes of shared memory for the ring and the buffers of C, and the most stages."""
_TILES = {128: (96, 128, 160, 192, 224, 256), 256: (96, 128, 160, 192)}
"""Columns by rows."""
_MOST_PARTS, _LEAST, _LARGEST_PIECE = 3, 48, 112
"""With SWAP: pairs of tiles into which rows of a are cut evenly, how many rows a tile has, and a buffer of C."""


def config(high: int, width: int, pair: int, swap: bool = False) -> dict[str, Any]:
    piece = host.piece(high, width, swap)
    stores = 1 if high == 256 or piece > 64 else 2
    room = _ROOM - 1024 - high * stores * piece * 2
    stages = min(_DEEPEST, room // ((high + width) * 128))
    found = {"HIGH": high, "WIDTH": width, "STAGES": stages, "STORES": stores}
    return {**found, "PAIR": pair, "SWAP": swap, "GROUP": 4 if pair == 2 else 8}


def candidates(problem: Any) -> list[dict[str, Any]]:
    """Best first."""
    return sorted(_all(problem), key=lambda one: cost(problem, one))


def _all(problem: Any) -> Iterator[dict[str, Any]]:
    for high, widths in _TILES.items():
        for width in widths:
            yield config(high, width, 2)
            yield config(high, width, 1)
        fewest = max(1, int(-(-problem.m // (2 * widths[-1]))))
        for parts in (fewest, fewest + 1) if fewest <= _MOST_PARTS else ():
            width = host.even(problem.m, parts)
            if _LEAST <= width <= widths[-1] and host.piece(high, width, True) <= _LARGEST_PIECE:
                yield config(high, width, 1, swap=True)


_START, _STORE, _STORE_AREA = 2100.0, 456.0, 0.0177
"""Nanoseconds before the first block has come, and of storing a tile, and an element of it."""
_SHARED, _MULTIPLY, _BLOCK = 214.0, 2634.0, 3.1
"""Bytes a nanosecond in and out of an SM's shared memory; products likewise; nanoseconds beside. All as fitted to 373
configs of 52 shapes with 129 rows and more, which they meet within 6%: from 257 rows on the first of them misses the
best by 2.7% in the mean, where a cell's noise is about 3%, the best of four by 0.4%."""


def cost(problem: Any, config: Mapping[str, Any]) -> float:
    """Microseconds."""
    high, width, (down, across) = config["HIGH"], config["WIDTH"], host.pairs(problem, config)
    units, rounds = high // 64, int(-(-down * across // ((problem.target.sm_count or 132) // 2)))
    shared = 128 * (high + width) + 4 * units * (2048 + 32 * width)
    block = _BLOCK + max(shared / _SHARED, units * width * 4096 / _MULTIPLY)
    return (_START + rounds * (int(-(-problem.k // 64)) * block + _STORE + _STORE_AREA * high * width)) * 1e-3
