"""The fit: honest neighbours. On made-up measurements whose best table is known."""

import dataclasses
import itertools
import json
import math
import types
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from registry import Target
from registry.contract.variant import Variant
from registry.ops.parts.cases import Case, digest
from registry.tables import measured
from registry.tables.lint import Known, lint
from registry.tables.nearest import REACH
from registry.tuning import evidence, journal
from registry.tuning.fit import fit
from registry.tuning.journal import CaseResults, Entry, Results, contestant_key
from registry.tuning.kinds import beside_of, fits
from registry.tuning.lint import load_files
from registry.tuning.rules import make_table
from registry.tuning.taking_part import BY_LAUNCHES, UNEVEN, WRONG, Settings
from registry.tuning.weights import regret_nearby
from registry.tuning.worker import explain_failure

VERSIONS = {"driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}
MACHINE = {"device": "NVIDIA H200", "arch": "sm90", "date": "2026-11-20", **VERSIONS}
SMALL = {"TILE": 64}
ALL = Settings()


def results_of(cases, times, *, failures=()):
    """Results in which times(facts) gives the milliseconds of each (variant, config)."""
    found = Results("made-up.jsonl", dict(MACHINE))
    for case in cases:
        problem = case.problem(Target.named("H200"))
        facts = {name: list(v) if isinstance(v, tuple) else v for name, v in problem.facts().items()}
        made = CaseResults(case.op, case.text, case.data(), facts, 1e12, done=True)
        firsts = set()
        for (variant, config), ms in times(facts).items():
            config = dict(config)
            entry = Entry(variant, config, variant not in firsts, digest(variant)[:12])
            firsts.add(variant)
            entry.samples = {turn: {"ms": ms} for turn in range(5)}
            if (variant, case.text) in failures or variant in failures:
                entry.failure = {"why": "wrong", "detail": "made up"}
            made.entries[contestant_key(variant, config)] = entry
        found.cases[digest([case.op, case.text])] = made
    return found


def attention_cases(heads=(8, 16), dims=(64, 128)):
    product = itertools.product(heads, dims, (False, True), (512, 1024, 4096, 16384))
    return [Case.of("attention", b=2, hq=h, s=s, d=d, causal=c) for h, d, c, s in product]


def one(variant, config=()):
    return variant, tuple(dict(config).items())


def table_of(results):
    return make_table(results, fits(results.of("attention"), results.machine, ALL), "h200/0001", ALL)


def picks_of(results):
    """What is picked on each shape by the others."""
    found = fit(results.of("attention"), results.machine, ALL)
    return [(case.facts, entry) for case, entry in evidence.picks_left_out(found, ALL)]


def test_one_variant_that_is_always_best_is_always_picked():
    made = table_of(results_of(attention_cases(), lambda f: {one("good"): 1.0, one("bad"): 1.5}))
    assert made.rules[0]["use"][0] == {"variant": "good"} and made.regret.worst == 0 == made.single.worst


def test_a_border_in_one_fact_is_found_by_the_weights():
    results = results_of(
        attention_cases(heads=(4, 8, 16)),
        lambda f: {one("few"): 1.0, one("many"): 1.5 if f["seqlen_q"] < 2048 else 0.5},
    )
    made = table_of(results)
    assert made.regret.worst == 0 and made.single.worst > 0
    nearest = made.rules[0]["nearest"]
    assert {"queries", "keys", "rows", "cached", "other_lengths"} & nearest.keys()


def test_a_flag_and_a_size_together():
    def times(f):
        return {one("a"): 1.0, one("b"): 0.7 if f["causal"] and f["head_dim"] == 128 else 1.4}

    assert table_of(results_of(attention_cases(heads=(2, 4, 8, 16, 32)), times)).regret.mean < 0.01


def test_the_same_measurements_always_give_the_same_table():
    results = results_of(attention_cases(), lambda f: {one("a"): 1.0, one("b"): 1.5 if f["seqlen_q"] < 2048 else 0.5})
    assert table_of(results).text == table_of(results).text


def test_wrong_results_are_never_picked_and_are_reported():
    made = table_of(results_of(attention_cases(), lambda f: {one("liar"): 0.1, one("honest"): 1.0}, failures={"liar"}))
    assert [use["variant"] for use in made.rules[0]["use"]] == ["honest"] and made.regret.worst == 0
    assert made.warnings and "liar" in made.warnings[0]


def test_peers_are_never_picked_nor_the_measure_of_regret():
    made = table_of(results_of(attention_cases(), lambda f: {one("peer.fast"): 0.1, one("ours"): 1.0}))
    assert "peer.fast" not in made.text + made.measured and made.regret.worst == 0


def test_evidence_is_what_was_measured_and_lint_finds_nothing():
    made = table_of(results_of(attention_cases(), lambda f: {one("ours"): 1.0, one("theirs"): 2.0}))
    tables = evidence.load_text(made.text, "attention")
    (rule,) = tables.tables[0].rules
    found = rule.evidence
    assert (found.device, found.tflops, found.cases, found.run) == ("NVIDIA H200", 1000.0, 32, "h200/0001")
    assert (found.runner_up.variant, found.runner_up.tflops) == ("theirs", 500.0)
    assert found.sources == {name: digest(name)[:12] for name in ("ours", "theirs")}
    known = Known({"ours": "attention", "theirs": "attention"})
    beside_no_file = ("misnamed-file", "no-shapes")
    assert [f for f in lint(tables, known) if f.code not in beside_no_file] == []


def test_who_ran_alone_is_no_runner_up_of_itself():
    made = table_of(results_of(attention_cases(), lambda f: {one("ours"): 1.0}))
    assert made.rules[0]["evidence"]["tflops"] == 1000.0 and "runner_up" not in made.rules[0]["evidence"]
    both = table_of(results_of(attention_cases(), lambda f: {one("ours"): 1.0 + f["causal"], one("theirs"): 1.5}))
    assert both.rules[0]["evidence"]["runner_up"]["variant"] in ("ours", "theirs")  # alone, of a mixture


def test_shapes_whose_contestants_were_not_all_timed_are_left_out():
    results = results_of(attention_cases(), lambda f: {one("a"): 1.0, one("b"): 2.0})
    case = results.of("attention")[3]
    case.entries[contestant_key("b", {})].samples.clear()
    made = table_of(results)
    assert made.skipped == {case.text: UNEVEN} and len(json.loads(made.measured)["rules"]["0"]) == 31


def test_short_shapes_timed_by_single_launches_are_left_out_beside_replayed_graphs():
    results = results_of(attention_cases(), lambda f: {one("a"): 0.01 if f["seqlen_q"] == 512 else 1.0, one("b"): 2.0})
    assert table_of(results).skipped == {}, "all were timed alike"
    next(case for case in results.of("attention") if case.facts["seqlen_q"] == 16384).mode = "graph"
    shorts = [case.text for case in results.of("attention") if case.facts["seqlen_q"] == 512]
    assert table_of(results).skipped == dict.fromkeys(shorts, BY_LAUNCHES)


def test_a_batch_or_a_dtype_that_nobody_measured_is_not_spoken_about():
    cases = [Case.of("matmul", m=m, n=1024, k=1024) for m in (16, 64, 256, 1024, 4096)]
    results = results_of(cases, lambda f: {one("a"): 1.0})
    made = make_table(results, fits(results.of("matmul"), results.machine), "h200/0001")
    assert made.rules[0]["when"] == {"dtype": ["bfloat16", "float16"], "batch": 1, "ieee": False}


def test_what_was_the_same_in_all_shapes_keeps_others_far():
    results = results_of(attention_cases(dims=(128,)), lambda f: {one("a"): 1.0, one("b"): 2.0})
    found = fit(results.of("attention"), results.machine)
    neighbours = beside_of([found]).neighbours(evidence.Rule(0, 0, (), (), nearest=found.weights))
    like = Case.of("attention", b=2, hq=8, s=1024, d=128).problem(Target.named("H200"))
    assert neighbours.ask(like.likeness()).near[0][0] < 0.2
    other = dataclasses.replace(like, deterministic=True, softcap=1.0)
    assert neighbours.ask(other.likeness()).near[0][0] >= REACH


# --- weights ------------------------------------------------------------------------------------------------------


def test_weights_are_judged_without_shapes_that_one_variant_ran_alone_on():
    """Five that the first ran alone on, one where it is the faster, and two where the other is: those two keep it."""
    alone, slower, faster = [0.0, math.nan], [0.3, 0.0], [0.0, 0.1]
    lost = torch.tensor([alone] * 5 + [slower, slower, faster])
    misled = math.expm1(0.1)  # the last asks the two before it
    assert regret_nearby(torch.arange(8.0)[:, None] / 1000, lost) == pytest.approx(misled / 8 + 0.1 * misled, rel=1e-3)


# --- proof --------------------------------------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path):
    """(raw results folder, table) as a release has them."""
    times = lambda f: {one("ours", SMALL): 1.0, one("theirs"): 2.0 if f["causal"] else 0.5}  # noqa: E731
    return shipped_of(results_of(attention_cases(), times), tmp_path)


def shipped_of(results, folder):
    path = folder / "h200" / "0001.jsonl"
    with journal.Journal(path) as file:
        file.write("run", format=journal.FORMAT, machine=MACHINE, mode="events")
        for key, case in results.cases.items():
            contestants = {k: [e.variant, e.config, e.first, e.fingerprint] for k, e in case.entries.items()}
            about = {"op": case.op, "text": case.text, "shape": case.shape, "facts": case.facts, "flops": case.flops}
            file.write("case", case=key, contestants=contestants, **about)
            for k, entry in case.entries.items():
                for turn, sample in entry.samples.items():
                    file.write("sample", case=key, key=k, round=turn, **sample)
            file.write("done", case=key)
    raw = journal.read(path)
    return folder, make_table(raw, fits(raw.of("attention"), raw.machine, ALL), "h200/0001", ALL)


def verified(shipped, text):
    folder, made = shipped
    path = Path(folder) / "attention.sm90.yaml"
    path.write_text(text)
    path.with_name("attention.sm90.measured.json").write_text(made.measured)
    return evidence.verify(load_files([path]).tables[0], folder, ALL)


def test_a_table_proves_against_its_raw_results(shipped):
    assert verified(shipped, shipped[1].text) == []


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("tflops: ", "tflops: 9", "tflops: the table says 9"),
        ("run: h200/0001", "run: h200/0002", "no raw results"),
        ("torch: 2.11.0", "torch: 2.12.0", "torch"),
        ("2026-11-20", "2026-11-19", "date"),
        ("cases: 32", "cases: 31", "cases"),
        ("device: NVIDIA H200", "device: NVIDIA H100", "device"),
        ("ours: ", "others: ", "sources"),
    ],
)
def test_a_table_that_was_tampered_with_does_not(shipped, before, after, complaint):
    text = shipped[1].text
    assert before in text
    found = verified(shipped, text.replace(before, after, 1))
    assert any(complaint in problem for problem in found), found


