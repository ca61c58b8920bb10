"""What `make plots` makes of raw results: tables of README.md and docs/."""

from __future__ import annotations

import json

import call_tables
import new_calls
import new_shapes
import plots
import pytest

import registry
from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.ops.known import op_named
from registry.tuning import grids, journal


def test_cells_beside_peers_become_a_table(tmp_path):
    run = {"kind": "run", "machine": "NVIDIA H200", "versions": {"torch": "2.11"}, "of": "these sources"}
    cell = {"kind": "cell", "timed": "backward", "hq": 8, "hkv": 8}
    cells = [{**cell, "tflops": {"ours": ours, "fa3": 4.0, "cudnn": 2.0}} for ours in (4.0, 1.0)]
    cells.append({**cell, "hkv": 2, "tflops": {"ours": 3.0, "fa4": 2.0}})
    (tmp_path / "peer_cells_1.jsonl").write_text("\n".join(map(json.dumps, [run, *cells])))
    *_, alike, grouped = plots.peer_cells(tmp_path).splitlines()
    assert alike == "| backward | alike | 2 | 0.500 | 0.250 | 0.500 | 1.000 |  |"
    assert grouped == "| backward | grouped | 1 | 1.500 | 1.500 |  |  | 1.500 |"
    run["versions"]["FlashAttention-4"] = "4.0"
    (tmp_path / "peer_cells_1.jsonl").write_text("\n".join(map(json.dumps, [run, *cells])))
    assert plots.peer_cells(tmp_path).startswith("NVIDIA H200; torch 2.11, FlashAttention-4 4.0; these sources")
    (tmp_path / "peer_cells_1.jsonl").write_text("\n".join(map(json.dumps, [run, *cells[:2]])))
    assert plots.peer_cells(tmp_path).startswith("NVIDIA H200; torch 2.11; these sources"), "it was not there"
    (tmp_path / "peer_cells_2.jsonl").write_text(json.dumps(cell))
    with pytest.raises(ValueError, match="kind 'cell', not 'run'"):
        plots.peer_cells(tmp_path)


def test_the_newest_run_with_all_peers_is_shown_of_each_card(tmp_path):
    cell = {"kind": "cell", "timed": "backward", "hq": 8, "hkv": 8}
    for number, (card, ours, peers) in enumerate(
        [
            ("H200", 9.0, ("fa3", "fa4")),
            ("H200", 3.0, ("fa3", "fa4")),
            ("H200", 8.0, ("fa3",)),
            ("H100", 1.0, ("fa3", "fa4")),
        ]
    ):
        run = {"kind": "run", "machine": f"NVIDIA {card} 80GB", "versions": {}, "of": "these sources"}
        found = {**cell, "tflops": {"ours": ours, **dict.fromkeys(peers, 2.0)}}
        (tmp_path / f"peer_cells_{number}.jsonl").write_text("\n".join(map(json.dumps, [run, found])))
    assert plots.peers_at_a_glance(tmp_path).splitlines()[2:] == [
        "| backward | 1, heads alike | 1.500 | 1.500 | 0.500 | 0.500 |"
    ]


