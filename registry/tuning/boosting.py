"""Boosting: each tree is fitted to what those before it left unexplained. Always the same trees from the same rows.

A tree grows where a question explains most, until it has its leaves. How large it may be, how much of the rest it
explains and what it sees of the rows is a `Extent`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from registry.tables.leaves import Tree

if TYPE_CHECKING:
    import torch

PARTS = 4
"""Of all trees, each without every fourth shape; beside them one that has seen all."""
LEAF = 5
"""Rows, the fewest of a leaf."""
CAUTION = 2.0
"""Rows of which nothing is left that count into every leaf."""
DEPTH = 12
"""Questions in a row, so that an answer takes no longer than it should."""
EDGES = 48
"""Of a coordinate that are tried, where it has more values."""


@dataclass(frozen=True)
class Extent:
    """How much there is of the trees of one part."""

    trees: int
    leaves: int
    """Of a tree."""
    rate: float
    """The share of what is left that a tree explains."""
    rows: float = 0.8
    columns: float = 0.7
    """The share of the rows, and of the coordinates, that a tree is fitted to."""


def boosted(
    points: torch.Tensor, told: torch.Tensor, size: Extent, seed: int, group: torch.Tensor | None = None
) -> tuple[Tree, ...]:
    """Trees that tell the columns of `told` (NaN where a row does not say) from points.

    Only differences count: those between the columns of a row, or, with `group`, those between the rows of a group.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two take as long for such small questions, and three times as long on busy cores
    try:
        return _Boosted(points, told, size, seed, group).trees
    finally:
        torch.set_num_threads(threads)


class _Boosted:
    def __init__(
        self, points: torch.Tensor, told: torch.Tensor, size: Extent, seed: int, group: torch.Tensor | None
    ) -> None:
        import torch

        self._chance, self._size, self._points, self._many = random.Random(seed), size, points, told.shape[1]
        self._edges = [_edges(points[:, at]) for at in range(points.shape[1])]
        self._bins = max(len(edges) for edges in self._edges) + 1
        columns = [
            torch.bucketize(points[:, at].contiguous(), edges, right=True) for at, edges in enumerate(self._edges)
        ]
        self._binned = torch.stack(columns, 1)
        self._known = (~told.isnan()).double()
        told = told.nan_to_num(0.0)
        mean = told.sum(0) / self._known.sum(0).clamp_min(1.0) if group is None else torch.zeros(self._many).double()
        expected = mean.expand_as(told).clone()
        self.trees: tuple[Tree, ...] = ((-1, _rounded(mean)),)
        one = torch.ones(len(told), 1, dtype=torch.float64)
        for _ in range(size.trees):
            left = self._apart((told - expected) * self._known, group)
            tree = self._grown(torch.cat([left, self._known, one], 1), self._drawn(group))
            self.trees += (tree,)
            self._add(tree, torch.arange(len(points)), expected)

    def _apart(self, left: torch.Tensor, group: torch.Tensor | None) -> torch.Tensor:
        """Without what a row has in common, or a group."""
        import torch

        if group is None:
            each = self._known.sum(1, keepdim=True).clamp_min(1.0)
            return (left - left.sum(1, keepdim=True) / each) * self._known
        count = torch.bincount(group).clamp_min(1)[:, None]
        return left - (torch.zeros(len(count), self._many).double().index_add_(0, group, left) / count)[group]

    def _drawn(self, group: torch.Tensor | None) -> torch.Tensor:
        """The rows that a tree is fitted to: groups are drawn whole."""
        import torch

        count = len(self._points) if group is None else int(group.max()) + 1
        drawn = torch.tensor([self._chance.random() < self._size.rows for _ in range(count)])
        return (drawn if group is None else drawn[group]).nonzero()[:, 0]

    def _grown(self, told: torch.Tensor, rows: torch.Tensor) -> Tree:
        """`told`: of each row what is left of each column, which of them are known, and a one."""
        width = self._points.shape[1]
        asked = sorted(self._chance.sample(range(width), max(1, round(self._size.columns * width))))
        root: dict[str, Any] = {"rows": rows, "depth": 0}
        turn, heap = itertools.count(), []  # type: ignore[var-annotated]
        nodes = [root]
        for _ in range(self._size.leaves - 1):
            for node in nodes:
                question = self._question(told, node["rows"], asked) if node["depth"] < DEPTH else None
                if question is not None:
                    heapq.heappush(heap, (-question[0], next(turn), node, question))
            if not heap:
                break
            _, _, node, (_, *node["asks"], lower, upper) = heapq.heappop(heap)
            node["sides"] = nodes = [{"rows": side, "depth": node["depth"] + 1} for side in (lower, upper)]
        return self._tree(told, root)

    def _tree(self, told: torch.Tensor, node: dict[str, Any]) -> Tree:
        if "sides" in node:
            return (*node["asks"], *(self._tree(told, side) for side in node["sides"]))
        own, many = told[node["rows"]], self._many
        return -1, _rounded(self._size.rate * own[:, :many].sum(0) / (own[:, many:-1].sum(0) + CAUTION))

    def _question(self, told: torch.Tensor, rows: torch.Tensor, asked: list[int]) -> Any:
        """(what it explains, place, edge, rows below, rows from it on): the best there is for these rows."""
        import torch

        if len(rows) < 2 * LEAF:
            return None
        own = told[rows]
        bins = self._binned[rows][:, asked] + torch.arange(len(asked)) * self._bins
        sums = torch.zeros(len(asked) * self._bins, own.shape[1], dtype=torch.float64)
        sums.index_add_(0, bins.flatten(), own[:, None].expand(-1, len(asked), -1).flatten(0, 1))
        below = sums.view(len(asked), self._bins, -1).cumsum(1)[:, :-1]
        whole = own.sum(0)
        gain = self._explained(below) + self._explained(whole - below) - self._explained(whole)
        few = torch.minimum(below[..., -1], whole[-1] - below[..., -1]) < LEAF - 0.5
        gain[few] = -1.0
        best = int(gain.argmax())
        if (most := float(gain.flatten()[best])) <= 1e-9:
            return None
        at, cut = asked[best // (self._bins - 1)], best % (self._bins - 1)
        lower = self._binned[rows, at] <= cut
        return most, at, float(self._edges[at][cut]), rows[lower], rows[~lower]

    def _explained(self, sums: torch.Tensor) -> torch.Tensor:
        many = self._many
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
