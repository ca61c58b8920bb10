"""What the measured shapes nearest to a problem say of it."""

import math
import random

import pytest

from registry.tables.nearest import COUNT, REACH, TRUST, Advice, Neighbours
from registry.tables.shapes import HERE, Result, Shape


def made_up(*shapes):
    """Neighbours along one coordinate: (place, {contestant: lost}) each."""
    points = [
        Shape((int(at),), (float(at),), tuple(Result(c, lost, 0.0) for c, lost in results.items()))
        for at, results in shapes
    ]
    contestants = (("ours", {"TILE": 1}), ("ours", {"TILE": 2}), ("library", {}))
    return Neighbours(("x",), {"x": 1.0}, contestants, points)


@pytest.mark.parametrize("count", [3, 40, 400])
def test_the_search_finds_the_nearest_of_all(count):
    draw = random.Random(count)
    point = lambda: tuple(draw.choice((draw.gauss(0, 3), draw.randrange(3))) for _ in range(5))  # noqa: E731
    shapes = [Shape((place,), point(), (Result(0, 0.0, 0.0),)) for place in range(count)]
    names = tuple("abcde")
    weights = dict(zip(names, (0.3, 1.0, 5.0, 0.0, 0.7), strict=True))
    neighbours = Neighbours(names, weights, (("ours", {}),), shapes)
    scaled = lambda at: [weights[name] * x for name, x in zip(names, at, strict=True)]  # noqa: E731
    for _ in range(100):
        here = point()
        every = sorted((math.dist(scaled(here), scaled(shape.point)), place) for place, shape in enumerate(shapes))
        for without in (None, every[0][1]):
            advice = neighbours.ask(dict(zip(names, here, strict=True)), without)
            wanted = [distance for distance, place in every if place != without][:COUNT]
            assert [distance for distance, _, _ in advice.near] == pytest.approx(wanted)


def test_the_nearer_shape_counts_more():
    asked = made_up((0, {0: 0.0, 2: 0.3}), (1, {0: 0.3, 2: 0.0}))
    order = lambda x: asked.ask({"x": x}).ranked(["library", "ours"], {"library"})  # noqa: E731
    assert order(0.2) == ["ours", "library"] and order(0.8) == ["library", "ours"]


def test_beyond_what_was_measured_the_librarys_kernel_is_first_unless_it_lost_much():
    asked, much = made_up((0, {0: 0.0, 2: TRUST - 0.01})), made_up((0, {0: 0.0, 2: TRUST}))
    assert asked.ask({"x": REACH - 0.1}).ranked(["library", "ours"], {"library"}) == ["ours", "library"]
    assert asked.ask({"x": REACH + 0.1}).ranked(["ours", "library"], {"library"}) == ["library", "ours"]
    assert much.ask({"x": REACH + 0.1}).ranked(["library", "ours"], {"library"}) == ["ours", "library"]


def test_who_ran_alone_is_held_against_none():
    """A shape that one variant can run, beside one where both were measured and the other was the faster."""
    asked = made_up((0, {0: 0.0}), (1, {0: 0.2, 2: 0.0}))
    advice = asked.ask({"x": 0.1})
    assert advice.lost == {"ours": pytest.approx(0.2), "library": 0.0}
    assert advice.ranked(["ours", "library"], {"library"}) == ["library", "ours"]
    assert made_up((0, {0: 0.0})).ask({"x": 0.0}).lost == {}


def test_ties_stay_in_the_order_given():
    advice = made_up((0, {0: 0.0, 2: 0.0})).ask({"x": 0.0})
    assert advice.ranked(["library", "ours"], {"library"}) == ["library", "ours"]


def test_a_config_is_what_its_variant_guesses_corrected_by_what_was_measured():
    tiles = [{"TILE": 1}, {"TILE": 2}]
    advice = made_up((0, {0: 0.2, 1: 0.0, 2: 0.5})).ask({"x": 0.1})
    assert list(advice.configs("ours", tiles, None)) == tiles, "a variant that guesses nothing keeps its own order"
    assert advice.configs("ours", tiles, lambda config: 1.0)[0] == {"TILE": 2}
    assert advice.configs("ours", tiles, lambda config: 1.0 if config["TILE"] == 1 else 1.5)[0] == {"TILE": 1}
    assert list(advice.configs("others", tiles, lambda config: 1.0)) == tiles


def test_advice_says_what_each_variant_lost_nearby():
    advice = made_up((0, {0: 0.0, 2: math.log(1.25)})).ask({"x": 0.0})
    assert isinstance(advice, Advice) and str(advice) == "ours loses 0.0%, library loses 25.0%"


def test_a_measured_shape_is_served_by_what_was_fastest_on_it_whatever_lies_around():
    around = [(1 + place / 10, {0: 0.3, 2: 0.0}) for place in range(1, COUNT)]
    asked = made_up((1, {0: 0.0, 2: 0.01}), *around)
    order = lambda x: asked.ask({"x": x}).ranked(["library", "ours"], {"library"})  # noqa: E731
    assert order(1.0) == ["ours", "library"] and order(1.01) == ["library", "ours"]


def test_a_config_that_nothing_but_its_measurement_tells_runs_on_that_shape_alone():
    tiles = [{"TILE": 1}, {"TILE": 2}]
    shape = Shape((1,), (1.0,), (Result(0, 0.4, 0.0), Result(1, 0.0, HERE), Result(2, 0.1, 0.0)))
    asked = Neighbours(("x",), {"x": 1.0}, (("ours", tiles[0]), ("ours", tiles[1]), ("library", {})), [shape])
    there, beside = asked.ask({"x": 1.0}), asked.ask({"x": 1.01})
    assert there.ranked(["library", "ours"], {"library"}) == ["ours", "library"]
    assert there.configs("ours", tiles, None)[0] == tiles[1]
    assert beside.ranked(["library", "ours"], {"library"}) == ["library", "ours"]
    assert list(beside.configs("ours", tiles, None)) == tiles
    assert beside.lost["ours"] == pytest.approx(0.4)
