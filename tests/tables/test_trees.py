"""Trees beside a table: what they answer, what they ask, and what of a file is refused."""

import itertools
import json
import math
import random
from functools import partial

import pytest

from registry.tables import leaves as finding
from registry.tables import measured
from registry.tables.nearest import CAP, LITTLE, NEVER, Neighbours
from registry.tables.shapes import Result, Shape
from registry.tables.trees import OWN, Trees, picker, trees_of

TREE = [0, 2.5, [0.0, 0.2], [1, 0.5, [0.3, 0.0], [0.1, 0.1]]]
OTHER = [[0.05, 0.0]]
CONTESTANTS = (("ours", {}), ("library", {}))


def three_parts() -> Trees:
    parts = [[TREE, *OTHER], [TREE], [TREE, *OTHER]]
    return trees_of(["size", "flag"], ["ours", "library"], [partial(list, part) for part in parts])


def shapes(lost: float = 0.1) -> tuple[Shape, ...]:
    return tuple(Shape((x,), (float(x), 0.0), (Result(0, 0.0, 0.0), Result(1, lost, 0.0))) for x in range(4))


@pytest.mark.parametrize(
    ("likeness", "ours", "library"),
    [
        ({"size": 2.0}, 0.0, 0.15),
        ({"size": 2.5}, 0.35, 0.0),
        ({"size": 9.0, "flag": 1.0}, 0.05, 0.0),
        ({"another": 9.0}, 0.0, 0.15),
    ],
)
def test_leaves_add_up(likeness, ours, library):
    trees = three_parts()
    assert trees.lost(trees.at(likeness)) == pytest.approx({"ours": ours, "library": library})


@pytest.mark.parametrize(
    "names, found", [(("size", "flag"), (2.0, 0.0)), (("size",), (2.0,)), (("a", "size"), (0.0, 2.0))]
)
def test_what_a_place_lacks_is_nought(names, found):
    assert picker(names)({"size": 2.0, "flag": 0.0}) == found
    assert picker(())({"size": 2.0}) == ()


def test_a_measured_shape_is_told_by_the_part_that_has_not_seen_it():
    trees = three_parts()
    here = trees.at({"size": 2.0})
    assert trees.lost(here, unseen=2) == pytest.approx({"ours": 0.0, "library": 0.2})
    assert trees.lost(here, unseen=3) == pytest.approx({"ours": 0.0, "library": 0.15})


def asked(trees: Trees | None, found: tuple[Shape, ...] | None = None, weight: float = 1.0) -> Neighbours:
    return Neighbours(("size", "flag"), {"size": weight}, CONTESTANTS, found or shapes(), trees)


def test_trees_rank_in_the_place_of_the_nearest_shapes():
    names = ["library", "ours"]
    assert asked(None).ask({"size": 3.2}).ranked(names, ["library"]) == ["ours", "library"]
    assert asked(three_parts()).ask({"size": 3.2}).ranked(names, ["library"]) == ["library", "ours"]


def test_a_shape_that_was_measured_is_served_by_what_was_fastest_there_whatever_trees_say():
    assert asked(three_parts()).ask({"size": 3.0}).ranked(["library", "ours"], ["library"]) == ["ours", "library"]
    unseen = asked(three_parts())
    advice = unseen.ask({"size": 3.0}, without=3)
    assert advice.ranked(["library", "ours"], ["library"]) == ["library", "ours"]


def test_far_from_all_shapes_the_librarys_kernel_is_first_whatever_trees_say():
    advice = asked(three_parts(), weight=9.0).ask({"size": -1.0})
    assert advice.lost["ours"] == 0.0 and advice.ranked(["library", "ours"], ["library"]) == ["library", "ours"]


def test_what_failed_nearby_is_behind_whatever_trees_say():
    failing = (*shapes()[1:], Shape((0,), (0.0, 0.0), (Result(0, NEVER, 0.0), Result(1, 0.0, 0.0))))
    neighbours = asked(three_parts(), failing, weight=2.0)
    assert neighbours.ask({"size": 0.0}).lost["ours"] > CAP
    assert neighbours.ask({"size": 0.0}).ranked(["ours", "library"], ["library"]) == ["library", "ours"]
    assert neighbours.ask({"size": 2.4}).lost["ours"] == 0.0


def test_a_ranking_by_trees_looks_for_no_nearest_shapes(monkeypatch):
    neighbours = asked(three_parts())
    counts = []
    looked = neighbours.found
    monkeypatch.setattr(
        neighbours, "found", lambda here, count, *rest: counts.append(count) or looked(here, count, *rest)
    )
    neighbours.ask({"size": 1.2}).ranked(["ours", "library"], ["library"])
    assert counts == []


