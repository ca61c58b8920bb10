"""Trees that tell which config is fastest: what they are asked, and who answers where they cannot."""

import dataclasses
import json
import math
import random

import pytest

from registry.contract.noted import Notes
from registry.tables import measured
from registry.tables.config_order import ASKED, GUESS, PLACE, ConfigTrees, coordinates_of, own_order
from registry.tables.nearest import NEVER, Neighbours
from registry.tables.shapes import Result, Shape
from registry.tables.trees import Trees

CONFIGS = [{"BLOCK": 128, "MODE": "coop"}, {"BLOCK": 64, "MODE": "coop"}, {"BLOCK": 64, "MODE": "pingpong"}]
COORDINATES = ("size", PLACE, GUESS, "config.BLOCK", "config.MODE=pingpong")
SMALL_IS_FAST = [0, 10.0, [3, 100.0, [-0.2], [0.0]], [0.0]]
"""Below a size of 10, where a block has less than 100."""
PINGPONG_IS_SLOW = [4, 0.5, [0.0], [0.05]]


def config_trees(*trees, coordinates=COORDINATES, unseen=None) -> ConfigTrees:
    part = tuple(map(_tree, trees))
    return ConfigTrees(Trees(coordinates, ("ours",), (part, tuple(map(_tree, unseen or trees)))))


def _tree(listed):
    return (-1, tuple(listed)) if len(listed) == 1 else (*listed[:2], *map(_tree, listed[2:]))


def test_what_is_asked_of_configs():
    assert coordinates_of(CONFIGS) == (PLACE, GUESS, "config.BLOCK", "config.MODE=coop", "config.MODE=pingpong")
    trees = config_trees(SMALL_IS_FAST)
    assert trees.told(own_order(CONFIGS, None)) == [(0, 0.0, 128, False), (1, 0.0, 64, False), (2, 0.0, 64, True)]


def test_a_guess_counts_in_octaves_above_the_least():
    guessed = [({"BLOCK": 64}, 3.0), ({"BLOCK": 64}, 6.0), ({"BLOCK": 64}, 12.1)]
    assert [one[1] for one in config_trees(SMALL_IS_FAST).told(guessed)] == [0.0, 1.0, 2.0]


def test_a_config_that_lacks_a_value_or_has_others_is_asked_about_all_the_same():
    (told,) = config_trees(SMALL_IS_FAST).told([({"WIDTH": 8, "DEEP": True}, 3.0)])
    assert told == (0, 0.0, 0, False)


def test_what_is_kept_of_configs_is_what_is_found_anew():
    """Where they stand and what they say are kept apart, as either comes with any other."""
    listed, draw = [SMALL_IS_FAST, PINGPONG_IS_SLOW, [1, 1.5, [2, 0.5, [0.1], [0.2]], [0.3]]], random.Random(1)
    trees = config_trees(*listed)
    for _ in range(100):
        order = [(draw.choice(CONFIGS), draw.choice([1.0, 1.5, 4.0])) for _ in range(4)]
        likeness = {"size": draw.uniform(0, 20)}
        assert trees.totals(likeness, order) == config_trees(*listed).totals(likeness, order)


def test_the_fastest_is_first_and_ties_stay_in_the_variants_order():
    trees = config_trees(SMALL_IS_FAST, PINGPONG_IS_SLOW)
    assert trees.in_order({"size": 3.0}, CONFIGS, None) == [CONFIGS[1], CONFIGS[2], CONFIGS[0]]
    assert trees.in_order({"size": 30.0}, CONFIGS, None) == [CONFIGS[0], CONFIGS[1], CONFIGS[2]]


def test_what_a_variant_guesses_counts():
    trees = config_trees(SMALL_IS_FAST)
    cost = {128: 10.0, 64: 10.0 * math.exp(0.3)}
    guess = lambda config: cost[config["BLOCK"]]  # noqa: E731
    assert trees.in_order({"size": 3.0}, CONFIGS, guess)[0] == CONFIGS[0], "0.3 longer, less 0.2, is 0.1 longer"
    assert trees.in_order({"size": 3.0}, CONFIGS, lambda config: 10.0)[0] == CONFIGS[1]


def test_without_one_of_the_guesses_the_variants_own_order_stands():
    """Trees correct guesses, and say nothing of a config without one."""
    trees = config_trees(SMALL_IS_FAST)
    guess = lambda config: None if config["MODE"] == "pingpong" else 1.0  # noqa: E731
    assert trees.in_order({"size": 3.0}, CONFIGS, guess) == CONFIGS
    assert own_order(CONFIGS, guess) == [(config, 1.0) for config in CONFIGS]


