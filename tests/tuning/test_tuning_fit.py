"""The fit: few rules, honest ones. On made-up measurements whose best table is known."""

import itertools
import math
import random
from dataclasses import asdict

import pytest

from registry import Target
from registry.ops.parts.cases import Case, digest, held_out
from registry.tables.lint import Known, lint
from registry.tuning import evidence, journal
from registry.tuning.fit import RULE_COSTS, Settings, fit
from registry.tuning.journal import CaseResults, Entry, Results, contestant_key
from registry.tuning.rules import make_table
from registry.tuning.tree import border, leaves

VERSIONS = {"driver": "580.1", "torch": "2.11.0", "triton": "3.6.0"}
MACHINE = {"device": "NVIDIA H200", "arch": "sm90", "date": "2026-11-20", **VERSIONS}
BIG, SMALL = {"TILE": 256}, {"TILE": 64}
ALL = Settings(held_out=0.0)


def results_of(cases, times, *, rounds=5, noise=0.0, failures=(), illegal=()):
    """Results in which times(facts) gives the milliseconds of each (variant, config)."""
    found = Results("made-up.jsonl", dict(MACHINE))
    for case in cases:
        problem = case.problem(Target.named("H200"))
        facts = {name: list(v) if isinstance(v, tuple) else v for name, v in problem.facts().items()}
        made = CaseResults(case.op, case.text, case.data(), facts, 1e12, done=True)
        chance = random.Random(case.text)
        firsts = set()
        for (variant, config), ms in times(facts).items():
            config = dict(config)
            if variant in illegal:
                made.illegal[variant] = "because"
                continue
            entry = Entry(variant, config, variant not in firsts, digest(variant)[:12])
            firsts.add(variant)
            entry.samples = {turn: {"ms": ms * (1 + noise * chance.uniform(-1, 1))} for turn in range(rounds)}
            if (variant, case.text) in failures or variant in failures:
                entry.failure = {"why": "wrong", "detail": "made up"}
            made.entries[contestant_key(variant, config)] = entry
        found.cases[digest([case.op, case.text])] = made
    return found


def attention_cases(heads=(8, 16), dims=(64, 128), lengths=(512, 1024, 4096, 16384)):
    product = itertools.product(heads, dims, (False, True), lengths)
    return [Case.of("attention", b=2, hq=h, s=s, d=d, causal=c) for h, d, c, s in product]


def one(variant, config=()):
    return variant, tuple(dict(config).items())


def table_of(results, settings=ALL):
    return make_table(results, fit(results.of("attention"), settings), "h200/0001", settings)


def test_one_variant_that_is_always_best_makes_one_rule():
    made = table_of(results_of(attention_cases(), lambda f: {one("ours"): 1.0, one("theirs"): 2.0}))
    assert len(made.rules) == 1
    assert [use["variant"] for use in made.rules[0]["use"]] == ["ours", "theirs"]
    assert made.tuning.worst == 0 and made.single.worst == 0


def test_a_border_in_one_fact_makes_two_rules_with_a_round_border():
    def times(facts):
        return {one("short"): 1.0 if facts["seqlen_q"] < 2000 else 3.0, one("long"): 2.0}

    made = table_of(results_of(attention_cases(), times))
    assert len(made.rules) == 2 and made.tuning.worst == 0
    assert [rule["when"]["seqlen_q"] for rule in made.rules] == ["2048..", "256.."]
    assert made.single.worst == pytest.approx(0.5)


def test_two_facts_together():
    def times(facts):
        special = facts["causal"] and facts["head_dim"] == 128
        return {one("a"): 3.0 if special else 1.0, one("b"): 1.0 if special else 2.0}

    made = table_of(results_of(attention_cases(), times))
    corner, rest = made.rules
    assert made.tuning.worst == 0 and corner["when"]["causal"] is True and corner["when"]["head_dim"] == "128.."
    assert corner["use"][0]["variant"] == "b" and rest["use"][0]["variant"] == "a"


def test_a_config_is_named_only_where_it_beats_the_first_one():
    def times(facts):
        long = facts["seqlen_q"] >= 4096
        return {one("ours", SMALL): 1.2 if long else 1.0, one("ours", BIG): 1.0 if long else 1.1, one("theirs"): 3.0}

    made = table_of(results_of(attention_cases(), times))
    uses = {rule["when"].get("seqlen_q"): rule["use"][0] for rule in made.rules}
    assert uses == {"2048..": {"variant": "ours", "config": BIG}, "256..": {"variant": "ours"}}


