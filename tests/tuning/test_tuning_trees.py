"""Trees fitted to measured shapes: what they find, and that they do not learn by heart."""

import functools
import math
import random

import pytest

from registry.tables.nearest import NEVER, Neighbours
from registry.tables.shapes import Result, Shape
from registry.tuning import trees as fitting
from registry.tuning.boosting import Extent

MANY = 400
COORDINATES = ("size", "flag", "noise")
EXTENTS = fitting.EXTENTS
CONTESTANTS = (("even", {}), ("flagged", {}), ("rare", {}))


@pytest.fixture(autouse=True)
def few_trees(monkeypatch):
    """As many as a flag and a size take."""
    monkeypatch.setattr(fitting, "EXTENTS", ((10**9, Extent(trees=16, leaves=8, rate=0.3)),))


def fitted_trees(coordinates, contestants, shapes, weights=None):
    """Without weights any shapes are the nearest, so that trees tell better."""
    return fitting.fitted_trees(coordinates, contestants, shapes, weights or {})


def shapes(count: int, lost, seed: int = 1) -> list[Shape]:
    chance = random.Random(seed)
    points = [(chance.uniform(0, 10), float(chance.random() < 0.5), chance.random()) for _ in range(count)]
    return [Shape((at,), point, tuple(Result(*one, 0.0) for one in lost(point))) for at, point in enumerate(points)]


def by_a_flag_and_a_size(point):
    faster = point[0] > 6 and point[1]
    return [(0, 0.3 if faster else 0.0), (1, 0.0 if faster else 0.3)]


@functools.cache
def told_of_a_flag_and_a_size():
    return fitted_trees(COORDINATES, CONTESTANTS, shapes(MANY, by_a_flag_and_a_size))


def test_a_border_of_a_flag_and_a_size_is_found(monkeypatch):
    monkeypatch.setattr(fitting, "EXTENTS", EXTENTS)
    trees = fitted_trees(COORDINATES, CONTESTANTS, shapes(MANY, by_a_flag_and_a_size))
    for size, flag, best in ((9.0, 1.0, "flagged"), (9.0, 0.0, "even"), (3.0, 1.0, "even"), (6.5, 1.0, "flagged")):
        lost = trees.lost(trees.at({"size": size, "flag": flag, "noise": 0.5}))
        assert lost[best] == 0.0 and max(lost.values()) > 0.15, (size, flag, lost)


def test_the_same_shapes_always_give_the_same_trees():
    found = shapes(fitting.LEAST, by_a_flag_and_a_size)
    assert fitted_trees(COORDINATES, CONTESTANTS, found) == fitted_trees(COORDINATES, CONTESTANTS, found)


def test_how_fast_a_shape_is_at_all_does_not_count():
    found = shapes(MANY, by_a_flag_and_a_size)
    slower = [Shape(s.sizes, s.point, tuple(r._replace(lost=r.lost + 0.1) for r in s.results)) for s in found]
    one, other = told_of_a_flag_and_a_size(), fitted_trees(COORDINATES, CONTESTANTS, slower)
    here = {"size": 9.0, "flag": 1.0, "noise": 0.5}
    assert math.isclose(one.lost(one.at(here))["even"], other.lost(other.at(here))["even"], abs_tol=0.01)


def test_a_part_has_not_seen_its_shapes(monkeypatch):
    """What is pure chance cannot be told of a shape that was not seen."""
    monkeypatch.setattr(fitting, "_lost_nearby", lambda *_: math.inf)  # chance tells, too, here
    chance = random.Random(7)
    found = shapes(700, lambda point: _either(chance))
    trees = fitted_trees(COORDINATES, CONTESTANTS, found)
    right = 0
    for place, shape in enumerate(found):
        lost = trees.lost(trees.at(dict(zip(COORDINATES, shape.point, strict=True))), unseen=place)
        right += min(lost, key=lost.get) == CONTESTANTS[min(shape.results, key=lambda r: r.lost).contestant][0]
    assert 0.4 < right / len(found) < 0.6


def _either(chance: random.Random) -> list[tuple[int, float]]:
    first = chance.choice((0, 1))
    return [(first, 0.0), (1 - first, 0.5)]