def test_measured_shapes_that_were_tampered_with_do_not_prove(shipped):
    folder, made = shipped
    changed = dataclasses.replace(made, measured=made.measured.replace('"ours", {"TILE": 64}', '"ours", {"TILE": 32}'))
    assert changed.measured != made.measured
    assert any("measured shapes" in problem for problem in verified((folder, changed), made.text))


def test_regret_of_a_failing_pick_is_infinite_and_uncovered_shapes_are_named():
    results = results_of(attention_cases(), lambda f: {one("a"): 1.0, one("b"): 2.0})
    cases = results.of("attention")
    entry = cases[0].entries[contestant_key("a", {})]
    found = evidence.regret_of([(cases[0], entry), (cases[1], None)], ALL)
    assert found.shapes == 2 and found.uncovered == (cases[1].text,) and found.worst == 0
    entry.failure = {"why": "wrong"}
    assert math.isinf(evidence.regret_of([(cases[0], entry)], ALL).worst)


def test_a_pick_that_does_not_fit_gives_way_to_the_next():
    results = results_of(attention_cases(), lambda f: {one("a"): 1.0, one("b"): 2.0})
    for case in results.of("attention"):
        case.entries[contestant_key("a", {})].failure = {"why": "does not compile"}
    assert {entry.variant for _, entry in picks_of(results)} == {"b"}