def test_differences_within_the_noise_make_no_rules():
    chance = random.Random(5)
    made = table_of(
        results_of(
            attention_cases(),
            lambda f: {
                one("a"): 1.0,
                one("b"): 1.0 + chance.uniform(-0.01, 0.01),
                one("c", SMALL): 1.0,
                one("c", BIG): 0.995,
            },
        )
    )
    assert len(made.rules) == 1 and "config" not in made.rules[0]["use"][0]
    assert made.tuning.worst < 0.03


def test_noisy_shapes_have_a_wider_tie():
    cases = attention_cases()
    quiet = table_of(results_of(cases, lambda f: {one("a"): 1.0, one("b"): 0.97 if f["causal"] else 1.3}))
    loud = table_of(
        results_of(cases, lambda f: {one("a"): 1.0, one("b"): 1.0 if f["causal"] else 1.3}, noise=0.05, rounds=7)
    )
    assert len(quiet.rules) == 2 and len(loud.rules) == 1


def test_a_rule_must_save_more_than_it_costs():
    def times(facts):
        odd = facts["heads_q"] == 8 and facts["head_dim"] == 64 and not facts["causal"] and facts["seqlen_q"] == 16384
        return {one("a"): 1.0, one("b"): 0.9 if odd else 2.0}

    results = results_of(attention_cases(), times)
    assert len(table_of(results, Settings(held_out=0.0, rule_cost=0.2)).rules) == 1
    (corner, rest) = table_of(results, Settings(held_out=0.0, rule_cost=0.05)).rules
    assert corner["use"][0]["variant"] == "b" and rest["use"][0]["variant"] == "a"
    assert corner["evidence"]["cases"] == 1


def test_what_a_rule_must_save_is_found_without_the_held_out_shapes():
    """Structure is worth rules of its own; where there is none but noise, one rule serves."""

    def edge(facts):
        return {one("a"): 1.0, one("b"): 1.5 if facts["seqlen_q"] < 2048 else 0.6}

    cases = attention_cases((4, 8, 16, 32), (64, 128), (512, 1024, 2048, 4096, 8192))
    found = fit(results_of(cases, edge).of("attention"), Settings(held_out=0.0))
    assert found.rule_cost in RULE_COSTS and len(list(leaves(found.tree))) == 2
    noise = results_of(cases, lambda facts: {one("a"): 1.0, one("b"): 1.03}, noise=0.05)
    found = fit(noise.of("attention"), Settings(held_out=0.0))
    assert found.rule_cost == max(RULE_COSTS) and len(list(leaves(found.tree))) == 1

    results = results_of(cases, edge)
    held = [case for case in results.of("attention") if held_out(case.text, 0.3)]
    before = fit(results.of("attention"), Settings(held_out=0.3)).rule_cost
    for case in held:
        for entry in case.entries.values():
            entry.samples = {0: {"ms": random.Random(case.text + entry.variant).random()}}
    assert fit(results.of("attention"), Settings(held_out=0.3)).rule_cost == before


def test_wrong_results_are_never_picked_and_are_reported():
    made = table_of(results_of(attention_cases(), lambda f: {one("liar"): 0.1, one("honest"): 1.0}, failures={"liar"}))
    assert all(use["variant"] == "honest" for rule in made.rules for use in rule["use"])
    assert made.warnings and "liar" in made.warnings[0]


def test_peers_are_never_picked_nor_the_measure_of_regret():
    made = table_of(results_of(attention_cases(), lambda f: {one("peer.fast"): 0.1, one("ours"): 1.0}))
    assert "peer.fast" not in made.text and made.tuning.worst == 0


def test_evidence_is_what_was_measured_and_lint_finds_nothing():
    made = table_of(results_of(attention_cases(), lambda f: {one("ours"): 1.0, one("theirs"): 2.0}))
    tables = evidence.load_text(made.text, "attention")
    (rule,) = tables.tables[0].rules
    assert asdict_like(rule.evidence) == {
        "device": "NVIDIA H200",
        "tflops": 1000.0,
        "runner_up": ("theirs", 500.0),
        "cases": 32,
        "run": "h200/0001",
    }
    known = Known({"ours": "attention", "theirs": "attention"})
    assert [f for f in lint(tables, known) if f.code != "misnamed-file"] == []


def asdict_like(found):
    names = ("device", "tflops", "cases", "run")
    return {n: getattr(found, n) for n in names} | {"runner_up": (found.runner_up.variant, found.runner_up.tflops)}


def test_a_faster_rival_that_is_not_worth_a_rule_is_a_note_not_a_runner_up():
    made = table_of(results_of(attention_cases(), lambda f: {one("a"): 1.0, one("b"): 0.999 if f["causal"] else 1.0}))
    (rule,) = made.rules
    picked = rule["use"][0]["variant"]
    assert picked == "b" or "not worth a rule" in rule["evidence"]["note"]