def test_of_few_shapes_the_luckier_fit_is_kept_unless_the_nearest_lose_clearly_less(monkeypatch):
    asked = []
    monkeypatch.setattr(
        fitting, "_lost_unseen", lambda trees, *_: asked.append(trees) or (3.0, 1.0, 2.0)[len(asked) - 1]
    )
    monkeypatch.setattr(fitting, "_lost_nearby", lambda *_: 1.0)
    found = shapes(fitting.LEAST, by_a_flag_and_a_size)
    kept = fitted_trees(COORDINATES, CONTESTANTS, found)
    assert len(asked) == fitting.CHANCES == 3
    assert kept is asked[1] and kept != asked[0]
    for nearby, decides in ((0.99 * fitting.AHEAD, False), (1.01 * fitting.AHEAD, True)):
        monkeypatch.setattr(fitting, "_lost_nearby", lambda *_, lost=nearby: lost)
        asked.clear()
        assert (fitted_trees(COORDINATES, CONTESTANTS, found) is not None) == decides


def test_few_shapes_and_a_single_variant_have_no_trees():
    assert fitted_trees(COORDINATES, CONTESTANTS, shapes(fitting.LEAST - 1, by_a_flag_and_a_size)) is None
    assert fitted_trees(COORDINATES, CONTESTANTS, shapes(fitting.LEAST, lambda point: [(0, 0.0)])) is None


def test_the_nearest_decide_where_they_choose_better():
    """Of each shape there are two; which variant is faster is chance, and the nearest other shape knows."""
    chance = random.Random(3)
    once = [shape for shape in shapes(MANY // 2, lambda point: _either(chance)) for _ in (0, 1)]
    assert fitted_trees(COORDINATES, CONTESTANTS, once, dict.fromkeys(COORDINATES, 100.0)) is None
    assert told_of_a_flag_and_a_size() is not None


def test_a_variant_that_seldom_runs_is_told_of_where_it_does():
    """As one for a few rows is, which is the fastest there."""
    found = shapes(300, lambda p: [(0, 0.3 if p[0] < 1 else 0.0), *([(2, 0.0)] if p[0] < 1 else [])], seed=5)
    ran = sum(len(shape.results) > 1 for shape in found)
    assert fitting.KNOWN <= ran < 50
    trees = fitted_trees(COORDINATES, CONTESTANTS, found)
    lost = trees.lost(trees.at({"size": 0.5, "flag": 0.0, "noise": 0.5}))
    assert lost["rare"] == 0.0 < lost["even"]


def test_what_ran_on_few_shapes_and_what_failed_is_not_told_of():
    found = shapes(fitting.LEAST, lambda p: [*by_a_flag_and_a_size(p), *([(2, 0.0)] if p[2] < 0.05 else [])])
    assert fitted_trees(COORDINATES, CONTESTANTS, found).variants == ("even", "flagged")
    failing = shapes(fitting.LEAST, lambda p: [(0, 0.2), (1, NEVER if p[0] > 6 else 0.0)])
    trees = fitted_trees(COORDINATES, CONTESTANTS, failing)
    assert max(trees.lost(trees.at({"size": 3.0, "flag": 0.0, "noise": 0.5})).values()) < 0.3


def test_a_newer_variant_is_held_against_what_was_measured_without_it():
    """On a shape that was measured before there was a third variant, the trees say how that does."""
    for gain, first in ((-0.2, "rare"), (0.2, "even")):

        def lost(point, gain=gain):
            known = [(0, 0.0), (1, 0.1)]
            if point[2] < 0.3:  # measured since
                known.append((2, gain))
            least = min(each for _, each in known)
            return [(at, each - least) for at, each in known]

        found = [*shapes(MANY, lost), Shape((0,), (20.0, 0.0, 0.9), ())]
        trees = fitted_trees(COORDINATES, CONTESTANTS, found)
        asked = Neighbours(COORDINATES, dict.fromkeys(COORDINATES, 1.0), CONTESTANTS, found, trees)
        old = next(shape for shape in found if shape.point[2] > 0.3)
        advice = asked.ask(dict(zip(COORDINATES, old.point, strict=True)))
        assert advice.ranked(["even", "flagged", "rare"], ())[0] == first, (gain, advice.lost)
        nothing = asked.ask({"size": 20.0, "noise": 0.9})
        assert set(nothing.lost) == {"even", "flagged", "rare"}, "a shape on which nothing ran says nothing"


def test_shapes_on_which_a_new_variant_comes_near_count_more():
    """Not those that it wins or loses by far, nor those that nobody else runs."""
    import torch

    none, near, far = torch.nan, fitting.CONTESTED / 2, fitting.CONTESTED * 2
    lost = [[0.0, near, none]] * 60 + [
        [0.0, near, near],
        [near, far, 0.0],
        [far, 0.9, 0.0],
        [0.0, none, far],
        [none, none, 0.0],
    ]
    assert fitting._telling(torch.tensor(lost)).tolist() == [False] * 60 + [True, True, False, False, False]
    settled = torch.tensor([[0.0, near]] * 3)
    assert not fitting._telling(settled).any(), "there is no new one"
