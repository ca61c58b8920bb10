"""Which tiles are worth trying, best first: by guesses at their time on an H200, fitted to measured shapes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from registry.plugins.gluon_matmul_pairs import host

_ROOM, _DEEPEST = 231_424, 8
"""Bytes of shared memory for the ring and the buffers of C, and the most stages."""
_TILES = {128: (96, 128, 160, 192, 224, 256), 192: (96, 128, 160, 192), 256: (96, 128, 160, 192)}
"""Columns by rows."""
_SWAPPED = {64: 256, 128: 256, 192: 192, 256: 192}
"""With SWAP: the most rows of a, by columns of b. Tiles of 64 are one consumer's."""
_EXACT = (128, 192, 208)
"""Columns beside 128 rows of 8-bit floats, whose blocks of K are summed in registers of their own."""
_BY_TURNS = (144, 160, 176, 192, 208)
"""Columns of tiles of 128 rows that one consumer has alone."""
_ALL_ROWS = (144, 160, 192)
"""With SWAP, too: so many rows of a in one tile."""
_MOST_PARTS, _LEAST = 3, 48
"""With SWAP: pairs of tiles into which rows of a are cut evenly, and how many rows a tile has."""
_LEAST_BLOCKS, _MOST_BYTES, _FEW = 8, 64 << 20, 2.0
"""Of a range of K; of the sums of all of them; and tiles of 128 x 128, of which a round over the chip has two for each
pair of CTAs, where ranges are worth a thought."""
_FULL = 3
"""Full rounds after which the last one is worth it."""


def config(*said: Any, **named: Any) -> dict[str, Any]:
    """The config of a tile, said as `_config` says it: one's own, to take apart."""
    return dict(_config(*said, **named))


@functools.lru_cache(1 << 12)
def _config(
    high: int,
    width: int,
    pair: int,
    swap: bool = False,
    ways: int = 1,
    turns: bool = False,
    group: int = 0,
    full: bool = False,
) -> dict[str, Any]:
    """`full`: there are full rounds over the chip before that of the ranges, whose tiles are stored as they are."""
    piece = host.piece(high, width, swap)
    stores = 0 if ways > 1 and not full else 1 if high == 256 or piece > 64 else 2
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
    """A config without ranges of K, and what the guess asks of it."""

    config: dict[str, Any]
    high: int
    width: int
    """Rows and columns of a pair of tiles."""
    swap: bool
    block: float
    """Nanoseconds of a block of K."""
    stored: float
    """Of storing a tile."""
    put: float
    """Of storing the sums of a range."""


@functools.lru_cache(1 << 12)
def _tile(*said: Any, **named: Any) -> _Tile:
    return _of(_config(*said, **named), exact=False)


def _of(config: dict[str, Any], exact: bool) -> _Tile:
    high, width, pair, swap = (config[name] for name in ("HIGH", "WIDTH", "PAIR", "SWAP"))
    stored = 0.0 if config["TURNS"] else _STORE + _STORE_AREA * high * width  # while the other consumer multiplies
    two = high * (2 if pair == 2 else 1), width * (2 if pair == 1 else 1)
    block = _block(high, width, pair == 1 and not swap, exact)
    return _Tile(config, *two, swap, block, stored, 4 * high * width / _PUT_BYTES)


def candidates(problem: Any, most: int | None = None) -> list[dict[str, Any]]:
    """Best first; so many of them at most."""
    found = sorted([(guess, at, *more) for at, (guess, *more) in enumerate(_guessed(problem))])
    return [_ranged(tile.config, ways, full) for _, _, tile, ways, full in found[:most]]


def _ranged(config: dict[str, Any], ways: int, full: bool) -> dict[str, Any]:
    if ways == 1:
        return dict(config)
    high, width, pair, swap, turns, group = (config[name] for name in _NAMES)
    return dict(_config(high, width, pair, swap, ways, turns, group, full))


_NAMES = ("HIGH", "WIDTH", "PAIR", "SWAP", "TURNS", "GROUP")