def test_what_is_said_of_a_noted_size_holds_for_others():
    """No exact length is learnt of a guess, so that a cache that grows by a token is not decided anew."""
    notes = Notes()
    with notes:
        (size,) = notes.sizes([100])
        config_trees(SMALL_IS_FAST).in_order({"size": 3.0}, CONFIGS, lambda config: size * config["BLOCK"])
    assert not any("==" in condition for condition in notes._conditions), notes._conditions


def test_a_measured_shape_is_told_by_trees_that_have_not_seen_it():
    trees = config_trees(SMALL_IS_FAST, unseen=[[0.0]])
    assert trees.in_order({"size": 3.0}, CONFIGS, None, unseen=0)[0] == CONFIGS[0]


def test_of_many_configs_the_first_are_asked_about_and_all_are_answered():
    many = [{"BLOCK": 1000 - place} for place in range(ASKED + 5)] + [{"BLOCK": 1}]
    found = config_trees(SMALL_IS_FAST).in_order({"size": 3.0}, many, None)
    assert found == many, "the fast one is too far behind to be asked about"


@pytest.mark.parametrize(
    "coordinates",
    [
        ("size", GUESS, PLACE, "config.BLOCK", "config.MODE=pingpong"),
        ("size", PLACE, GUESS, "config.MODE=pingpong", "config.BLOCK"),
        ("size",),
        (PLACE, GUESS, "config.BLOCK", "config.MODE=pingpong", "size"),
    ],
)
def test_coordinates_in_another_order_are_refused(coordinates):
    with pytest.raises(ValueError, match=PLACE):
        config_trees([0.0], coordinates=coordinates)


def test_trees_of_several_variants_are_no_trees_of_configs():
    with pytest.raises(ValueError, match="one variant"):
        ConfigTrees(Trees(COORDINATES, ("ours", "theirs"), (((-1, (0.0, 0.0)),),) * 2))


CONTESTANTS = tuple(("ours", config) for config in CONFIGS)


def neighbours(trees: ConfigTrees | None) -> Neighbours:
    shapes = [Shape((size,), (float(size),), (Result(2, 0.0, 0.0),)) for size in (1, 5, 50)]
    return Neighbours(("size",), {"size": 1.0}, CONTESTANTS, shapes, None, {"ours": trees} if trees else {})


def test_on_a_measured_shape_what_was_fastest_there_is_first():
    asked = neighbours(config_trees(SMALL_IS_FAST, PINGPONG_IS_SLOW))
    assert asked.ask({"size": 5.0}).configs("ours", CONFIGS, None)[0] == CONFIGS[2]
    assert asked.ask({"size": 4.0}).configs("ours", CONFIGS, None)[0] == CONFIGS[1]
    left_out = asked.ask({"size": 5.0}, without=1)
    assert left_out.configs("ours", CONFIGS, None)[0] == CONFIGS[1]


@pytest.mark.parametrize("trees", [None, config_trees(SMALL_IS_FAST, PINGPONG_IS_SLOW)])
def test_what_was_fastest_on_a_measured_shape_needs_no_guess(trees):
    shapes = [Shape((5,), (5.0,), (Result(0, 0.3, 4.0), Result(1, 0.1, 0.0), Result(2, 0.0, 0.0)))]
    trees = {"ours": trees} if trees else {}
    asked = Neighbours(("size",), {"size": 1.0}, CONTESTANTS, shapes, None, trees)
    nothing = lambda config: None  # noqa: E731
    assert asked.ask({"size": 5.0}).configs("ours", CONFIGS, nothing) == [CONFIGS[2], *CONFIGS[:2]]
    assert asked.ask({"size": 6.0}).configs("ours", CONFIGS, nothing) == CONFIGS


def test_where_all_failed_on_a_measured_shape_none_is_the_fastest():
    shapes = [Shape((5,), (5.0,), (Result(0, NEVER, 0.0), Result(1, NEVER, 0.0)))]
    asked = Neighbours(("size",), {"size": 1.0}, CONTESTANTS, shapes)
    found = asked.ask({"size": 5.0}).configs("ours", CONFIGS[:2], lambda config: float(config["BLOCK"]))
    assert found == [CONFIGS[1], CONFIGS[0]], "as the variant guesses"


def test_a_measured_shape_that_differs_in_what_weighs_nothing_is_another():
    shapes = [Shape((5,), (5.0, bits), (Result(fastest, 0.0, 0.0),)) for bits, fastest in ((4.0, 0), (3.0, 2))]
    trees = {"ours": config_trees(SMALL_IS_FAST, PINGPONG_IS_SLOW)}
    asked = Neighbours(("size", "bits"), {"size": 1.0}, CONTESTANTS, shapes, None, trees)
    first = [asked.ask({"size": 5.0, "bits": bits}).configs("ours", CONFIGS, None)[0] for bits in (4.0, 3.0)]
    assert first == [CONFIGS[0], CONFIGS[2]]


