"""Broken tables in a process: which calls fail, which go on, and what doctor says."""

from __future__ import annotations

import time

import pytest
import torch

import registry
from registry.contract.target import Target
from registry.dispatch import in_force
from registry.doctor import ailments, examine
from registry.errors import TableError
from registry.ops.attention.problem import AttentionProblem
from registry.ops.parts.cases import Case
from registry.tables import Layer, files_at, load_tables
from registry.tuning.contestants import line_up
from registry.tuning.lint import lint_tables, load_files

DIGITS = "op: attention\narch: any\nrules:\n- when: {head_dim: '" + "9" * 5000 + "..'}\n  use: [torch_cpu]\n"
BROKEN = {
    "digits": DIGITS,
    "residue": DIGITS.replace("..", " mod 7"),
    "rules": "op: attention\narch: sm90\nrules: 7\n",
    "yaml": "op: attention\nrules: [",
}


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """Set files of an environment layer, as a process that has not read its tables yet."""

    def put(text):
        (tmp_path / "given.yaml").write_text(text)
        monkeypatch.setenv("REGISTRY_TABLES", str(tmp_path / "given.yaml"))
        monkeypatch.setattr(in_force, "_loaded", False)
        registry.forget_plans()
        return str(tmp_path / "given.yaml")

    yield put
    monkeypatch.undo()
    registry.reload_tables()


def attend():
    return registry.attention(*[torch.ones(1, 1, 4, 8)] * 3)


def multiply():
    return registry.matmul(torch.ones(4, 4), torch.ones(4, 4))


@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_file_of_the_environment_fails_its_own_op_alone(tables, text):
    file = tables(text)
    multiply()
    with pytest.raises(TableError, match="given.yaml:") as raised:
        attend()
    assert raised.value.file == file
    wrong = [text for text in ailments(examine()) if "given.yaml" in text]
    assert len(wrong) == 1


@pytest.mark.parametrize(
    "text", ["{op: attention, arch: 5}", "'op': attention", " op: attention", '{"op": "attention", ']
)
def test_a_broken_file_says_its_op_in_any_spelling_of_yaml(tables, text):
    tables(text)
    multiply()
    with pytest.raises(TableError, match="given.yaml:"):
        attend()


ERRATUM = "{variant: torch_math, op: attention, reason: wrong, link: 'https://example.org/1', severity: %s}"
WRONG = ERRATUM % "bad"


@pytest.mark.parametrize(
    ("text", "failing"),
    [
        (f"errata: [{WRONG}]", ["attention"]),
        (f"errata:\n- {WRONG}\n- {WRONG}", ["attention"]),
        (f"errata:\n- {ERRATUM % 'crash'}\n- {WRONG.replace('attention', 'matmul')}", ["attention", "matmul"]),
        (f"errata:\n- {WRONG}\n- {{", ["attention"]),
        ("errata:\n- variant: torch_matmul\n  'op': matmul\n  when: [", ["matmul"]),
        (f"errata: [{WRONG.replace('attention', 'atention')}]", ["attention", "matmul"]),
        ("errata: 7", ["attention", "matmul"]),
        ("errata: [", ["attention", "matmul"]),
    ],
)
def test_broken_errata_of_the_environment_fail_the_ops_that_they_are_about(tables, text, failing):
    """Without them what they forbid would run."""
    tables(text)
    for name, call in (("attention", attend), ("matmul", multiply)):
        if name in failing:
            with pytest.raises(TableError, match="given.yaml:"):
                call()
        else:
            call()
    assert len([text for text in ailments(examine()) if "given.yaml" in text]) == 1
    assert sum("given.yaml" in text for text in registry.notices.counts()) == 1


@pytest.mark.parametrize("text", [*BROKEN.values(), f"errata: [{WRONG}]"], ids=[*BROKEN, "errata"])
@pytest.mark.parametrize(
    "block",
    [
        lambda: registry.use("torch_math"),
        lambda: registry.use("torch_math", config={}),
        lambda: registry.prefer("torch_math"),
        registry.try_out,
    ],
    ids=["use", "use with a config", "prefer", "try_out"],
)
def test_a_broken_file_fails_what_is_asked_by_name_too(tables, text, block):
    """Of what is preferred errata may know that it is wrong."""
    tables(text)
    with block():
        with pytest.raises(TableError, match="given.yaml:"):
            attend()
        with pytest.raises(TableError, match="given.yaml:"):
            registry.attention.explain(*[torch.ones(1, 1, 4, 8)] * 3)


def test_a_sweep_under_broken_errata_is_refused_and_under_a_broken_table_it_is_not(tables):
    """What a table says is measured anew; what crashes or hangs is not begun."""
    case, cpu = Case.parse("attention", "s=16,d=8,dtype=float32"), Target.named("cpu")
    tables(BROKEN["rules"])
    assert line_up(case, cpu).contestants
    tables(f"errata: [{WRONG}]")
    with pytest.raises(TableError, match="given.yaml:"):
        line_up(case, cpu)
    assert line_up(Case.parse("matmul", "m=4,n=4,k=4,dtype=float32"), cpu).contestants


def test_a_file_of_no_op_is_left_out_and_named(tables):
    tables("\x00")
    attend()
    multiply()
    assert any("given.yaml" in text for text in registry.notices.counts())
    assert any("given.yaml" in text for text in ailments(examine()))


