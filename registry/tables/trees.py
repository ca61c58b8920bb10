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
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OWN = "config."
"""How coordinates of a config begin (tables/config_order.py); they stand behind those of the problem."""
DEEPEST = 32
"""Questions in a row."""
TOGETHER = 4
"""Trees that become one function: of 128 leaves each that takes 3 ms."""
OFTEN = 64
"""How often trees are asked before more of them become code."""
Tree = tuple[Any, ...]
"""(place of a coordinate, edge, tree below it, tree from it on), or a leaf: (-1, what it adds for each variant)."""


@dataclass(frozen=True)
class Trees:
    """The trees of one rule."""

    coordinates: tuple[str, ...]
    """What they ask about."""
    variants: tuple[str, ...]
    """Whose losses the leaves hold."""
    parts: Sequence[tuple[Tree, ...]]
    """The first was fitted to all shapes, and is all that a dispatcher asks."""
    _functions: tuple[Callable[..., Any], ...] = field(default=(), init=False, repr=False, compare=False)
    """The first trees of the first part as code. Of one variant each adds what some trees say of its configs; of
    several each gives the leaves that it comes to."""
    _asked: list[None] = field(default_factory=list, init=False, repr=False, compare=False)
    """One for each time since."""

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
        reached: list[Sequence[float]] = []
        trees = self._part(unseen)
        if unseen is None and len(self.variants) > 1:
            functions = self._functions  # there may be more of them at any time
            for function in functions:
                reached += function(here)
            trees = self._in_no_code(trees, functions)
        for tree in trees:
            while (place := tree[0]) >= 0:
                tree = tree[2] if here[place] < tree[1] else tree[3]
            reached.append(tree[1])
        return list(map(sum, zip(*reached, strict=True)))

    def totals(
        self, here: Sequence[float], each: Sequence[tuple[float, ...]], unseen: int | None = None
    ) -> list[float]:
        """Their only sum, where they are of one variant, for each of its configs, which lie at `each` of one problem's
        `here`."""
        found, trees = [0.0] * len(each), self._part(unseen)
        if unseen is None:
            functions = self._functions
            for function in functions:
                function(found, here, each)
            trees = self._in_no_code(trees, functions, len(each))
        for at, own in enumerate(each) if trees else ():
            point, sums = (*here, *own), found[at]
            for tree in trees:
                while (place := tree[0]) >= 0:
                    tree = tree[2] if point[place] < tree[1] else tree[3]
                sums += tree[1][0]
            found[at] = sums
        return found

    def _in_no_code(self, trees: tuple[Tree, ...], functions: Sequence[Any], times: int = 1) -> tuple[Tree, ...]:
        """The trees of the first part that these functions leave; from time to time there are more functions."""
        left = trees[TOGETHER * len(functions) :]
        if left:
            self._asked.extend([None] * times)
            if len(self._asked) >= OFTEN:
                self._write_more()
        return left

    def _write_more(self) -> None:
        """Have the next few trees as code, which takes half the time; all at once would take too long for one call."""
        with _writing:
            if len(self._asked) >= OFTEN:
                at = TOGETHER * len(self._functions)
                trees, shared = self.parts[0][at : at + TOGETHER], self.shared
                own = len(self.coordinates) - shared
                function = _adding(trees, shared, own) if len(self.variants) == 1 else _reaching(trees, shared)
                object.__setattr__(self, "_functions", (*self._functions, function))
                self._asked.clear()

    def _part(self, unseen: int | None) -> tuple[Tree, ...]:
        return self.parts[0 if unseen is None else 1 + unseen % (len(self.parts) - 1)]

    def lost(self, here: Sequence[float], unseen: int | None = None) -> dict[str, float]:
        """What each variant is expected to lose to that which loses least."""
        sums = self.sums(here, unseen)
        least = min(sums)
        return {name: lost - least for name, lost in zip(self.variants, sums, strict=True)}

    def listed(self) -> dict[str, Any]:
        """As plain data: a question is [place of its coordinate, edge, below, from there on], a leaf its numbers."""
        parts = [[_listed(tree) for tree in part] for part in self.parts]
        return {"coordinates": list(self.coordinates), "variants": list(self.variants), "parts": parts}


