"""tools/fold.py takes sweeps into the journals that tables are fitted to."""

from __future__ import annotations

import json
from pathlib import Path

import fold
import pytest

from registry.tuning import journal
from registry.tuning.journal import ResultsError

MACHINE = {"device": "NVIDIA H200", "arch": "sm90", "driver": "1", "torch": "2", "triton": "3", "date": "2026-01-02"}


def sweep(path: Path, times: dict[str, float], *, finished: bool = True, **machine: str) -> Path:
    lines: list[dict[str, object]] = [{"kind": "run", "format": 1, "machine": MACHINE | machine, "mode": "graph"}]
    for text, ms in times.items():
        shape = {"op": "matmul", "shape": {"m": int(text[2:]), "n": 8, "k": 8}}
        case = {"case": text, "op": "matmul", "text": text, "shape": shape, "facts": {}, "flops": 1.0}
        lines.append({"kind": "case", **case, "contestants": {"one": ["acme", {}, True, "0123456789ab"]}})
        lines.append({"kind": "check", "case": text, "key": "one"})
        lines.append({"kind": "sample", "case": text, "key": "one", "round": 0, "ms": ms})
        lines += [{"kind": "done", "case": text}] * finished
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def times(folder: Path) -> dict[str, float]:
    return {case.text: case.entries["one"].ms for case in journal.read(folder / "matmul.jsonl").cases.values()}


def test_cases_say_how_they_were_timed_and_are_replaced_where_they_stand(tmp_path):
    assert fold.fold(tmp_path, [sweep(tmp_path / "a.jsonl", {"m=1": 1.0, "m=2": 2.0})]) == {"matmul": (2, 0)}
    assert fold.fold(tmp_path, [sweep(tmp_path / "b.jsonl", {"m=3": 3.0, "m=1": 9.0})]) == {"matmul": (1, 1)}
    found = journal.read(tmp_path / "matmul.jsonl")
    assert found.mode == journal.MIXED and not found.bad_lines
    assert {case.mode for case in found.cases.values()} == {"graph"} and all(c.done for c in found.cases.values())
    assert list(times(tmp_path).items()) == [("m=1", 9.0), ("m=2", 2.0), ("m=3", 3.0)]


def test_a_file_of_one_mode_takes_others_and_says_of_each_how_it_was_timed(tmp_path):
    sweep(tmp_path / "matmul.jsonl", {"m=1": 1.0})
    assert fold.fold(tmp_path, [sweep(tmp_path / "a.jsonl", {"m=2": 2.0})]) == {"matmul": (1, 0)}
    found = journal.read(tmp_path / "matmul.jsonl")
    assert found.mode == journal.MIXED and [case.mode for case in found.cases.values()] == ["graph", "graph"]


def test_what_was_measured_elsewhere_is_refused_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    fold.fold(tmp_path, [sweep(tmp_path / "a.jsonl", {"m=1": 1.0})])
    other = sweep(tmp_path / "b.jsonl", {"m=2": 2.0}, device="NVIDIA H100 80GB HBM3")
    with pytest.raises(ResultsError, match="device NVIDIA H100 80GB HBM3"):
        fold.fold(tmp_path, [sweep(tmp_path / "c.jsonl", {"m=4": 2.0}), other])
    assert times(tmp_path) == {"m=1": 1.0}
    monkeypatch.setattr("sys.argv", ["fold.py", str(tmp_path), str(other)])
    assert fold.main() == 1 and "H100" in capsys.readouterr().err


def test_a_sweep_of_some_variants_leaves_what_others_took(tmp_path):
    fold.fold(tmp_path, [sweep(tmp_path / "a.jsonl", {"m=1": 1.0, "m=2": 2.0})])
    again = sweep(tmp_path / "b.jsonl", {"m=1": 3.0, "m=4": 4.0})
    again.write_text(
        again.read_text(encoding="utf-8").replace('"one"', '"two"').replace("acme", "other"), encoding="utf-8"
    )
    assert fold.fold(tmp_path, [again], beside=True) == {"matmul": (1, 1)}
    found = {
        case.text: {e.variant: e.ms for e in case.timed.values()}
        for case in journal.read(tmp_path / "matmul.jsonl").cases.values()
    }
    assert found == {"m=1": {"acme": 1.0, "other": 3.0}, "m=2": {"acme": 2.0}, "m=4": {"other": 4.0}}
    newer = sweep(tmp_path / "c.jsonl", {"m=1": 5.0})
    newer.write_text(newer.read_text(encoding="utf-8").replace('"one"', '"new"'), encoding="utf-8")  # another config
    fold.fold(tmp_path, [newer], beside=True)
    (case,) = [case for case in journal.read(tmp_path / "matmul.jsonl").cases.values() if case.text == "m=1"]
    assert {e.variant: e.ms for e in case.timed.values()} == {"acme": 5.0, "other": 3.0} and case.done


