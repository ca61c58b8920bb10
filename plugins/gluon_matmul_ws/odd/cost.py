"""A guess at how long a config takes: what memory, one SM's loads and its matrix units need, and what comes on top.

Measured facts.  Fitted to 1,394 configs of 218 random products on an H200 (benchmarks/results/h200): of other such
products than it is fitted to, its first config takes 3.0% longer than the best, the best of its first four 0.2%.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from registry.plugins.gluon_matmul_ws.odd.fragments import STEP


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
    store: float
    """Nanoseconds for an element of a tile, by single ones; two of a row at once take half, and so on."""
    split: float
    """Microseconds: to count and add up ranges of K."""
    part: float
    """Of each range, for an element of a tile."""
    copy: float
    """Of the launch that copies the second factor."""
    copied: float
    """Bytes a nanosecond that it copies."""


_SPEED = _Speed(2.8, 3000.0, 71.0, 2.8e3, 340.0, 0.13, 2.0, 4.5e-5, 1.7, 2600.0)


def guesses(problem: Any, run: int) -> Callable[..., float]:
    """Microseconds of MODE, BLOCK_M, BLOCK_N, SWAP and SPLIT_K. `run`: elements of C stored at once."""
    sizes = problem.m, problem.n, problem.k, problem.batch or 1, problem.target.sm_count or 132
    return functools.partial(_guess, _SPEED, sizes, run)


def _guess(
    speed: _Speed, sizes: tuple[int, int, int, int, int], run: int, mode: str, x: int, y: int, swap: bool, way: int
) -> float:
    m, n, k, z, sms = sizes
    rows, columns = (n, m) if swap else (m, n)
    tiles, blocks = -(-rows // x) * -(-columns // y) * z, -(-k // STEP)
    loaded = (min(x, rows) + min(y, columns)) * 128
    block = max(loaded / speed.loads, x * y * 64 / speed.products, speed.block)
    rounds = tiles / sms if way == 0 else -(-tiles * way // sms) / way
    read = 2.0 * z * (m * k + n * k) / speed.memory
    stores = x * y * speed.store / run * (1.0 if mode == "coop" else 0.6) * -(-tiles // sms)
    found = speed.start + speed.copy + (max(read, rounds * blocks * block) + stores) * 1e-3
    found += 4.0 * columns * k * z / speed.copied * 1e-3
    if way != 1:
        parts = way or max(sms // tiles, 1) + 1
        found += speed.split + (1 + parts) * x * y * speed.part
    return found
