"""What a table says about where it was measured: in `explain`, and in lint, which fails a rule that reaches past it."""

import json
import os
from pathlib import Path

import pytest
import torch

import registry
from registry import doctor, notices
from registry.contract.target import Target
from registry.dispatch import in_force
from registry.tables import Layer, Rule, Table, measured
from registry.tables.match import compile_condition
from registry.tables.shapes import Result, Shape
from registry.tuning.lint import coverage, lint_tables, load_files
from registry.tuning.store import write_both

TABLE = """op: matmul
arch: sm90
rules:
- when: {{m: {m}, n: 64..128}}
  use: [{{variant: {variant}}}]
- use: [{{variant: torch_matmul}}]
"""
SHAPES = {0: ((16, 64), (64, 128)), 1: ((8, 8),)}
BESIDE = measured.text(
    measured.MeasuredSizes(
        ("m", "n"), SHAPES, (), {i: tuple(Shape(sizes, (), ()) for sizes in found) for i, found in SHAPES.items()}
    )
)


def rule(**when) -> Rule:
    return Rule(0, 1, tuple(compile_condition(name, "int", value) for name, value in when.items()), ())


@pytest.fixture
def sizes(tmp_path) -> measured.MeasuredSizes:
    (tmp_path / "matmul.sm90.measured.json").write_text(BESIDE)
    found = measured.read_beside(Table(str(tmp_path / "matmul.sm90.yaml"), Layer.TUNED, "matmul", "sm90", None, ()))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"m": 64, "n": 128}, "this very size (m 64, n 128)"),
        ({"m": 80, "n": 128}, "within a factor of 1.25 (m 64, n 128)"),
        ({"m": 16, "n": 32}, "within a factor of 2.00 (m 16, n 64)"),
        ({"m": 0, "n": 64}, "within a factor of 16.00 (m 16, n 64)"),
    ],
)
def test_the_nearest_measured_shape(sizes, facts, expected):
    assert str(sizes.nearest(rule(), facts)) == expected


def test_no_shape_is_near_where_a_fact_is_missing(sizes):
    assert sizes.nearest(rule(), {"m": 3}) is None


@pytest.mark.parametrize(
    ("when", "beyond"),
    [
        ({"m": "16..64", "n": "64..128"}, []),
        ({"m": 32, "n": "100..128"}, []),
        ({"m": "8..64", "n": "64..128"}, ["m 8..64, measured 16..64"]),
        ({"m": "16..", "n": "64..128"}, ["m 16..inf, measured 16..64"]),
        ({"m": "16..64"}, ["any n, measured 64..128"]),
    ],
)
def test_a_rule_that_reaches_past_its_evidence(sizes, when, beyond):
    assert sizes.beyond(rule(**when)) == beyond


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "null",
        '{"facts": ["m"], "coordinates": [], "contestants": [], "rules": {"0": [[[1e400], [], []]]}}',
        '{"facts": ["m"], "coordinates": [], "contestants": [], "rules": {"0": [[[-1], [], []]]}}',
        '{"facts": ["m"], "coordinates": ["x"], "contestants": [], "rules": {"0": [[[1], [NaN], []]]}}',
        '{"facts": 3, "coordinates": [], "contestants": [], "rules": {}}',
        '{"facts": ["m"], "coordinates": [], "contestants": [], "rules": {"0": [[[1, 2], [], []]]}}',
        '{"facts": ["m"], "coordinates": ["x"], "contestants": [], "rules": {"0": [[[1], [], []]]}}',
        '{"facts": ["m"], "coordinates": [], "contestants": [], "rules": {"0": [[[1], [], [0, 0.1, 0]]]}}',
        '{"facts": ["m"], "coordinates": ["x"], "contestants": [], "rules": {"0": [[[1], [1e308], []]]}}',
        '{"facts": ["m"], "coordinates": ["x"], "contestants": [], "rules": {"0": [[[1], ["1"], []]]}}',
        '{"facts": ["m"], "coordinates": ["x"], "contestants": [], "rules": {"0": [[[true], [1], []]]}}',
        '{"facts": ["m"], "coordinates": ["x", "x"], "contestants": [], "rules": {"0": [[[1], [1, 1], []]]}}',
        '{"facts": ["m"], "coordinates": [], "contestants": [["a", {}]], "rules": {"0": [[[1], [], [0.5, 1, 1]]]}}',
        '{"facts": ["m"], "coordinates": [], "contestants": [["a", {}]], "rules": {"0": [[[1], [], [0, 1e99, 1]]]}}',
        '{"facts": ["m"], "coordinates": [], "contestants": [["\\u001b[31m", {}]], "rules": {}}',
        '{"facts": ["m"], "coordinates": [], "contestants": [["a", {"B": [1]}]], "rules": {}}',
        '{"facts": ["m"], "coordinates": [], "contestants": ["ab"], "rules": {}}',
        '{"facts": ["m"], "coordinates": [], "contestants": [], "rules": {"zero": []}}',
        '{"facts": [], "coordinates": [], "contestants": [], "rules": {"0": [[[], [], []]]}}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:80],
)
def test_what_cannot_be_read_is_as_nothing(tmp_path, text):
    (tmp_path / "x.measured.json").write_text(text)
    table = Table(str(tmp_path / "x.yaml"), Layer.TUNED, "matmul", "sm90", None, ())
    assert measured.read_beside(table) is None
    why = measured.without_shapes(table, Rule(0, 1, (), (), nearest={"x": 1.0}))
    assert why.startswith("has no measured shapes to rank by: x.measured.json: ") and len(why) < 400
    assert why.isprintable()


