"""Which measured shape lies where a problem does, if one does: told by few coordinates before all are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from registry.tables.search import Point
from registry.tables.shapes import Shapes, rounded
from registry.tables.trees import picker

TELLING, SAMPLE = 4, 300
"""Coordinates by which a problem is told from nearly all measured shapes before all are compared, and of how many
shapes they are chosen."""


class Same:
    """The shapes of one rule, by what tells them apart."""

    def __init__(self, names: Sequence[str], rows: Shapes) -> None:
        self._rows, self._point = rows, picker(names)
        telling = _told_apart(rows)
        self._telling = picker([names[place] for place in telling])
        self._there: dict[Point, tuple[int, ...]] = {}
        for place, point in enumerate(rows.points):
            told = tuple([point[one] for one in telling])
            self._there[told] = (*self._there.get(told, ()), place)

    def place_of(self, likeness: Mapping[str, float], without: int | None) -> int | None:
        """The first shape that lies where a problem does, to the digits that are kept of it: it counts as measured, and
        what was fastest there is served, whatever the trees say."""
        there = self._there.get(rounded(self._telling(likeness)))
        if there is None:
            return None
        point = rounded(self._point(likeness))
        return next((place for place in there if place != without and self._rows.point(place) == point), None)


def _told_apart(shapes: Shapes) -> list[int]:
    """Few coordinates that tell shapes apart: hardly a problem lies where a shape does, and these say so."""
    rows = shapes.rows[:: -(-len(shapes) // SAMPLE)]
    columns = list(zip(*[point for _, point, _ in rows], strict=True))
    found: list[int] = []
    groups = [0] * len(rows)
    for _ in range(TELLING):
        best = max(range(len(columns)), key=lambda place: len(set(zip(groups, columns[place], strict=True))))
        numbers: dict[Any, int] = {}
        groups = [numbers.setdefault(pair, len(numbers)) for pair in zip(groups, columns[best], strict=True)]
        found.append(best)
    return found