def test_settings_are_plain_data():
    assert asdict(Settings())["exclude"] == ("peer.*",)


def test_a_variants_guess_is_kept_beside_the_table_and_one_that_cannot_guess_is_none():
    entry = Entry("gluon_fa3", {"no such": 1})
    problem = Case.of("attention", b=2, hq=8, s=1024, d=128).problem(Target.named("H200"))
    from registry.dispatch.catalog import catalog
    from registry.tuning.taking_part import guess_of

    assert guess_of(entry, problem) == 0.0
    variant: Variant = catalog.get().variants["gluon_fa3"]
    first = variant.configs_for(problem)[0]
    assert guess_of(Entry("gluon_fa3", dict(first)), problem) == pytest.approx(math.log(variant.cost(problem, first)))


@pytest.mark.parametrize("given", [math.nan, math.inf])
def test_a_table_is_not_lost_to_what_is_no_guess(declare, monkeypatch, given):
    """Nor is one written that no process can read."""
    declare("ours", dtypes=("bfloat16",), cost=lambda problem, config: given)
    results = results_of(attention_cases(), lambda f: {one("ours", SMALL): 1.0, one("theirs"): 2.0})
    measured._checked(measured.Decoder(measured._File).decode(table_of(results).measured))
    monkeypatch.setattr("registry.tuning.taking_part.guess_of", lambda entry, problem: given)
    with pytest.raises(ValueError, match="JSON"):
        table_of(results)