def test_what_dispatch_loses_on_a_draw_and_gains_over_a_library(tmp_path, monkeypatch):
    """Ours in twice the time of the best and half of the library's; a shape that was timed by another source, and one
    that tables are fitted to, count nowhere, one whose pick was not timed is told of. At a glance there are only draws
    of which most counts."""
    machine = {"device": "NVIDIA H200", "driver": "", "torch": "2", "triton": "3", "date": "2026-01-02"}
    cases = grids.select("matmul", grid_name="random:1:40")
    picks = [(case, registry.matmul.explain(case.problem(Target.named("H200")))) for case in cases]
    ours = [(case, pick) for case, pick in picks if not pick.variant.startswith("torch")][:4]
    assert len(ours) == 4
    now = {name: fingerprint_of(variant) for name, variant in catalog.get().of("matmul").items()}
    with journal.Journal(tmp_path / "judged_77_matmul.jsonl") as file:
        file.write("run", format=journal.FORMAT, machine=machine, mode="graph")
        for number, (case, pick) in enumerate(ours):
            timed = {
                journal.contestant_key(pick.variant, pick.config): (pick.variant, pick.config, 2.0),
                "library": ("torch_matmul", {}, 4.0),
                "best": ("triton_matmul", {"no": "config"}, 1.0),
            }
            if number == 1:
                timed.pop(next(iter(timed)))
            ones = {
                key: [name, config, True, "old" if number == 2 else now[name]]
                for key, (name, config, _) in timed.items()
            }
            told = {"op": "matmul", "text": case.text, "shape": case.data(), "facts": {}, "flops": 1.0}
            file.write("case", case=str(number), contestants=ones, illegal={}, **told)
            for key, (_, _, ms) in timed.items():
                file.write("sample", case=str(number), key=key, round=0, ms=ms)
    with journal.Journal(tmp_path / "matmul.jsonl") as file:
        told = {"op": "matmul", "text": ours[3][0].text, "shape": ours[3][0].data(), "facts": {}, "flops": 1.0}
        file.write("case", case="3", contestants={}, illegal={}, **told)
    assert plots.at_a_glance(tmp_path) == ""
    monkeypatch.setattr("off_grid.FAIR", 1 / 3)
    whose = "models" if op_named("matmul").tuning.of_a_model(ours[0][0]) else "any sizes"
    assert plots.at_a_glance(tmp_path).splitlines()[2:] == [
        f"| matmul | H200 | {whose} | 1 | 2.00 times | 100.0% | 100.0% | 100.0% |"
    ]
    (row,) = plots.lost_between(tmp_path).splitlines()[2:]
    same = ours[0][1].variant == "triton_matmul"
    between = f"configs of `{ours[0][1].variant}`" if same else f"`{ours[0][1].variant}` for `triton_matmul`"
    assert row == f"| matmul | H200 | {whose} | 100.00% | 100.00 {between} (1) |"
    (row,) = plots.losing(tmp_path).splitlines()[2:]
    assert row == f"| matmul | H200 | 100%: `{ours[0][0].text}` | 0 of 1 | 2.00: `{ours[0][0].text}` |"
    best = "another config" if same else "`triton_matmul`"
    *_, worst = plots.worst_shapes(tmp_path).splitlines()
    assert worst == f"| matmul | H200 | `{ours[0][0].text}` | `{ours[0][1].variant}` | {best} | 100% |"
    *_, row = plots.every_draw(tmp_path).splitlines()
    assert row == "| matmul | H200 | 77 | 1 of 3 | 2.00 (1) | 2.00 | 0 | 100.0, 100.0, 100.0% |  |  |  |"
    plots.note_new_draws(tmp_path)
    noted = (tmp_path / "first_judged.json").read_text()
    assert json.loads(noted) == {"judged_77_matmul": {"date": "2026-01-02", "counted": 1, "lost": [1.0, 1.0, 1.0]}}
    (tmp_path / "first_judged.json").write_text(noted.replace("[1.0, 1.0, 1.0]", "[0.5, 0.25, 2.0]"))
    plots.note_new_draws(tmp_path)  # it was new once
    *_, row = plots.every_draw(tmp_path).splitlines()
    assert row.endswith("| 100.0, 100.0, 100.0% | 50.0, 25.0, 200.0% |  |  |")


def test_decisions_for_new_shapes_become_a_table(tmp_path):
    """Each shape once, in order: the first reads tables and is told apart."""
    taken = new_shapes.decided("grouped_mm", "random:1:4")
    assert len(taken) == 4
    assert min(taken) > 0
    machine = {"device": "NVIDIA H200", "torch": "2", "triton": "3", "date": "2026-01-02"}
    figures = {"grouped_mm": [500_000.0, *[100.0] * 90, *[300.0] * 9, *[200.0] * 19, 1000.0]}
    (tmp_path / "h200").mkdir()
    record = {"machine": machine, "draw": "random:1:120", "figures": figures}
    (tmp_path / "h200" / "new_shapes.json").write_text(json.dumps(record))
    *_, row = plots.new_shapes(tmp_path).splitlines()
    assert row == "| grouped_mm | 0.50 s | 100, 118, 300 | 200, 240, 1000 |"


