"""Which leaves some trees come to, found for all of them at once.

Every leaf is a bit of one long number, the first leaf of a tree the highest of its bits. A question whose answer is
"from the edge on" takes away the bits of all leaves below that edge, and what the questions about one coordinate take
away depends only on between which of their edges it lies. So a place is looked up coordinate by coordinate, what is
left is what all of them leave, and a tree comes to the first of its leaves that is left. Coordinates count in steps:
what the few values of one leave is found once for each, and a place is looked up without a line of Python in between.

Built in 2 to 5 ms of trees of 3,000 to 9,000 leaves. Walking trees question by question took one to three times as
long, most of it waiting for memory, where a place is asked about once. Functions written of trees were as fast, but
each four of them took 3 to 10 ms to write, which one new shape in twenty paid for hundreds of shapes.
"""

from __future__ import annotations

import functools
import itertools
import operator
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

Tree = tuple[Any, ...]
"""(place of a coordinate, edge, tree below it, tree from it on), or a leaf: (-1, what it adds for each variant)."""
Leaf = tuple[float, ...]
_Taken = dict[int, dict[float, int]]
"""By coordinate and edge, which leaves go from there on."""
_Take = Callable[[Sequence[Any]], Any]
_number: Any = functools.partial(int.from_bytes, byteorder="big") if sys.version_info < (3, 11) else int.from_bytes
"""Big-endian, which need not be said from Python 3.11 on."""
LANE, HALF, UNIT = 32, 1 << 30, 1e-4
"""Numbers of a leaf lie side by side in one integer, each in a lane of so many bits, in these units, which are decimal
as those of leaves in a file: what is equal there adds up to the same. Sums are kept above that half. Lanes are as
narrow as that, for most of the time goes to memory that was not looked at lately."""
MOST = 100
"""Of log time no leaf has more, so that the sums of a thousand trees fit into their lanes."""
VALUES = 1024
"""For which it is kept what they leave; they go when there are more."""
FEW = 2
"""Edges of coordinates that are looked up together."""


class _Kept(dict[Any, int]):
    """What one coordinate leaves, by its value."""

    def __init__(self, edges: Sequence[float], left: Sequence[int]) -> None:
        self._edges, self._left = edges, left

    def __missing__(self, value: Any) -> int:
        if len(self) >= VALUES:
            self.clear()
        found = self[value] = self.looked_up(value)
        return found

    def looked_up(self, value: Any) -> int:
        """Of a value that must not be kept."""
        return self._left[bisect_right(self._edges, value)]


class _Together(dict[Any, int]):
    """What several coordinates leave that are asked few questions, flags most of them, by their values."""

    def __init__(self, every: int, kept: Sequence[_Kept]) -> None:
        self._every, self._kept = every, kept

    def __missing__(self, values: Sequence[Any]) -> int:
        if len(self) >= VALUES:
            self.clear()
        found = self[values] = self.looked_up(values)
        return found

    def looked_up(self, values: Sequence[Any]) -> int:
        """Of values that must not be kept."""
        return functools.reduce(operator.and_, map(_Kept.looked_up, self._kept, values), self._every)


def taking(places: Sequence[int]) -> _Take:
    """What is in these places of a sequence."""
    if len(places) == 1:
        (place,) = places  # of a single place an itemgetter gives no tuple
        return lambda point: (point[place],)
    return operator.itemgetter(*places) if places else lambda point: ()


