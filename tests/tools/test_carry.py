"""`make carry` gives measurements the hash of sources that run the same, and leaves those of others alone."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import carry
import pytest
import yaml
from host_code import code_beside_declarations, reached
from replay import Comparison, Side, differing, merged

from registry.tuning.journal import Journal, read

OLD, NEW, OTHER = "0123456789ab", "76737746e646", "ffffffffffff"
CONFIG = {"BLOCK": 64, "PAIR": True}


def contestant(variant: str, source: str, **changes: object) -> list[object]:
    return [variant, CONFIG | changes, True, source]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    lines = [{"kind": "run", "format": 1, "machine": {"device": "NVIDIA H200"}, "mode": "graph"}]
    for text in ("m=1", "m=2"):
        entries = [contestant("acme", OLD), contestant("acme", OLD, BLOCK=32), contestant("peer", OLD)]
        entries += [contestant("acme", OTHER, BLOCK=16)]
        named = {str(n): one for n, one in enumerate(entries)}
        facts = {"shape": {}, "facts": {}, "flops": 1.0}
        lines.append({"kind": "case", "case": text, "op": "matmul", "text": text, **facts, "contestants": named})
        lines.append({"kind": "sample", "case": text, "key": "0", "round": 0, "ms": 1.0})
    path = tmp_path / "matmul.jsonl"
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")
    return path


def hashes(file: Path) -> list[list[str]]:
    return [[one.fingerprint for one in case.entries.values()] for case in read(file).cases.values()]


def test_journals_and_tables_carry_the_new_hash_of_the_variant_that_has_it(journal):
    table = journal.with_name("matmul.sm90.yaml")
    table.write_text(f"evidence: {{sources: {{acme: {OLD}, acme_2: {OLD}, peer: {OLD}}}}}\n", encoding="utf-8")
    before = journal.read_bytes()
    assert list(carry.carry([journal], [table], {"acme": (OLD, NEW)})) == [journal, table]
    assert hashes(journal) == [[NEW, NEW, OLD, OTHER]] * 2
    assert journal.read_bytes().startswith(before) and journal.read_bytes().count(b"\n") == before.count(b"\n") + 1
    sources = yaml.safe_load(table.read_text(encoding="utf-8"))["evidence"]["sources"]
    assert sources == {"acme": NEW, "acme_2": OLD, "peer": OLD}
    assert f"'{NEW}'" in table.read_text(encoding="utf-8")  # which YAML 1.2 reads as a number
    assert list(carry.carry([journal], [table], {"acme": (OLD, NEW)})) == []
    assert list(carry.carry([journal], [table], {"acme": (NEW, OLD)})) == [journal, table]  # what was quoted, too
    assert hashes(journal) == [[OLD, OLD, OLD, OTHER]] * 2
    assert carry.measured_rows([journal], {"acme": (NEW, OLD)}) == []


def test_what_is_measured_after_a_carry_joins_what_was_carried(journal):
    """A sweep that goes on writes its cases again, with the source of now: samples of before count for it, and those of
    a contestant that was left apart begin anew."""
    line = journal.read_text(encoding="utf-8").splitlines()[1]
    apart = {row[0] for row in carry.measured_rows([journal], {"acme": (OLD, NEW)}) if row[0].endswith("m=2")}
    assert list(carry.carry([journal], [], {"acme": (OLD, NEW)}, apart)) == [journal]
    again = [json.loads(line.replace("m=1", text)) for text in ("m=1", "m=2")]
    with Journal(journal) as file:
        for record in again:
            for one in record["contestants"].values():
                one[3] = NEW if one[3] == OLD and one[0] == "acme" else one[3]
            file.write(**record)
    cases = read(journal).cases
    assert not read(journal).bad_lines
    assert {name: len(case.entries["0"].samples) for name, case in cases.items()} == {"m=1": 1, "m=2": 0}
    assert hashes(journal) == [[NEW, NEW, OLD, OTHER]] * 2


def test_rows_are_those_of_the_old_source_and_the_chosen_show_each_feature_and_config(journal):
    rows = carry.measured_rows([journal], {"acme": (OLD, NEW)})
    assert len(rows) == 4 and {row[1] for row in rows} == {"acme"} and {row[4] for row in rows} == {"NVIDIA H200"}
    answers = {row[0]: {"features": ["a"]} for row in rows}
    assert len(carry.covering(rows, answers)) == 2  # each config
    answers[rows[-1][0]] = {"features": ["a", "b"]}
    assert carry.covering(rows, answers)[1] == rows[-1]


@pytest.mark.parametrize(
    ("new", "builds", "verdict"),
    [
        ({"launches": ["(1,) [8]"], "keys": ["x"]}, {}, ""),
        ({"launches": ["(1,) [8]"], "keys": ["y"]}, {}, ""),
        ({"launches": ["(1,) [8]"], "keys": ["y"]}, {"the row": ["another instruction"]}, "another instruction"),
        ({"launches": ["(2,) [8]"], "keys": ["x"]}, {}, "new: (2,) [8]"),
        ({"raised": "ValueError", "text": "no such config"}, {}, "no such config"),
    ],
)
def test_a_variant_is_the_same_only_where_launches_and_builds_are(monkeypatch, tmp_path, new, builds, verdict):
    old = {"launches": ["(1,) [8]"], "keys": ["x"], "features": ["a"]}
    compared = []

    def compare_builds(_old: Side, _new: Side, options: object, _most: int, _same: object) -> Comparison:
        compared.extend(json.loads((tmp_path / "asked.json").read_text(encoding="utf-8")))
        return Comparison("builds", len(compared), differing=builds)

    monkeypatch.setattr(carry, "both", lambda *_: ({"the row": old}, {"the row": new}))
    monkeypatch.setattr(carry, "compare_builds", compare_builds)
    rows = [["the row", "acme", {}, CONFIG, "H200"]]
    found = carry.compare(Side("old", tmp_path), Side("new", tmp_path), rows, 2)
    assert bool(found["acme"]) is bool(verdict) and verdict in " ".join(found["acme"])
    assert len(compared) == (new.get("keys") == ["y"])  # another key is no other build yet


@pytest.mark.parametrize(
    "more, alike",
    [(["0.0"], True), (["1", "-2e-05", "None"], True), ([], True), (["out"], False), (["0.0", "k"], False)],
)
def test_numbers_that_one_side_alone_gives_are_left_to_the_machine_code(more, alike):
    def launch(*given, grid="(1,)", warps=4):
        return f"{grid} {dict(zip('abcdef', given, strict=False))} [('num_warps', {warps})] cluster=1"

    arguments = ["PerCall('x')", "8"]
    old, new = launch(*arguments), launch(*arguments, *more)
    assert carry.same_launches([old, old], [old, new]) == carry.same_launches([new], [old]) == alike
    assert carry.same_launches([old], [new], more=True) and carry.same_launches([new], [old], more=True)
    assert not carry.same_launches([old], [launch(*arguments[:1], "9", *more)])
    assert not carry.same_launches([old], [launch(*arguments, *more, grid="(2,)")])
    assert not carry.same_launches([old], [launch(*arguments, *more, warps=8)])
    assert not carry.same_launches([old], [old, old]) and not carry.same_launches([old], None)
    turned = old.replace("'a'", "'z'")
    assert turned != old and not carry.same_launches([old], [turned], more=True)  # each has a name of its own


def test_where_launches_may_differ_theirs_keep_the_old_hash(monkeypatch, tmp_path, journal):
    was = {"launches": ["(1,) [8]"], "keys": ["x"], "features": ["a"]}
    rows = carry.measured_rows([journal], {"acme": (OLD, NEW)})
    other = next(row[0] for row in rows if row[0].endswith("matmul m=2") and '"BLOCK": 32' in row[0])
    before = {row[0]: was for row in rows}
    after = {**before, other: was | {"launches": ["(2,) [8]"]}}
    monkeypatch.setattr(carry, "both", lambda *_: (before, after))
    monkeypatch.setattr(carry, "compare_builds", lambda *_: Comparison("builds", 0, differing={}))
    apart: set[str] = set()
    sides = Side("old", tmp_path), Side("new", tmp_path)
    assert carry.compare(*sides, rows, 2, apart) == {"acme": []} and apart == {other}
    judged = journal.with_name(f"judged_{journal.name}")
    judged.write_text(journal.read_text(encoding="utf-8"), encoding="utf-8")
    for file, expected in ((journal, [OLD, OLD, OLD, OTHER]), (judged, [NEW, OLD, OLD, OTHER])):
        assert list(carry.carry([file], [], {"acme": (OLD, NEW)}, apart)) == [file]
        assert hashes(file) == [[NEW, NEW, OLD, OTHER], expected]


def test_what_is_named_is_not_compared(journal):
    rows = carry.measured_rows([journal], {"acme": (OLD, NEW)})
    rest, named = carry.put_apart(rows, r"m=2$")
    assert named == {row[0] for row in rows if row[0].endswith("matmul m=2")} and 0 < len(named) < len(rows)
    assert named | {row[0] for row in rest} == {row[0] for row in rows}
    assert carry.put_apart(rows, None) == (rows, set())


def test_what_neither_side_can_launch_tells_no_difference(monkeypatch, tmp_path, journal):
    """A config of before, whose names nobody knows any more."""
    rows = carry.measured_rows([journal], {"acme": (OLD, NEW)})
    raised = {"raised": "KeyError", "text": "'BLOCK'"}
    sides = {
        row[0]: raised if '"BLOCK": 32' in row[0] else {"launches": ["x"], "keys": ["x"], "features": []}
        for row in rows
    }
    monkeypatch.setattr(carry, "both", lambda *_: (sides, sides))
    monkeypatch.setattr(carry, "compare_builds", lambda *_: Comparison("builds", 0, differing={}))
    gone: set[str] = set()
    asked = Side("old", tmp_path), Side("new", tmp_path), rows, 2
    assert carry.compare(*asked, gone=gone) == {"acme": []} and len(gone) == 2
    assert any(carry.compare(*asked)["acme"]), "where nobody asks for them they differ"


@pytest.mark.parametrize(
    "new, same",
    [(["k tail=True"], True), (["k tail=16"], False), (["k tail=True", "k more=1"], True), (["k other=2"], True)],
)
def test_constants_that_both_sides_name_have_the_same_values(new, same):
    assert carry.constant({"features": ["k tail=True"]}, {"features": new}) is same


def test_answers_of_shares_are_joined_in_the_order_in_which_they_were_asked():
    assert list(merged([{"a": 1, "c": 3, "d": 4}, {"b": 2}])) == ["a", "b", "c", "d"]
    assert differing({"a": 1}, {"a": 1, "b": None}) == ["b"]


@pytest.mark.parametrize(
    ("changed", "same"),
    [("claims", True), ("comments", True), ("others", True), ("code", False), ("named", False), ("prepared", False)],
)
def test_a_variant_that_builds_nothing_is_the_code_that_it_comes_to(tmp_path, changed, same):
    text = """
