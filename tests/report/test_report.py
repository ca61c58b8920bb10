"""What a report is made of: files read and passed over, rows, picks, comparisons, and the page as a file."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from results_files import MACHINE, lines, write

from registry.cli import FINDING, OK, USAGE, main, tune
from registry.errors import InvalidArgument
from registry.ops.parts.cases import from_file
from registry.report import against, charts, dispatch, library, sources
from registry.report.page import MOST_BYTES, page, payload, sheets_of
from registry.report.sheet import group_rows, sheet

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASE = re.compile(r'"case":"([0-9a-f]+)"')
SHAPE, OTHER = "b=2,hq=4,s=1024,d=64", "b=2,hq=4,s=2048,d=64,causal"
CONFIG = {"BLOCK_N": 128, "consumers": 2, "stages": 2, "pingpong": "pair", "q_columns": 64}
CONFIG |= {"schedule": "dynamic", "rescale": "after_pv", "overlap": True}
WIDER = {**CONFIG, "consumers": 3, "q_columns": 0}
TIMES = {
    SHAPE: {
        "gluon_fa3": [(CONFIG, [1.0, 1.01, 0.99]), (WIDER, [0.8, 0.81, 0.79])],
        "torch_cudnn": [({}, [1.0, 1.0, 1.0])],
        "peer.other": [({}, [0.9, 0.9, 0.9])],
    },
    OTHER: {"gluon_fa3": [(CONFIG, [2.0, 2.0, 2.0])], "torch_cudnn": [({}, [3.0, 3.0, 3.0])]},
}


@pytest.fixture
def read(tmp_path):
    def read(*files: str) -> sources.Sources:
        path = tmp_path / "h200" / "attention.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(files) + "\n")
        return sources.read([path])

    return read


# --- files ----------------------------------------------------------------------------------------------------------


def test_damaged_and_cut_off_lines_are_named_and_counted(read):
    whole = lines("attention", TIMES)
    damaged = [*whole[:3], "{not json", '{"kind":"sample","case":"nobody","key":"x","round":0,"ms":1}', *whole[3:]]
    found = read(*damaged, whole[-2][: len(whole[-2]) // 2])
    (note,) = found.passed_over
    assert "3 damaged lines passed over (4, 5, " in note and "attention.jsonl" in note
    assert len(found.runs["attention"].cases) == 2


def test_what_is_no_result_is_named_and_the_rest_is_shown(tmp_path):
    write(tmp_path / "a.jsonl", "attention", TIMES)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "nothing.json").write_text("\n")
    (tmp_path / "prose.json").write_text('"hello"')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "others.jsonl").write_text('{"model": "Llama", "ms": 60.3}\n{"model": "Llama", "ms": 58.1}\n')
    (tmp_path / "other_format.jsonl").write_text(
        json.dumps({"kind": "run", "format": 99, "machine": MACHINE, "mode": "x"})
    )
    (tmp_path / "calls.json").write_text(
        json.dumps({"machine": MACHINE, "unit": "us", "figures": {"a call": [2, 1, 3]}})
    )
    (tmp_path / "limits.json").write_text(
        json.dumps({"machine": MACHINE, "limits": {"gbs": 4000, "tflops": {"bfloat16": 700}}})
    )
    (tmp_path / "bad_limits.json").write_text(json.dumps({"machine": MACHINE, "limits": {"gbs": -1, "tflops": {}}}))
    found = sources.read([tmp_path])
    assert list(found.runs) == ["a"] and found.calls["calls"]["figures"] == {"a call": [1.0, 2.0, 3.0]}
    assert found.limits["NVIDIA H200"]["gbs"] == 4000
    text = "\n".join(found.passed_over)
    for name in (
        "empty.jsonl: no measurement",
        "nothing.json: no measurement",
        "prose.json: no file of results",
        "broken.json:",
        "others.jsonl: no measurement in it (2 lines, none of kreg tune's)",
        "bad_limits.json: limits",
    ):
        assert name in text
    assert "other_format.jsonl" in text and "format 99" in text and len(found.passed_over) == 7


def test_recorded_timelines_are_shown_and_damaged_ones_named(tmp_path):
    role = {"role": "producer", "stalled": 0.9, "in_flight": None, "covered": None}
    spans = [["wait slot", 0.8, 9, 100, 200], ["load", 0.1, 9, 10, 20], ["wait turn", 0.1, 9, 10, 20]]
    row = {"variant": "v", "op": "matmul", "shape": "m=64", "config": {"x": 1}}
    row["figures"] = {"any_in_flight": None, "roles": [{**role, "spans": spans}]}
    (tmp_path / "timelines.json").write_text(json.dumps({"timelines": [row]}))
    (tmp_path / "cut.json").write_text(json.dumps({"timelines": [{**row, "figures": {"any_in_flight": 0.5}}]}))
    found = sources.read([tmp_path])
    (shown,) = payload(found, None, "t")["timelines"]
    assert shown["roles"] == [["producer", 0.9, None, [["wait slot", 0.8], ["wait turn", 0.1]]]]
    (note,) = found.passed_over
    assert "cut.json" in note and "roles" in note


def test_a_path_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(InvalidArgument, match="nowhere"):
        sources.read([tmp_path / "nowhere"])


def test_files_of_one_name_are_told_apart(tmp_path):
    for folder in ("x", "y"):
        write(tmp_path / folder / "attention.jsonl", "attention", TIMES)
    assert set(sources.read([tmp_path]).runs) == {"x/attention", "y/attention"}


# --- rows -----------------------------------------------------------------------------------------------------------


def test_a_row_is_the_best_config_over_the_best_peer(read):
    found = sheet(read(*lines("attention", TIMES)).runs["attention"], "attention", "attention")
    assert found.variants == ["gluon_fa3", "torch_cudnn", "peer.other"], "ours, libraries, vendors"
    cells = {(found.cases[r["case"]].text, found.variants[r["variant"]]): r for r in found.rows}
    assert cells[SHAPE, "gluon_fa3"]["ratio"] == pytest.approx(0.9 / 0.8, rel=1e-3)
    assert cells[SHAPE, "torch_cudnn"]["ratio"] == pytest.approx(0.9, rel=1e-3)
    assert cells[OTHER, "gluon_fa3"]["ratio"] == pytest.approx(1.5, rel=1e-3)
    assert cells[SHAPE, "gluon_fa3"]["x"] == 1024 and cells[SHAPE, "gluon_fa3"]["panel"] == "head dim 64, causal no"
    flops, moved = 4 * 2 * 4 * 1024 * 1024 * 64, 4 * 2 * 4 * 1024 * 64 * 2
    assert cells[SHAPE, "gluon_fa3"]["intensity"] == pytest.approx(flops / moved)


def test_warp_groups_are_compared_where_several_were_measured(read):
    found = sheet(read(*lines("attention", TIMES)).runs["attention"], "attention", "attention")
    rows = group_rows(found)
    assert {row["groups"]: row["ms"] for row in rows} == {2: 1.0, 3: 0.8}


def test_every_op_is_shown_over_facts_that_it_has():
    from registry.contract.problem import PROBLEM_TYPES
    from registry.ops.known import all_ops

    for name, op in all_ops().items():
        facts = PROBLEM_TYPES[name].fact_kinds()
        assert not {op.tuning.over, *op.tuning.panels, *op.tuning.leading[:1]} - {""} - facts.keys(), name


def test_picks_are_the_dispatchers_and_their_regret_is_to_the_best_measured(read):
    found = sheet(read(*lines("attention", TIMES)).runs["attention"], "attention", "attention")
    answers = dispatch.picks(found)
    assert [pick.case for pick in answers] == [0, 1]
    lines_of = dispatch.regret([dispatch.Pick(0, "v", "s", 0.0, True), dispatch.Pick(1, "v", "s", 0.2, True)])
    assert lines_of[0]["mean"] == pytest.approx(0.1) and lines_of[0]["worst_case"] == 1 and len(lines_of) == 1
    rules = dispatch.coverage(found, answers)
    assert sum(rule["shapes"] for rule in rules) == 2
    assert any(rule["beyond"] == ["no shape in these results reaches it"] for rule in rules)


def test_shapes_that_no_table_was_made_with_are_told_apart():
    """On shapes that are in the fit a small regret says little."""
    picks = [dispatch.Pick(0, "v", "s", 0.0, True, 0.001), dispatch.Pick(1, "v", "s", 0.2, False, 0.8)]
    lines_of = {line["where"]: line for line in dispatch.regret(picks)}
    assert lines_of["new to the table"]["mean"] == pytest.approx(0.2) and lines_of["new to the table"]["shapes"] == 1
    assert lines_of["on a grid"]["shapes"] == lines_of["off every grid"]["shapes"] == 1


def test_a_rule_by_the_nearest_shapes_says_what_it_was_measured_on_and_which_shapes_are_far(read):
    """The shipped table's own shapes are not new to it; a length that nobody has measured is far from all."""
    shape = "b=4,hq=32,s=4096,d=64"
    far = "hq=1,s=1,sk=8000000,d=8"
    found = sheet(
        read(*lines("attention", dict.fromkeys((shape, far), TIMES[SHAPE]))).runs["attention"], "a", "attention"
    )
    answers = {found.cases[pick.case].text: pick for pick in dispatch.picks(found)}
    assert not answers[shape].new and answers[far].new and answers[far].far > 2
    rule = next(one for one in dispatch.coverage(found, list(answers.values())) if one["shapes"])
    assert "nearest measured shapes; far from all, torch_" in rule["use"] and "seqlen_q 1.." in rule["measured"]
    assert rule["shapes"] == 2 and rule["beyond"] == [
        f"no measured shape is near 1 of 2, so a library's kernel is first where it is not expected to lose much: {far}"
    ]