class Leaves:
    """Of some trees. Their coordinates come in groups, which begin at 0 and at these places, and are asked about apart:
    what one group leaves may be kept where it stays as it is."""

    def __init__(self, trees: Sequence[Tree], begins: Sequence[int] = ()) -> None:
        if len(trees) * MOST >= HALF * UNIT:
            raise ValueError(f"{len(trees)} trees, more than are added up")
        counts = [_count(tree) for tree in trees]
        size = -(-max(counts) // 64) * 8  # bytes for the leaves of one tree: a word of the machine, or several
        self._length = size * len(trees)
        self._cut = struct.Struct(f">{len(trees)}Q" if size == 8 else f"{size}s" * len(trees)).unpack
        self._words = size == 8
        self._leaves: list[Sequence[int]] = []
        """Of each tree, by how many of its bits there are from the first that is left on. Leaves of one number lie in
        an array, side by side: a list leads to each by another place in memory."""
        self._every = 0
        taken: _Taken = {}
        for number, (tree, count) in enumerate(zip(trees, counts, strict=True)):
            low = 8 * size * (len(trees) - 1 - number)
            leaves: list[Leaf] = []
            _plant(tree, low + count, leaves, taken)
            added = [0, *map(_side_by_side, reversed(leaves))]
            self._leaves.append(array("i", added) if len(leaves[0]) == 1 else added)
            self._every |= ((1 << count) - 1) << low
        begins = 0, *begins, 1 << 30
        self._groups = [
            (
                *self._apart([one for one in places if len(taken[one]) > FEW], low, taken),
                *self._together([one for one in places if len(taken[one]) <= FEW], low, taken),
            )
            for low, high in itertools.pairwise(begins)
            for places in [[place for place in sorted(taken) if low <= place < high]]
        ]
        lanes = len(leaves[0])
        self._halves = sum([HALF << (LANE * lane) for lane in range(lanes)])
        self._lanes = struct.Struct(f"<{lanes}I")

    def _apart(self, places: Sequence[int], low: int, taken: _Taken) -> tuple[_Take, list[_Kept]]:
        """What takes these coordinates out of a group that begins there, and what each leaves."""
        return taking([place - low for place in places]), [self._kept(taken[one]) for one in places]

    def _together(self, places: Sequence[int], low: int, taken: _Taken) -> tuple[_Take, _Together]:
        """The same of coordinates that are looked up together."""
        take, kept = self._apart(places, low, taken)
        return take, _Together(self._every, kept)

    def _kept(self, taken: dict[float, int]) -> _Kept:
        """What is left below the first edge of one coordinate, between any two, from the last on."""
        edges, left = sorted(taken), [self._every]
        for edge in edges:
            left.append(left[-1] & ~taken[edge])
        return _Kept(array("d", edges), left)

    def left(self, point: Sequence[Any], group: int = 0) -> int:
        """Which leaves are left by the coordinates of one group, where a problem or a config lies."""
        taken, kept, taken_together, together = self._groups[group]
        return functools.reduce(
            operator.and_, map(operator.getitem, kept, taken(point)), together[taken_together(point)]
        )

    def left_by_noted(self, point: Sequence[Any], group: int = 0) -> int:
        """The same of numbers that must not be looked up, for they note what is asked of them."""
        taken, kept, taken_together, together = self._groups[group]
        return functools.reduce(
            operator.and_, map(_Kept.looked_up, kept, taken(point)), together.looked_up(taken_together(point))
        )

    def sums(self, left: int) -> list[float]:
        """What the first leaves of all trees that are left add up to."""
        total = self._added(left).to_bytes(self._lanes.size, "little")
        return [(lane - HALF) * UNIT for lane in self._lanes.unpack(total)]

    def totals(self, left: Sequence[int]) -> list[float]:
        """The same of several, where leaves are of one number."""
        return [(added - HALF) * UNIT for added in map(self._added, left)]

    def _added(self, left: int) -> int:
        bits = self._cut(left.to_bytes(self._length, "big"))
        found = bits if self._words else map(_number, bits)
        return sum(map(operator.getitem, self._leaves, map(int.bit_length, found)), self._halves)


def _side_by_side(leaf: Sequence[float]) -> int:
    return sum([round(number / UNIT) << (LANE * lane) for lane, number in enumerate(leaf)])


def _count(tree: Tree) -> int:
    return 1 if tree[0] < 0 else _count(tree[2]) + _count(tree[3])


def _plant(tree: Tree, top: int, leaves: list[Leaf], taken: dict[int, dict[float, int]]) -> int:
    """Give the leaves of a tree the bits below `top`, and note what its questions take away; which bit is next."""
    place = tree[0]
    if place < 0:
        leaves.append(tree[1])
        return top - 1
    middle = _plant(tree[2], top, leaves, taken)
    edges = taken.setdefault(place, {})
    edges[tree[1]] = edges.get(tree[1], 0) | (((1 << (top - middle)) - 1) << middle)
    return _plant(tree[3], middle, leaves, taken)