ONE = 1


def run(a, *, config):
    return _plus(a)


def prepare(problem, config):
    return run


def _plus(a):
    return a + ONE


def other(a, *, config):
    return a - 2


def registry_variants():
    return [("run", "sm90")]
"""
    edits = {
        "claims": ("sm90", "any"),
        "comments": ("return a", "# a sum\n    return a"),
        "others": ("a - 2", "a - 3"),
        "code": ("a + ONE", "ONE + a"),
        "named": ("ONE = 1", "ONE = 2"),
        "prepared": ("return run", "return other"),
    }
    texts = text, text.replace(*edits[changed])
    found = []
    for number, one in enumerate(texts):
        path = tmp_path / f"acme_{number}.py"
        path.write_text(one, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        found.append(code_beside_declarations(SimpleNamespace(run=module.run, prepare=module.prepare)))
        del sys.modules[path.stem]
    assert (found[0] == found[1]) is same


def test_where_nobody_sees_what_runs_all_of_the_file_counts():
    body = ast.parse("def make():\n    def run(): ...\n    return run\nONE = 1\nprint(ONE)\n").body
    assert reached(body, {"make.<locals>.run"}) == body
    assert reached(body, {"make"}) == body, "print binds nothing, so it counts, and what it names"
    assert reached(body[:2], {"make"}) == body[:1]


def machine_code(inside, before, shared):
    """A kernel that sets up what is `before`, and then goes round a loop."""
    body = [*before, ".L_x_0:", *inside, "BRA `(.L_x_0)", "EXIT"]
    lines, at = [], 0
    for line in body:
        lines.append(line if line.startswith(".L") else f"/*{at:04x}*/ {line} ;")
        at += 0 if line.startswith(".L") else 16
    return "\n".join([json.dumps({"num_warps": "4", "shared": str(shared)}), *lines])


def test_loops_alike_are_those_of_the_same_instructions_wherever_they_lie():
    inside = ["HGMMA R0, R4", "FADD R1, R2"]
    old = machine_code(inside, ["SYNCS.EXCH R0", "BAR.SYNC 0x0"], 1024)
    assert carry.same_loops(old, machine_code(inside, [], 1008))
    assert not carry.same_loops(old, machine_code(inside[:1], [], 1008)), "the loop has lost one of a few"
    assert not carry.same_loops(old, machine_code(inside[1:], [], 1008)), "the loop does not multiply"
    assert not carry.same_loops(old, machine_code(inside, [], 4096)), "another share of shared memory"