BY_NEAREST = """op: matmul
arch: any
rules:
- nearest: {x: 1.0}
  use: [torch_matmul]
"""


WRONG_TREES = """{"facts": ["m"], "coordinates": ["x"], "contestants": [["torch_matmul", {}]],
"rules": {"0": [[[1], [1.0], [0, 0.0, 0.0]]]},
"trees": {"0": {"coordinates": ["x"], "variants": ["torch_matmul"], "parts": [[[0.1, 0.2]], [[0.1]]]}}}"""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there is no matmul.any.measured.json"),
        (WRONG_TREES, "matmul.any.measured.json: ValueError: a leaf has not one number for each variant"),
        ('{"facts": ["m"], "coordinates"', "matmul.any.measured.json: DecodeError: "),
        (BESIDE.replace('"coordinates": []', '"coordinates": ["y"]').replace(" [],", " [1.0],"), "has no coordinate x"),
        ('{"facts": [], "coordinates": ["x"], "contestants": [], "rules": {"1": []}}', "has no shapes for it"),
    ],
    ids=["missing", "wrong trees", "cut short", "other coordinates", "other rules"],
)
def test_a_rule_without_its_shapes_says_so(tmp_path, put_in_force, text, why):
    file = tmp_path / "matmul.any.yaml"
    file.write_text(BY_NEAREST)
    if text is not None:
        (tmp_path / "matmul.any.measured.json").write_text(text.replace("],[],[]]", "],[1.0],[]]"))
    put_in_force(file)
    decision = registry.matmul.explain(torch.ones(2, 2), torch.ones(2, 2))
    assert decision.variant == "torch_matmul"
    assert why in decision.nearest and "Its own order counts" in str(decision)
    assert [text for text in notices.counts() if f"{file}:4 rules[0]" in text and why in text]
    found = [finding for finding in doctor.examine()["tables"]["findings"] if finding["code"] == "no-shapes"]
    assert [(one["file"], one["line"], one["severity"]) for one in found] == [(str(file), 4, "error")]


