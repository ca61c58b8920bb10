"""A guess at how long a config takes on an H200, from the blocks of keys that SMs have to go through.

Lengths are on the device. What the host knows is taken for one sequence as long as the longest and others that are
alike; where only the longest keys are known, the others are to it as their queries are. Tables correct the guess by
what was measured nearby, so what counts is how it changes with tiles.

Measured facts: 1,774 batches, 90 of them on an H100, one half to choose by, one to judge by. The first config by this
guess loses 1.08% and 1.01% to the best that was timed (1.80 and 1.74 before): 2.0% of prompts whose keys may be shared
out (3.5), 0.8% of up to 8 queries (1.6), 0.8% of all else (1.3). In points that the halves lose more without it:
- ALONE of ../cost.py, 0.3 and 0.1. Tiles that do not fill the SMs were guessed to take 0.73 of their time, others 1.0;
- that a sequence far longer than the others shares SMs while these last, and has them to itself after that (span_of),
  0.1 and 0.2; what few tiles get of the memory's speed says nothing beside it;
- _ENDS, 0.3 and 0.3. Overlapped tiles take 1.3 to 1.8 us longer (medians of 258 pairs of configs) where an SM has up
  to four of them, and gain about 0.1 us a tile from 32 on;
- _HALF, 0.1 and 0.1: lengths that differ leave tiles half empty, and a mean that is rounded up does not say so;
- 4.5 TB/s, of 4.8 by the data sheet, where it was 4.0, 0.2 and 0.0.
What failed: a search over all constants (better by this guess alone, worse with trees on top), whole rounds of the
longest sequence's tiles, more time for each share (better on one half only).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from registry.plugins.gluon_fa3.cost import TIMES, at_once, capped, span_of
from registry.plugins.gluon_fa3.traits import ROWS, UNLIMITED, tier, window_bounds
from registry.plugins.gluon_fa3.varlen.configs import BESIDE, FEW, LEAST_BLOCKS, sequences

ALIKE = 0.95  # of the longest, if the mean is as long
# In blocks of keys, what a share takes besides its own, and how many times the mean an uneven one goes through.
_AGAIN, _UNEVEN = 2.0, 1.2
_TRIED = 3  # numbers of waves, one more than are needed and so on
_PARTS, _ADDED = 2.5, 4e-4  # microseconds for a kernel that adds up, and for each row of a head that it does
_BYTES = 4.5e6  # of keys and values a microsecond, if all SMs ask
_FEW_ASK = 1.3  # times its share of that for an SM among few
_HALF = 0.5  # of a tile that a sequence's last has empty, in the mean over lengths that nobody knows
_ENDS, _HIDDEN = 1.4, 0.05  # microseconds that overlapped tiles take more at the end of all, and less for each other


def cost(problem: Any, config: Mapping[str, Any]) -> float:
    """Microseconds."""
    wide, groups, columns = tier(problem), config["consumers"], config["BLOCK_N"]
    launch, scores = TIMES.get((wide, groups, columns)) or TIMES[128, groups, columns]
    scores *= capped(problem, config)
    heads, group = config.get("heads", 1), problem.heads_q // problem.heads_kv
    sms, rows, room = max(problem.target.sm_count, 1), ROWS * groups // heads, at_once(wide, config)
    alike = problem.total_q >= ALIKE * problem.batch * problem.max_seqlen_q > FEW * ALIKE * problem.batch
    tiles, work, longest, keys = 0.0, 0.0, 0.0, 0.0
    for count, queries, own in sequences(problem):
        each = -(-queries // rows) if alike or count == 1 else max(queries / rows + _HALF, 1.0)
        blocks = count * each * problem.heads_kv * -(-group // heads)
        usual, all_seen = _seen(problem, queries, own)
        seen = usual / columns + BESIDE[min(groups, 2)]
        tiles, work, keys = tiles + blocks, work + blocks * seen, keys + count * all_seen
        longest = max(longest, seen)
    if config.get("shared_out"):
        span = _shared(tiles, work, longest, sms * room, alike) * room
        launch += _PARTS + _ADDED * problem.total_q * problem.heads_q
        tiles = float(sms)
    else:
        span = span_of(tiles, work / max(tiles, 1), longest, alike, sms, room)
    if config["overlap"]:
        launch += _ENDS - _HIDDEN * tiles / sms
    share = min(1.0, _FEW_ASK * tiles / sms)  # of the memory's speed
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
