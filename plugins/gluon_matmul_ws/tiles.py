"""Which tiles are worth trying, best first: by what was measured of each, and by what they have to move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from registry.plugins.gluon_matmul_ws.cost import cost_of, few, itemsize, tiles_for
from registry.toolbox.matrices import split_n

HAND_OVER = 256
"""Bytes that barriers and the hand-over to the warp groups take."""


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
    found, cost = _few(problem) if few(problem) else _many(problem), cost_of(problem)
    best = sorted(found, key=lambda one: cost(one.mode, one.m, one.n, one.split, one.split_k, one.swap))[:most]
    return [config(**one._asdict()) for one in best]


class _Tile(NamedTuple):
    """What `config` is made of; most of these are dropped again."""

    mode: str
    m: int
    n: int
    stages: int
    k: int = 64
    split: int = 1
    split_k: int = 1
    stores: int = 2
    swap: bool = False


def _many(problem: Any) -> Iterator[_Tile]:
    size, count = itemsize(problem.dtype), problem.target.sm_count or 132
    blocks = -(-problem.k * size // 128)
    swap = size == 4 and _across(problem)
    rows, columns = (problem.n, problem.m) if swap else (problem.m, problem.n)
    for mode, m, n, stages, _ in tiles_for(problem):
        tiles = -(-rows // m) * -(-columns // n) * problem.batch
        for split, split_k in _splits(mode, n, tiles, blocks, count, swap):
            stores = 1 if m == 256 else 2  # a stage more is worth it
            yield _Tile(mode, m, n, stages, 128 // size, split, split_k, stores, swap)


def _across(problem: Any) -> bool:
    """float32: whether b is the factor that comes from registers; what else does not lie along K is copied."""
    first = problem.layout == "nn" or (problem.layout == "tn" and problem.m < problem.n)
    return first and min(problem.m, problem.k) > 1


def _splits(mode: str, n: int, tiles: int, blocks: int, count: int, swap: bool) -> Iterable[tuple[int, int]]:
    """(SPLIT, SPLIT_K): of the columns of the last round, or of K where the tiles do not fill the chip."""
    yield 1, 1
    if mode == "coop":
        rest = tiles % count
        if tiles > count and rest and not split_n(n)[1] and not swap:
            yield from ((split, 1) for split in (2, 4) if n // split >= 64 and -(-rest * split // count) < split)
        yield from ((1, split_k) for split_k in _ways(tiles, blocks, count))


def _ways(tiles: int, blocks: int, count: int) -> Iterable[int]:
    ways = (2, 3, 4, 6, 8, 12, 16, 24, 32)
    return (way for way in ways if tiles * way <= count and way * 4 <= blocks)


_WIDTHS = (32, 48, 64, 80, 96, 128, 160, 192, 256)
_ROWS = (16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
"""Where columns of b are wgmma's rows. All are one or two powers of two."""


def _few(problem: Any) -> Iterator[_Tile]:
    """Weights come once, rows of a once for each tile: so tiles are as wide as lets them fill the chip, once."""
    blocks, count = -(-problem.k // 64), problem.target.sm_count or 132
    for mode, high, width, swap in _shapes(problem.m):
        stages = _stages(problem, mode, high, width)
        rows, columns = (problem.n, problem.m) if swap else (problem.m, problem.n)
        tiles = -(-rows // high) * -(-columns // width) * problem.batch
        for split, way in _cuts(mode, width, swap, tiles, blocks, count) if stages > 2 else ():
            yield _Tile(mode, high, width, stages, split=split, split_k=way, swap=swap)


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
        if tiles > count and width >= 128 and not split_n(width)[1] and 2 * rest <= count and not swap:
            yield 2, 1


def _stages(problem: Any, mode: str, high: int, width: int) -> int:
    """As many as there is room for."""
    first, second = split_n(width)
    buffers = 4 * (high // 2 if mode == "coop" else high) * min(64, second or first) * itemsize(problem.out_dtype)
    return min(12, int(problem.target.shared_memory - HAND_OVER - buffers) // ((high + width) * 128 + 16))
