"""What variants are expected to lose on a problem: small trees of questions about its coordinates, added up.

A tree asks of one coordinate after the other whether it lies below an edge; the leaf that it comes to adds to what each
variant loses, in log time, or to what a config takes (tables/config_order.py). The trees come in parts. The first was
fitted to all measured shapes, and is asked about problems. Each of the others has not seen some of the shapes, and is
asked about those as if nobody had measured them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.tables.leaves import MOST, Leaves, Tree

OWN = "config."
"""How coordinates of a config begin (tables/config_order.py); they stand behind those of the problem."""
STANDING = 2
"""The first of those: where a config stands among the others of its variant, which hangs on the problem."""
DEEPEST = 32
"""Questions in a row."""


@dataclass(frozen=True)
class Trees:
    """The trees of one rule."""

    coordinates: tuple[str, ...]
    """What they ask about."""
    variants: tuple[str, ...]
    """Whose losses the leaves hold."""
    parts: Sequence[tuple[Tree, ...]]
    """The first was fitted to all shapes, and is all that a dispatcher asks."""
    _leaves: dict[int, Leaves] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By part, what finds its leaves, once it was asked for."""

    def at(self, likeness: Mapping[str, float]) -> tuple[float, ...]:
        """Where a problem lies, in the coordinates of problems that are asked about."""
        return self._place(likeness)

    @functools.cached_property
    def _place(self) -> Callable[[Mapping[str, float]], tuple[float, ...]]:
        return picker(self.coordinates[: self.shared])

    @functools.cached_property
    def shared(self) -> int:
        """How many coordinates, the first ones, are the problem's."""
        return sum(not name.startswith(OWN) for name in self.coordinates)

    def sums(self, here: Sequence[float], unseen: int | None = None) -> list[float]:
        """What the leaves add up to; with `unseen`, the place of a measured shape, those of the part that has not seen
        it."""
        leaves = self.leaves(unseen)
        return leaves.sums(leaves.left(here))

    def leaves(self, unseen: int | None = None) -> Leaves:
        """Of the same part: where a problem lies is the first group of its coordinates, where a config stands the
        second, what it says the third."""
        at = 0 if unseen is None else 1 + unseen % (len(self.parts) - 1)
        found = self._leaves.get(at)
        if found is None:
            found = self._leaves[at] = Leaves(self.parts[at], (self.shared, self.shared + STANDING))
        return found

    def lost(self, here: Sequence[float], unseen: int | None = None) -> dict[str, float]:
        """What each variant is expected to lose to that which loses least."""
        sums = self.sums(here, unseen)
        least = min(sums)
        return dict(zip(self.variants, [lost - least for lost in sums], strict=True))

    def listed(self) -> dict[str, Any]:
        """As plain data: a question is [place of its coordinate, edge, below, from there on], a leaf its numbers."""
        parts = [[_listed(tree) for tree in part] for part in self.parts]
        return {"coordinates": list(self.coordinates), "variants": list(self.variants), "parts": parts}


def picker(names: Sequence[str]) -> Callable[[Mapping[str, float]], tuple[float, ...]]:
    """What a mapping holds under these names, in their order; 0 under one that it lacks."""
    all_there = operator.itemgetter(*names) if len(names) > 1 else None  # of a single name it gives no tuple
    nothing = dict.fromkeys(names, 0.0)

    def pick(likeness: Mapping[str, float]) -> tuple[float, ...]:
        if all_there is None:
            return tuple([likeness.get(name, 0.0) for name in names])
        try:
            return all_there(likeness)  # type: ignore[no-any-return]
        except KeyError:
            return all_there({**nothing, **likeness})  # type: ignore[no-any-return]

    return pick


def trees_of(coordinates: Sequence[str], variants: Sequence[str], parts: Sequence[Callable[[], Any]]) -> Trees:
    """What was listed. Each part is held against itself when it is asked for, and raises ValueError then: most
    processes ask the first part of one rule or two."""
    if not variants or len(parts) < 2:
        raise ValueError("trees without variants, or with less than two parts")
    return Trees(tuple(coordinates), tuple(variants), _Parts(parts, len(coordinates), len(variants)))


class _Parts(Sequence[tuple[Tree, ...]]):
    """Parts of trees, which are read each time they are asked for: what finds their leaves is kept, not they. Ten
    thousand tuples a rule are as many that a collector of garbage stops everything to look at."""

    def __init__(self, parts: Sequence[Callable[[], Any]], coordinates: int, variants: int) -> None:
        self._parts, self._coordinates, self._variants = parts, coordinates, variants

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, at: Any) -> Any:
        listed = self._parts[at]()
        if not isinstance(listed, list) or not listed:
            raise ValueError("a part without trees")
        return tuple([_grown(tree, self._coordinates, self._variants, DEEPEST) for tree in listed])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


def _listed(tree: Tree) -> list[Any]:
    return list(tree[1]) if tree[0] < 0 else [*tree[:2], _listed(tree[2]), _listed(tree[3])]


def _grown(listed: Any, coordinates: int, variants: int, depth: int) -> Tree:
    if not isinstance(listed, list) or depth < 0:
        raise ValueError("a tree is not of lists, or asks too much")
    if len(listed) == 4 and isinstance(listed[3], list):
        place, edge, below, above = listed
        if type(place) is not int or not 0 <= place < coordinates or not _is_number(edge):
            raise ValueError("a tree asks about a coordinate that is not listed, or has no number for an edge")
        return (place, edge, *(_grown(side, coordinates, variants, depth - 1) for side in (below, above)))
    if len(listed) != variants or not all(_is_number(number) and abs(number) < MOST for number in listed):
        raise ValueError("a leaf has not one number for each variant, or one that is no log time")
    return -1, tuple(listed)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