# --- two results ----------------------------------------------------------------------------------------------------


def changed(factor, spread=0.0):
    rounds = [2.0 * factor * (1 + spread * (n - 1)) for n in range(3)]
    return {OTHER: {"gluon_fa3": [(CONFIG, rounds)]}}


@pytest.mark.parametrize(
    ("factor", "spread", "slower", "faster"), [(1.2, 0, 1, 0), (0.8, 0, 0, 1), (1.01, 0, 0, 0), (1.1, 0.2, 0, 0)]
)
def test_a_change_counts_beyond_the_noise_of_both(read, factor, spread, slower, faster):
    old = read(*lines("attention", {OTHER: TIMES[OTHER]})).runs
    new = read(*lines("attention", changed(factor, spread))).runs
    found = against.compare(new, old)
    assert (found["slower"], found["faster"]) == (slower, faster) and found["only_old"] == 1


def test_results_of_another_machine_or_mode_are_said_to_be(read):
    old = read(*lines("attention", TIMES)).runs
    new = read(*lines("attention", TIMES, torch="2.12.0")).runs
    assert against.compare(new, old)["machines"] == ["torch: 2.11.0 before, 2.12.0 now"]
    graph = read(*lines("attention", TIMES, mode="graph")).runs
    assert against.compare(graph, old)["same"] == 0 and against.compare(graph, old)["only_new"] == 5


