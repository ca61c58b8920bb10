"""What was fastest on the measured shapes nearest to a problem: how a rule with `nearest` ranks, and picks configs.

A measured shape is a point in the coordinates of its op (`Problem.likeness`), each times its weight in the rule, with
what every contestant lost there to the fastest. A variant is expected to lose what it lost on the nearest shapes, the
nearer the more it counts. What compiles here is put before a library's kernel only where such a shape is near.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Config = Mapping[str, Any]

COUNT = 4
"""Shapes that are asked."""
WINDOWS = 0.5, 1.0, 2.0, math.inf
"""Where they are looked for, one after the other, along the coordinates in which the fewest lie close together."""
AXES = 3
"""How many these are."""
REACH = 2.0
"""A kernel that is compiled here goes before a library's where the nearest measured shape is nearer than this."""
CAP = 0.7
"""Most that one shape holds against a variant, in log time: what is twice as slow is bad enough."""
UNKNOWN = 0.75
"""What a variant is expected to lose that was measured on none of the nearest shapes: more than any that was."""
NEVER = 10.0
"""What a contestant loses that gave a wrong result, hung or crashed there."""
OTHER = 0.03
"""What a config is expected to lose to others of its variant where it was not measured itself."""


class Result(NamedTuple):
    """One contestant on one measured shape."""

    contestant: int
    lost: float
    """Log time over the fastest contestant of the shape."""
    guess: float
    """The log of what its variant guessed (`Variant.cost`); 0 where it guesses nothing."""


@dataclass(frozen=True)
class Shape:
    """One measured shape."""

    sizes: tuple[int, ...]
    """The facts that people know it by."""
    point: tuple[float, ...]
    results: tuple[Result, ...]


@dataclass(frozen=True)
class Advice:
    """What the nearest shapes say of one problem."""

    near: tuple[tuple[float, float, Shape], ...]
    """(distance, weight, shape), nearest first."""
    lost: Mapping[str, float]
    """What each variant is expected to lose, in log time."""
    contestants: Sequence[tuple[str, Config]]

    def __str__(self) -> str:
        each = sorted(self.lost.items(), key=lambda pair: pair[1])
        return ", ".join(f"{name} loses {100 * math.expm1(lost):.1f}%" for name, lost in each)

    def ranked(self, names: Sequence[str], libraries: Collection[str]) -> list[str]:
        """These variants, that which is expected to lose least first. Ties stay in the order given."""
        far = not self.near or self.near[0][0] >= REACH
        expected = {name: self.lost.get(name, UNKNOWN) for name in names}
        return sorted(names, key=lambda name: (far and name not in libraries, expected[name]))

    def configs(
        self, variant: str, configs: Sequence[Config], cost: Callable[[Config], float] | None
    ) -> Sequence[Config]:
        """These configs, that which is expected to be fastest first; ties stay in the order given, and so do all of a
        variant that guesses no cost: its configs may mean another thing on each shape (a number of splits)."""
        measured = []
        for _, weight, shape in self.near:
            own = [(self.contestants[r.contestant][1], r.lost - r.guess) for r in shape.results if self._of(r, variant)]
            if own:
                measured.append((weight, own, sum(lost for _, lost in own) / len(own) + OTHER))
        if cost is None or not measured or len(configs) < 2:
            return configs
        whole = sum(weight for weight, _, _ in measured)

        def expected(config: Config) -> float:
            off = sum(w * next((lost for c, lost in own if c == config), other) for w, own, other in measured)
            return off / whole + math.log(max(cost(config), 1e-9))

        return sorted(configs, key=expected)

    def _of(self, result: Result, variant: str) -> bool:
        return self.contestants[result.contestant][0] == variant