def test_a_reload_that_fails_leaves_the_tables_in_force(monkeypatch, tmp_path):
    before = in_force.tables()
    (tmp_path / "given.yaml").write_text("op: attention\nrules: 7\n", encoding="utf-8")
    monkeypatch.setenv("REGISTRY_TABLES", str(tmp_path / "given.yaml"))
    with pytest.raises(TableError, match="given.yaml"):
        registry.reload_tables()
    assert in_force.tables() is before
    attend()


@pytest.mark.parametrize("layer", [Layer.PLUGIN, Layer.TUNED])
@pytest.mark.parametrize("text", BROKEN.values(), ids=list(BROKEN))
def test_no_value_gets_past_containment(tmp_path, layer, text):
    (tmp_path / "bad.yaml").write_text(text)
    loaded = load_tables(files_at([tmp_path], layer), in_force.op_fields(), contain=(layer,))
    assert not loaded.tables and len(loaded.problems) == 1


@pytest.mark.parametrize("place", ["file/below", "x" * 300, "~no-such-user/cache"])
def test_a_cache_that_cannot_be_made_breaks_no_call(tables, monkeypatch, tmp_path, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REGISTRY_CACHE", place if place.startswith("~") else str(tmp_path / place))
    monkeypatch.setattr(in_force, "_loaded", False)
    registry.forget_plans()
    attend()
    examine()


def test_who_has_no_home_is_told_what_to_name_and_calls_go_on(tables, monkeypatch, capsys):
    """As a user whom a container makes up."""

    def nowhere(name):
        raise RuntimeError("could not determine the home directory")

    monkeypatch.delenv("REGISTRY_CACHE")
    monkeypatch.setattr("platformdirs.user_cache_path", nowhere)
    registry.reload_tables()
    attend()
    told = "there is no cache folder: could not determine the home directory; REGISTRY_CACHE names one"
    assert examine()["folders"] == {"cache": told}
    assert capsys.readouterr().err.count(told) == 1


def test_tables_that_nobody_may_look_for_are_said(monkeypatch, tmp_path, capsys):
    """Here a file is in their place: a superuser, as whom tests may run, may look everywhere."""
    (tmp_path / "tables").write_text("")
    monkeypatch.setenv("REGISTRY_CACHE", str(tmp_path))
    in_force.layer_files()
    assert "the user's own tables are left out: NotADirectoryError" in capsys.readouterr().err


MANY = {
    "one key": (10_000, "- when: {{head_dim: {0}}}\n  use: [torch_cpu]\n"),
    "any": (25_000, "- use: [torch_cpu]\n"),
    "ranges": (
        4_000,
        "- {{when: {{head_dim: {1}, seqlen_q: '{2}..{3}', causal: true, heads_q: {2}}}, use: [torch_cpu]}}\n",
    ),
    "alternating": (
        4_000,
        "- {{when: {{head_dim: {0}, seqlen_q: '{1}..'}}, use: [torch_cpu]}}\n"
        "- {{when: {{head_dim: {0}}}, use: [torch_cpu]}}\n",
    ),
}


@pytest.mark.parametrize(("count", "rule"), MANY.values(), ids=list(MANY))
def test_a_table_of_very_many_rules_is_read_and_linted_in_seconds(tmp_path, count, rule):
    rules = "".join(rule.format(3 * n, 64 * (n % 4), n * 7919 % 1000, 1000 + n) for n in range(count))
    (tmp_path / "attention.any.yaml").write_text("op: attention\narch: any\nrules:\n" + rules)
    begun = time.process_time()
    codes = [finding.code for finding in lint_tables(load_files([tmp_path]))]
    assert time.process_time() - begun < 15
    assert "malformed" not in codes
    assert ("many-rules" in codes) == (count == 4_000), "lint says where it stops comparing"


def test_the_last_of_very_many_rules_is_held_against_all(tmp_path):
    rows = "".join(MANY["one key"][1].format(n) for n in range(10_000)) + MANY["one key"][1].format("'12..9999'")
    (tmp_path / "attention.any.yaml").write_text("op: attention\narch: any\nrules:\n" + rows)
    (finding,) = lint_tables(load_files([tmp_path]))
    assert (finding.code, finding.path) == ("unreachable-rule", "$.rules[10000]")


def test_facts_meet_the_first_rule_of_very_many(tmp_path):
    rules = "".join(f"- when: {{head_dim: {n}}}\n  use: [torch_cpu]\n" for n in range(1000))
    (tmp_path / "many.yaml").write_text("op: attention\narch: any\nrules:\n" + rules)
    loaded = load_tables(files_at([tmp_path], Layer.ENVIRONMENT), in_force.op_fields())
    problem = AttentionProblem.of_shape(Target.named("cpu"), d=64)
    (match,) = loaded.match("attention", problem.facts(), "cpu")
    assert match.rule.index == 64


def test_a_relative_cache_stays_where_it_was_first_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(in_force.CACHE_VARIABLE, "a-relative-cache")
    assert in_force.cache_folder() == tmp_path / "a-relative-cache"
    monkeypatch.chdir("/")
    assert in_force.tuned_folder() == tmp_path / "a-relative-cache" / "tables"
    monkeypatch.setenv(in_force.CACHE_VARIABLE, str(tmp_path / "another"))
    assert in_force.cache_folder() == tmp_path / "another", "another value is another folder"
