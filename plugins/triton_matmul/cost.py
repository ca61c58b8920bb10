"""A guess at how long a config takes on an H200: rounds of programs over the chip, each a number of blocks of K.

Fitted to 5,200 timings of 1,100 random products (2 bytes an element, no activation), a good half of them with configs
drawn at random. Fitted to one half of the products, the config that it puts first on the other half was 5.5% slower
than the best that was measured, in the mean (95th percentile about 30%); the ladder of rules that stood here before was
8 to 15% slower. What stands here is fitted to all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class _Speed(NamedTuple):
    """Microseconds, and what one SM does in one."""

    start: float
    """Of a launch."""
    round: float
    """Before the first block of a round has come."""
    wgmma: float
    """Million operations, by the matrix units of tiles with 64 rows and more."""
    mma: float
    """By those of smaller tiles."""
    b_along_k: float
    """The share that products take longer where b is contiguous along K."""
    a_along_m: float
    """And where a is contiguous along M."""
    loads: float
    """Kilobytes."""
    memory: float
    """Megabytes, by the whole chip."""
    epilogue: float
    """Microseconds of a tile of 128 x 128."""
    ragged: float
    """What a last block of K costs that K does not fill."""
    split: float
    part: float
    """What counting and adding up cost; each range of K, for 8,192 elements of a tile."""
    alone: Mapping[int, float]
    """Until a block has come with no other in flight, by the bytes of a run."""
    ahead: float
    """The same where others are in flight: divided by their number."""
    slower: Mapping[int, float]
    """How many times longer loads take, by the bytes of a run."""


_WIDE = _Speed(
    *(0.26, 0.49, 5.4, 0.92, 0.126, 3.14, 73.0, 5.7, 4.2, 0.008, 2.34, 1.43),
    alone={8: 0.85, 16: 1.36},
    ahead=1.2,
    slower={8: 3.3, 16: 1.0},
)
_NARROW = _Speed(
    *(1.04, 0.055, 1.36, 3.1, 0.08, 0.004, 46.3, 4.2, 2.16, 0.0, 1.9, 0.37),
    alone={2: 0.72, 4: 0.7},
    ahead=1.2,
    slower={2: 1.87, 4: 1.43},
)
"""Where the contiguous runs of an operand are shorter than 8 bytes: fitted to 708 timings of 117 products, since blocks
are loaded ahead."""
WIDE = 8

_EFFICIENCY = {(16, 32): 0.69, (16, 64): 0.87, (32, 16): 0.83, (32, 64): 1.17, (32, 128): 1.76, (64, 64): 1.09}
_EFFICIENCY |= {(64, 128): 0.84, (128, 64): 0.62, (128, 128): 1.69, (128, 256): 1.04}
_EFFICIENCY_NARROW = {(64, 32): 1.08, (64, 64): 1.59, (64, 128): 0.96, (128, 64): 0.78, (128, 128): 0.93}


class _Tile(NamedTuple):
    """What is the same for all problems whose operands have runs as long: of one program, and one block of K."""

    at_once: int
    """Programs that an SM has room for."""
    products: float
    rate: float
    """How fast they are multiplied."""
    loads: float
    waits: float
    epilogue: float


@functools.lru_cache(maxsize=1 << 9)
def _tile(run: int, x: int, y: int, block: int, warps: int, stages: int) -> _Tile:
    speed, efficiency = (_WIDE, _EFFICIENCY) if run >= WIDE else (_NARROW, _EFFICIENCY_NARROW)
    ring = max((x + y) * block * 2 * max(stages - (x < 64), 1), x * y * 2) + 1024
    registers = max(4 * x * y + 6144 * warps, 8192 * warps)
    alone = stages == 1 or run < 4  # the compiler has no copies of 2 bytes that could be in flight
    return _Tile(
        at_once=max(1, min(_SHARED // ring, _REGISTERS // registers, _THREADS // (32 * warps), _PROGRAMS)),
        products=2e-6 * x * y * block,
        rate=(speed.wgmma if x >= 64 else speed.mma) * efficiency.get((x, y), 1.0),
        loads=2e-3 * (x + y) * block,
        waits=speed.alone[run] * ((x + y) * block / 8192) ** 0.3 if alone else speed.ahead / (stages - 1),
        epilogue=speed.epilogue * x * y / 16384,
    )


_SHARED, _REGISTERS, _THREADS, _PROGRAMS = 227 << 10, 256 << 10, 2048, 32
"""What an SM has: bytes of shared memory and of registers, threads, programs at once."""


def guesses(problem: Any, run: int) -> Callable[[int, int, int, int, int, int], float]:
    """Microseconds that rows, columns and K of a tile, warps, stages and ranges of K take, for one problem: what is the
    same for all is worked out once. `run`: bytes of the shorter of the operands' contiguous runs: 2, 4, 8 or 16."""
    speed = _WIDE if run >= WIDE else _NARROW
    m, n, k, z, sms = problem.m, problem.n, problem.k, problem.batch or 1, problem.target.sm_count or 132
    moved = 2e-6 * (m * k + k * n + m * n) * z / speed.memory
    layout = 1.0 + speed.b_along_k * (problem.layout[1] == "t") + speed.a_along_m * (problem.layout[0] == "t")
    return functools.partial(_guess, speed, (m, n, k, z, sms), run, layout, moved)


def _guess(
    speed: _Speed,
    sizes: tuple[int, int, int, int, int],
    run: int,
    layout: float,
    moved: float,
    x: int,
    y: int,
    block: int,
    warps: int,
    stages: int,
    split: int,
) -> float:
    m, n, k, z, sms = sizes
    programs = -(-m // x) * -(-n // y) * z * split
    blocks = -(-k // (block * split))

    tile = _tile(run, x, y, block, warps, stages)
    each = min(tile.at_once, -(-programs // sms))  # programs of one SM
    products = tile.products * each / tile.rate * layout
    loads = tile.loads * each / speed.loads * speed.slower[run]
    step = max(products, loads, tile.waits)

    rounds = -(-programs // (sms * tile.at_once))
    ends = tile.epilogue * each + (speed.ragged if k % block else 0.0)
    found = speed.start + max(rounds * (speed.round + blocks * step + ends), moved)
    if split > 1:
        found += speed.split + speed.part * split * x * y / 8192 * min(1.0, programs / sms)
    return found
