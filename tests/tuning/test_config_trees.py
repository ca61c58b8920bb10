"""Trees for configs, fitted to what was timed of them."""

import math
import random

from registry.tables.config_order import ConfigTrees
from registry.tuning import config_trees as fitting
from registry.tuning.boosting import Extent
from registry.tuning.config_trees import Timed, fitted_config_trees

COORDINATES = ("size", "noise")
CONFIGS = [{"BLOCK": 128, "MODE": "coop"}, {"BLOCK": 64, "MODE": "coop"}, {"BLOCK": 32, "MODE": "solo"}]


def takes(size: float, config) -> float:
    """Large blocks are for large sizes."""
    return 1.0 + 0.2 * abs(math.log2(config["BLOCK"]) - 5 - size / 4)


def shapes(count: int, cost=None, fails=None, seed: int = 1) -> list[dict[str, Timed]]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        likeness = {"size": chance.uniform(0, 8), "noise": chance.random()}
        scale = 2.0 ** chance.uniform(-5, 5)
        ms = {at: scale * takes(likeness["size"], config) for at, config in enumerate(CONFIGS)}
        if fails is not None:
            ms[fails] = math.inf
        found.append({"ours": Timed(likeness, CONFIGS, cost, ms)})
    return found


def first(trees: ConfigTrees, size: float, cost=None):
    return trees.in_order({"size": size, "noise": 0.5}, CONFIGS, cost)[0]["BLOCK"]


def test_which_config_is_fastest_where_is_found_however_fast_shapes_are():
    trees = fitted_config_trees(COORDINATES, shapes(200))["ours"]
    assert [first(trees, size) for size in (0.5, 4.0, 7.5)] == [32, 64, 128]


def test_a_guess_is_corrected():
    cost = lambda config: float(config["BLOCK"])  # noqa: E731
    trees = fitted_config_trees(COORDINATES, shapes(200, cost))["ours"]
    assert [first(trees, size, cost) for size in (0.5, 4.0, 7.5)] == [32, 64, 128]


def test_a_config_that_fails_is_not_chosen():
    trees = fitted_config_trees(COORDINATES, shapes(200, fails=1))["ours"]
    assert 64 not in [first(trees, size) for size in (0.5, 4.0, 7.5)]


def test_the_same_shapes_always_give_the_same_trees():
    one, other = (fitted_config_trees(COORDINATES, shapes(100)) for _ in range(2))
    assert one == other


def test_there_are_more_trees_for_more_shapes_and_other_ones_where_costs_are_guessed(monkeypatch):
    of = lambda trees: Extent(trees=trees, leaves=4, rate=0.5)  # noqa: E731
    monkeypatch.setattr(fitting, "EXTENTS", {0: of(2), 60: of(3), 70: of(4)})
    monkeypatch.setattr(fitting, "GUESSED", of(5))
    monkeypatch.setattr(fitting, "MANY", 70)
    guess = lambda config: 1.0  # noqa: E731
    asked = ((59, None), (60, None), (60, guess), (70, None), (70, guess))
    fitted = [fitted_config_trees(COORDINATES, shapes(count, cost))["ours"] for count, cost in asked]
    begun = len(fitted[0].trees.parts[0]) - 2  # from the mean
    assert [len(one.trees.parts[0]) - begun for one in fitted] == [2, 3, 3, 4, 5]


def test_few_shapes_have_no_trees_and_nothing_timed_has_none():
    assert fitted_config_trees(COORDINATES, shapes(fitting.LEAST - 1)) == {}
    assert fitted_config_trees(COORDINATES, [{}] * 100) == {}


def test_a_shape_left_out_is_told_by_the_others():
    """What is pure chance cannot be told of a shape that was not seen, and is learnt by heart of one that was."""
    chance = random.Random(3)
    found = []
    for place in range(200):
        ms = {0: 1.0, 1: chance.choice((0.5, 2.0))}
        found.append({"ours": Timed({"size": float(place), "noise": 0.0}, CONFIGS[:2], None, ms)})
    trees = fitted_config_trees(COORDINATES, found)["ours"]
    best = [min(timed["ours"].ms, key=timed["ours"].ms.get) for timed in found]
    unseen = sum(timed["ours"].order(trees, place)[0] == best[place] for place, timed in enumerate(found)) / 200
    seen = sum(timed["ours"].order(trees, None)[0] == best[place] for place, timed in enumerate(found)) / 200
    assert unseen < 0.62 < seen