def test_an_answer_is_kept_for_problems_that_lie_in_the_same_place_and_no_other():
    asked = neighbours(config_trees(SMALL_IS_FAST))
    near, same, other = (asked.ask({"size": size}) for size in (4.0, 4.0, 30.0))
    assert near is same and near.configs("ours", CONFIGS, None) is same.configs("ours", CONFIGS, None)
    assert other.configs("ours", CONFIGS, None)[0] == CONFIGS[0]
    assert near.configs("ours", CONFIGS[::2], None)[0] == CONFIGS[2]


def test_a_problem_that_only_trees_for_configs_tell_apart_is_another():
    trees = config_trees([0, 10.0, [0.0], [3, 100.0, [-0.2], [0.0]]], coordinates=("flag", *COORDINATES[1:]))
    asked = neighbours(trees)
    assert asked.ask({"size": 5.5}).configs("ours", CONFIGS, None)[0] == CONFIGS[0]
    assert asked.ask({"size": 5.5, "flag": 20.0}).configs("ours", CONFIGS, None)[0] == CONFIGS[1]


def test_without_trees_and_without_a_guess_the_variants_order_stays():
    assert neighbours(None).ask({"size": 4.0}).configs("ours", CONFIGS, None) == CONFIGS


def written(trees: ConfigTrees) -> str:
    shape = Shape((1,), (1.0,), (Result(0, 0.0, 0.0),))
    return measured.text(
        measured.MeasuredSizes(
            ("m",), {0: ((1,),)}, ("size",), {0: (shape,)}, CONTESTANTS, config_trees={0: {"ours": trees}}
        )
    )


def read(text: str) -> measured.MeasuredSizes:
    return measured._checked(measured.Decoder(measured._File).decode(text.encode()))


def test_what_is_written_is_what_is_read():
    trees = config_trees(SMALL_IS_FAST, PINGPONG_IS_SLOW)
    text = written(trees)
    assert read(text).config_trees == {0: {"ours": trees}}
    assert measured.text(read(text)) == text


def test_a_config_may_say_a_fraction_and_what_could_not_be_read_is_not_written():
    shape = Shape((1,), (1.0,), (Result(0, 0.0, 0.0),))
    sizes = ("m",), {0: ((1,),)}, ("size",), {0: (shape,)}
    made = measured.MeasuredSizes(*sizes, (("ours", {"SHARE": 0.5}),))
    assert read(measured.text(made)) == made
    for wrong in (math.nan, 2 * measured.MOST):
        shapes = {0: (Shape((1,), (1.0,), (Result(0, 0.0, wrong),)),)}
        with pytest.raises(ValueError, match="JSON|number|float"):
            measured.text(measured.MeasuredSizes(*sizes[:3], shapes, made.contestants))


def test_a_file_whose_trees_ask_for_something_else_is_refused():
    data = json.loads(written(config_trees(SMALL_IS_FAST)))
    data["config_trees"]["0"]["ours"]["coordinates"][1:3] = [GUESS, PLACE]
    with pytest.raises(ValueError, match=PLACE):
        read(json.dumps(data))


def of_two_rules() -> measured.MeasuredSizes:
    """Whose trees are the same, each knowing its configs in an order of its own."""
    one = dataclasses.replace(config_trees(SMALL_IS_FAST), order="1" * 12)
    shape = Shape((1,), (1.0,), (Result(0, 0.0, 0.0),))
    trees = {0: {"ours": one}, 1: {"ours": ConfigTrees(one.trees, "2" * 12)}}
    rules, shapes = {0: ((1,),), 1: ((1,),)}, {0: (shape,), 1: (shape,)}
    return measured.MeasuredSizes(("m",), rules, ("size",), shapes, CONTESTANTS, config_trees=trees)


def test_trees_of_several_rules_are_written_once_and_read_as_one():
    text = measured.text(of_two_rules())
    assert text.count('"parts"') == 1
    found = read(text).config_trees
    assert found[0]["ours"].trees is found[1]["ours"].trees
    assert [found[rule]["ours"].order[0] for rule in (0, 1)] == ["1", "2"]
    assert measured.text(read(text)) == text


@pytest.mark.parametrize("told", [{"1": {"ours": [2, ""]}}, {"1": {"theirs": [0, ""]}}, {"1": {"ours": [1, ""]}}])
def test_a_file_that_names_trees_of_a_rule_without_them_is_refused(told):
    data = {**json.loads(measured.text(of_two_rules())), "same": told}
    with pytest.raises(ValueError, match="which has none"):
        read(json.dumps(data))
