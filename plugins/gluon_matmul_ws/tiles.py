"""Which tiles are worth trying, best first: by what was measured of each, and by what they have to move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from registry.plugins.gluon_matmul_ws import host

# Measured facts: see kernel.py. Speed of one tile shape against the fastest, where the chip is full.
_TILES = (
    ("coop", 128, 128, 6, 1.00),
    ("coop", 128, 256, 4, 0.99),
    ("coop", 128, 192, 4, 0.985),
    ("coop", 128, 320, 3, 0.95),
    ("pingpong", 128, 128, 4, 0.965),
    ("coop", 256, 128, 4, 0.99),
    ("pingpong", 64, 256, 4, 0.92),
    ("pingpong", 64, 128, 8, 0.82),
    ("coop", 128, 64, 6, 0.80),
)
_TILES_RAGGED = (
    ("coop", 256, 160, 4, 1.00),
    ("coop", 256, 192, 3, 0.98),
    ("coop", 128, 256, 4, 0.90),
    ("coop", 128, 192, 4, 0.88),
    ("coop", 256, 128, 4, 0.87),
)
"""Where rows are no multiples of 128 bytes, each of a box touches two lines: the more a tile makes of it the better."""
_TILES_8BIT = (
    ("coop", 128, 192, 4, 1.00),
    ("coop", 128, 128, 6, 1.00),
    ("coop", 128, 64, 6, 0.79),
    ("pingpong", 64, 128, 6, 0.65),
)

_TILES_TF32 = (
    ("coop", 128, 256, 4, 1.00),
    ("coop", 256, 128, 4, 0.97),
    ("coop", 128, 128, 6, 0.94),
    ("coop", 128, 64, 6, 0.80),
)
_TILES_ALONG_K = (*_TILES_TF32, ("coop", 128, 192, 4, 0.98))
"""Where no factor has to come from registers, which one power of two of columns can have."""

_EPILOGUE = {"gelu": 1.5e-4, "silu": 0.3e-4}
"""Microseconds for an element of a tile."""

HAND_OVER = 256
"""Bytes that barriers and the hand-over to the warp groups take."""


def itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def config(
    mode: str,
    m: int,
    n: int,
    stages: int,
    k: int = 64,
    group: int = 8,
    split: int = 1,
    split_k: int = 1,
    stores: int = 2,
    swap: bool = False,
) -> dict[str, Any]:
    found = {
        "MODE": mode,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "STAGES": stages,
        "STORES": stores,
        "GROUP": group,
        "SPLIT": split,
        "SPLIT_K": split_k,
    }
    return {**found, "SWAP": True} if swap else found


def candidates(problem: Any, most: int = 8) -> list[dict[str, Any]]:
    """Every tile worth trying, best first."""
    few = problem.m <= host.FEW and itemsize(problem.dtype) == 2
    found = list(_few(problem) if few else _many(problem))
    found.sort(key=lambda pair: pair[0])
    return [entry for _, entry in found[:most]]


Guess = tuple[float, dict[str, Any]]
"""Microseconds on an H200, and the config."""


# --- many rows: the rounds of tiles over the chip decide --------------------------------------------------------------


def _many(problem: Any) -> Iterator[Guess]:
    size, count = itemsize(problem.dtype), problem.target.sm_count or 132
    blocks = -(-problem.k * size // 128)
    swap = size == 4 and _across(problem)
    rows, columns = (problem.n, problem.m) if swap else (problem.m, problem.n)
    for mode, m, n, stages, speed in _tiles(problem, size):
        tiles = -(-rows // m) * -(-columns // n) * problem.batch
        for split, split_k in _splits(mode, n, tiles, blocks, count, swap):
            cost = _microseconds(m, n, tiles, blocks, split, split_k, count, speed)
            rounds = -(-tiles // count)
            # ping-pong hides most, but the last, by half the warps
            shown = rounds if mode == "coop" else 2 + rounds / 4
            cost += shown * m * n * _EPILOGUE.get(problem.activation, 0.0)
            cost *= 2.0 if m > 64 >= rows or n > 64 >= columns else 1.0  # a tile that is mostly padding
            stores = 1 if m == 256 else 2  # a stage more is worth it
            yield cost, config(mode, m, n, stages, 128 // size, split=split, split_k=split_k, stores=stores, swap=swap)


def _tiles(problem: Any, size: int) -> tuple[tuple[str, int, int, int, float], ...]:
    if size == 4:
        return _TILES_ALONG_K if problem.layout == "nt" else _TILES_TF32
    return _TILES_8BIT if size == 1 else _TILES_RAGGED if _ragged(problem) else _TILES


def _across(problem: Any) -> bool:
    """float32: whether b is the factor that comes from registers; what else does not lie along K is copied."""
    first = problem.layout == "nn" or (problem.layout == "tn" and problem.m < problem.n)
    return first and min(problem.m, problem.k) > 1


def _ragged(problem: Any) -> bool:
    return any(max(fact.strides[-2:]) * fact.itemsize % 128 for fact in problem.operands if 1 not in fact.shape[-2:])


def _splits(mode: str, n: int, tiles: int, blocks: int, count: int, swap: bool) -> Iterable[tuple[int, int]]:
    """(SPLIT, SPLIT_K): of the columns of the last round, or of K where the tiles do not fill the chip."""
    yield 1, 1
    if mode == "coop":
        rest = tiles % count
        if tiles > count and rest and not host.split_n(n)[1] and not swap:
            yield from ((split, 1) for split in (2, 4) if n // split >= 64 and -(-rest * split // count) < split)
        yield from ((1, split_k) for split_k in _ways(tiles, blocks, count))


def _ways(tiles: int, blocks: int, count: int) -> Iterable[int]:
    ways = (2, 3, 4, 6, 8, 12, 16, 24, 32)
    return (way for way in ways if tiles * way <= count and way * 4 <= blocks)


def _microseconds(m: int, n: int, tiles: int, blocks: int, split: int, split_k: int, count: int, speed: float) -> float:
    """A guess at a config's time on an H200: rounds over the chip times the time of a tile at full speed, and for
    split-K what writing, counting and adding up cost."""
    block = m * n * 2.4e-5 / speed
    if split_k > 1:
        return -(-blocks // split_k) * block + 5 + (2 + split_k) * m * n * 1e-4
    whole = -(-tiles // count) if split == 1 else tiles // count
    narrow = m * n // split * 2.4e-5 / (0.965 if n // split >= 128 else 0.7)
    tail = 0 if split == 1 else -(-(tiles % count) * split // count) * narrow * (1.0 if split == 2 else 1.35)
    return blocks * (whole * block + tail)


# --- few rows: what has to be read decides ----------------------------------------------------------------------------

_WIDTHS = (32, 48, 64, 80, 96, 128, 160, 192, 256)
_ROWS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
"""Where columns of b are wgmma's rows. All are one or two powers of two."""
_START, _FROM_MEMORY, _TO_ONE_SM, _MULTIPLY = 3.2, 3920.0, 87.0, 2.9e3
"""Microseconds before the first block has come; bytes a nanosecond of the chip and of one SM; products likewise."""
_BLOCK, _BOX = 140.0, 1.7
"""Nanoseconds that a block takes at least, and a box of it takes more. As all here fitted to 144 shapes, whose best the
first config then misses by 1.0% in the mean, the best of four by 0.1%."""


