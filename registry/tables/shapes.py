"""Measured shapes: where each lies, and what every contestant lost there to the fastest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

from registry.tables.search import Point

Sizes = tuple[int, ...]
DIGITS = 3
"""Of a coordinate that are kept of a measured shape."""
HERE = 1000.0
"""No log of any time."""
Row = tuple[Sizes, Point, tuple[float, ...]]
"""A shape as a file has it: three numbers for each result."""


class Result(NamedTuple):
    """One contestant on one measured shape."""

    contestant: int
    lost: float
    """Log time over the fastest contestant of the shape."""
    guess: float
    """The log of what its variant guessed (`Variant.cost`); 0 where it guesses nothing. HERE: a config that nothing but
    this measurement tells."""

    @property
    def here(self) -> bool:
        """Whether it runs on this very shape alone, and says nothing of others."""
        return self.guess >= HERE


@dataclass(frozen=True)
class Shape:
    """One measured shape."""

    sizes: Sizes
    """The facts that people know it by."""
    point: Point
    results: tuple[Result, ...]


class Shapes(Sequence[Shape]):
    """Many of them, kept as rows of numbers and made into a `Shape` when one is asked for.

    A tuple of numbers is nothing to a collector of garbage. As objects the 19,000 shapes of three ops made it look at
    354,000 instead of 269,000 in a process, and stop that for 0.14 s instead of 0.10 to 0.13.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    @classmethod
    def of(cls, shapes: Iterable[Shape]) -> Shapes:
        if isinstance(shapes, cls):
            return shapes
        return cls([(one.sizes, one.point, tuple([x for result in one.results for x in result])) for one in shapes])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: Any) -> Any:
        return tuple(starmap(_shape, self.rows[at])) if isinstance(at, slice) else _shape(*self.rows[at])

    def __iter__(self) -> Iterator[Shape]:
        return starmap(_shape, self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def points(self) -> list[Point]:
        return [point for _, point, _ in self.rows]

    def point(self, place: int) -> Point:
        return self.rows[place][1]

    def losers(self, least: float) -> set[int]:
        """Contestants that lost so much on one of them."""
        found = [flat for *_, flat in self.rows if max(flat[1::3], default=0.0) >= least]
        pairs = (pair for flat in found for pair in zip(flat[::3], flat[1::3], strict=True))
        return {int(contestant) for contestant, lost in pairs if lost >= least}


def _shape(sizes: Sizes, point: Point, flat: tuple[float, ...]) -> Shape:
    results = zip(map(int, flat[::3]), flat[1::3], flat[2::3], strict=True)
    return Shape(sizes, point, tuple(starmap(Result, results)))


class _Rounded(dict[float, float]):
    """Numbers to the digits that are kept: most coordinates are one of few steps, and rounding takes its time."""

    MOST = 4096
    """They go when there are more."""

    def __missing__(self, value: float) -> float:
        if len(self) >= self.MOST:
            self.clear()
        found = self[value] = round(value, DIGITS)
        return found


_TO_DIGITS = _Rounded()


def rounded(point: Point) -> Point:
    """A point as a measured shape would have it."""
    return tuple(map(_TO_DIGITS.__getitem__, point))