# --- the page -------------------------------------------------------------------------------------------------------


def one_of_many(folder: Path) -> Path:
    """Every file of raw results, with one of 40 of its shapes."""
    for path in RESULTS.rglob("*.jsonl"):
        with path.open(encoding="utf-8") as file:
            kept = [line for line in file if (found := CASE.search(line)) is None or int(found[1], 16) % 40 == 0]
        made = folder / path.relative_to(RESULTS)
        made.parent.mkdir(exist_ok=True)
        made.write_text("".join(kept), encoding="utf-8")
    return folder


def test_the_page_of_raw_results_is_small_and_names_no_other_place(monkeypatch, tmp_path):
    """Every view has rows, of the raw results under an op's own name."""
    everything = sources.read([one_of_many(tmp_path)])
    made = sheets_of(everything)
    monkeypatch.setattr("registry.report.page.sheets_of", lambda _: made)
    of_op = {found.op: found for found, *_ in made.found if found.run in (found.op, f"h200/{found.op}")}
    for op in ("attention", "attention_backward", "attention_varlen", "grouped_mm", "matmul"):
        found = of_op[op]
        assert found.rows and all(row["intensity"] and row["tflops"] for row in found.rows), op
        assert sum(row["panel"] != "" and row["x"] > 0 for row in found.rows) > len(found.rows) / 2, op
    text = page(everything)
    assert len(text.encode()) < 0.3 * MOST_BYTES
    before_script = text.partition("<script>")[0]
    assert not re.search(r"(src|href)=[\"']?https?:", before_script) and "Content-Security-Policy" in before_script


def test_a_page_that_grows_too_large_leaves_samples_of_slower_configs_out(read, monkeypatch):
    slow = {SHAPE: {"gluon_fa3": [(CONFIG, [1.0 + i / 100 for i in range(99)]), (WIDER, [0.8, 0.81, 0.79])]}}
    found = read(*lines("attention", slow))
    whole = page(found)
    monkeypatch.setattr("registry.report.page.MOST_BYTES", len(whole.encode()) - 1)
    assert len(page(found)) < len(whole)
    assert "fastest config only" in "".join(payload(found, None, "t", False)["notes"])


def test_text_in_results_is_no_markup(read):
    strange = lines("attention", TIMES, device="</script><b>H200")
    assert "</script><b>" not in page(read(*strange))


