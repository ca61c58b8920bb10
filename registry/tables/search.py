"""The nearest of many points, without looking at all of them: a tree of halves, each along one coordinate.

What a search costs hardly grows with the number of points. It finds what a look at all would, ties included.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

Point = tuple[float, ...]
Found = list[tuple[float, int]]
"""(distance, place of the point), nearest first; of two as near the earlier."""

LEAF = 10
"""Points that are looked at one after the other."""
SOME = 24
"""Points that are asked where a tree is halved: looking at all took most of the time."""
SLACK = 1 + 1e-9
"""Distances to a half are sums of squares, those to points are `math.dist`'s: a rounding apart."""


class Half(NamedTuple):
    """Points below and above a gap along one coordinate."""

    axis: int
    low: float
    """The last below the gap."""
    high: float
    """The first above it."""
    below: Tree
    above: Tree


class Leaf(NamedTuple):
    points: tuple[Point, ...]
    places: tuple[int, ...]


Tree = Half | Leaf


def tree_of(points: Sequence[Point]) -> Tree:
    return _grown(points, list(range(len(points))))


def _grown(points: Sequence[Point], places: list[int]) -> Tree:
    """Halved where some of them spread most, until few points are left, or points that are all the same."""
    if len(places) > LEAF:
        some = _widest(points, places[:: max(1, len(places) // SOME)])
        axis = some if some is not None else _widest(points, places) or 0
        order = sorted(places, key=lambda place: points[place][axis])
        values = [points[place][axis] for place in order]
        gaps = [at for at in range(1, len(values)) if values[at] > values[at - 1]]
        if gaps:
            cut = min(gaps, key=lambda at: abs(2 * at - len(values)))
            below, above = _grown(points, order[:cut]), _grown(points, order[cut:])
            return Half(axis, values[cut - 1], values[cut], below, above)
    places = sorted(places)
    return Leaf(tuple([points[place] for place in places]), tuple(places))


def _widest(points: Sequence[Point], places: Sequence[int]) -> int | None:
    """The coordinate along which these spread most; None where they are all the same."""
    columns = list(zip(*(points[place] for place in places), strict=True))
    spreads = [_spread(column) for column in columns]
    most = max(spreads, default=0.0)
    return spreads.index(most) if most > 0.0 else None


def _spread(column: Sequence[float]) -> float:
    return math.dist(column, (math.fsum(column) / len(column),) * len(column))


def nearest(tree: Tree, here: Point, count: int, within: float = math.inf) -> Found:
    """So many points that are no farther than `within`, or all where there are fewer."""
    found: Found = []
    bound = within
    aside = [0.0] * len(here)
    """How far the half being looked at lies aside of `here`, along each coordinate."""

    def look(tree: Tree, squared: float) -> None:
        nonlocal bound
        if isinstance(tree, Half):
            axis, low, high, below, above = tree
            at, before = here[axis], aside[axis]
            if at - low <= high - at:
                near, far, away = below, above, max(high - at, before)
            else:
                near, far, away = above, below, max(at - low, before)
            look(near, squared)
            squared += away * away - before * before
            if squared > bound * bound * SLACK:
                return
            aside[axis] = away
            look(far, squared)
            aside[axis] = before
            return
        away_of = map(math.dist, tree.points, itertools.repeat(here))
        for distance, place in zip(away_of, tree.places, strict=True):
            if distance <= bound:
                found.append((distance, place))
                if len(found) >= count:
                    found.sort()
                    del found[count:]
                    bound = found[-1][0]

    look(tree, 0.0)
    found.sort()
    return found


def reaches(tree: Tree, here: Point, within: float) -> bool:
    """Whether any point is nearer than this: the first that is will do, most often one of the leaf that it falls to."""
    leaf = tree
    while not isinstance(leaf, Leaf):
        axis, low, high, below, above = leaf
        at = here[axis]
        leaf = below if at - low <= high - at else above
    return _has_nearer(leaf, here, within) or (leaf is not tree and _reaches(tree, here, within))


def _reaches(tree: Tree, here: Point, within: float) -> bool:
    if isinstance(tree, Leaf):
        return _has_nearer(tree, here, within)
    axis, low, high, below, above = tree
    at = here[axis]
    near, far, away = (below, above, high - at) if at - low <= high - at else (above, below, at - low)
    return _reaches(near, here, within) or (away < within and _reaches(far, here, within))


def _has_nearer(leaf: Leaf, here: Point, within: float) -> bool:
    return any(map(within.__gt__, map(math.dist, leaf.points, itertools.repeat(here))))
