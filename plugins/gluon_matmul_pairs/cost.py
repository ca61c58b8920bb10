"""Which tiles are worth trying, best first: by guesses at their time on an H200, fitted to measured shapes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from registry.plugins.gluon_matmul_pairs import host

_ROOM, _DEEPEST = 231_424, 8
"""Bytes of shared memory for the ring and the buffers of C, and the most stages."""
_TILES = {128: (96, 128, 160, 192, 224, 256), 256: (96, 128, 160, 192)}
"""Columns by rows."""
_EXACT = (128, 192, 208)
"""Columns beside 128 rows of 8-bit floats, whose blocks of K are summed in registers of their own."""
_BY_TURNS = (144, 160, 176, 192, 208)
"""Columns of tiles of 128 rows that one consumer has alone."""
_ALL_ROWS = (144, 160, 192)
"""With SWAP, too: so many rows of a in one tile."""
_MOST_PARTS, _LEAST, _LARGEST_PIECE = 3, 48, 112
"""With SWAP: pairs of tiles into which rows of a are cut evenly, how many rows a tile has, and a buffer of C."""
_LEAST_BLOCKS, _MOST_BYTES, _FEW = 8, 64 << 20, 1.5
"""Of a range of K; of the sums of all of them; and tiles of 128 x 128, of which a round over the chip has two for each
pair of CTAs, where ranges are worth a thought."""


def config(
    high: int, width: int, pair: int, swap: bool = False, *, ways: int = 1, turns: bool = False, group: int = 0
) -> dict[str, Any]:
    return dict(_config(high, width, pair, swap, ways, turns, group))


@functools.lru_cache(1 << 12)
def _config(
    high: int, width: int, pair: int, swap: bool = False, ways: int = 1, turns: bool = False, group: int = 0
) -> dict[str, Any]:
    piece = host.piece(high, width, swap)
    stores = 0 if ways > 1 else 1 if high == 256 or piece > 64 else 2
    room = _ROOM - 1024 - high * stores * piece * (4 if turns else 2)
    stages = min(_DEEPEST, room // ((high + width) * 128))
    found = {"HIGH": high, "WIDTH": width, "STAGES": stages, "STORES": stores, "PAIR": pair, "SWAP": swap}
    return {**found, "GROUP": group or (4 if pair == 2 else 8), "WAYS": ways, "TURNS": turns}


@functools.lru_cache(1 << 6)
def _exact(width: int, pair: int) -> _Tile:
    """With as many buffers of C as cost no stage."""
    found, piece = _config(128, width, pair), host.piece(128, width, False)
    stages = min(_DEEPEST, (_ROOM - 1024 - 256 * piece) // ((128 + width) * 128))
    stores = (_ROOM - 1024 - stages * (128 + width) * 128) // (256 * piece)
    return _of({**found, "STAGES": stages, "STORES": min(stores, width // piece)}, exact=True)


class _Tile(NamedTuple):
    """A config, and what the guess asks of it."""

    config: dict[str, Any]
    high: int
    width: int
    """Rows and columns of a pair of tiles."""
    swap: bool
    ways: int
    block: float
    """Nanoseconds of a block of K."""
    stored: float
    """Of storing in one round."""
    turns: bool


@functools.lru_cache(1 << 12)
def _tile(*said: Any, **named: Any) -> _Tile:
    return _of(_config(*said, **named), exact=False)


def _of(config: dict[str, Any], exact: bool) -> _Tile:
    high, width, pair, swap, ways = (config[name] for name in ("HIGH", "WIDTH", "PAIR", "SWAP", "WAYS"))
    stored = 4 * high * width / _PUT_BYTES if ways > 1 else _STORE + _STORE_AREA * high * width
    two = high * (2 if pair == 2 else 1), width * (2 if pair == 1 else 1)
    block = _block(high, width, pair == 1 and not swap, exact)
    return _Tile(config, *two, swap, ways, block, stored, config["TURNS"])


def candidates(problem: Any, most: int | None = None) -> list[dict[str, Any]]:
    """Best first; so many of them at most."""
    found = sorted([(guess, at, tile) for at, (guess, tile) in enumerate(_guessed(problem))])
    return [dict(tile.config) for _, _, tile in found[:most]]


def _all(problem: Any) -> Iterator[_Tile]:
    if host.exact(problem):
        yield from (_exact(width, pair) for width in _EXACT for pair in (2, 1))
        return
    tiles, slots = int(-(-problem.m // 128)) * int(-(-problem.n // 128)), _slots(problem)
    for one in _whole(problem):
        yield one
        if tiles <= slots * _FEW:
            yield from _in_ranges(problem, one)
    for width in _BY_TURNS if tiles > 2 * slots else ():
        down, across = _pairs(problem, _tile(128, width, 2))
        if down * across > slots:
            yield _tile(128, width, 2, turns=True, group=8 if down >= 8 else 4)
            yield _tile(128, width, 1, turns=True)
    width = next((width for width in _ALL_ROWS if problem.m <= width), 0)
    if width and _pairs(problem, _tile(128, width, 2, True))[0] > slots:
        yield _tile(128, width, 2, True, turns=True)


def _whole(problem: Any) -> Iterator[_Tile]:
    for high, widths in _TILES.items():
        for width in widths:
            yield _tile(high, width, 2)
            yield _tile(high, width, 1)
        fewest = max(1, int(-(-problem.m // (2 * widths[-1]))))
        for parts in (fewest, fewest + 1) if fewest <= _MOST_PARTS else ():
            width = host.even(problem.m, parts)
            if _LEAST <= width <= widths[-1] and host.piece(high, width, True) <= _LARGEST_PIECE:
                yield _tile(high, width, 1, True)


def _in_ranges(problem: Any, whole: _Tile) -> Iterator[_Tile]:
    """The same with ranges of K, as many as fill half of the chip, or the chip."""
    high, width, pair, swap = (whole.config[name] for name in ("HIGH", "WIDTH", "PAIR", "SWAP"))
    down, across = _pairs(problem, whole)
    slots, most = _slots(problem), int(-(-problem.k // 64)) // _LEAST_BLOCKS
    rows, columns = host.plane(problem, whole.config)
    for ways in sorted({min(most, slots * times // (2 * down * across)) for times in (1, 2)}):
        if ways > 1 and 4 * ways * rows * columns <= _MOST_BYTES:
            yield _tile(high, width, pair, swap, ways)


def _pairs(problem: Any, tile: _Tile) -> tuple[int, int]:
    """As host.pairs, of plain integers: of sizes that are noted, such is known that all that follows is known."""
    rows, columns = (problem.n, problem.m) if tile.swap else (problem.m, problem.n)
    return int(-(-rows // tile.high)), int(-(-columns // tile.width))


def _slots(problem: Any) -> int:
    """Pairs of CTAs that run at once."""
    return (problem.target.sm_count or 132) // 2


_START, _STORE, _STORE_AREA = 2100.0, 456.0, 0.0177
"""Nanoseconds before the first block has come, and of storing a tile, and an element of it."""
_SHARED, _MULTIPLY, _BLOCK = 214.0, 2634.0, 3.1
"""Bytes a nanosecond in and out of an SM's shared memory; products likewise; nanoseconds beside. All as fitted to 373
configs of 52 shapes with 129 rows and more, which they meet within 6%: from 257 rows on the first of them misses the
best by 2.7% in the mean, where a cell's noise is about 3%, the best of four by 0.4%."""
_SIDE_BY_SIDE, _HALF = 1.012, 0.8
"""PAIR 1 is so much slower where both fill the chip; half a chip is not at its limit of power and multiplies faster."""
_MULTIPLY_8BIT = 4600.0
"""Products a nanosecond."""
_SUM, _SUM_WAY, _SUM_BYTES, _PUT_BYTES = 1300.0, 200.0, 2500.0, 110.0
"""Where there are ranges of K: nanoseconds of the second kernel, of each range in it, and bytes a nanosecond that it
adds up and that a CTA stores."""