def file_with(parts) -> bytes:
    found = measured.MeasuredSizes(("m",), {0: ((1,),)}, ("size", "flag"), {0: shapes()[:1]}, CONTESTANTS)
    data = json.loads(measured.text(found))
    data["trees"] = {"0": {"coordinates": ["size", "flag"], "variants": ["ours", "library"], "parts": parts}}
    return json.dumps(data).encode()


def read(data: bytes) -> measured.MeasuredSizes:
    return measured._checked(measured.Decoder(measured._File).decode(data))


def test_what_is_written_is_what_is_read():
    found = read(file_with([[TREE, *OTHER], [TREE], [TREE, *OTHER]]))
    assert found.trees == {0: three_parts()}
    assert read(measured.text(found).encode()) == found


@pytest.mark.parametrize(
    "tree",
    [
        [0.1],
        [0.1, 0.2, 0.3],
        [2, 0.5, [0.0, 0.0], [0.0, 0.0]],
        [-1, 0.5, [0.0, 0.0], [0.0, 0.0]],
        [0.0, 0.5, [0.0, 0.0], [0.0, 0.0]],
        [True, 0.5, [0.0, 0.0], [0.0, 0.0]],
        [0, "edge", [0.0, 0.0], [0.0, 0.0]],
        [0, 0.5, [1e9, 0.0], [0.0, 0.0]],
        [0, 0.5, 1.0, [0.0, 0.0]],
        [0, 0.5, [0.0, 0.0], [0.0]],
        ["0.1", 0.2],
        [],
        7,
    ],
)
def test_what_is_no_tree_is_refused(tree):
    found = read(file_with([[tree], [TREE]]))
    with pytest.raises(ValueError):
        found.trees[0].leaves()
    assert found.wrong_parts()[0].startswith("part 0 of the trees: ValueError: ")
    (wrong,) = read(file_with([[TREE], [tree]])).wrong_parts()  # which nobody asks but who tunes
    assert wrong.startswith("part 1 of the trees: ValueError: ")


@pytest.mark.parametrize("parts", [[], [[]], [[TREE]], "trees"])
def test_trees_that_are_not_there_are_refused(parts):
    with pytest.raises(ValueError):
        read(file_with(parts))
    assert read(file_with([[TREE], []])).wrong_parts() == ["part 1 of the trees: ValueError: a part without trees"]


def test_a_tree_that_never_ends_is_refused():
    deep = [0.0, 0.0]
    for _ in range(100):
        deep = [0, 0.5, deep, [0.0, 0.0]]
    with pytest.raises(ValueError):
        read(file_with([[deep], [TREE]])).trees[0].leaves()
    assert read(file_with([[TREE], [deep]])).wrong_parts()


def test_no_number_is_no_leaf():
    with pytest.raises(ValueError):
        trees_of(["size"], ["ours"], [lambda: [[math.inf]], lambda: [[math.inf]]]).leaves()


def test_a_librarys_kernel_runs_where_others_are_expected_to_gain_little():
    """What was measured is no guess: there the fastest runs."""

    def told(gain):
        one = [[0.0, gain]]
        return asked(trees_of(["size", "flag"], ["ours", "library"], [lambda: one, lambda: one, lambda: one]))

    much = told(2 * LITTLE).ask({"size": 1.2})
    assert much.ranked(["ours", "library"], ["library"]) == ["ours", "library"]
    neighbours = told(LITTLE / 2)
    assert neighbours.ask({"size": 1.2}).lost["ours"] < neighbours.ask({"size": 1.2}).lost["library"]
    assert neighbours.ask({"size": 1.2}).ranked(["ours", "library"], ["library"]) == ["library", "ours"]
    assert neighbours.ask({"size": 1.2}).ranked(["ours", "library"], []) == ["ours", "library"]
    nearly = asked(
        neighbours.trees, (Shape((0,), (0.0, 0.0), (Result(0, 0.0, 0.0), Result(1, LITTLE, 0.0))), *shapes()[1:])
    )
    assert nearly.ask({"size": 0.0}).ranked(["ours", "library"], ["library"]) == ["ours", "library"]