def test_other_shapes_are_another_digest(tmp_path, put_in_force):
    """Graphs that have settled their choices go by it."""
    file, digests = tmp_path / "matmul.any.yaml", set()
    for weights, beside in (("x: 1.0", BESIDE), ("x: 1.0", "{}"), ("x: 2.0", "{}"), ("x: 2.0", None)):
        file.write_text(BY_NEAREST.replace("x: 1.0", weights))
        (tmp_path / "matmul.any.measured.json").unlink(missing_ok=True)
        if beside is not None:
            (tmp_path / "matmul.any.measured.json").write_text(beside)
        put_in_force(file)
        digests.add(in_force.digest())
    assert len(digests) == 4


def written(file, when, lost, weights="x: 1.0"):
    """A table by the nearest shapes with its file of them, as kreg tune writes both: who loses nothing is the first."""
    shape = Shape((2, 2), (4.0,), (Result(0, lost, 0.0), Result(1, 0.5, 0.0)))
    contestants = (("torch_matmul", {}), ("test.other", {}))
    beside = measured.MeasuredSizes(("m", "n"), {0: (shape.sizes,)}, ("x",), {0: (shape,)}, contestants)
    text = BY_NEAREST.replace("- nearest: {x: 1.0}", f"- when: {when}\n  nearest: {{{weights}}}")
    write_both(file, text, measured.text(beside))


def held(file):
    """Whether the rule has shapes, and what is said of it where it has none."""
    table = next(table for table in in_force.tables().tables if table.file == str(file))
    return measured.neighbours_of(table, table.rules[0]) is not None, measured.without_shapes(table, table.rules[0])


@pytest.mark.parametrize("names_it", [True, False], ids=["as written today", "as written before tables named it"])
def test_a_table_that_is_written_anew_leaves_those_who_read_it_before_without_its_shapes(
    tmp_path, put_in_force, names_it
):
    """Rules know their shapes by a number: those of the new table are of another rule."""
    file = tmp_path / "matmul.any.yaml"
    written(file, "{dtype: float32}", 0.0)
    if not names_it:
        file.write_text(file.read_text().partition("# With")[0])
    put_in_force(file)
    written(file, "{dtype: int8}", 0.25)
    has, why = held(file)
    assert not has and "is not the one that this table was written with" in why and why.endswith("own order counts")
    assert len([text for text in notices.counts() if "matmul.any.measured.json" in text]) == 1
    assert in_force._shapes_of(in_force.tables().tables[-1]) == "", "nor do graphs that are settled go by them"
    registry.reload_tables()
    assert held(file) == (True, "")


def test_shapes_that_were_read_stay_in_force_while_the_table_is_written_anew(tmp_path, put_in_force):
    file = tmp_path / "matmul.any.yaml"
    written(file, "{dtype: float32}", 0.0)
    put_in_force(file)
    assert held(file) == (True, "")
    written(file, "{dtype: int8}", 0.25)
    assert held(file) == (True, "")