@functools.cache
def _block(high: int, width: int, side_by_side: bool, exact: bool = False) -> float:
    """Nanoseconds of 128 bytes of K."""
    units = high // 64
    shared = 128 * (high + width) + 4 * units * (2048 + 32 * width)
    multiplied = units * width * 8192 / _MULTIPLY_8BIT if exact else units * width * 4096 / _MULTIPLY
    block = _BLOCK + max(shared / _SHARED, multiplied)
    return block * _SIDE_BY_SIDE if side_by_side else block


def _guessed(problem: Any) -> Iterator[tuple[float, _Tile]]:
    """All, each with the microseconds that it is guessed to take."""
    m, n, k, depth, slots = problem.m, problem.n, problem.k, host.depth(problem), _slots(problem)
    for tile in _all(problem):
        _, high, width, swap, ways, block, stored, turns = tile
        rows, columns = (n, m) if swap else (m, n)
        items = int(-(-rows // high)) * int(-(-columns // width)) * ways
        rounds = -(-items // slots)
        took: float = rounds * int(-(-k // (depth * ways))) * block
        if 2 * items <= slots:
            took *= _HALF
        if ways > 1:
            rows, columns = host.plane(problem, tile.config)
            stored = rounds * stored + (_SUM + ways * (_SUM_WAY + 4 * rows * columns / _SUM_BYTES))
        elif not turns:  # by turns one consumer stores while the other multiplies
            stored = rounds * stored
        yield (_START + took + stored) * 1e-3, tile
