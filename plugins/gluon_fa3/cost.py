"""A guess at how long a config takes on an H200, from the blocks of keys that the busiest SM has to go through.

Fitted to the measurements in benchmarks/results/h200: a launch, and a time for each score of a tile. It is off by 14%
in the mean square; tables correct it by what was measured nearby, so what counts is how it changes with sizes.
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


def cost(problem: Any, config: Mapping[str, Any]) -> float:
    """Microseconds."""
    wide = tier(problem)
    rows, columns = ROWS * config["consumers"], config["BLOCK_N"]
    launch, scores = TIMES[wide, config["consumers"], columns]
    scores *= _WRITTEN.get(wide, 1.0) if config.get("written") else 1.0
    at_once = 2 if config["consumers"] == 1 and (wide == 64 or (wide == 128 and columns == 64)) else 1
    sms = max(problem.target.sm_count, 1)
    tiles = problem.batch * problem.heads_q * -(-problem.seqlen_q // rows)
    usual, longest = _blocks(problem, rows, columns)
    slots = sms * at_once
    if tiles <= sms:
        span = longest
    elif usual == longest:
        span = -(-tiles // slots) * at_once * usual
    elif tiles <= slots:
        span = at_once * max(tiles * usual / slots, min(longest, 2 * usual))
    else:
        span = at_once * (tiles * usual / slots + 0.3 * longest)
    return launch + span * rows * columns * scores * 1e-5


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