def test_held_out_shapes_take_no_part_in_the_fit():
    results = results_of(attention_cases(heads=(4, 8, 16, 32)), lambda f: {one("a"): 1.0, one("b"): 2.0})
    held = [case for case in results.of("attention") if held_out(case.text, 0.2)]
    assert 0.1 * 64 < len(held) < 0.35 * 64
    for case in held:  # on these alone, b is far better
        for entry in case.entries.values():
            entry.samples = {0: {"ms": 1.0 if entry.variant == "b" else 9.0}}
    made = table_of(results, Settings(held_out=0.2))
    assert len(made.rules) == 1 and made.rules[0]["use"][0]["variant"] == "a"
    assert made.tuning.worst == 0 and made.held.mean == pytest.approx(8.0) and made.held.shapes == len(held)


def test_it_generalises_to_shapes_that_it_has_not_seen():
    """A smooth machine with overheads: held-out regret stays small, with few rules."""

    def times(facts):
        work = (
            facts["batch_heads"] * facts["seqlen_q"] ** 2 * facts["head_dim"] * (0.5 if facts["causal"] else 1) / 1e11
        )
        return {
            one("ws", BIG): 0.02 + work * (1.0 if facts["head_dim"] > 64 else 1.15),
            one("ws", SMALL): 0.012 + work * 1.2,
            one("plain"): 0.006 + work * 1.9,
        }

    cases = attention_cases((4, 8, 16, 32, 64), (64, 128, 256), (256, 512, 1024, 1536, 2048, 4096, 8192))
    settings = Settings(rule_cost=0.08)
    results = results_of(cases, times, noise=0.005)
    made = table_of(results, settings)
    assert made.held.shapes > 20 and made.held.mean < 0.02 and made.held.worst < 0.15, str(made.held)
    assert len(made.rules) <= 20 and made.single.mean > 5 * made.held.mean


def test_shapes_whose_contestants_were_not_all_timed_are_left_out():
    results = results_of(attention_cases(), lambda f: {one("a"): 1.0, one("b"): 2.0})
    first = results.of("attention")[0]
    next(iter(first.entries.values())).samples.clear()
    made = table_of(results)
    assert made.skipped == [first.text]
    with pytest.raises(ValueError, match="no shape"):
        fit([first])


def test_small_problems_that_nobody_measured_are_not_spoken_about():
    made = table_of(results_of(attention_cases(lengths=(1024, 4096)), lambda f: {one("a"): 1.0}))
    assert made.rules[0]["when"]["seqlen_q"] == "512.."
    decode = [*attention_cases(), Case.of("attention", hq=8, s=1, sk=4096, d=128)]
    made = table_of(results_of(decode, lambda f: {one("a"): 1.0}))
    assert "seqlen_q" not in made.rules[0]["when"]


def test_a_batch_or_a_dtype_that_nobody_measured_is_not_spoken_about():
    def conditions(*shapes):
        cases = [Case.of("matmul", n=4096, k=4096, **shape) for shape in shapes]
        results = results_of(cases, lambda f: {one("a"): 1.0 + f["m"] / 1e6})
        return make_table(results, fit(results.of("matmul"), ALL), "h200/0001", ALL).rules[0]["when"]

    alone = conditions({"m": 64}, {"m": 128})
    assert alone["batch"] == 1 and alone["dtype"] == ["bfloat16", "float16"]  # the same instructions
    both = conditions({"m": 64, "b": 8}, {"m": 64}, {"m": 64, "dtype": "float8_e4m3fn", "layout": "nt"})
    assert "batch" not in both and both["dtype"] == ["bfloat16", "float16", "float8_e4m3fn"]
    assert conditions({"m": 64, "dtype": "float16"}, {"m": 64})["dtype"] == ["bfloat16", "float16"]


@pytest.mark.parametrize(
    ("low", "high", "at"), [(1024, 4096, 2048), (132, 192, 160), (1, 2, 2), (96, 128, 128), (3, 4, 4)]
)
def test_borders_are_round_and_between(low, high, at):
    assert border(low, high) == at and low < at <= high


@pytest.fixture
def shipped(tmp_path):
    """(raw results folder, table) as a release has them."""
    results = results_of(
        attention_cases(), lambda f: {one("ours", SMALL): 1.0, one("theirs"): 2.0 if f["causal"] else 0.5}
    )
    path = tmp_path / "h200" / "0001.jsonl"
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
    return tmp_path, make_table(raw, fit(raw.of("attention"), ALL), "h200/0001", ALL)


def verified(shipped, text):
    folder, _ = shipped
    return evidence.verify(evidence.load_text(text, "attention").tables[0], folder, ALL)


