"""A table fitted to measurements of several devices of one architecture."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import to_builtins

from registry.cli import main
from registry.dispatch.decision import evidence_text
from registry.ops.parts.cases import Case, digest
from registry.tuning import evidence, journal
from registry.tuning.fit import fit, target_of
from registry.tuning.journal import Results, ResultsError, contestant_key
from registry.tuning.lint import load_files

VERSIONS = {"driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}
H200 = {"device": "NVIDIA H200", "arch": "sm90", "sm_count": 132, "date": "2026-11-20", **VERSIONS}
H100 = H200 | {"device": "NVIDIA H100 PCIe", "sm_count": 114}


def write(path: Path, machine: dict, lengths: tuple, fast: str) -> Path:
    """Attentions of these lengths, of which one variant was always the fastest."""
    with journal.Journal(path) as file:
        file.write("run", format=journal.FORMAT, machine=machine, mode="graph")
        for case in [Case.of("attention", b=2, hq=8, s=s, d=64) for s in lengths]:
            facts = case.problem(target_of(machine)).facts()
            facts = {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}
            key, names = digest([case.op, case.text]), ("ours", "other")
            contestants = {contestant_key(name, {}): [name, {}, True, digest(name)[:12]] for name in names}
            about = {"op": case.op, "text": case.text, "shape": case.data(), "facts": facts, "flops": 1e9}
            file.write("case", case=key, contestants=contestants, **about)
            for one, (name, *_) in contestants.items():
                file.write("sample", case=key, key=one, round=0, ms=1.0 if name == fast else 2.0)
            file.write("done", case=key)
    return path


@pytest.fixture
def raw(tmp_path):
    return (
        write(tmp_path / "h200" / "attention.jsonl", H200, (512, 1024, 4096), "ours"),
        write(tmp_path / "h100" / "attention.jsonl", H100, (1024, 700, 9000), "other"),
    )


def test_cases_of_another_device_join_beside_those_of_the_same_shape_and_are_problems_of_that_device(raw):
    own, other = map(journal.read, raw)
    joined = own.joined([other])
    assert [case.machine for case in joined.of("attention")] == [None, None, None, H100, H100, H100]
    assert len(own.cases) == 3  # as it was
    found = fit(joined.of("attention"), joined.machine)
    assert [problem.target.sm_count for problem in found.problems] == [132, 132, 132, 114, 114, 114]
    each = zip(found.cases, found.shapes, strict=True)
    lost = {(case.text, case.machine is None): shape.results[0].lost for case, shape in each}
    assert lost["b=2,hq=8,s=1024,d=64", True] == 0 < lost["b=2,hq=8,s=1024,d=64", False]
    assert lost["b=2,hq=8,s=9000,d=64", False] > 0


def test_another_architecture_does_not_join(raw):
    own = journal.read(raw[0])
    with pytest.raises(ResultsError, match="was measured on sm80, not sm90"):
        own.joined([replace(Results("a100.jsonl"), machine={"device": "A100", "arch": "sm80"})])


def test_a_table_of_two_devices_names_both_runs_and_proves_against_both(raw, tmp_path, capsys):
    path = tmp_path / "attention.sm90.yaml"
    given = ["--out", str(raw[0]), "--also", str(raw[1]), "--run", "h200/attention", "--table", str(path)]
    assert main(["tune", "attention", "--fit-only", *given]) == 0
    table = load_files([path]).tables[0]
    said = table.rules[0].evidence
    assert (said.device, said.run, said.also, said.cases) == ("NVIDIA H200", "h200/attention", ["h100/attention"], 6)
    assert "NVIDIA H200 and NVIDIA H100 PCIe" in path.read_text(encoding="utf-8").replace("\n# ", " ")
    assert "run h200/attention and h100/attention, " in evidence_text(to_builtins(said))
    assert evidence.verify(table, tmp_path) == []
    path.write_text(path.read_text(encoding="utf-8").replace("also: [h100/attention], ", ""), encoding="utf-8")
    assert any("measured shapes" in problem for problem in evidence.verify(load_files([path]).tables[0], tmp_path))
    raw[1].unlink()
    assert main(["tune", "attention", "--fit-only", *given]) == 2
    assert "--also" in capsys.readouterr().err


def test_speed_is_that_of_the_tables_own_device(raw):
    own, other = map(journal.read, raw)
    found = fit(own.joined([other]).of("attention"), own.machine)
    picks = evidence.picks_left_out(found, evidence.Settings())
    said = evidence.evidence(own, picks, "h200/attention", evidence.Settings(), ["h100/attention"])
    alone = evidence.evidence(
        own, [pick for pick in picks if not pick[0].machine], "h200/attention", evidence.Settings()
    )
    assert said["tflops"] == alone["tflops"] and json.dumps(said["also"]) == '["h100/attention"]'


def test_a_device_nobody_has_heard_of_is_like_others_of_its_architecture():
    found = target_of({"device": "H999", "arch": "sm90", "sm_count": 64})
    assert (found.name, found.arch, found.sm_count) == ("H999", "sm90", 64)
    assert found.shared_memory == target_of(H200).shared_memory > 0
    assert target_of({"device": "H999", "arch": "sm999"}).arch == "sm999"
