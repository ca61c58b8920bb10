"""Traces, their figures and the anatomy of kernels: recorded on an H200, made up, and damaged."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest

from registry.cli import OK, USAGE, main
from registry.profiling.figures import common, figures, length, merged, role_names, window
from registry.profiling.trace import Trace, TraceError, WarpSpan, collect, lanes, perfetto, read

pytest.importorskip("triton")

from browser import Browser
from races import in_threads

from registry.profiling import anatomy, record, timeline

RECORDED = Path(__file__).parent / "recorded"
ATTENTION = RECORDED / "gluon_fa3.trace.json.gz"
SHAPE = ("--shape", "b=4,hq=32,s=4096,d=64")
ROLES = {0: "consumer 0", 4: "consumer 1", 8: "consumer 2", 14: "producer"}


def event(name, begin, end, warp=0, block=0, kernel="k"):
    """As Proton writes it."""
    place = {"pid": f"{kernel} Core7 CTA{block}", "tid": f"warp {warp} (line 0)", "cat": kernel}
    return dict(ph="X", name=name, ts=begin / 1e3, dur=(end - begin) / 1e3, args={"Frequency (MHz)": 1000.0}, **place)


MADE_UP = [
    *(event("wait K", 0, 10), event("async QK", 10, 40), event("softmax", 20, 60), event("wait QK", 60, 100)),
    *(event("wait slot", 0, 50, warp=4), event("load", 50, 100, warp=4)),
]
TWO = {0: "consumer", 4: "producer"}


# --- traces ---------------------------------------------------------------------------------------------------------


def test_a_recorded_trace_holds_every_role_and_its_spans():
    trace = read(ATTENTION)
    assert trace.damaged == 0 and len(trace.blocks) == 2
    names = {warp: {span.name for span in trace.spans if span.warp == warp} for warp in ROLES}
    for consumer in (0, 4, 8):
        assert {"wait K", "wait V", "softmax", "async QK", "async PV"} <= names[consumer]
    assert "wait slot of K or V" in names[14]
    for block in trace.blocks:
        spans = trace.of_block(block)
        assert all(span.cycles >= 0 for span in spans) and max(span.end for span in spans) < 1e7


def test_damaged_events_are_counted_and_the_rest_is_read():
    damaged = [
        7,
        {"ph": "X"},
        event("x", 5, 1),
        {**event("x", 0, 1), "tid": "nowhere"},
        {**event("x", 0, 1), "ts": "?"},
    ]
    trace = collect([*MADE_UP, *damaged, {"ph": "M", "name": "process_name"}])
    assert trace.damaged == 5 and len(trace.spans) == len(MADE_UP)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no trace"),
        (b'{"traceEvents": [', "was it cut off"),
        (b'{"traceEvents": 7}', "not a list"),
        (b"[]", "no trace"),
        (b'{"traceEvents": []}', "no spans of any kernel"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, content, said):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=said) as error:
        read(path)
    assert str(path) in str(error.value)


def test_a_recorded_trace_that_was_cut_off_is_named(tmp_path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(ATTENTION.read_bytes()[:-200])
    with pytest.raises(TraceError, match="cannot be read"):
        read(path)


def test_another_kernels_spans_are_left_out():
    other = [event("x", 0, 1, kernel="other")]
    assert {span.kernel for span in collect([*MADE_UP, *other]).spans} == {"k"}
    assert len(collect([*MADE_UP, *other], "other").spans) == 1
    with pytest.raises(TraceError, match="no spans of third .*; it holds k, other"):
        collect([*MADE_UP, *other], "third")


def test_perfetto_gets_named_threads_with_products_beside_their_role():
    trace = collect([*MADE_UP, *(event("x", 0, 1, block=3),)])
    written = json.loads(perfetto(trace, [0], TWO))["traceEvents"]
    names = {e["args"]["name"] for e in written if e["ph"] == "M"}
    assert names == {"block 0 on SM 7", "consumer", "consumer: QK", "producer"}
    spans = [e for e in written if e["ph"] == "X"]
    assert len(spans) == len(MADE_UP) and {e["pid"] for e in spans} == {0}
    for thread in {e["tid"] for e in spans}:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == thread)
        assert all(a[1] <= b[0] or b[1] <= a[1] for a, b in zip(own, own[1:], strict=False)), "nested, or apart"


def test_lanes_keep_a_warps_own_spans_together():
    spans = [WarpSpan("k", 0, 0, 0, name, 0, 1) for name in ("async PV", "wait K", "async QK", "softmax")]
    assert [(lane, len(held)) for lane, held in lanes(spans).items()] == [("", 2), ("PV", 1), ("QK", 1)]


# --- figures --------------------------------------------------------------------------------------------------------


def test_figures_of_made_up_spans_are_exact():
    """The first product begins at 10: what was in flight before is not known."""
    found = figures(collect(MADE_UP), TWO)
    consumer, producer = found.roles
    assert (found.blocks, found.cycles) == (1, 90) and found.any_in_flight == pytest.approx(30 / 90)
    assert consumer.stalled == pytest.approx(40 / 90) and producer.stalled == pytest.approx(40 / 90)
    assert consumer.in_flight == pytest.approx(30 / 90) and producer.in_flight is None
    assert consumer.covered == pytest.approx(0.5) and consumer.covered_by_own == pytest.approx(0.5)
    assert producer.covered == 0.0 and producer.covered_by_own is None
    assert [(line.name, line.count) for line in consumer.lines] == [("softmax", 1), ("wait QK", 1), ("async QK", 1)]


def test_without_a_whole_product_nothing_is_said_of_overlap():
    found = figures(collect([one for one in MADE_UP if "async" not in one["name"]]), TWO)
    assert found.any_in_flight is None and {(one.in_flight, one.covered) for one in found.roles} == {(None, None)}


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.glob("*.gz")))
def test_every_recorded_trace_adds_up(name):
    trace = read(RECORDED / name)
    warps = {span.warp: str(span.warp) for span in trace.spans}
    found = figures(trace, warps)
    assert found.blocks == 2 and trace.damaged == 0
    for one in found.roles:
        assert 0 <= one.stalled <= 1 and all(0 <= line.share <= 1 for line in one.lines)


def test_only_time_in_which_every_role_was_recorded_counts():
    spans = collect([*MADE_UP, event("load", 100, 900, warp=4)]).of_block(0)
    assert window(spans, TWO) == (10, 100) and window([], TWO) == (0.0, 0.0)


def test_stretches_merge_and_intersect():
    one, other = merged([(5, 9), (0, 2), (1, 3)]), merged([(2, 6)])
    assert one == [(0, 3), (5, 9)] and common(one, other) == [(2, 3), (5, 6)] and length(one) == 7


def test_figures_of_the_recorded_trace_are_plausible():
    found = figures(read(ATTENTION), ROLES)
    assert found.blocks == 2 and 0.8 < found.any_in_flight <= 1
    for one in found.roles[:3]:
        assert 0 < one.stalled < 0.5 and one.covered is not None and one.covered > 0.8
    assert found.roles[3].role == "producer" and found.roles[3].stalled > 0.5, "it waits for empty slots"


# --- kernels --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def attention():
    """The anatomy of the kernel that was recorded, compiled here."""
    from registry.contract.target import Target
    from registry.dispatch.catalog import catalog
    from registry.ops.parts.cases import Case

    variant = catalog.get().variants["gluon_fa3"]
    problem = Case.parse("attention", SHAPE[1]).problem(Target.named("H200"))
    return record.anatomy(variant, problem, variant.legal_configs(problem)[0])


@pytest.mark.slow(6)
def test_roles_registers_and_memory_of_a_specialized_kernel(attention):
    assert [(role.first_warp, role.warps, role.registers) for role in attention.roles] == [
        (0, 4, 160),
        (4, 4, 160),
        (8, 4, 160),
        (14, 1, 32),
    ]
    assert role_names(attention.roles) == ROLES
    held = {buffer.name: buffer for buffer in attention.buffers}
    k = held["k"]
    assert (k.kind, k.bytes, k.writers, k.readers) == ("tiles", 2 * 128 * 64 * 2, {3}, {0, 1, 2})
    barriers = [buffer for buffer in attention.buffers if buffer.kind == "barriers"]
    assert barriers and all(buffer.waiters for buffer in barriers)
    ends = [(buffer.offset, buffer.offset + buffer.bytes) for buffer in attention.buffers]
    assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False)), "no buffer lies on another"
    assert max(end for _, end in ends) <= attention.shared


def test_proton_is_asked_for_a_power_of_two_of_warps(attention):
    warps = record.sampled_warps(attention)
    assert set(ROLES) <= set(warps) and len(warps) == 4
    two = anatomy.Anatomy("k", 12, attention.roles[:3], (), 0)
    assert len(record.sampled_warps(two)) == 4 and {0, 4, 8} <= set(record.sampled_warps(two))


def test_proton_does_not_hear_of_kernels_without_marks(tmp_path, monkeypatch):
    """It divides by the room for their records: a chain of launches of which one is marked ended the process."""
    hooks = pytest.importorskip("triton.profiler.hooks.instrumentation")
    from types import SimpleNamespace

    heard, paths = [], {}
    for name, size in (("plain", 0), ("marked", 128)):
        paths[name] = str(tmp_path / f"{name}.json")
        Path(paths[name]).write_text(json.dumps({"profile_scratch_size": size}))
    for which in ("enter", "exit"):
        hear = lambda self, metadata, which=which: heard.append((which, metadata.data["function"]))  # noqa: E731
        monkeypatch.setattr(hooks.InstrumentationHook, which, hear)
    hook = SimpleNamespace(metadata_path=paths)
    with record.only_marked_kernels():
        for name in ("plain", "marked", "unknown"):
            for which in (hooks.InstrumentationHook.enter, hooks.InstrumentationHook.exit):
                which(hook, SimpleNamespace(data={"function": name}))
    assert heard == [("enter", "marked"), ("exit", "marked"), ("enter", "unknown"), ("exit", "unknown")]
    hooks.InstrumentationHook.enter(hook, SimpleNamespace(data={"function": "plain"}))
    assert heard[-1] == ("enter", "plain"), "as it was, afterwards"


def test_a_kernel_without_roles_has_one(attention):
    text = 'module attributes {"ttg.num-warps" = 8 : i32, ttg.shared = 64 : i32} {\n}'
    found = anatomy.read(text, "plain")
    assert [(role.first_warp, role.warps) for role in found.roles] == [(0, 8)] and found.shared == 64


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_draws_a_recorded_trace_without_a_gpu(attention, tmp_path, capsys):
    out = tmp_path / "p.html"
    assert main(["profile", "gluon_fa3", *SHAPE, "--from", str(ATTENTION), "-o", str(out)]) == OK
    said = " ".join(capsys.readouterr().out.split())
    assert "2 blocks; a product of some role is in flight" in said and "producer: stalled" in said
    assert json.loads(out.with_suffix(".perfetto.json").read_text())["traceEvents"]
    program = Browser.find()
    if program is None:
        pytest.skip("no Chromium: how the timeline looks is NOT tested")
    browser = Browser(program)
    try:
        browser.view(390, 844, dark=True)
        browser.open(out)
        browser.wait("document.querySelector('.chart')?.dataset.drawn === 'yes'")
        assert browser.faults() == [] and browser.requests() == []
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        text = browser.run("document.body.innerText")
        assert "o_tiles" in text and "Memory plan" in text and "wait slot of K or V" in text
    finally:
        browser.close()


def test_the_figures_come_as_json_too(attention, capsys):
    assert main(["profile", "gluon_fa3", *SHAPE, "--plan-only", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["figures"] is None and found["roles"][3] == {"role": "producer", "warps": "14", "registers": 32}


def test_with_json_the_files_that_were_asked_for_are_written(attention, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drawn = ["profile", "gluon_fa3", *SHAPE, "--from", str(ATTENTION), "--json"]
    assert main([*drawn, "-o", "p.html", "--svg", "p.svg"]) == OK
    assert json.loads(capsys.readouterr().out)["figures"]["blocks"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"p.html", "p.perfetto.json", "p.svg"}
    for path in tmp_path.iterdir():
        path.unlink()
    assert main(drawn) == OK and not list(tmp_path.iterdir()), "a page that nobody asked for"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "t.json", "-o", "t.json"], "-o: got t.json, a file of --from"),
        (["--from", "t.json", "--svg", "./t.json"], "--svg: got t.json, a file of --from"),
        (["--from", "t.json", "--figures", "t.json"], "--figures: got t.json, a file of --from"),
        (["--from", "t.perfetto.json", "-o", "t.html"], "-o: got t.html, whose trace goes to t.perfetto.json, a file"),
        (["--from", "t.json", "-o", "p.html", "--svg", "p.html"], "--svg: got p.html, a file of -o"),
        (
            ["--from", "t.json", "-o", "p.html", "--figures", "p.perfetto.json"],
            "--figures: got p.perfetto.json, a file",
        ),
        (["--from", "t.json", "--svg", "gluon_fa3.html"], "--svg: got gluon_fa3.html, a file of -o"),
        (["--keep", "p.svg", "--svg", "p.svg"], "--keep: got p.svg, a file of --svg"),
    ],
)
def test_no_file_is_written_over_what_is_read_or_written(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    for name in ("t.json", "t.perfetto.json"):
        (tmp_path / name).write_text("measured")
    assert main(["profile", "gluon_fa3", *SHAPE, *words]) == USAGE
    assert said in " ".join(capsys.readouterr().err.split())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["measured"] * 2


def test_a_live_run_leaves_no_trace_of_its_own_and_that_of_others(attention, tmp_path, monkeypatch):
    """The launch stands in for one on a GPU: Proton's file of it is the recorded one."""
    trace = gzip.decompress(ATTENTION.read_bytes())
    monkeypatch.setattr(record, "record", lambda *given: given[-1].write_bytes(trace))
    (tmp_path / "p.proton.json").write_text("somebody's")
    live = ["profile", "gluon_fa3", *SHAPE, "--device", "H200", "-o", str(tmp_path / "p.html")]
    assert main(live) == OK
    assert {path.name for path in tmp_path.iterdir()} == {"p.html", "p.perfetto.json", "p.proton.json"}
    assert (tmp_path / "p.proton.json").read_text() == "somebody's"
    assert main([*live, "--keep", str(tmp_path / "new" / "t.json")]) == OK
    assert (tmp_path / "new" / "t.json").read_bytes() == trace


