"""The nearest of many points: what a look at all of them finds, and how few are looked at."""

import math
import random
from types import SimpleNamespace

import pytest

from registry.tables import search


def drawn(count, kind, dims=4, seed=0):
    """Points anywhere, points on a grid (as far from here as each other), a few crowds, or all the same."""
    draw = random.Random(f"{kind} {count} {seed}")
    one = {
        "anywhere": lambda: draw.gauss(0, 3),
        "grid": lambda: float(draw.randrange(3)),
        "crowds": lambda: draw.choice((0.0, 50.0)) + draw.random(),
        "same": lambda: 1.0,
    }[kind]
    return [tuple(one() for _ in range(dims)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["anywhere", "grid", "crowds", "same"])
@pytest.mark.parametrize("count", [1, 4, 11, 300])
def test_it_finds_what_a_look_at_all_finds(kind, count):
    points = drawn(count, kind)
    tree = search.tree_of(points)
    for here in (*drawn(40, kind, seed=1), *drawn(40, "anywhere", seed=2), *points[:5]):
        every = sorted((math.dist(point, here), place) for place, point in enumerate(points))
        assert search.nearest(tree, here, 5) == every[:5]
        within = every[min(3, len(every) - 1)][0]
        assert search.nearest(tree, here, 5, within) == [pair for pair in every[:5] if pair[0] <= within]
        assert search.reaches(tree, here, every[0][0] * 1.001 + 1e-9)
        assert not search.reaches(tree, here, every[0][0])


def test_the_cost_hardly_grows_with_the_points(monkeypatch):
    looked = []

    def dist(one, other):
        looked.append(one)
        return math.dist(one, other)

    monkeypatch.setattr(search, "math", SimpleNamespace(dist=dist, fsum=math.fsum, inf=math.inf))
    costs = []
    for count in (1000, 8000):
        tree = search.tree_of(drawn(count, "anywhere", dims=3))
        looked.clear()
        for here in drawn(50, "anywhere", dims=3, seed=3):
            search.nearest(tree, here, 5)
        costs.append(len(looked) / 50)
    assert costs[0] < 150 and costs[1] < 1.5 * costs[0], costs
