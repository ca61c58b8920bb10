"""What explain tells, for all ops: the configs ruled out of each legal variant, and how far each rule was measured."""

import json
import re

import pytest

from registry.cli import main
from registry.contract.target import Target
from registry.dispatch import in_force
from registry.dispatch.select import decide, guesses_of
from registry.ops.known import all_ops, op_named
from registry.ops.parts.cases import Case
from registry.tables.measured import MeasuredSizes, read_beside
from registry.tables.measured import text as measured_text
from registry.tables.shapes import Result, Shape

TARGETS = ("H200", "RTX 3090", "cpu")


def decisions(name, target):
    """Of some shapes of each grid of the op."""
    listed = [grid(name) for grid in op_named(name).tuning.grids.values()]
    for case in (case for cases in listed for case in cases[:: max(1, len(cases) // 6)]):
        problem = case.problem(Target.named(target))
        if op_named(name).trivial(problem) is None:
            yield decide(problem)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", sorted(all_ops()))
def test_configs_ruled_out_of_every_legal_variant(name, target):
    met = 0
    for decision in decisions(name, target):
        text, data = str(decision), decision.to_dict()
        for found, plain in zip(decision.candidates, data["candidates"], strict=True):
            variant = op_named(name).variants[found.variant]
            refused = variant.config_refusals(decision.problem) if found.legal else []
            assert list(found.refused_configs) == refused and len(plain["refused_configs"]) == len(refused)
            if refused:
                met += 1
                assert f"configs ruled out: {refused[0]}" in text
    assert met or name != "attention" or target != "H200"


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_how_far_the_nearest_measured_shape_of_each_rule_is(name):
    for decision in decisions(name, "H200"):
        problem = decision.problem
        matches = {
            match.where: match
            for match in in_force.tables().match(name, problem.facts(), problem.target.arch, problem.target.name)
        }
        for found in decision.candidates:
            match = matches.get(found.because.partition(";")[0]) if found.legal else None
            beside = read_beside(match.table) if match is not None else None
            expected = beside.nearest(match.rule, problem.facts()) if beside is not None else None
            if match is not None:
                assert re.split("; (?:near|expected) here ", found.nearest)[0] == (
                    "none: the rule was not measured" if expected is None else str(expected)
                )
                assert found.nearest in str(decision)


@pytest.mark.parametrize(("name", "shape"), [("attention", "s=4000,d=128"), ("matmul", "m=5,n=333,k=777")])
def test_the_command_says_it_once_for_each_rule(name, shape, capsys):
    asked = ["explain", name, "--device", "H200", "--shape", shape]
    assert main(asked) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rules = {one["because"]: one["nearest"] for one in found["candidates"] if one["legal"] and one["nearest"]}
    assert len(rules) > 1 if name == "attention" else rules
    for because, nearest in rules.items():
        label = "nearest" if because == found["because"] else f"{because}; nearest measured shape:"
        measured = "measured " if because == found["because"] and not nearest.startswith("none") else ""
        assert text.count(f"{label} {measured}{nearest}") == 1


def test_a_closer_look_says_what_was_guessed():
    shapes = [
        {"hq": 32, "hkv": 8, "s": queries, "sk": 3000 * queries, "d": 128} for queries in (1, 2, 8, 17, 32, 64, 128)
    ]
    said = 0
    for shape in shapes:
        problem = Case.of("attention", **shape).problem(Target.named("H200"))
        nearest = decide(problem).nearest
        if "by a closer look at what they guess" in nearest:
            said += 1
            for name in ("gluon_fa3", "triton_split"):
                assert f"{name} {guesses_of(problem)(name):.3g}" in nearest
    assert 0 < said < len(shapes), "only where two are expected to take about as long"


GONE = """op: matmul
arch: sm90
rules:
- nearest: {n: 1.0}
  use: [triton_matmul, torch_matmul]
"""


@pytest.mark.parametrize(("dtype", "met"), [("bfloat16", True), ("float64", False)], ids=["may run", "may not"])
def test_measured_configs_that_are_declared_no_more_are_noted(put_in_force, tmp_path, capsys, dtype, met):
    """As lint says of the whole table, explain does of the shapes nearby and of variants that may run the problem."""
    problem = Case.of("matmul", m=512, n=64, k=64, layout="nt").problem(Target.named("H200"))
    kept = dict(op_named("matmul").variants["gluon_matmul_ws"].configs_for(problem)[0])
    contestants = (("triton_matmul", {"BLOCK_M": -5}), ("gluon_matmul_ws", kept), ("torch_matmul", {}))
    shape = Shape((512, 64), (6.0,), tuple(Result(place, 0.1 * place, 0.0) for place in range(3)))
    beside = MeasuredSizes(("m", "n"), {0: (shape.sizes,)}, ("n",), {0: (shape,)}, contestants)
    (tmp_path / "matmul.sm90.yaml").write_text(GONE)
    (tmp_path / "matmul.sm90.measured.json").write_text(measured_text(beside))
    put_in_force(tmp_path)
    asked = ["--device", "H200", "--dtype", dtype, "--shape", "m=512,n=64,k=64,layout=nt", "--json"]
    assert main(["explain", "matmul", *asked]) == 0
    notes = [note for note in json.loads(capsys.readouterr().out)["notes"] if "no more" in note]
    wanted = "of 1 configs that triton_matmul was measured with nearby it declares 1 no more, such as BLOCK_M=-5;"
    assert len(notes) == 1 and wanted in notes[0] if met else not notes
