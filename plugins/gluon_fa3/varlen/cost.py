"""A guess at how long a config takes on an H200, from the blocks of keys that SMs have to go through.

Lengths are on the device. What the host knows is taken for one sequence as long as the longest and others that are
alike; where only the longest keys are known, the others are to it as their queries are. Tables correct the guess by
what was measured nearby, so what counts is how it changes with tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from registry.plugins.gluon_fa3.cost import TIMES
from registry.plugins.gluon_fa3.traits import ROWS, UNLIMITED, tier, window_bounds
from registry.plugins.gluon_fa3.varlen.configs import BESIDE, FEW, LEAST_BLOCKS, sequences

ALIKE = 0.95  # of the longest, if the mean is as long
# In blocks of keys, what a share takes besides its own, and how many times the mean an uneven one goes through.
_AGAIN, _UNEVEN = 2.0, 1.2
_TRIED = 3  # numbers of waves, one more than are needed and so on
_CAPPED = {1: 1.15, 2: 1.33}  # times as long where scores have a soft cap, by consumer groups
_PARTS, _ADDED = 2.5, 4e-4  # microseconds for a kernel that adds up, and for each row of a head that it does
_BYTES = 4.0e6  # of keys and values a microsecond, if all SMs ask
_ALONE = 1.3  # times its share of that for an SM among few


def cost(problem: Any, config: Mapping[str, Any]) -> float:
    """Microseconds."""
    wide, groups, columns = tier(problem), config["consumers"], config["BLOCK_N"]
    launch, scores = TIMES.get((wide, groups, columns)) or TIMES[128, groups, columns]
    scores *= _CAPPED[min(groups, 2)] if problem.softcap else 1.0
    heads, group = config.get("heads", 1), problem.heads_q // problem.heads_kv
    sms, rows = max(problem.target.sm_count, 1), ROWS * groups // heads
    at_once = 2 if groups == 1 and (wide == 64 or (wide == 128 and columns == 64)) else 1
    tiles, work, longest, keys = 0.0, 0.0, 0.0, 0.0
    for count, queries, own in sequences(problem):
        blocks = -(-queries // rows) * problem.heads_kv * -(-group // heads)
        usual, all_seen = _seen(problem, queries, own)
        seen = usual / columns + BESIDE[min(groups, 2)]
        tiles, work, keys = tiles + count * blocks, work + count * blocks * seen, keys + count * all_seen
        longest = max(longest, seen)
    alike = problem.total_q >= ALIKE * problem.batch * problem.max_seqlen_q > FEW * ALIKE * problem.batch
    if config.get("shared_out"):
        span = _shared(tiles, work, longest, sms * at_once, alike) * at_once
        launch += _PARTS + _ADDED * problem.total_q * problem.heads_q
        tiles = float(sms)
    elif tiles <= sms:
        span = longest
    elif alike:
        span = -(-tiles // (sms * at_once)) * at_once * longest
    elif tiles <= sms * at_once:
        span = max(work / sms, longest)
    else:
        span = max(work / sms + 0.3 * at_once * longest, longest)
    share = min(1.0, _ALONE * tiles / sms)  # of the memory's speed
    memory = keys * problem.heads_kv * (problem.head_dim + problem.head_dim_v) * 2 / (_BYTES * share)
    return launch + max(span * ROWS * groups * columns * scores * 1e-5, memory)


def _seen(problem: Any, queries: float, keys: float) -> tuple[float, float]:
    """Keys that a usual tile of a sequence sees, and that all of them do."""
    left, right = window_bounds(problem.causal, problem.window)
    if left < UNLIMITED:
        return min(keys, left + min(queries, ROWS)), min(keys, left + queries)
    if right < UNLIMITED:
        return max(keys - min(queries, keys) / 2, 1), keys
    return keys, keys


def _shared(tiles: float, work: float, longest: float, slots: int, alike: bool) -> float:
    """Blocks that an SM goes through for each tile that it works on at once, where keys are shared out."""
    even = max(work / slots, LEAST_BLOCKS)
    if not alike:
        return _UNEVEN * even + _AGAIN
    first = math.ceil(tiles / slots)
    waves = [(n, max(min(n * slots // tiles, longest / LEAST_BLOCKS), 1)) for n in range(first, first + _TRIED)]
    return min(n * (longest / shares + _AGAIN) for n, shares in waves)