def test_no_op_is_too_strange_to_be_counted(read):
    case = json.loads(lines("attention", TIMES)[1])
    unknown = json.dumps({**case, "op": "convolution", "case": "x"})
    sample = json.dumps({"kind": "sample", "case": "x", "key": next(iter(case["contestants"])), "round": 0, "ms": 1.0})
    found = payload(read(*lines("attention", TIMES), unknown, sample), None, "t")
    assert "attention: op convolution is not known here: not shown" in found["notes"] and "attention" in found["ops"]


@pytest.mark.parametrize(
    "chart",
    [
        charts.calls(2),
        charts.regret(),
        charts.roofline(["a"], "x"),
        charts.speed(["a"], "s", "T"),
        charts.groups("s", "T"),
    ],
)
def test_every_chart_draws(chart):
    row = {"variant": "a", "x": 64, "speed": 1, "panel": "p", "intensity": 9, "tflops": 3, "groups": 2, "dtype": "bf16"}
    row |= dict(call="c", median=1, low=1, high=2, lost=0.1, share=0.5, where="on", ms=1, shape="s")
    assert library.svg(chart, {"rows": [row, {**row, "x": 128}], "roof": [row]}).startswith("<svg")


def test_without_the_package_that_draws_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    library.script.cache_clear()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    file = write(tmp_path / "a.jsonl", "attention", TIMES)
    assert main(["report", str(file), "-o", str(tmp_path / "r.html")]) == FINDING
    assert "pip install 'kernel-registry[report]'" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_the_command_draws_compares_and_says_what_it_passed_over(tmp_path, capsys):
    new = write(tmp_path / "new.jsonl", "attention", {**TIMES, **changed(1.3)})
    old = write(tmp_path / "old.jsonl", "attention", TIMES)
    new.write_text(new.read_text() + '{"kind": "sample", "ca')
    out = tmp_path / "deep" / "r.html"
    assert main(["report", str(new), "-o", str(out), "--against", str(old)]) == OK
    said = " ".join(capsys.readouterr().out.split())
    assert "1 damaged line passed over" in said and "1 slower, 0 faster" in said and "+30.0%" in said
    assert out.read_text().startswith("<!doctype html>")
    assert main(["report", str(new), "-o", str(out), "--against", str(old), "--fail-if-slower"]) == FINDING


def test_a_gate_that_compares_nothing_does_not_pass(tmp_path, capsys):
    new, out = write(tmp_path / "new.jsonl", "attention", TIMES), tmp_path / "r.html"
    other = write(tmp_path / "other.jsonl", "attention_backward", TIMES)
    (empty := tmp_path / "empty").mkdir()
    gate = ["report", str(new), "-o", str(out), "--fail-if-slower", "--against"]
    for old in (empty, other):
        assert main([*gate, str(old)]) == USAGE and not out.exists()
        err = capsys.readouterr().err
        assert f"--against: got {old}, which measured nothing that RESULTS did; allowed" in err
    assert main([*gate[:-2], "--against", str(other)]) == OK, "a page may be drawn of them"
    assert main([*gate, str(tmp_path / "nope")]) == USAGE
    assert f"--against: got {tmp_path / 'nope'}; allowed: files of results" in capsys.readouterr().err


def test_the_command_refuses_what_it_cannot_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REGISTRY_CACHE", str(tmp_path / "none"))
    assert main(["report", "-o", str(tmp_path / "r.html")]) == USAGE
    assert "you have not tuned yet" in capsys.readouterr().err
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert main(["report", str(empty), "-o", str(tmp_path / "r.html")]) == FINDING
    assert main(["report", str(empty), "--fail-if-slower"]) == USAGE


def test_the_command_that_reruns_a_cell_is_one(read):
    """The command line parses, and a shape comes through a pipe as it would from a file."""
    (one,) = payload(read(*lines("attention", {SHAPE: TIMES[SHAPE]})), None, "t")["ops"]["attention"]
    words = shlex.split(one["rerun"].replace("VARIANT", "'gluon_fa3'")) + ["--shapes", "/dev/stdin"]
    assert words[:2] == ["kreg", "tune"]
    parsed = tune.command.make_context("tune", words[2:]).params
    assert parsed["op"] == "attention" and parsed["only"] == ("gluon_fa3",)
    reader, writer = os.pipe()
    os.write(writer, (one["cases"][0]["shape"] + "\n").encode())
    os.close(writer)
    assert [case.text for case in from_file("attention", Path(f"/dev/fd/{reader}"))] == [SHAPE]
    os.close(reader)
