"""A closer look: where variants are expected to take about as long, what they guess is asked for, and only there."""

from functools import partial

import pytest

from registry.contract.noted import Notes
from registry.tables import measured, nearest
from registry.tables.closer import CLOSE, NO_GUESS, Closer, close, coordinates_of, told
from registry.tables.nearest import Neighbours
from registry.tables.shapes import Result, Shape
from registry.tables.trees import trees_of

CONTESTANTS = (("ours", {}), ("theirs", {}), ("library", {}))
SHAPES = tuple(Shape((x,), (float(x),), tuple(Result(at, 0.1 * at, 0.0) for at in range(3))) for x in range(4))
PLAIN = [0, 2.5, [0.0, 0.04, 0.4], [0.0, 0.2, 0.4]]
"""Below 2.5 the first two are close."""
LOOKED = [3, 0.5, [0.0, 0.3, 0.5], [0.3, 0.0, 0.5]]
"""Whether the guess of ours is half an octave above the least."""


def trees(coordinates, tree):
    return trees_of(coordinates, ["ours", "theirs", "library"], [partial(list, [tree]), partial(list, [tree])])


def closer() -> Closer:
    return Closer(trees(["size", *coordinates_of(["ours", "theirs"])], LOOKED))


def neighbours() -> Neighbours:
    return Neighbours(("size",), {"size": 1.0}, CONTESTANTS, SHAPES, trees(["size"], PLAIN), {}, closer())


def test_guesses_count_in_steps_alone_and_over_the_least():
    assert coordinates_of(["a", "b"]) == ("guess.a", "guess.b", "above.a", "above.b")
    assert told(["a", "b"], {"a": 8.0, "b": 2.0}.get) == (3.0, 1.0, 2.0, 0.0)
    assert told(["a", "b"], {"b": 2.0}.get) == (0.0, 1.0, NO_GUESS, 0.0)
    assert told(["a"], {}.get) == (0.0, NO_GUESS)


@pytest.mark.parametrize(
    "guess, first", [({"ours": 4.0, "theirs": 2.0}, "theirs"), ({"ours": 2.0, "theirs": 4.0}, "ours")]
)
def test_where_the_first_two_are_close_guesses_decide(guess, first):
    ranked = neighbours().ask({"size": 1.4}, guess=guess.get).ranked(["library", "theirs", "ours"], ["library"])
    assert ranked[0] == first
    assert neighbours().ask({"size": 1.4}, guess=guess.get).guessing == ("ours", "theirs")
    assert neighbours().ask({"size": 1.4}).guessing == ()


def test_nobody_is_asked_where_one_is_far_ahead_or_the_shape_was_measured():
    def guess(name):
        raise AssertionError(name)

    assert neighbours().ask({"size": 2.6}, guess=guess).ranked(["theirs", "ours"], [])[0] == "ours"
    assert neighbours().ask({"size": 1.0}, guess=guess).ranked(["theirs", "ours"], [])[0] == "ours"
    with pytest.raises(AssertionError, match="ours"):
        neighbours().ask({"size": 1.4}, guess=guess)


def test_problems_in_one_place_are_told_by_their_own_guesses():
    asked = neighbours()
    for guess, first in (
        ({"ours": 4, "theirs": 2}, "theirs"),
        ({"ours": 2, "theirs": 4}, "ours"),
        ({"ours": 4, "theirs": 2}, "theirs"),
    ):
        assert asked.ask({"size": 1.4}, guess=guess.get).ranked(["theirs", "ours"], [])[0] == first
    assert asked.ask({"size": 1.4}).ranked(["theirs", "ours"], [])[0] == "ours", "without guesses"


def test_answers_are_kept_and_not_too_many(monkeypatch):
    monkeypatch.setattr(nearest, "ANSWERS", 8)
    asked, first = neighbours(), {"ours": 4.0, "theirs": 2.0}
    assert asked.ask({"size": 1.4}, guess=first.get) is asked.ask({"size": 1.4}, guess=first.get)
    for more in range(100):
        asked.ask({"size": 1.4}, guess={"ours": 4.0, "theirs": 2.0 + more}.get)
        assert 0 < len(asked._answers) <= 8
    assert asked.ask({"size": 1.4}, without=1, guess=first.get).guessing and len(asked._answers) <= 8


def test_close_is_a_difference_of_the_first_two():
    assert close({"a": 0.0, "b": CLOSE / 2, "c": 1.0}) and not close({"a": 0.0, "b": CLOSE}) and not close({"a": 0.0})


def test_who_does_not_run_is_none_of_the_first_two():
    expected = {"wide": 0.0, "ours": CLOSE / 2, "theirs": CLOSE}
    assert close(expected) and close(expected, {"ours", "theirs"}.__contains__)
    assert not close(expected, {"wide", "theirs"}.__contains__)
    assert not close(expected, {"ours"}.__contains__) and not close(expected, set().__contains__)
    asked, guess = neighbours(), {"ours": 4.0, "theirs": 2.0}.get
    assert asked.ask({"size": 1.4}, guess=guess, runs={"ours", "theirs"}.__contains__).guessing
    assert not asked.ask({"size": 1.4}, guess=guess, runs={"ours"}.__contains__).guessing


def test_a_guess_of_a_noted_size_holds_for_sizes_that_lie_between_the_same_edges():
    with Notes() as notes:
        (size,) = notes.sizes([1000])
        found = told(["ours", "theirs"], {"ours": 1.0 + size * 0.01, "theirs": 20.0}.get)
        following = notes.following((1000,))
    assert found == told(["ours", "theirs"], {"ours": 11.0, "theirs": 20.0}.get)
    assert following.of((1001,)) is not None and following.of((1500,)) is None


def test_a_file_holds_a_closer_look_and_refuses_one_of_other_coordinates():
    found = measured.MeasuredSizes(
        ("m",), {0: tuple(shape.sizes for shape in SHAPES)}, ("size",), {0: SHAPES}, CONTESTANTS,
        {0: trees(["size"], PLAIN)}, {}, {0: closer()},
    )  # fmt: skip
    text = measured.text(found)
    read = measured._checked(measured.Decoder(measured._File).decode(text.encode()))
    assert read == found and measured.text(read) == text and not read.wrong_parts()
    for wrong in ("above.ours", "guess.theirs"):
        with pytest.raises(ValueError, match="closer look"):
            measured._checked(measured.Decoder(measured._File).decode(text.replace(wrong, "another").encode()))