def drawn(draw, numbers, depth=6):
    """A listed tree about three coordinates, with so many numbers a leaf."""
    if not depth or draw.random() < 0.1:
        return [round(draw.uniform(-1, 1), 4) for _ in range(numbers)]
    edge = round(draw.uniform(-2, 2), 1)
    return [draw.randrange(3), edge, *(drawn(draw, numbers, depth - 1) for _ in range(2))]


def walked(tree, point):
    """The leaf that a listed tree comes to, question by question."""
    while isinstance(tree[-1], list):
        tree = tree[2] if point[tree[0]] < tree[1] else tree[3]
    return tree


def point_of(draw, count):
    """Some of these numbers are edges, too."""
    return tuple(round(draw.uniform(-2, 2), 1) for _ in range(count))


@pytest.mark.parametrize("seed", range(20))
def test_leaves_are_those_that_trees_come_to_question_by_question(seed):
    draw = random.Random(seed)
    listed = [drawn(draw, 3) for _ in range(draw.randrange(1, 9))]
    trees = trees_of(["a", "b", "c"], ["ours", "theirs", "slow"], [lambda: listed, lambda: listed[:1]])
    for _ in range(50):
        here = point_of(draw, 3)
        assert trees.sums(here) == pytest.approx([sum(walked(tree, here)[at] for tree in listed) for at in range(3)])
        assert trees.sums(here, unseen=0) == pytest.approx(walked(listed[0], here))


@pytest.mark.parametrize("seed", range(20))
def test_what_groups_of_coordinates_leave_is_what_all_of_them_leave_together(seed):
    draw = random.Random(seed)
    listed = [drawn(draw, 1) for _ in range(draw.randrange(1, 9))]
    trees = trees_of(["a", OWN + "place", OWN + "guess"], ["ours"], [lambda: listed, lambda: listed])
    leaves = trees.leaves()
    for _ in range(50):
        here, *each = point_of(draw, 1), point_of(draw, 2), point_of(draw, 2)
        for own in each:
            (total,) = leaves.totals([leaves.left(here) & leaves.left(own, 1) & leaves.left((), 2)])
            assert total == pytest.approx(sum(walked(tree, (*here, *own))[0] for tree in listed))


def test_few_values_of_a_coordinate_are_kept(monkeypatch):
    """Of one that is asked many questions, and of flags, which are looked up together."""
    monkeypatch.setattr(finding, "VALUES", 4)
    listed = [[0, float(edge), [1.0], [2.0]] for edge in range(5)] + [[1, 0.5, [1.0], [2.0]]]
    trees = trees_of(["a", "b"], ["ours"], [lambda: listed] * 2)
    for a, b in itertools.product(range(9), repeat=2):
        assert trees.sums((a, b)) == pytest.approx([sum(walked(tree, (a, b))[0] for tree in listed)])
    _, apart, _, together = trees.leaves()._groups[0]
    assert all(0 < len(kept) <= 4 for kept in (*apart, together))


@pytest.mark.parametrize("leaves", [1, 2, 64, 65, 200])
def test_trees_of_any_size_fit(leaves):
    def grown(low, high):
        middle = (low + high) // 2
        return [low / 4] if high - low == 1 else [0, float(middle), grown(low, middle), grown(middle, high)]

    trees = trees_of(["a"], ["ours"], [lambda: [grown(0, leaves), [0.5]], lambda: [[0.0]]])
    for at in range(leaves):
        assert trees.sums((at + 0.5,)) == pytest.approx([at / 4 + 0.5])


def test_more_trees_than_are_added_up_are_none():
    """Sums of several variants lie side by side: one that is too large would run into the next."""
    trees = trees_of(["a"], ["ours", "theirs"], [lambda: [[1.0, -1.0]] * 1100] * 2)
    with pytest.raises(ValueError, match="1100 trees"):
        trees.sums((0.0,))


def test_equal_sums_are_equal_to_the_last_bit():
    """Who stands first among equals is told by the table's order, not by how sums are rounded."""
    listed = [[0.1, 0.3], [0.2, 0.0], [0.0632, 0.0632]]
    trees = trees_of(["a"], ["ours", "theirs"], [lambda: listed] * 2)
    assert len(set(trees.sums((0.0,)))) == 1


def test_what_finds_leaves_is_built_before_the_first_problem(monkeypatch):
    neighbours = asked(three_parts()).ready()
    monkeypatch.setattr("registry.tables.trees.Leaves", None)
    assert neighbours.ask({"size": 3.2}).lost["library"] == 0.0
    with pytest.raises(TypeError):
        neighbours.ask({"size": 3.2}, without=1)  # parts that only a fit asks are built when it does