@dataclass
class Neighbours:
    """The measured shapes of one rule, ready to be asked about problems."""

    names: tuple[str, ...]
    """Of the coordinates."""
    weights: Mapping[str, float]
    contestants: Sequence[tuple[str, Config]]
    shapes: Sequence[Shape]
    _points: list[tuple[float, ...]] = field(init=False)
    _shapes: list[Shape] = field(init=False)
    _axes: list[int] = field(init=False)
    """The coordinates that divide the points best; the points are in the order of the first."""
    _columns: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        used = [place for place, name in enumerate(self.names) if self.weights.get(name)]
        self._used = [self.names[place] for place in used]
        self._scale = [float(self.weights[name]) for name in self._used]
        points = [
            (tuple(w * shape.point[place] for w, place in zip(self._scale, used, strict=True)), shape)
            for shape in self.shapes
        ]
        crowds = [_crowd(sorted(column)) for column in zip(*(point for point, _ in points), strict=True)]
        self._axes = sorted(range(len(crowds)), key=crowds.__getitem__)[:AXES]
        points.sort(key=lambda pair: [pair[0][axis] for axis in self._axes])
        self._points, self._shapes = [point for point, _ in points], [shape for _, shape in points]
        self._columns = [[point[axis] for point in self._points] for axis in self._axes]

    def ask(self, likeness: Mapping[str, float], without: Shape | None = None) -> Advice | None:
        """What the nearest shapes say of a problem, leaving one out; None where there are none."""
        if not self._points:
            return None
        here = tuple([w * likeness.get(name, 0.0) for w, name in zip(self._scale, self._used, strict=True)])
        nearest = [(d, shape) for d, place in self._nearest(here) if (shape := self._shapes[place]) is not without]
        near = tuple((d, math.exp(-d * d) + 1e-4 / (1 + d * d), shape) for d, shape in nearest[:COUNT])
        return Advice(near, self._lost(near), self.contestants)

    def _nearest(self, here: tuple[float, ...]) -> list[tuple[float, int]]:
        """(distance, place) of the nearest points, one more than are asked."""
        for window in WINDOWS:
            found = self._within(here, window)
            if len(found) > COUNT:  # no other is nearer than the last of these
                return found if found[COUNT][0] <= window else self._within(here, found[COUNT][0])
        return found

    def _within(self, here: tuple[float, ...], window: float) -> list[tuple[float, int]]:
        """The same of the points that are no farther along any of a few coordinates."""
        places: Sequence[int] = range(len(self._points))
        for axis, column in zip(self._axes, self._columns, strict=True):
            low, high = here[axis] - window, here[axis] + window
            if axis == self._axes[0]:
                places = range(bisect_left(column, low), bisect_right(column, high))
            else:
                places = [place for place in places if low <= column[place] <= high]
        return _least(here, self._points, places)

    def _lost(self, near: Sequence[tuple[float, float, Shape]]) -> dict[str, float]:
        sums: dict[str, list[float]] = {}
        for _, weight, shape in near:
            best: dict[str, float] = {}
            for contestant, lost, _ in shape.results:
                name = self.contestants[contestant][0]
                best[name] = min(lost if lost >= NEVER else min(lost, CAP), best.get(name, lost))
            for name, lost in best.items():
                held = sums.setdefault(name, [0.0, 0.0])
                held[0] += weight * lost
                held[1] += weight
        return {name: lost / weight for name, (lost, weight) in sums.items()}


def _crowd(column: list[float]) -> int:
    """How many points lie a window or less apart along one coordinate."""
    return sum(bisect_right(column, at + WINDOWS[0]) - bisect_left(column, at - WINDOWS[0]) for at in column)


def _least(
    here: tuple[float, ...], points: Sequence[tuple[float, ...]], places: Sequence[int]
) -> list[tuple[float, int]]:
    """(distance, place) of the nearest points among some, one more than are asked."""
    distances = list(map(math.dist, map(points.__getitem__, places), itertools.repeat(here)))
    ordered = sorted(distances)
    last = ordered[min(COUNT, len(ordered) - 1)] if ordered else 0.0
    return sorted((d, place) for d, place in zip(distances, places, strict=True) if d <= last)[: COUNT + 1]
