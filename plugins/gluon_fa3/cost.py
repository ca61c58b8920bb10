"""A guess at how long a config takes on an H200, from the blocks of keys that the busiest SM has to go through.

Fitted to the measurements in benchmarks/results/h200: a launch, and a time for each score of a tile. Tables correct it
by what was measured nearby, so what counts is how it changes with sizes. The packed kernel's guess (varlen/cost.py)
takes from here what a tile takes and how many rounds of them there are.

Measured facts: 3,061 attentions, 332 of them on an H100, one half to choose by, one to judge by. The first config by
this guess loses 0.26% and 0.27% to the best that was timed, at most 21% (before: 1.23 and 1.36, at most 43):
- A tile that has an SM with room for two to itself takes longer than half of what two take side by side: 15 us of
  100,000 scores at head dim 128 where each of two takes 9, at head dim 64 8.9 and 6.3. Any ALONE from 1.3 to 1.6 is as
  good within 0.08 points; with 1 it loses 1.2% and 1.3%.
- With a soft cap a score takes 1.4 and 1.5 times as long (1.3 and 1.4 in packed batches): 109 shapes lose 0.06%, for
  0.24 without. It is the ratio that decides.
What failed: TIMES fitted anew to how configs of a shape differ (0.28 to 0.33% on the other half), blocks that a tile
takes besides its own (0.32 to 0.68), the memory's speed as a bound (0.33 to 0.44), what overlapped tiles take at their
end (0.26 to 0.29: configs.py asks for it where tiles are many).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.plugins.gluon_fa3.traits import ROWS, UNLIMITED, tier, window_bounds

# (padded head dim, consumers, BLOCK_N): microseconds of a launch, and of 100,000 scores of an SM
TIMES = {
    (64, 1, 128): (7.0, 6.60),
    (64, 2, 128): (7.4, 6.53),
    (64, 3, 128): (7.9, 5.62),
    (96, 1, 128): (7.3, 11.4),
    (96, 2, 128): (8.2, 7.2),
    (96, 3, 64): (8.0, 7.2),
    (128, 1, 64): (7.6, 11.5),
    (128, 1, 128): (7.3, 14.4),
    (128, 2, 128): (8.2, 8.95),
    (128, 3, 64): (8.0, 9.28),
    (192, 1, 64): (7.7, 18.0),
    (192, 2, 64): (8.5, 12.0),
    (192, 2, 128): (8.5, 10.5),
    (256, 1, 64): (7.7, 21.1),
    (256, 2, 64): (8.5, 14.2),
}


_WRITTEN = {96: 0.93, 128: 0.995, 192: 0.95}  # of the same tile otherwise, in full tiles
CAPPED = {1: 1.3, 2: 1.5}  # times as long where scores have a soft cap, by consumer groups, two and more
ALONE = 1.45  # times as long a tile takes with an SM to itself that has room for two, as half of two side by side do
_TAIL = 0.3  # of the longest tile, by which SMs are done one after the other


def cost(problem: Any, config: Mapping[str, Any]) -> float:
    """Microseconds."""
    wide = tier(problem)
    rows, columns = ROWS * config["consumers"], config["BLOCK_N"]
    launch, scores = TIMES[wide, config["consumers"], columns]
    scores *= _WRITTEN.get(wide, 1.0) if config.get("written") else 1.0
    scores *= capped(problem, config)
    tiles = problem.batch * problem.heads_q * -(-problem.seqlen_q // rows)
    usual, longest = _blocks(problem, rows, columns)
    sms = max(problem.target.sm_count, 1)
    span = span_of(tiles, usual, longest, usual == longest, sms, at_once(wide, config))
    return launch + span * rows * columns * scores * 1e-5


def capped(problem: Any, config: Mapping[str, Any]) -> float:
    """How many times as long a score takes as without a soft cap."""
    return CAPPED[min(config["consumers"], 2)] if problem.softcap else 1.0


def at_once(wide: int, config: Mapping[str, Any]) -> int:
    """Tiles that an SM has room for."""
    return 2 if config["consumers"] == 1 and (wide == 64 or (wide == 128 and config["BLOCK_N"] == 64)) else 1


def span_of(tiles: float, usual: float, longest: float, alike: bool, sms: int, room: int) -> float:
    """Blocks of keys that the busiest SM goes through, the longest tile first; an SM has room for so many tiles.

    Where that is two, a block counts as half of what two tiles side by side take for one each.
    """
    alone, slots = ALONE if room == 2 else 1.0, sms * room
    if room == 1 and (alike or tiles <= sms):
        return -(-tiles // sms) * longest
    if alike or tiles <= sms:
        left = tiles % slots  # of the last round
        return (tiles // slots * room + (room if left > sms else alone if left > 0 else 0.0)) * longest
    every = tiles * usual / sms
    if tiles <= slots:
        return max(every, alone * longest)
    # A tile far longer than others shares its SM as long as these last.
    return max(every + _TAIL * room * longest, every + alone * (longest - every / room))


def _blocks(problem: Any, rows: int, columns: int) -> tuple[float, float]:
    """Blocks of keys of the usual tile, and of the longest."""
    queries, keys = problem.seqlen_q, problem.seqlen_k
    whole = -(-keys // columns)
    left, right = window_bounds(problem.causal, problem.window)
    if left >= UNLIMITED and right >= UNLIMITED:
        return whole, whole
    triangle = max(keys - queries / 2, keys / 2 if keys < queries else 0.0)
    usual = min(whole, max(1.0, (triangle + rows / 2) / columns + 0.5)) if right < UNLIMITED else float(whole)
    if left >= UNLIMITED and not 0 < right < UNLIMITED:
        return usual, whole
    band = min(whole, (min(left, keys) + min(right, keys) + rows) / columns + 0.5)
    return min(usual, band), band