def test_of_too_few_shapes_nothing_is_left_out_and_evidence_is_what_was_measured():
    """A variant that fails is the first where nothing tells."""
    times = lambda f: {one("bad"): 1.0, one("good"): 2.0}  # noqa: E731
    made = table_of(results_of(attention_cases()[:1], times, failures=("bad",)))
    assert "nothing could be left out in turn (too few shapes: 1" in str(made.regret)
    assert made.regret.data() | {"mean": None, "p95": None, "worst": None} == made.regret.data()
    assert json.loads(json.dumps(made.regret.data(), allow_nan=False))["shapes"] == 1
    assert made.rules[0]["evidence"]["tflops"] == pytest.approx(0.5e3) and made.rules[0]["evidence"]["cases"] == 1


def test_a_warning_keeps_the_error_and_the_line_it_came_from():
    results = results_of(attention_cases(), lambda f: {one("bad"): 1.0, one("good"): 2.0}, failures=("bad",))
    for case in results.of("attention"):
        (entry,) = (entry for entry in case.entries.values() if entry.failure)
        entry.failure = {
            "why": "error",
            "detail": f"ValueError: {'so it is ' * 99}\n  mine.py:7 in run: raise ValueError",
        }
    warnings = table_of(results).warnings
    assert all("ValueError: so" in text and text.endswith("mine.py:7 in run: raise ValueError") for text in warnings)
    assert warnings and max(map(len, warnings)) < 300


def test_what_no_graph_can_hold_is_not_wrong():
    """A launch that waits for the GPU cannot be captured, so no graph can time it; it may well be dispatched to."""
    worker = types.SimpleNamespace(synchronize=lambda: None)
    refused = explain_failure(worker, RuntimeError("cannot copy during CUDA graph capture unless it is pinned"))
    assert refused["why"] not in WRONG


def test_an_op_that_counts_no_work_is_compared_by_its_calls():
    found = results_of(attention_cases()[:1], lambda facts: {one("slow"): 2.0, one("fast"): 1.0})
    (case,) = found.of("attention")
    case.flops = 0.0
    slow, fast = (evidence.speed_of([(case, case.best[name])]) for name in ("slow", "fast"))
    assert slow > 0 and fast == pytest.approx(2 * slow)


def test_a_variant_alone_has_a_table_though_another_than_its_first_config_is_fastest():
    times = {("torch_math", (("TILE", 64),)): 2.0, ("torch_math", (("TILE", 128),)): 1.0}
    made = table_of(results_of(attention_cases()[:3], lambda facts: times))
    assert [use["variant"] for use in made.rules[0]["use"]] == ["torch_math"]


def test_the_best_config_of_a_variant_alone_is_told():
    from registry.cli._sweep import results_lines

    times = {("torch_math", (("TILE", 64),)): 2.0, ("torch_math", (("TILE", 128),)): 1.0}
    (line,) = results_lines(results_of(attention_cases()[:1], lambda facts: times), "attention")
    assert "torch_math" in line and "(TILE=128)" in line
    times |= {one("b"): 3.0}
    (line,) = results_lines(results_of(attention_cases()[:1], lambda facts: times), "attention")
    assert "TILE=" not in line


def test_thousands_of_shapes_are_counted_and_a_few_are_named():
    from registry.cli._fit import _first, _left_out

    skipped = {f"m={m}": "under 30 us" for m in range(1000)} | {"m=0,n=1": "uneven"}
    *named, counted, other = _left_out(skipped)
    assert named == [f"not in the fit (under 30 us): m={m}" for m in range(8)]
    assert (counted, other) == ("and 992 more", "not in the fit (uneven): m=0,n=1")
    assert _first(["a", "b"], 2) == ["a", "b"] and _first(["a", "b", "c"], 2, ": there") == [
        "a",
        "b",
        "and 1 more: there",
    ]