def test_a_crash_between_a_table_and_its_shapes_leaves_one_without_shapes(tmp_path, put_in_force, monkeypatch):
    file = tmp_path / "matmul.any.yaml"
    written(file, "{dtype: float32}", 0.0)

    def killed(source, target, replace=os.replace):
        if target == file:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        written(file, "{dtype: int8}", 0.25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["matmul.any.measured.json", "matmul.any.yaml"]
    put_in_force(file)
    assert not held(file)[0] and "float32" in file.read_text()
    written(file, "{dtype: int8}", 0.25)
    registry.reload_tables()
    assert held(file) == (True, "")


def test_what_people_add_to_a_table_keeps_its_shapes(tmp_path, put_in_force):
    file = tmp_path / "matmul.any.yaml"
    written(file, "{dtype: float32}", 0.0)
    file.write_text("# mine\n" + file.read_text().replace("\n", "\r\n") + "# the end\r\n", newline="")
    put_in_force(file)
    assert held(file) == (True, "")


def test_a_table_is_found_from_another_folder_with_its_shapes(tmp_path, put_in_force, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("mine") / "matmul.any.yaml"
    written(file, "{dtype: float32}", 0.0)
    put_in_force(file.parent)
    monkeypatch.chdir("/")
    assert held(file) == (True, ""), "and it is still called by its short name"


def test_shipped_tables_name_no_file_yet_and_have_their_shapes():
    for table in in_force.tables().tables:
        for rule in table.rules:
            assert measured.without_shapes(table, rule) == ""


@pytest.mark.parametrize(
    ("variant", "m", "codes"),
    [("triton_matmul", "16..64", []), ("triton_matmul", "16..", ["past-evidence"]), ("torch_matmul", "16..", [])],
)
def test_lint_fails_our_kernels_past_their_evidence(tmp_path, variant, m, codes):
    (tmp_path / "matmul.sm90.yaml").write_text(TABLE.format(variant=variant, m=m))
    (tmp_path / "matmul.sm90.measured.json").write_text(BESIDE)
    covered, past = coverage(load_files([tmp_path]))
    assert [finding.code for finding in past] == codes
    assert [(one.variant, one.shapes) for one in covered] == [(variant, 2), ("torch_matmul", 1)]
    assert "m 16..64, n 64..128" in str(covered[0])


def test_explain_says_how_far_the_nearest_measured_shape_is():
    a, b = (torch.empty(4096, 4100, dtype=torch.bfloat16, device="meta") for _ in range(2))
    decision = registry.matmul.explain(a, b.t(), target=Target.named("H200"))
    assert decision.nearest.startswith("within a factor of ")
    assert decision.nearest in str(decision)
    assert json.loads(json.dumps(decision.to_dict()))["nearest"] == decision.nearest


NEAREST = """op: matmul
arch: sm90
rules:
- nearest: {{{weights}}}
  use: [{first}, {second}]
"""


@pytest.mark.parametrize(
    ("weights", "first", "codes"),
    [
        ("x: 1.0", "torch_matmul", []),
        ("x: 1.0", "triton_matmul", ["past-evidence"]),
        ("y: 1.0", "torch_matmul", ["no-shapes"]),
    ],
)
def test_lint_of_a_rule_by_the_nearest_shapes(tmp_path, weights, first, codes):
    second = "torch_matmul" if first == "triton_matmul" else "triton_matmul"
    (tmp_path / "matmul.sm90.yaml").write_text(NEAREST.format(weights=weights, first=first, second=second))
    shape = Shape((16, 64), (4.0,), ())
    beside = measured.MeasuredSizes(("m", "n"), {0: (shape.sizes,)}, ("x",), {0: (shape,)})
    (tmp_path / "matmul.sm90.measured.json").write_text(measured.text(beside))
    tables = load_files([tmp_path])
    covered, past = coverage(tables)
    assert [finding.code for finding in (*past, *lint_tables(tables)) if finding.severity == "error"] == codes
    assert "the nearest: measured on 1 sizes: m 16..16, n 64..64" in str(covered[0])


def test_lint_names_measured_configs_that_no_variant_declares(tmp_path):
    """Which no decision takes: a variant's first legal config stands for them."""
    text = NEAREST.format(weights="x: 1.0", first="triton_matmul", second="torch_matmul")
    (tmp_path / "matmul.sm90.yaml").write_text(text)
    shape = Shape((16, 64), (4.0,), (Result(0, 0.0, 0.0), Result(1, 0.1, 0.0)))
    contestants = (("triton_matmul", {"BLOCK_M": -5}), ("torch_matmul", {}))
    beside = measured.MeasuredSizes(("m", "n"), {0: (shape.sizes,)}, ("x",), {0: (shape,)}, contestants)
    (tmp_path / "matmul.sm90.measured.json").write_text(measured.text(beside))
    found = {finding.code: finding for finding in lint_tables(load_files([tmp_path]))}
    assert found["unknown-config"].severity == "warning" and found["unknown-config"].line == 4
    assert (
        "triton_matmul declares 1 of its 1 configs nowhere, such as {'BLOCK_M': -5}" in found["unknown-config"].message
    )
    assert "torch_matmul declares" not in str(list(found.values()))