def _few(problem: Any) -> Iterator[Guess]:
    """Weights come once, rows of a once for each tile: so tiles are as wide as lets them fill the chip, once."""
    blocks, count = -(-problem.k // 64), problem.target.sm_count or 132
    for mode, high, width, swap in _shapes(problem.m):
        stages = _stages(problem, mode, high, width, swap)
        rows, columns = (problem.n, problem.m) if swap else (problem.m, problem.n)
        tiles = -(-rows // high) * -(-columns // width) * problem.batch
        loaded = high + min(width, problem.m) if swap else width + -(-problem.m // -(-problem.m // high))
        boxes = (3 if mode == "coop" else 2) + bool(host.split_n(width)[1]) + (mode == "coop")
        block = max(loaded * 128 / _TO_ONE_SM + boxes * _BOX, high * width * 64 / _MULTIPLY, _BLOCK)
        for split, way in _cuts(mode, width, swap, tiles, blocks, count) if stages > 2 else ():
            cost = _streaming(problem, block, high * width, tiles, blocks, split, way, count)
            epilogue = -(-tiles // count) * high * width * _EPILOGUE.get(problem.activation, 0.0)
            cost *= (0.985 if problem.m <= 128 else 1.07) if swap else 1.015 if host.split_n(width)[1] else 1.0
            yield cost + epilogue, config(mode, high, width, stages, split=split, split_k=way, swap=swap)


def _shapes(m: int) -> Iterator[tuple[str, int, int, bool]]:
    """(mode, rows, columns, swapped)."""
    for width in _WIDTHS:
        if m <= 64 or width >= 96:
            yield "pingpong", 64, width, False
        if m > 64:
            yield "coop", 128, width, False
    if m > 1:
        yield "coop", 128, next(width for width in _ROWS if width >= m), True


def _cuts(mode: str, width: int, swap: bool, tiles: int, blocks: int, count: int) -> Iterator[tuple[int, int]]:
    """(SPLIT, SPLIT_K). Equal shares of K only won where columns of b are wgmma's rows."""
    yield 1, 1
    if swap:
        yield 1, 0
    if mode == "coop":
        yield from ((1, way) for way in _ways(tiles, blocks, count))
        rest = tiles % count
        if tiles > count and width >= 128 and not host.split_n(width)[1] and 2 * rest <= count and not swap:
            yield 2, 1


def _stages(problem: Any, mode: str, high: int, width: int, swap: bool) -> int:
    """As many as there is room for."""
    first, second = host.split_n(width)
    buffers = 4 * (high // 2 if mode == "coop" else high) * min(64, second or first) * itemsize(problem.out_dtype)
    return min(12, int(problem.target.shared_memory - HAND_OVER - buffers) // ((high + width) * 128 + 16))


def _streaming(
    problem: Any, block: float, area: int, tiles: int, blocks: int, split: int, way: int, count: int
) -> float:
    """A guess at the time: memory or the blocks of one SM, whichever is slower, and what adding up costs."""
    even = tiles / count
    rounds = even if way == 0 else -(-tiles * way // count) / way if split == 1 else tiles // count + 1.09
    idle = 1 - even / rounds if tiles > count else 0.4 * max(0.0, 1 - even * (way or count))  # of the chip, at the end
    weights = 2.0 * problem.batch * problem.n * problem.k / _FROM_MEMORY * (1 + 0.42 * idle)
    cost = _START + max(weights, rounds * blocks * block) * 1e-3
    if way == 1:
        return cost
    parts = way or max(count // tiles, 1) + 1
    hidden = way == 0 and tiles >= count
    return cost + (6.5 if hidden else 2.0 + (1 + parts) * area * 7e-5)
