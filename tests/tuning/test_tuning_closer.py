"""A closer look is fitted where what variants guess tells more than where a problem lies."""

import random

import pytest

from registry.tables.shapes import Result, Shape
from registry.tuning import closer as fitting
from registry.tuning import trees as fitting_trees
from registry.tuning.boosting import Extent

MANY = 400
CONTESTANTS = (("ours", {}), ("theirs", {}))


@pytest.fixture(autouse=True)
def few_trees(monkeypatch):
    monkeypatch.setattr(fitting_trees, "EXTENTS", ((10**9, Extent(trees=8, leaves=8, rate=0.3)),))


def look(monkeypatch, hidden, guess):
    """Of shapes that lie anywhere, and of which one is faster as a fact says that no coordinate tells."""
    chance = random.Random(3)
    shapes = [
        Shape((at,), (chance.random(),), (Result(0, 0.05 * one, 0.0), Result(1, 0.05 * (not one), 0.0)))
        for at, one in enumerate(hidden)
    ]
    monkeypatch.setattr(fitting, "guesses_of", lambda fact: lambda name: guess(name, fact))
    plain = fitting_trees.fitted_trees(("x",), CONTESTANTS, shapes, {})
    return fitting.closer_look(plain, ("x",), CONTESTANTS, shapes, hidden)


HIDDEN = [random.Random(at).random() < 0.5 for at in range(MANY)]


def test_guesses_that_tell_who_is_faster_are_asked(monkeypatch):
    found = look(monkeypatch, HIDDEN, lambda name, slow: 8.0 if (name == "ours") == slow else 4.0)
    assert found.names == ("ours", "theirs")
    for slow, first in ((True, "theirs"), (False, "ours")):
        lost = found.trees.lost(found.at({"x": 0.5}, lambda name, slow=slow: 8.0 if (name == "ours") == slow else 4.0))
        assert min(lost, key=lost.__getitem__) == first


@pytest.mark.parametrize(
    "guess",
    [
        lambda name, slow: None,
        lambda name, slow: 1.0,
        lambda name, slow: 4.0 + slow if name == "ours" else None,
        lambda name, slow: 4.0 + slow if name == "ours" else 1.0,
    ],
    ids=["none", "the same of all", "one alone", "one, and one the same of all"],
)
def test_less_than_two_that_guess_are_no_closer_look(monkeypatch, guess):
    assert look(monkeypatch, HIDDEN, guess) is None


def test_guesses_that_tell_nothing_are_not_asked(monkeypatch):
    seen = []
    monkeypatch.setattr(fitting, "_lost", lambda trees, closer, *rest: seen.append(closer) or 1.0)
    assert look(monkeypatch, HIDDEN, lambda name, slow: 4.0 + slow + len(name)) is None
    assert seen[0] is None and seen[1] is not None, "it was fitted, and lost as much"
