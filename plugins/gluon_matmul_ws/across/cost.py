"""A guess at how long a config takes: what memory, one SM's loads and its matrix units need, and what comes on top.

Fitted to all configs of 69 products on an H200: fitted to half of them, the first config is 6 to 10% from the best on
the others, the best of four 0 to 1%.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from registry.plugins.gluon_matmul_ws.across.copy import blocks_of


class _Speed(NamedTuple):
    start: float
    """Microseconds, until the first block has come."""
    memory: float
    """Bytes a nanosecond, by the whole chip."""
    loads: float
    """By one SM."""
    products: float
    """Of wgmma, a nanosecond, by one SM."""
    block: float
    """Nanoseconds that a block takes at least."""
    phase: float
    """Nanoseconds for a column of a tile between two phases."""
    store: float
    """Nanoseconds for an element of a tile, by single ones; two of a row at once take half, and so on."""
    split: float
    """Microseconds: to count and add up ranges of K."""
    part: float
    """Of each range, for an element of a tile."""
    copy: float
    """Of the launch that copies the first factor."""
    copied: float
    """Bytes a nanosecond that it copies."""


_SPEED = _Speed(4.7, 2970.0, 69.0, 2.7e3, 120.0, 1.35, 0.158, 4.1, 4.4e-5, 1.0, 3330.0)


def guesses(problem: Any, run: int, block: int, classes: int, copied: int) -> Callable[..., float]:
    """Microseconds of MODE, BLOCK_M, BLOCK_N, SWAP and SPLIT_K. `run`: elements of C stored at once; `block`: of K;
    `copied`: of the first factor."""
    sizes = problem.m, problem.n, problem.k, problem.batch or 1, problem.target.sm_count or 132
    return functools.partial(_guess, _SPEED, sizes, run, block, classes, copied)


def _guess(
    speed: _Speed,
    sizes: tuple[int, int, int, int, int],
    run: int,
    high: int,
    classes: int,
    copied: int,
    mode: str,
    x: int,
    y: int,
    swap: bool,
    way: int,
) -> float:
    m, n, k, z, sms = sizes
    rows, columns = (n, m) if swap else (m, n)
    tiles, blocks = -(-rows // x) * -(-columns // (y - 8)) * z, classes * blocks_of(k, high, classes)
    loaded = (min(x, rows) + min(y, columns)) * 2 * high
    block = max(loaded / speed.loads, x * y * high / speed.products, speed.block)
    rounds = tiles / sms if way == 0 else -(-tiles * way // sms) / way
    phases = speed.phase * y * (classes - 1) * -(-tiles // sms)
    read = 2.0 * z * (m * k + n * k) / speed.memory
    stores = x * y * speed.store / run * (1.0 if mode == "coop" else 0.6) * -(-tiles // sms)
    found = speed.start + (max(read, rounds * blocks * block) + stores + phases) * 1e-3
    if copied:
        found += speed.copy + 4.0 * copied / speed.copied * 1e-3
    if way != 1:
        parts = way or max(sms // tiles, 1) + 1
        found += speed.split + (1 + parts) * x * y * speed.part
    return found
