"""Parts of the coordinates in which problems of an op are alike (`Problem.likeness`)."""

from __future__ import annotations

import math


def octaves(value: float) -> float:
    """A size on a scale where each doubling is one step."""
    return math.log2(value) if value > 0.5 else -1.0


def waves(tiles: int, slots: int) -> float:
    """How much longer whole rounds of tiles over the SMs take than the tiles would without a tail, in octaves; 1 where
    the tiles fill no more than half of a round."""
    slots = max(slots, 1)
    return math.log2(-(-tiles // slots) * slots / tiles) if 2 * tiles > slots else 1.0


def rounding_up(size: int, tile: int) -> float:
    """How much larger a size is once it is covered with tiles, in octaves."""
    return math.log2(-(-size // tile) * tile / size)
