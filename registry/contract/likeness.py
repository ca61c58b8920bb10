"""Parts of the coordinates in which problems of an op are alike (`Problem.likeness`).

Sizes count in steps: a coordinate only tells between which two edges a size lies. So a decision by such coordinates
holds for all sizes between them (contract/noted.py), not for one length of a cache alone.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from registry.contract.noted import Noted, noting

STEPS = 8
"""To a doubling."""
LOWEST = -STEPS
_EDGES = [2.0 ** (step / STEPS) for step in range(LOWEST, 64 * STEPS)]
_MARKS = [LOWEST / STEPS, *((step + LOWEST) / STEPS for step in range(len(_EDGES)))]
"""What a size counts that is not below so many edges."""
_EXACT = 53
"""Integers of so many bits are what they are as floats, too, which are found in a list of floats in a third of the
time."""
_LARGEST = 1 << _EXACT


def is_size(value: Any) -> bool:
    """Whether it is a number that others may lie between, as those of a flag do not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def octaves(value: Any) -> float:
    """A size on a scale where each doubling is one, by the edge that it is not below; half of one and less is -1."""
    if type(value) is not Noted:
        return _MARKS[bisect_right(_EDGES, 1.0 * value if type(value) is int and not value >> _EXACT else value)]
    place = bisect_right(_EDGES, value.value)  # between which edges it lies, and no more, is asked of it
    assert (not place or value >= _EDGES[place - 1]) and (place == len(_EDGES) or value < _EDGES[place])
    return _MARKS[place]


def in_octaves(sizes: Sequence[Any]) -> Iterable[float]:
    """Several sizes as `octaves` has them, without a line of Python for each."""
    if noting() or max(sizes, default=0) >= _LARGEST:
        return map(octaves, sizes)
    return map(_MARKS.__getitem__, map(bisect_right, itertools.repeat(_EDGES), map(float, sizes)))


def counted(*names: str) -> Callable[[dict[str, Any]], dict[str, float]]:
    """What turns the sizes that a dict has under these names into octaves; the rest stays, and where it is."""
    sizes_of = operator.itemgetter(*names)

    def count(found: dict[str, Any]) -> dict[str, float]:
        found.update(zip(names, in_octaves(sizes_of(found)), strict=True))
        return found

    return count


def waves(tiles: Any, slots: int) -> float:
    """How much longer whole rounds of tiles over the SMs take than the tiles would without a tail, in octaves; 1 where
    the tiles fill no more than half of a round."""
    return octaves(rounds(tiles, slots))


def rounds(tiles: Any, slots: int) -> Any:
    """The same before it is counted in octaves."""
    slots = max(slots, 1)
    return -(-tiles // slots) * slots / tiles if 2 * tiles > slots else 2.0


def rounding_up(size: Any, tile: int) -> float:
    """How much larger a size is once it is covered with tiles, in octaves."""
    return octaves(-(-size // tile) * tile / size)