def test_calls_up_to_their_launch_become_a_table(tmp_path):
    """Those of a cache that grows meet a length each; a card whose record has none is left out."""
    taken = new_shapes.in_its_own_process("a cache that grows by a token", "", processes=1)
    assert len(taken) == new_calls.CALLS and min(taken) > 0
    for card, more in (("cpu", {"calls": {"tokens": [9000.0] * 100 + [10.0] * 19 + [50.0]}}), ("h200", {})):
        (tmp_path / card).mkdir()
        machine = {"device": card, "torch": "2", "triton": "3", "date": "2026-01-02"}
        record = {"machine": machine, "draw": "random:1:120", "figures": {}, **more}
        (tmp_path / card / "new_shapes.json").write_text(json.dumps(record))
    *_, head, _, row = plots.new_calls(tmp_path).splitlines()
    assert (head, row) == ("| calls | cpu |", "| tokens | 10, 12, 50 |")


def test_whole_first_calls_become_a_table(tmp_path):
    machine = {"device": "NVIDIA H200", "torch": "2", "triton": "3", "date": "2026-01-02"}
    pairs = [*[[100.0, 10.0]] * 15, *[[300.0, 20.0]] * 4, [5000.0, 30.0]]
    (tmp_path / "h200").mkdir()
    record = {"machine": machine, "figures": {"matmul, waiting: torch": pairs}}
    (tmp_path / "h200" / "first_calls.json").write_text(json.dumps(record))
    *_, row = plots.first_calls(tmp_path).splitlines()
    assert row == "| matmul, waiting: torch | 20 | 100, 5000 | 1 | 10 |"


def test_warm_calls_are_held_against_those_of_the_same_round(tmp_path):
    (tmp_path / "h200").mkdir()
    names = {name for _, ours, theirs in call_tables.WARM_CALLS for name in (ours, theirs)}
    figures = {name: [2.0, 4.0, 6.0] for name in names}
    figures["matmul: torch"] = [1.0, 4.0, 12.0]
    (tmp_path / "h200" / "call_overhead.json").write_text(json.dumps({"figures": figures}))
    assert "| matmul | 4.0 | 4.0 | 1.00 |" in plots.warm_calls(tmp_path).splitlines()


def test_a_guided_sweep_is_held_against_the_full_one_by_its_times(tmp_path):
    case = grids.select("matmul", grid_name="random:1:1")[0]
    machine = {"device": "NVIDIA H200", "driver": "", "torch": "2", "triton": "3"}
    for name, times in (("full", {"fast": 1.0, "slow": 1.5, "slower": 2.0}), ("guided", {"slow": 2.5, "slower": 2.6})):
        with journal.Journal(tmp_path / f"live_{name}_matmul.jsonl") as file:
            file.write("run", format=journal.FORMAT, machine=machine, mode="graph")
            ones = {one: [one, {}, True, "f"] for one in times}
            told = {"op": "matmul", "text": case.text, "shape": case.data(), "facts": {}, "flops": 1.0}
            file.write("case", case="c", contestants=ones, illegal={}, **told)
            for one, ms in times.items():
                file.write("check", case="c", key=one, errors={})
                file.write("sample", case="c", key=one, round=0, ms=ms, low=ms, high=ms, n=1)
    head, _, row, every, _, _, _, far = plots.guided(tmp_path).splitlines()
    assert row == "| matmul | 1 | 2 of 3 (66.7%) | 50.00% | 50.0% | 0 of 1 |" and every == row.replace("matmul", "all")
    assert far == f"- matmul `{case.text}`: slow 1500.0, fast 1000.0 us (2 of 3 measured)"


def test_runs_of_the_conformance_kit_add_up_by_variant(tmp_path):
    """A variant that no run was kept of is named, too: nobody takes silence for a pass."""
    assert plots.conformance(tmp_path) == ""
    for name, outcomes in (("conformance", [True, False]), ("conformance_12", [True])):
        report = {"subject": "triton_fa2", "cases": [{"passed": passed} for passed in outcomes]}
        (tmp_path / "h200").mkdir(exist_ok=True)
        (tmp_path / "h200" / f"{name}.json").write_text(json.dumps([report]))
    rows = plots.conformance(tmp_path).splitlines()
    where = "../../benchmarks/results/h200/conformance_12.json"
    assert f"| `triton_fa2` | 3 | 1 | [12]({where}) | none | |  |" in rows
    assert "| `triton_gemv` | none | |  | none | |  |" in rows
    assert not any("torch_cpu" in row for row in rows)