def test_a_table_proves_against_its_raw_results(shipped):
    assert verified(shipped, shipped[1].text) == []


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("tflops: 1000.0", "tflops: 1100.0", "tflops: the table says 1100, h200/0001 says 1000"),
        ("run: h200/0001", "run: h200/0002", "no raw results"),
        ("torch: 2.11.0", "torch: 2.12.0", "torch"),
        ("2026-11-20", "2026-11-19", "date"),
        ("cases: 16", "cases: 15", "cases"),
        ("device: NVIDIA H200", "device: NVIDIA H100", "device"),
        ("runner_up: {variant: theirs", "runner_up: {variant: others", "runner_up"),
        (
            "- {variant: ours}\n  - {variant: theirs}",
            "- {variant: mine}\n  - {variant: theirs}",
            "no measurement of mine",
        ),
    ],
)
def test_a_table_that_was_tampered_with_does_not(shipped, before, after, complaint):
    text = shipped[1].text
    assert before in text
    assert any(complaint in problem for problem in verified(shipped, text.replace(before, after))), verified(
        shipped, text
    )


def test_regret_of_a_failing_pick_is_infinite_and_uncovered_shapes_are_named(shipped):
    results = results_of(attention_cases(), lambda f: {one("a"): 1.0, one("b"): 2.0})
    table = evidence.load_text("op: attention\narch: sm90\nrules: [{when: {causal: true}, use: [a]}]\n", "attention")
    found = evidence.regret(table, results.of("attention"), ALL)
    assert found.shapes == 32 and len(found.uncovered) == 16 and found.worst == 0
    for case in results.of("attention"):
        case.entries[contestant_key("a", {})].failure = {"why": "wrong"}
    assert math.isinf(evidence.regret(table, results.of("attention"), ALL).worst)


def test_a_pick_that_does_not_fit_gives_way_to_the_next(shipped):
    results = results_of(attention_cases(), lambda f: {one("a"): 1.0, one("b"): 2.0})
    table = evidence.load_text("op: attention\narch: sm90\nrules: [{use: [a, b]}]\n", "attention")
    for case in results.of("attention"):
        case.entries[contestant_key("a", {})].failure = {"why": "does not compile"}
    found = evidence.regret(table, results.of("attention"), ALL)
    assert found.worst == 0 and not found.uncovered


def test_settings_are_plain_data():
    assert asdict(Settings())["exclude"] == ("peer.*",)


# --- a rule for a kernel of ours reaches as far as its shapes ---------------------------------------------------------

OURS, LIBRARY = "triton_fa2", "torch_flash"


def beyond(rules, **facts):
    """The rules' picks for facts that no shape here has."""
    from registry.tuning.evidence import load_text
    from registry.tuning.rules import dump

    table = load_text(dump({"op": "attention", "arch": "sm90", "rules": rules}), "attention")
    asked = {**Case.of("attention", b=2, hq=8, s=1024, d=64).problem(Target.named("H200")).facts(), **facts}
    return [use.variant for match in table.match("attention", asked, "sm90", "NVIDIA H200") for use in match.rule.use]


def test_a_kernel_of_ours_is_put_first_between_its_shapes_only():
    made = table_of(results_of(attention_cases(), lambda f: {one(OURS): 1.0, one(LIBRARY): 2.0}))
    assert made.tuning.worst == 0 and beyond(made.rules)[0] == OURS
    for facts in ({"seqlen_q": 32, "seqlen_k": 32}, {"seqlen_q": 65536, "seqlen_k": 65536}, {"blocks": 1}):
        assert beyond(made.rules, **facts)[0] == LIBRARY


def test_few_shapes_prove_nothing():
    few = attention_cases(heads=(8,), dims=(64,), lengths=(512, 1024))
    made = table_of(results_of(few, lambda f: {one(OURS): 1.0, one(LIBRARY): 1.5}))
    assert [use["variant"] for use in made.rules[0]["use"]] == [LIBRARY, OURS]


def test_what_is_lost_weighs_more_than_what_is_gained():
    def times(facts):
        return {one(OURS): 1.6 if facts["causal"] and facts["seqlen_q"] == 1024 else 0.93, one(LIBRARY): 1.0}

    made = table_of(results_of(attention_cases(), times), Settings(held_out=0.0, rule_cost=9.0))
    assert [rule["use"][0]["variant"] for rule in made.rules] == [LIBRARY]


def test_where_ours_cannot_run_the_librarys_kernel_is_next():
    made = table_of(results_of(attention_cases(), lambda f: {one(OURS): 1.0, one(LIBRARY): 2.0, one("gluon_fa3"): 1.5}))
    assert [use["variant"] for use in made.rules[0]["use"]] == [OURS, LIBRARY, "gluon_fa3"]
