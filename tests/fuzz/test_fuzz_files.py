"""Tables, raw results and rows of the cache of any making: read, or passed over and named; never more than that."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import yaml
from brew_tables import unreachable_by
from drawn import cases, conditions, json_values, outcome
from hypothesis import given
from hypothesis import strategies as st
from tuning_rows import GOOD, MACHINE, row

import registry
from registry.dispatch import in_force
from registry.ops.known import all_ops, op_named
from registry.tables import Layer, files_at, load_tables
from registry.tuning import journal, store
from registry.tuning.lint import lint_tables, load_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drawn")


def table(data, op):
    """A table of drawn rows; some of its configs are declared, some are none."""
    variants = [name for name, variant in registry.variants().items() if variant.op == op]
    config = st.one_of(st.none(), st.dictionaries(st.sampled_from(["BLOCK_M", "X"]), st.integers(-1, 128), max_size=2))
    use = st.tuples(st.sampled_from(variants), config).map(lambda pair: {"variant": pair[0], "config": pair[1]})
    rule = st.fixed_dictionaries({"when": conditions(op), "use": st.lists(use, min_size=1, max_size=2)})
    rules = data.draw(st.lists(rule, min_size=1, max_size=6))
    for one in rules:
        one["use"] = [{k: v for k, v in use.items() if v is not None} for use in one["use"]]
    return {"op": op, "arch": "any", "rules": rules}


@pytest.mark.parametrize("op", sorted(all_ops()))
@given(data=st.data())
def test_drawn_tables_rank_or_are_named_with_their_line(folder, op, data):
    file = folder / f"{op}.any.yaml"
    file.write_text(yaml.safe_dump(table(data, op), sort_keys=False))
    loaded = load_tables(files_at([file], Layer.PLUGIN), in_force.op_fields(), contain=(Layer.PLUGIN,))
    findings = lint_tables(load_files([file]))
    assert all(finding.file == str(file) and finding.line > 0 for finding in findings)
    if not loaded.tables:
        assert [finding.code for finding in findings] == ["malformed"]
        return
    (read,) = loaded.tables
    dead = {finding.path for finding in findings if finding.code == "unreachable-rule"}
    assert dead == {
        f"$.rules[{i}]"
        for i, rule in enumerate(read.rules)
        if unreachable_by(rule.conditions, [earlier.conditions for earlier in read.rules[:i]])
    }
    for _ in range(5):
        problem = data.draw(cases(op)).problem(registry.Target.named("cpu"))
        for match in loaded.match(op, problem.facts(), "cpu"):
            assert f"$.rules[{match.rule.index}]" not in dead
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGISTRY_TABLES", str(file))
        registry.reload_tables()
        decided = outcome(op_named(op).explain, problem)
    registry.reload_tables()
    if decided[0] == "gave":
        variant = registry.variants()[decided[1].variant]
        assert decided[1].config in [dict(config) for config in variant.legal_configs(problem)]


@given(
    content=st.one_of(
        st.binary(max_size=200), st.text(max_size=200).map(str.encode), json_values().map(repr).map(str.encode)
    )
)
def test_no_bytes_get_past_containment(folder, content):
    (folder / "any.yaml").write_bytes(content)
    loaded = load_tables(files_at([folder / "any.yaml"], Layer.TUNED), in_force.op_fields(), contain=(Layer.TUNED,))
    assert len(loaded.problems) == 1


@given(data=st.data())
def test_a_drawn_line_of_results_is_read_or_numbered(folder, data):
    base = data.draw(st.sampled_from(GOOD))
    key = data.draw(st.sampled_from(sorted(base)))
    line = json.dumps(base | {key: data.draw(json_values())})
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in GOOD) + line + "\n")
    try:
        found = journal.read(path)
    except journal.ResultsError as refused:  # of another format, or of another machine
        assert str(path) in str(refused)
        return
    assert found.bad_lines in ([], [len(GOOD) + 1])
    for case in found.of("attention"):
        assert all(entry.ms > 0 for entry in case.timed.values())


@given(data=st.data())
def test_a_drawn_row_of_the_cache_is_read_or_named(folder, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(in_force.CACHE_VARIABLE, str(folder / "cache"))
        store.merge([row()])
        (path,) = store.folder().glob("*.jsonl")
        good = path.read_text()
        key = data.draw(st.sampled_from(sorted(asdict(row()))))
        path.write_text(good + json.dumps(asdict(row("s=128")) | {key: data.draw(json_values())}) + "\n")
        found = store.load("attention", MACHINE)
        named = store.damaged("attention", MACHINE["device"])
        assert len(named) <= 1 and len(found.rows) >= 1
        path.unlink()