def picker(names: Sequence[str]) -> Callable[[Mapping[str, float]], tuple[float, ...]]:
    """What a mapping holds under these names, in their order; 0 under one that it lacks."""
    all_there = operator.itemgetter(*names) if len(names) > 1 else None  # of a single name it gives no tuple

    def pick(likeness: Mapping[str, float]) -> tuple[float, ...]:
        if all_there is not None:
            try:
                return all_there(likeness)  # type: ignore[no-any-return]
            except KeyError:
                pass
        return tuple([likeness.get(name, 0.0) for name in names])

    return pick


def trees_of(coordinates: Sequence[str], variants: Sequence[str], parts: Sequence[Callable[[], Any]]) -> Trees:
    """What was listed, held against itself: the first part at once, each of the others when it is first asked for, for
    most processes never ask. Raises ValueError."""
    if not variants or len(parts) < 2:
        raise ValueError("trees without variants, or with less than two parts")
    found = Trees(tuple(coordinates), tuple(variants), _Parts(parts, len(coordinates), len(variants)))
    found.parts[0]
    return found


class _Parts(Sequence[tuple[Tree, ...]]):
    """Parts of trees that are read when they are first asked for."""

    def __init__(self, parts: Sequence[Callable[[], Any]], coordinates: int, variants: int) -> None:
        self._parts, self._coordinates, self._variants = parts, coordinates, variants
        self._grown: list[tuple[Tree, ...] | None] = [None] * len(parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, at: Any) -> Any:
        found = self._grown[at]
        if found is None:
            listed = self._parts[at]()
            if not isinstance(listed, list) or not listed:
                raise ValueError("a part without trees")
            counts = self._coordinates, self._variants
            found = self._grown[at] = tuple(_grown(tree, *counts, DEEPEST) for tree in listed)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]


_writing = threading.Lock()


def _adding(trees: Sequence[Tree], shared: int, own: int) -> Callable[..., Any]:
    """A function that adds what these trees of one variant say of each of its configs to a list of sums."""
    lines = [f"{_names(0, shared)}= here", f"for at, ({_names(shared, own)}) in enumerate(each):", " sums = found[at]"]
    return _written(
        "found, here, each", [*lines, *(f" sums += {_code(t, _alone)}" for t in trees), " found[at] = sums"]
    )


def _reaching(trees: Sequence[Tree], shared: int) -> Callable[..., Any]:
    """A function that gives the leaves that these trees come to from one place."""
    reached = ", ".join(_code(tree, repr) for tree in trees)
    return _written("here", [f"{_names(0, shared)}= here", f"return {reached},"])


def _names(first: int, count: int) -> str:
    """Of so many coordinates, each with a comma, so that one is a tuple, too."""
    return "".join(f"x{place}, " for place in range(first, first + count))


def _written(takes: str, lines: Sequence[str]) -> Callable[..., Any]:
    scope: dict[str, Any] = {}
    exec("\n ".join([f"def function({takes}):", *lines]), scope)
    function: Callable[..., Any] = scope["function"]
    return function


def _alone(leaf: tuple[float, ...]) -> str:
    return repr(float(leaf[0]))


def _code(tree: Tree, leaf: Callable[[tuple[float, ...]], str]) -> str:
    if tree[0] < 0:
        return leaf(tree[1])
    return f"({_code(tree[2], leaf)} if x{tree[0]} < {tree[1]!r} else {_code(tree[3], leaf)})"


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
    if len(listed) != variants or not all(map(_is_number, listed)):
        raise ValueError("a leaf has not one number for each variant")
    return -1, tuple(listed)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
