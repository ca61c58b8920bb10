"""A closer look where two variants are expected to take about as long: trees that ask what variants guess, too.

A guess (`Variant.cost`) is worked out from a problem's own sizes, and takes longer than all coordinates of likeness, so
it is asked for only then. Trees see it in the same steps as sizes: how long the best config of a variant would take,
and how far that is above the least such guess.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from registry.contract.likeness import octaves
from registry.tables.trees import Trees, picker

GUESS, ABOVE = "guess.", "above."
"""How the coordinates of a variant's guess begin: microseconds, and over the least; the variant's name follows."""
CLOSE = 0.05
"""Log time between the first two up to which trees are asked again, as of 14% of random attentions. 4,241 left out in
turn lose 1.49% by variant and config; 1.47 with 0.1 (26%), 1.48 with 0.2, 1.54 with 0.03; 0.2 more without."""
NO_GUESS = 3.0
"""Octaves above the least of a variant that guesses nothing of such problems."""
Guess = Callable[[str], Any]
"""Of the variant of this name: microseconds, or None (`Variant.guess`)."""
Runs = Callable[[str], bool]
"""Whether the claims of the variant of this name let the problem through."""


def coordinates_of(names: Iterable[str]) -> tuple[str, ...]:
    return tuple([how + name for how in (GUESS, ABOVE) for name in names])


def told(names: Sequence[str], guess: Guess) -> tuple[float, ...]:
    """What these variants guess, in those coordinates."""
    found = [guess(name) for name in names]
    known = [one for one in found if one is not None]
    least = min(known) if known else 1.0
    alone = [octaves(one) if one is not None else 0.0 for one in found]
    return (*alone, *[octaves(one / least) if one is not None else NO_GUESS for one in found])


@dataclass(frozen=True)
class Closer:
    """Trees of coordinates of problems, then those of guesses; raises ValueError where they are others."""

    trees: Trees

    def __post_init__(self) -> None:
        if not self.names or self.trees.coordinates[-2 * len(self.names) :] != coordinates_of(self.names):
            raise ValueError("the trees of a closer look do not end with what variants guess")

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of the variants that are asked."""
        return tuple([one.removeprefix(GUESS) for one in self.trees.coordinates if one.startswith(GUESS)])

    @functools.cached_property
    def _place(self) -> Callable[[Mapping[str, float]], tuple[float, ...]]:
        return picker(self.trees.coordinates[: -2 * len(self.names)])

    def at(self, likeness: Mapping[str, float], guess: Guess) -> tuple[float, ...]:
        """Where a problem lies."""
        return (*self._place(likeness), *told(self.names, guess))


def close(expected: Mapping[str, float], runs: Runs | None = None) -> bool:
    """Whether the first two are, of those that run: what a kernel would take that does not is nobody's concern."""
    first = math.inf
    for name in sorted(expected, key=expected.__getitem__):
        if expected[name] - first >= CLOSE:
            break
        if runs is None or runs(name):
            if first < math.inf:
                return True
            first = expected[name]
    return False
