"""Configs for 2 bytes an element on Hopper and newer: few tiles, each with ranges of K that fill the chip, by cost."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from registry.plugins.triton_matmul.cost import WIDE, guesses
from registry.toolbox import integers

Config = dict[str, int]

# rows, columns and K of a tile, warps, stages
_PIPELINED = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 8, 4),
    (128, 64, 64, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 128, 128, 4, 3),
    (64, 64, 64, 4, 4),
    (64, 64, 128, 4, 4),
    (64, 32, 64, 4, 4),
    (64, 32, 128, 4, 4),
    (32, 128, 128, 4, 3),
    (32, 64, 128, 4, 4),
    (32, 32, 256, 4, 3),
    (32, 64, 64, 4, 4),
    (32, 16, 64, 4, 4),
    (32, 16, 128, 4, 4),
    (16, 32, 256, 4, 3),
    (16, 32, 64, 4, 4),
    (16, 64, 64, 4, 4),
    (16, 64, 128, 4, 6),
    (16, 64, 256, 4, 4),
    (16, 128, 128, 4, 4),
)
_UNPIPELINED = (
    (128, 128, 32, 8, 1),
    (128, 64, 32, 8, 1),
    (64, 128, 32, 8, 1),
    (64, 64, 64, 8, 1),
    (64, 64, 64, 4, 1),
    (64, 64, 32, 4, 1),
    (64, 32, 64, 4, 1),
    (64, 32, 32, 4, 1),
    (64, 16, 64, 4, 1),
    (32, 64, 64, 4, 1),
    (32, 64, 32, 4, 1),
    (32, 32, 64, 4, 1),
    (32, 32, 32, 4, 1),
    (32, 32, 128, 4, 1),
    (32, 16, 64, 4, 1),
    (16, 32, 128, 4, 1),
    (16, 64, 64, 4, 1),
    (16, 64, 32, 4, 1),
    (16, 32, 64, 4, 1),
)
"""Where copies would be shorter than 8 bytes, or K is one block."""
_LARGEST = 256 * 128
"""Elements of a tile; half of that where b is contiguous along K (see kernel.py)."""
MOST = 4
_SMALL = 64 * 64
_SINGLES = 48 * 32
"""Elements of both operands' blocks that a warp loads one by one without a spill."""
ROUNDS = 8
"""With more rounds over the chip than these small tiles are not tried."""


def config_of(m: int, n: int, k: int, warps: int, stages: int, split: int = 1, group: int = 8) -> Config:
    return {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "GROUP": group,
        "SPLIT": split,
        "num_warps": warps,
        "num_stages": stages,
    }


def ranked(problem: Any, run: int) -> list[Config]:
    """That which is expected to be fastest first; one that any GPU has shared memory for is among them. `run`: bytes of
    the shorter of the operands' contiguous runs."""
    run = min(run, 16)
    guess = guesses(problem, run)
    found = sorted([(guess(*config), config) for config in _listed(problem, run)])
    chosen = found[:MOST]
    if not any(x * y <= _SMALL for _, (x, y, *_) in chosen):
        chosen = [*chosen[:-1], *[one for one in found if one[1][0] * one[1][1] <= _SMALL][:1]]
    return [config_of(*config) for _, config in chosen]


def _listed(problem: Any, run: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Rows, columns and K of a tile, warps, stages, ranges of K."""
    m, n, k, sms = problem.m, problem.n, problem.k, problem.target.sm_count or 132
    along_k = problem.layout[1] == "t"
    largest = _LARGEST // (2 if along_k else 1)  # it would spill in a tail of K, in an epilogue, and in short copies
    if k % 64 or problem.activation or run < 16:
        largest //= 2
    least = [_SIZES[bisect_left(_SIZES, one, hi=len(_SIZES) - 1)] for one in (m, n, k)]
    fitting = _fitting(run, *least, bool(m <= 32), bool(n <= 16), bool(k <= 64), integers.gcd(k, _SIZES[-1]), largest)
    for x, y, block, warps, stages in fitting:
        tiles = -(-m // x) * -(-n // y) * (problem.batch or 1)
        if x * y < 64 * 64 and tiles > ROUNDS * sms and min(m, n) > 64:
            continue
        most = min(32, max(1, -(-k // block) // 2))  # ranges of K, each two blocks long at least
        yield x, y, block, warps, stages, 1
        if most > 1 and tiles <= sms:
            parts = sms // tiles, sms // tiles // 2, 2 * sms // tiles
            for split in {min(most, max(1, part)) for part in parts} - {1}:
                yield x, y, block, warps, stages, split


_SIZES = (16, 32, 64, 128, 256)
"""No tile asks for more than whether a size has more than these."""


@functools.lru_cache(maxsize=1 << 10)
def _fitting(
    run: int, rows: int, columns: int, depth: int, low: bool, thin: bool, short: bool, divisor: int, largest: int
) -> tuple[tuple[int, int, int, int, int], ...]:
    """The tiles for sizes of no more than these powers of two, or beyond them all; `divisor`: of K, as of 256."""
    listed = () if run < WIDE or short else _PIPELINED
    listed += () if listed and run > WIDE else _UNPIPELINED
    return tuple(
        [
            (x, y, block, warps, stages)
            for x, y, block, warps, stages in listed
            if x <= 2 * rows
            and y <= 2 * columns
            and (x > 16 or low)
            and (y > 16 or thin)
            and block <= max(64, depth)
            and (stages == 1 or (x * y <= largest and (block <= 64 or divisor % block == 0)))
            and (run >= 4 or (x + y) * block <= _SINGLES * warps)
        ]
    )