def test_figures_are_collected_for_a_guided_sweep(attention, tmp_path, capsys):
    """One row for each config and shape: recording it again replaces it."""
    from registry.tuning import observed

    file = tmp_path / "timelines.json"
    for _ in range(2):
        words = ["--from", str(ATTENTION), "--figures", str(file), "-o", str(tmp_path / "p.html")]
        assert main(["profile", "gluon_fa3", *SHAPE, *words]) == OK
    (one,) = observed.read(file)
    assert one.variant == "gluon_fa3" and one.config["consumers"] == 3
    assert 0.8 < one.shares["in flight"] <= 1 and 0 < one.shares["stalled"] < 0.5 < one.shares["others stalled"]
    file.write_text(file.read_text()[:-9])
    assert main(["profile", "gluon_fa3", *SHAPE, *words]) != OK
    said = "".join(capsys.readouterr().err.split())
    assert str(file) in said and "--figures:got" in said


def test_figures_that_several_add_at_once_are_all_kept(tmp_path, monkeypatch):
    """Each reads the file, and writes it whole: one profile a card, as scripts run them."""
    from registry.cli.profile import _collect
    from registry.tuning import observed

    file, reading = tmp_path / "timelines.json", observed.rows

    def slowly(path, option):
        found = reading(path, option)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(observed, "rows", slowly)
    row = {"variant": "gluon_fa3", "op": "attention", "config": {}, "figures": {"any_in_flight": 0.5, "roles": []}}
    in_threads(lambda number: _collect(file, row | {"shape": f"s={number}"}), 6)
    assert sorted(row["shape"] for row in reading(file)) == [f"s={number}" for number in range(6)]


