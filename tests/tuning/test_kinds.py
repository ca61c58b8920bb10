"""Kinds of shapes that an op keeps apart: a fit and a rule for each, in one table with one file beside it."""

from __future__ import annotations

import pytest
from test_tuning_fit import ALL, attention_cases, one, results_of

from registry.ops.known import all_ops, op_named
from registry.ops.parts.cases import Case
from registry.tables import measured
from registry.tuning import evidence
from registry.tuning.fit import Earlier, fit
from registry.tuning.kinds import beside_of, fits, kept, parted
from registry.tuning.lint import load_files
from registry.tuning.rules import make_table


def cases():
    wide = [Case.of("attention", b=2, hq=8, s=s, d=64, dtype="float32") for s in (64, 500, 3000)]
    return [*attention_cases(), *wide]


def results():
    def times(facts):
        ours, theirs = (2.0, 1.0) if facts["dtype"] == "float32" else (1.0, 1.5)
        return {one("ours"): ours, one("theirs"): theirs, **({} if ours < theirs else {one("wide"): 3.0})}

    return results_of(cases(), times)


def test_shapes_are_parted_by_the_first_kind_that_they_are_of_and_the_rest_comes_last():
    wide, others = parted(list(results().cases.values()))
    assert wide[0] == {"dtype": "float32"} and {case.facts["dtype"] for case in wide[1]} == {"float32"}
    assert others[0] == {} and len(others[1]) == len(cases()) - 3
    assert parted(others[1]) == [others] and parted([]) == [({}, [])]


def test_each_kind_has_a_rule_of_its_own_and_the_general_one_is_the_last():
    made = make_table(results(), fits(results().of("attention"), results().machine, ALL), "h200/0001", ALL)
    assert [rule["when"]["dtype"] for rule in made.rules] == ["float32", ["bfloat16", "float16"]]
    assert [rule["use"][0]["variant"] for rule in made.rules] == ["theirs", "ours"]
    assert made.regret.shapes == len(cases()) and made.regret.worst == 0
    assert [(kind, regret.shapes) for kind, regret in made.kinds] == [({"dtype": "float32"}, 3), ({}, len(cases()) - 3)]


def test_what_lies_beside_is_what_each_fit_knows_in_the_same_coordinates():
    found = fits(results().of("attention"), results().machine, ALL)
    beside = beside_of(found)
    assert {len(shape.point) for shapes in beside.shapes.values() for shape in shapes} == {len(beside.coordinates)}
    for index, one_fit in enumerate(found):
        names = [name for name, _ in one_fit.contestants]
        for shape, again in zip(one_fit.shapes, beside.shapes[index], strict=True):
            said = {names[r.contestant]: r.lost for r in shape.results}
            assert said == {beside.contestants[r.contestant][0]: r.lost for r in again.results}
            told = dict(zip(beside.coordinates, again.point, strict=True))
            assert tuple(told[name] for name in one_fit.coordinates) == shape.point
    assert measured.text(beside).count('"0": [') == 1 <= measured.text(beside).count('"1": [')


def test_a_fit_of_one_kind_lies_beside_as_it_is():
    found = fit([case for case in results().of("attention") if case.facts["dtype"] != "float32"], results().machine)
    beside = beside_of([found])
    assert beside.coordinates == found.coordinates and beside.shapes[0] == tuple(found.shapes)


def test_a_kind_that_was_measured_elsewhere_alone_says_where():
    raw = results()
    for case in raw.cases.values():
        case.machine = {**raw.machine, "device": "NVIDIA H100 PCIe"} if case.facts["dtype"] == "float32" else None
    rules = make_table(raw, fits(raw.of("attention"), raw.machine, ALL), "h200/0001", ALL, also=["h100/0001"]).rules
    assert [rule["evidence"]["device"] for rule in rules] == ["NVIDIA H100 PCIe", raw.machine["device"]]
    assert all(rule["evidence"]["tflops"] > 1e-6 for rule in rules)


@pytest.mark.parametrize("op", sorted(all_ops()))
def test_every_kind_is_made_of_facts_of_the_ops_problems(op):
    for kind in op_named(op).tuning.apart:
        text = f"op: {op}\narch: sm90\nrules:\n- when: {dict(kind)}\n  use: [torch_{op}]\n"
        assert evidence.load_text(text.replace("True", "true"), op).tables


def test_kinds_whose_shapes_are_those_behind_a_table_keep_what_was_fitted(tmp_path):
    raw = results()
    made = make_table(raw, fits(raw.of("attention"), raw.machine, ALL), "h200/0001", ALL)
    path = tmp_path / "attention.sm90.yaml"
    path.write_text(made.text, encoding="utf-8")
    path.with_name("attention.sm90.measured.json").write_text(made.measured, encoding="utf-8")
    table = load_files([path]).tables[0]
    assert [one is not None for one in kept(table, raw.of("attention"), raw.machine)] == [True, True]
    del raw.cases[next(key for key, case in raw.cases.items() if case.facts["dtype"] == "float32")]
    assert [one is not None for one in kept(table, raw.of("attention"), raw.machine)] == [False, True]
    both = kept(table, raw.of("attention"), raw.machine, other_shapes=True)
    assert [one is not None for one in both] == [True, True]
    general = [case for case in raw.of("attention") if case.facts["dtype"] != "float32"]
    assert [one is not None for one in kept(table, general, raw.machine)] == [True]


def test_of_new_shapes_what_was_fitted_before_may_stay_and_they_lie_beside_it():
    """Weights are those of before; the shape that was new to them is there to be served by what was fastest on it."""
    raw = results()
    general = [case for case in raw.of("attention") if case.facts["dtype"] != "float32"]
    (first,) = fits(general[:-1], raw.machine, ALL)
    before = Earlier(dict.fromkeys(first.weights, 7.0), None)
    (again,) = fits(general, raw.machine, ALL, [before])
    assert again.weights == before.weights and len(again.shapes) == len(first.shapes) + 1
