"""In what grouped products are alike, besides their facts: what tiles make of groups of the mean size."""

from __future__ import annotations

import math
from typing import Any

from registry.contract.likeness import octaves, rounding_up, waves

TILES = ((128, 256), (128, 128), (64, 128))
SAME_KERNEL = ("out", "deterministic")
"""Facts that decide who may run, and change nothing in what does: as coordinates they made such problems far from all
that was measured, and torch's kernel was first where it was expected to lose up to a quarter."""
KILO = 1024
"""Elements and products are counted by so many, that octaves begin where they differ."""


def coordinates(problem: Any) -> dict[str, float]:
    """Tiles of an SM, how full rounds of them are, what lies in tiles and in no group, the work and the matrices. Of a
    persistent kernel's configs on 1,318 shapes, each asked of the others, 2.4% are lost by the choice with these, 2.9
    by facts alone."""
    groups, sms = max(problem.groups, 1), problem.target.sm_count
    wide = max(problem.n * (2 if problem.gated else 1), 1)
    rows, k = (problem.m, problem.each) if problem.form == "inner" else (problem.each, problem.k)
    rows = max(rows, 1)
    tiles = {(high, broad): groups * math.ceil(rows / high) * math.ceil(wide / broad) for high, broad in TILES}
    return {
        "tiles": octaves(tiles[128, 128] / max(sms, 1)),
        **{f"waves_{high}x{broad}": waves(count, sms) for (high, broad), count in tiles.items()},
        **{f"waste_{high}": rounding_up(rows, high) for high in (64, 128)},
        "work": octaves(groups * rows * wide * k / KILO),
        "matrices": octaves(groups * wide * k / KILO),
    }
