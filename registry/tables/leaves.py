"""Which leaves some trees come to, found for all of them at once.

Every leaf is a bit of one long number, the first leaf of a tree the highest of its bits. A question whose answer is
"from the edge on" takes away the bits of all leaves below that edge, and what the questions about one coordinate take
away depends only on between which of their edges it lies. So a place is looked up coordinate by coordinate, what is
left is what all of them leave, and a tree comes to the first of its leaves that is left.

Built in 2 to 5 ms of trees of 3,000 to 9,000 leaves. Walking trees question by question took one to three times as
long, most of it waiting for memory, where a place is asked about once. Functions written of trees were as fast, but
each four of them took 3 to 10 ms to write, which one new shape in twenty paid for hundreds of shapes.
"""

from __future__ import annotations

import itertools
import operator
import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

Tree = tuple[Any, ...]
"""(place of a coordinate, edge, tree below it, tree from it on), or a leaf: (-1, what it adds for each variant)."""
Leaf = tuple[float, ...]
_number: Any = int.from_bytes
LANE, HALF, UNIT = 32, 1 << 30, 1e-4
"""Numbers of a leaf lie side by side in one integer, each in a lane of so many bits, in these units, which are decimal
as those of leaves in a file: what is equal there adds up to the same. Sums are kept above that half. Lanes are as
narrow as that, for most of the time goes to memory that was not looked at lately."""
MOST = 100
"""Of log time no leaf has more, so that the sums of a thousand trees fit into their lanes."""


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
        taken: dict[int, dict[float, int]] = {}
        for number, (tree, count) in enumerate(zip(trees, counts, strict=True)):
            low = 8 * size * (len(trees) - 1 - number)
            leaves: list[Leaf] = []
            _plant(tree, low + count, leaves, taken)
            added = [0, *map(_side_by_side, reversed(leaves))]
            self._leaves.append(array("i", added) if len(leaves[0]) == 1 else added)
            self._every |= ((1 << count) - 1) << low
        begins = 0, *begins, 1 << 30
        self._groups = [
            [(place - low, *self._looked_up(taken[place])) for place in sorted(taken) if low <= place < high]
            for low, high in itertools.pairwise(begins)
        ]
        lanes = len(leaves[0])
        self._halves = sum([HALF << (LANE * lane) for lane in range(lanes)])
        self._lanes = struct.Struct(f"<{lanes}I")

    def _looked_up(self, taken: dict[float, int]) -> tuple[Sequence[float], list[int]]:
        """The edges of one coordinate, and what is left below the first, between any two, from the last on."""
        edges, left = sorted(taken), [self._every]
        for edge in edges:
            left.append(left[-1] & ~taken[edge])
        return array("d", edges), left

    def left(self, point: Sequence[float], group: int = 0) -> int:
        """Which leaves are left by the coordinates of one group, where a problem or a config lies."""
        left = self._every
        for place, edges, kept in self._groups[group]:
            left &= kept[bisect_right(edges, point[place])]
        return left

    def sums(self, left: int) -> list[float]:
        """What the first leaves of all trees that are left add up to."""
        total = self._added(left).to_bytes(self._lanes.size, "little")
        return [(lane - HALF) * UNIT for lane in self._lanes.unpack(total)]

    def total(self, left: int) -> float:
        """The same, where leaves are of one number."""
        return (self._added(left) - HALF) * UNIT

    def _added(self, left: int) -> int:
        bits = self._cut(left.to_bytes(self._length, "big"))
        found = bits if self._words else map(_number, bits, itertools.repeat("big"))
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