def test_the_memory_plan_says_what_lives_when(attention):
    lives = {buffer.name: buffer.lives for buffer in attention.buffers}
    assert lives["k"] == "while the roles run" and "before the roles part" in lives.values()
    nobody = anatomy.Buffer("x", "tiles", "", 0, 8)
    assert nobody.lives == "never used"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody", *SHAPE], "no variant 'nobody'"),
        (["torch_flash", *SHAPE, "--plan-only"], "declares no builds"),
        (["gluon_fa3", *SHAPE, "--config", "consumers=9", "--plan-only"], "--config"),
        (["gluon_fa3", "--shape", "b=1,hq=1,s=64,d=300", "--plan-only"], "head_dim"),
        (["gluon_fa3", "--shape", "nonsense=1", "--plan-only"], "nonsense"),
        (["gluon_fa3", *SHAPE, "--plan-only", "--figures", "f.json"], "--figures needs a recording"),
        (["gluon_fa3", *SHAPE, "--plan-only", "--svg", "f.svg"], "--svg needs a recording"),
        (["gluon_fa3", *SHAPE, "--plan-only", "--keep", "f.json"], "--keep needs a recording"),
        (["gluon_fa3", *SHAPE, "--from", "t.json", "--keep", "f.json"], "--keep: got it together with --from t.json"),
        (["gluon_fa3", *SHAPE, "--from", "t.json", "--plan-only"], "--plan-only: got it together with --from t.json"),
    ],
)
def test_what_cannot_be_profiled_is_refused_with_a_reason(arguments, said, capsys):
    assert main(["profile", *arguments]) != OK
    assert said in " ".join(capsys.readouterr().err.split())


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["profile", "gluon_fa3", *SHAPE]) == USAGE
    assert "no GPU" in capsys.readouterr().err


def test_a_picture_is_drawn_without_a_browser():
    from registry.report import library

    shown = timeline.rows(collect(MADE_UP), 0, TWO)
    assert [row["lane"] for row in shown if row["kind"] == "product"] == ["consumer: QK"]
    drawn = library.svg(timeline.chart(shown, "t", zoom=False, width=600), {"rows": shown})
    assert drawn.startswith("<svg") and "softmax" in drawn


def test_nothing_recorded_is_no_figure():
    assert figures(Trace((WarpSpan("k", 0, 0, 9, "x", 0, 1),)), TWO).blocks == 0