def test_beside_times_of_another_kind_nothing_is_put(tmp_path):
    fold.fold(tmp_path, [sweep(tmp_path / "a.jsonl", {"m=1": 1.0})])
    other = sweep(tmp_path / "b.jsonl", {"m=1": 9.0})
    other.write_text(other.read_text(encoding="utf-8").replace('"graph"', '"events"'), encoding="utf-8")
    assert fold.fold(tmp_path, [other], beside=True) == {} and times(tmp_path) == {"m=1": 1.0}


@pytest.mark.parametrize(
    ("clock", "both", "found"),
    [
        (1950, True, {"acme one": 9.0, "acme two": 4.0, "other": 2.0}),
        (None, True, {"acme one": 9.0, "acme two": 4.0, "other": 2.0}),
        (1700, True, {"acme one": 3.0, "acme two": 1.3332, "other": 2.0}),
        (1700, False, {"acme one": 3.0, "other": 2.0}),
    ],
)
def test_times_at_another_clock_are_brought_to_that_of_before_by_what_both_runs_timed(tmp_path, clock, both, found):
    """Or left, where there is nothing."""

    def at(path: Path, sm_mhz: int | None, took: dict[str, float]) -> Path:
        """A sweep of these contestants ("acme one": a variant, and its config)."""
        lines = [json.loads(line) for line in sweep(path, {"m=1": 1.0}).read_text(encoding="utf-8").splitlines()]
        lines[1]["contestants"] = {key: [key.split()[0], {"way": key}, True, "0123456789ab"] for key in took}
        clocked = {"sm_mhz": sm_mhz} if sm_mhz else {}
        told = [{**line, "key": key} for line in lines[2:3] for key in took]
        told += [{**lines[3], "key": key, "ms": ms, **clocked} for key, ms in took.items()]
        path.write_text("".join(json.dumps(one) + "\n" for one in [*lines[:2], *told, lines[4]]), encoding="utf-8")
        return path

    fold.fold(tmp_path, [at(tmp_path / "a.jsonl", 1980, {"acme one": 3.0, "other": 2.0})])
    later = {"acme one": 9.0, "acme two": 4.0} if both else {"acme two": 4.0}
    fold.fold(tmp_path, [at(tmp_path / "b.jsonl", clock, later)], beside=True)
    (case,) = journal.read(tmp_path / "matmul.jsonl").cases.values()
    assert {key: pytest.approx(entry.ms, rel=1e-3) for key, entry in case.entries.items()} == found


def test_unfinished_cases_are_left(tmp_path):
    assert fold.fold(tmp_path, [sweep(tmp_path / "a.jsonl", {"m=1": 1.0}, finished=False)]) == {}
    assert not (tmp_path / "matmul.jsonl").exists()


def test_a_damaged_sweep_is_refused(tmp_path):
    path = sweep(tmp_path / "a.jsonl", {"m=1": 1.0})
    path.write_text(path.read_text(encoding="utf-8") + '{"kind":"sam', encoding="utf-8")
    with pytest.raises(ResultsError, match="line 6 is damaged"):
        fold.fold(tmp_path, [path])


def test_a_joined_sweep_that_does_not_say_it_of_a_case_is_refused(tmp_path):
    path = sweep(tmp_path / "a.jsonl", {"m=1": 1.0})
    path.write_text(path.read_text(encoding="utf-8").replace('"mode": "graph"', '"mode": "mixed"'), encoding="utf-8")
    with pytest.raises(ResultsError, match="line 2 is damaged"):
        fold.fold(tmp_path, [path])


def test_a_case_in_a_joined_file_that_does_not_say_how_it_was_timed_is_damaged(tmp_path):
    """It would pass for one timed by single launches, and short ones of those take no part in a fit."""
    fold.fold(tmp_path, [sweep(tmp_path / "a.jsonl", {"m=1": 1.0, "m=2": 2.0})])
    path = tmp_path / "matmul.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace(',"mode":"graph"', "", 1), encoding="utf-8")
    found = journal.read(path)
    assert found.bad_lines and list(times(tmp_path)) == ["m=2"]


def test_what_was_carried_stays_so_on_both_sides(tmp_path):
    """In the journal by its line, and of a sweep by the hash that its cases come with."""
    carried = {
        "kind": "carried",
        "variant": "acme",
        "from": "0123456789ab",
        "to": "ffffffffffff",
        "but": {"m=2": ["one"]},
    }
    for name, cases in (("a", {"m=1": 1.0, "m=2": 2.0}), ("b", {"m=3": 3.0})):
        path = sweep(tmp_path / f"{name}.jsonl", cases)
        path.write_text(path.read_text(encoding="utf-8") + json.dumps(carried) + "\n", encoding="utf-8")
        fold.fold(tmp_path, [path])
    found = {
        name: case.entries["one"].fingerprint for name, case in journal.read(tmp_path / "matmul.jsonl").cases.items()
    }
    assert found == {"m=1": "ffffffffffff", "m=2": "0123456789ab", "m=3": "ffffffffffff"}
    fold.fold(tmp_path, [sweep(tmp_path / "c.jsonl", {"m=3": 9.0})])
    assert journal.read(tmp_path / "matmul.jsonl").cases["m=2"].entries["one"].fingerprint == "0123456789ab"
