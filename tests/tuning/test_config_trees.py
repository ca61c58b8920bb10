"""Trees for configs, fitted to what was timed of them."""

import dataclasses
import math
import random

from registry.tables.config_order import ConfigTrees
from registry.tuning import config_trees as fitting
from registry.tuning.boosting import Extent
from registry.tuning.config_trees import Timed, fitted_config_trees, pooled_config_trees

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


def test_a_kind_with_few_shapes_is_told_by_what_another_was_timed_on():
    few, many = shapes(fitting.LEAST, seed=11), shapes(400, seed=8)
    pooled = pooled_config_trees([(COORDINATES, few), (COORDINATES, many)])
    assert pooled["ours"].shapes == fitting.LEAST + 400
    own = fitted_config_trees(COORDINATES, few)["ours"]
    kept = fitted_config_trees(COORDINATES, few, pooled)["ours"]
    assert kept is pooled["ours"].trees and lost_left_out(kept, few) < lost_left_out(own, few)


def lost_left_out(trees: ConfigTrees, own) -> float:
    return fitting._lost_left_out(trees, {place: timed["ours"] for place, timed in enumerate(own)})


def test_a_kind_that_is_told_better_by_itself_keeps_trees_of_its_own():
    """Of the other kind, which has a hundred shapes for each of this one's, the other configs are fast."""
    few, many = shapes(100, seed=7), shapes(1500, seed=8)
    turned = [{"ours": dataclasses.replace(one["ours"], ms={0: 3.0, 1: 2.0, 2: 1.0})} for one in many]
    pooled = pooled_config_trees([(COORDINATES, few), (COORDINATES, turned)])
    assert fitted_config_trees(COORDINATES, few, pooled) == fitted_config_trees(COORDINATES, few)


def test_a_kind_with_most_of_the_shapes_takes_pooled_trees_unasked(monkeypatch):
    few, many = shapes(fitting.LEAST, seed=7), shapes(fitting.LEAST + 1, seed=8)
    pooled = pooled_config_trees([(COORDINATES, few), (COORDINATES, many)])
    monkeypatch.setattr(fitting, "_fitted", None)
    assert fitted_config_trees(COORDINATES, many, pooled)["ours"] is pooled["ours"].trees


def test_what_was_timed_on_one_kind_alone_is_not_pooled():
    assert pooled_config_trees([(COORDINATES, shapes(100)), (COORDINATES, [{}] * 100)]) == {}
    assert pooled_config_trees([(COORDINATES, shapes(100)), (COORDINATES, shapes(fitting.LEAST - 1))]) == {}


def test_a_part_of_pooled_trees_has_not_seen_what_the_same_part_of_a_kinds_own_would_not_have():
    """Chance, learnt by heart: of each kind a part errs on those shapes that it has not seen, and on no other."""
    chance = random.Random(3)
    kinds = []
    for kind, count in enumerate((81, 90)):
        ms = [{0: 1.0, 1: chance.choice((0.5, 2.0))} for _ in range(count)]
        likenesses = [{"size": float(place), "noise": float(kind)} for place in range(count)]
        kinds.append([{"ours": Timed(one, CONFIGS[:2], None, took)} for one, took in zip(likenesses, ms, strict=True)])
    trees = pooled_config_trees([(COORDINATES, own) for own in kinds])["ours"].trees
    for own in kinds:
        told = lambda place, of, own=own: own[place]["ours"].order(trees, of)[0]  # noqa: E731
        best = [min(timed["ours"].ms, key=timed["ours"].ms.get) for timed in own]
        right = [[told(place, of) == best[place] for place in range(len(own))] for of in range(4)]
        unseen = [right[of][place] for of in range(4) for place in range(len(own)) if place % 4 == of]
        seen = [right[of][place] for of in range(4) for place in range(len(own)) if place % 4 != of]
        assert sum(unseen) / len(unseen) < 0.65 < 0.7 < sum(seen) / len(seen)
