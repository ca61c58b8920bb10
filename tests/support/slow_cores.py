"""How slow this core is at Python, for tests that hold times to a budget."""

from __future__ import annotations

import math
import time

KNOWN_US = 9.6
"""What `arithmetic` takes on a machine where a new attention is planned in 120 us: 16.5, where that takes 205."""


def arithmetic() -> list[tuple[int, float]]:
    """A fixed piece of Python alone."""
    found: dict[int, float] = {}
    for at in range(100):
        found[at % 7] = found.get(at % 7, 0.0) + math.log2(at + 1.5)
    return sorted(found.items(), key=lambda pair: -pair[1])


def slower_by() -> float:
    """How many times as long as on the machine that budgets were set on; at least once. At best: it may be busy."""
    best = math.inf
    for _ in range(100):
        begun = time.thread_time()
        for _ in range(100):
            arithmetic()
        best = min(best, (time.thread_time() - begun) / 100)
    return max(1.0, best * 1e6 / KNOWN_US)