def _all(problem: Any, few: bool) -> Iterator[_Tile]:
    """`few`: tiles of 128 x 128 would be."""
    if host.exact(problem):
        yield from (_exact(width, pair) for width in _EXACT for pair in (2, 1))
        return
    yield from _WHOLE
    m, slots = problem.m, _slots(problem)
    for high, widest in _SWAPPED.items():
        for parts, pair in _parts(m, widest, high > 128) if few or high > 64 else ():
            width = even(m, parts, 8 if pair == 1 else 16)
            if _LEAST <= width <= widest:
                yield _tile(high, width, pair, True, turns=high == 64)
    for one in _TURNED:
        down, across = _pairs(problem, one[0])
        if down * across > slots:
            yield one[down >= 8]
            yield one[2]
    width = next((width for width in _ALL_ROWS if m <= width), 0)
    if width and _pairs(problem, _tile(128, width, 2, True))[0] > slots:
        yield _tile(128, width, 2, True, turns=True)


def _parts(m: int, widest: int, below: bool) -> Iterator[tuple[int, int]]:
    """(tiles into which rows of a are cut, PAIR): two more than have to be for pairs side by side, one for those that
    lie one `below` the other."""
    fewest = int(-(-m // (2 * widest)))
    if fewest <= _MOST_PARTS:
        yield 2 * fewest, 1
        yield 2 * fewest + 2, 1
    fewest = int(-(-m // widest))
    if below and fewest <= 2 * _MOST_PARTS:
        yield fewest, 2
        yield fewest + 1, 2


def even(rows: int, parts: int, grain: int) -> int:
    """Rows of a tile, where so many tiles share them out: a multiple of `grain`."""
    return grain * int(-(-rows // (grain * parts)))


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
_SIDE_BY_SIDE, _HALF, _ALONE = 1.012, 0.8, 1.15
"""PAIR 1 is so much slower where both fill the chip; half a chip is not at its limit of power and multiplies faster;
one consumer multiplies so much slower than two."""
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
    if high == 64:
        block *= _ALONE
    return block * _SIDE_BY_SIDE if side_by_side else block


_WHOLE = tuple(_tile(high, width, pair) for high, widths in _TILES.items() for width in widths for pair in (2, 1))
_TURNED = tuple(
    (_tile(128, width, 2, turns=True), _tile(128, width, 2, turns=True, group=8), _tile(128, width, 1, turns=True))
    for width in _BY_TURNS
)


def _guessed(problem: Any) -> Iterator[tuple[float, _Tile, int, bool]]:
    """All, each with the microseconds that it is guessed to take: (those, the tile, ranges of K, whether there are full
    rounds before)."""
    m, n, slots, blocks = problem.m, problem.n, _slots(problem), int(-(-problem.k // host.depth(problem)))
    few = int(-(-m // 128)) * int(-(-n // 128)) <= slots * _FEW
    most = 1 if host.exact(problem) else blocks // _LEAST_BLOCKS
    for tile in _all(problem, few):
        _, high, width, swap, block, stored, put = tile
        rows, columns = (n, m) if swap else (m, n)
        items = int(-(-rows // high)) * int(-(-columns // width))
        rounds = -(-items // slots)
        took = rounds * blocks * block
        yield (_START + (took * _HALF if 2 * items <= slots else took) + rounds * stored) * 1e-3, tile, 1, False
        if most < 2 or rounds > _FULL + 1 or (rounds == 1 and not few):
            continue
        full, rest = divmod(items, slots)
        if not rest or 2 * rest > slots:
            continue
        for ways in {min(most, slots // rest)} if full else {min(most, slots // rest), min(most, slots // (2 * rest))}:
            if ways > 1 and 4 * ways * rest * high * width <= _MOST_BYTES:
                took = (full * blocks + -(-blocks // ways)) * block
                if not full and 2 * ways * rest <= slots:
                    took *= _HALF
                took += full * stored + put + _SUM + ways * (_SUM_WAY + 4 * rest * high * width / _SUM_BYTES)
                yield (_START + took) * 1e-3, tile, ways, full > 0
