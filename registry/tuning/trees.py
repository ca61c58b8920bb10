"""Trees that tell what variants lose on a problem (tables/trees.py), fitted to measured shapes: by boosting.

Each tree is fitted to what those before it left unexplained of the differences between the variants of a shape; how
fast the shape is at all cancels out. Always the same trees from the same shapes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from registry.tables.nearest import CAP, NEVER, Config, Shape
from registry.tables.trees import Tree, Trees

if TYPE_CHECKING:
    import torch

LEAST = 250
"""Shapes, below which the nearest decide: trees served 105 gradients worse. Fitted to three fourths of 308 and
asked about the others, trees lose 3.2% to the best variant, the nearest 4.0%."""
KNOWN = 50
"""Shapes that a variant ran on, for trees to tell of it on others; what ran on fewer comes last."""
RARE, AGAIN = 0.1, 4
"""Shapes on which a variant ran that ran on a smaller share of all, a new one, count so many times: they alone tell how
it does beside the others. Two new variants on 233 of 4,184 products, asked of the others: 3.7% lost, not 4.0%."""
PARTS = 4
"""Each without every fourth shape; beside them one that has seen all."""
TREES = 80
"""Of a part."""
DEPTH = 6
RATE = 0.1
"""The share of what is left that a tree explains."""
ROWS, COLUMNS = 0.8, 0.7
"""The share of the shapes, and of the coordinates, that a tree is fitted to."""
LEAF = 5
"""Shapes, the fewest of a leaf."""
CAUTION = 2.0
"""Shapes on which nothing is lost that count into every leaf."""
EDGES = 48
"""Of a coordinate that are tried, where it has more values."""


def fitted_trees(
    coordinates: Sequence[str], contestants: Sequence[tuple[str, Config]], shapes: Sequence[Shape]
) -> Trees | None:
    """None where there are too few shapes, or there is nothing to choose."""
    import torch

    from registry.tuning.weights import lost_of

    names, lost = lost_of(contestants, shapes)
    often = [at for at in range(len(names)) if int((~lost[:, at].isnan()).sum()) >= KNOWN]
    names, lost = [names[at] for at in often], lost[:, often]
    if len(shapes) < LEAST or len(names) < 2:
        return None
    lost = torch.where(lost < NEVER, lost.clamp(max=CAP), torch.nan).double()
    points = torch.tensor([shape.point for shape in shapes], dtype=torch.float64)
    place = torch.arange(len(shapes))
    ran = ~lost.isnan()
    telling = ran[:, ran.double().mean(0) < RARE].any(1)
    seen = [place, *(place[place % PARTS != part] for part in range(PARTS))]
    seen = [torch.cat([rows, *[rows[telling[rows]]] * (AGAIN - 1)]) for rows in seen]
    parts = tuple(_Boosted(points[rows], lost[rows], seed).trees for seed, rows in enumerate(seen))
    used = sorted({at for part in parts for tree in part for at in _asked(tree)})
    again = {at: number for number, at in enumerate(used)}
    return Trees(
        tuple(coordinates[at] for at in used),
        tuple(names),
        tuple(tuple(_renumbered(tree, again) for tree in part) for part in parts),
    )


def _asked(tree: Tree) -> set[int]:
    return set() if tree[0] < 0 else {tree[0]} | _asked(tree[2]) | _asked(tree[3])


def _renumbered(tree: Tree, again: dict[int, int]) -> Tree:
    if tree[0] < 0:
        return tree
    return again[tree[0]], tree[1], _renumbered(tree[2], again), _renumbered(tree[3], again)


class _Boosted:
    """The trees of one part."""

    def __init__(self, points: torch.Tensor, lost: torch.Tensor, seed: int) -> None:
        import torch

        self._chance = random.Random(seed)
        self._points, self._variants = points, lost.shape[1]
        self._edges = [_edges(points[:, at]) for at in range(points.shape[1])]
        self._bins = max(len(edges) for edges in self._edges) + 1
        columns = [
            torch.bucketize(points[:, at].contiguous(), edges, right=True) for at, edges in enumerate(self._edges)
        ]
        self._binned = torch.stack(columns, 1)
        known = (~lost.isnan()).double()
        lost = lost.nan_to_num(0.0)
        mean = (lost * known).sum(0) / known.sum(0).clamp_min(1.0)
        expected = mean.expand_as(lost).clone()
        self.trees: tuple[Tree, ...] = ((-1, _rounded(mean)),)
        each = known.sum(1, keepdim=True).clamp_min(1.0)
        for _ in range(TREES):
            left = (lost - expected) * known
            left = (left - left.sum(1, keepdim=True) / each) * known
            rows = [row for row in range(len(points)) if self._chance.random() < ROWS]
            width = max(1, round(COLUMNS * points.shape[1]))
            asked = sorted(self._chance.sample(range(points.shape[1]), width))
            told = torch.cat([left, known, torch.ones(len(left), 1, dtype=torch.float64)], 1)
            tree = self._grown(told, torch.tensor(rows), asked, DEPTH)
            self.trees += (tree,)
            self._add(tree, torch.arange(len(points)), expected)

    def _grown(self, told: torch.Tensor, rows: torch.Tensor, asked: list[int], depth: int) -> Tree:
        """`told`: of each shape what is left of each variant, which of them are known, and a one."""
        import torch

        own, many = told[rows], self._variants
        if depth and len(rows) >= 2 * LEAF:
            bins = self._binned[rows][:, asked] + torch.arange(len(asked)) * self._bins
            sums = torch.zeros(len(asked) * self._bins, own.shape[1], dtype=torch.float64)
            sums.index_add_(0, bins.flatten(), own[:, None].expand(-1, len(asked), -1).flatten(0, 1))
            below = sums.view(len(asked), self._bins, -1).cumsum(1)[:, :-1]
            whole = own.sum(0)
            gain = self._explained(below) + self._explained(whole - below) - self._explained(whole)
            few = torch.minimum(below[..., -1], whole[-1] - below[..., -1]) < LEAF - 0.5
            gain[few] = -1.0
            best = int(gain.argmax())
            if float(gain.flatten()[best]) > 1e-9:
                at, cut = asked[best // (self._bins - 1)], best % (self._bins - 1)
                lower = self._binned[rows, at] <= cut
                sides = (self._grown(told, rows[side], asked, depth - 1) for side in (lower, ~lower))
                return (at, float(self._edges[at][cut]), *sides)
        return -1, _rounded(RATE * own[:, :many].sum(0) / (own[:, many:-1].sum(0) + CAUTION))

    def _explained(self, sums: torch.Tensor) -> torch.Tensor:
        many = self._variants
        found: torch.Tensor = (sums[..., :many].square() / (sums[..., many:-1] + CAUTION)).sum(-1)
        return found

    def _add(self, tree: Tree, rows: torch.Tensor, expected: torch.Tensor) -> None:
        import torch

        if tree[0] < 0:
            expected[rows] += torch.tensor(tree[1], dtype=torch.float64)
            return
        lower = self._points[rows, tree[0]] < tree[1]
        self._add(tree[2], rows[lower], expected)
        self._add(tree[3], rows[~lower], expected)


def _edges(column: torch.Tensor) -> torch.Tensor:
    """Half way between neighbouring values, or between some of them."""
    values = column.unique()
    between = (values[1:] + values[:-1]) / 2
    step = -(-len(between) // EDGES) or 1
    found: torch.Tensor = between[step // 2 :: step].contiguous()
    return found


def _rounded(values: torch.Tensor) -> tuple[float, ...]:
    return tuple(round(float(value), 4) for value in values)
