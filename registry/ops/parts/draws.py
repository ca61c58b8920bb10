"""Random shapes by seed, for measuring what no grid has seen: never chosen by hand, drawn anew for every sweep."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from registry.ops.parts.cases import Case


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """An integer, each factor of two as likely as any other; not rounded to anything."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def drawn(draw: Callable[[random.Random], Case], seed: int, count: int) -> list[Case]:
    """The first `count` shapes of a seed. A longer draw of the same seed begins with a shorter one."""
    rng = random.Random(seed)
    found: dict[Case, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
