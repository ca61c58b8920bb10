"""Trees know a config by its place, too: lint says which variants declare others there than when they were fitted."""

from __future__ import annotations

import dataclasses
import json

import pytest
from test_tuning_fit import attention_cases, one, results_of, shipped_of, table_of, verified

from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.ops.parts.cases import Case
from registry.tables.config_order import ASKED, own_order
from registry.tables.measured import read_beside
from registry.tables.model import Rule
from registry.tuning import config_trees, journal
from registry.tuning.config_trees import order_digest
from registry.tuning.evidence import picks_left_out
from registry.tuning.fit import fit
from registry.tuning.kinds import beside_of, kept
from registry.tuning.lint import lint_tables, load_files
from registry.tuning.taking_part import Settings

TILES = [{"TILE": 2**n} for n in range(ASKED + 2)]
MOVED = "rules[0]: test.ours declares its configs in another order, or others, than when it was fitted"


@pytest.fixture
def declared(declare, monkeypatch):
    """What a variant declares, best first: a list to be edited, as where measurements are carried over an edit."""
    monkeypatch.setattr(config_trees, "LEAST", 8)
    found = list(TILES)
    declare("test.ours", configs=lambda problem: list(found), dtypes=("bfloat16",))
    return found


@pytest.fixture
def shipped(declared, tmp_path):
    """(raw results folder, table) as a release has them."""

    def times(facts):
        first = 1.0 if facts["seqlen_q"] > 2000 else 1.2
        return {one("test.ours", TILES[0]): first, one("test.ours", TILES[1]): 1.1, one("theirs"): 3.0}

    results = results_of(attention_cases(), times)
    for case in results.cases.values():
        for entry in case.entries.values():
            if entry.variant == "test.ours":
                entry.fingerprint = fingerprint_of(catalog.get().variants["test.ours"])
    return shipped_of(results, tmp_path)


def moved(shipped):
    """Whether lint says so."""
    return any(problem.startswith(MOVED) for problem in verified(shipped, shipped[1].text))


def keeps(shipped):
    """What a fit that keeps what holds would keep."""
    folder, made = shipped
    raw = journal.read(folder / "h200" / "0001.jsonl")
    verified(shipped, made.text)
    (found,) = kept(load_files([folder / "attention.sm90.yaml"]).tables[0], raw.of("attention"), raw.machine)
    return found and fit(raw.of("attention"), raw.machine, before=found)


@pytest.mark.parametrize(
    "edit",
    [
        lambda tiles: tiles.reverse(),
        lambda tiles: tiles.insert(1, {"TILE": 3}),
        lambda tiles: tiles.remove(TILES[3]),
        lambda tiles: tiles.__setitem__(2, {**TILES[2], "deep": True}),
    ],
    ids=["another order", "one more", "one less", "another value"],
)
def test_configs_at_other_places_are_an_error_and_fitted_again(shipped, declared, edit):
    assert verified(shipped, shipped[1].text) == [] and keeps(shipped)
    edit(declared)
    assert moved(shipped) and not keeps(shipped)
    declared[:] = TILES
    assert not moved(shipped) and keeps(shipped)


def test_configs_that_trees_are_not_asked_about_may_change(shipped, declared):
    declared[ASKED:] = [{"TILE": 3}]
    assert not moved(shipped) and keeps(shipped)


def test_trees_from_before_an_order_was_kept_are_a_warning_until_a_fit_that_keeps_them_adds_it(shipped):
    folder, made = shipped
    data = json.loads(made.measured)
    order = data["config_trees"]["0"]["test.ours"].pop("order")
    before = folder, dataclasses.replace(made, measured=json.dumps(data))
    assert verified(before, made.text) == []
    tables = load_files([folder / "attention.sm90.yaml"])
    found = {finding.code: finding for finding in lint_tables(tables)}["unkept-order"]
    assert found.severity == "warning" and "kreg tune attention --fit-only --keep" in found.message
    assert keeps(before).config_trees["test.ours"].order == order
    assert keeps(before).config_trees == read_beside(tables.tables[0]).config_trees[0]
    verified(shipped, made.text)
    assert "unkept-order" not in [f.code for f in lint_tables(load_files([folder / "attention.sm90.yaml"]))]


def test_the_order_counts_in_which_a_variant_would_try_its_configs_whatever_it_was_written_in():
    cost = lambda config: float(config["TILE"])  # noqa: E731
    there, back = own_order(TILES, None), own_order(TILES[::-1], None)
    assert order_digest([there]) != order_digest([back]) != order_digest([back, back])
    assert order_digest([own_order(TILES, cost)]) == order_digest([own_order(TILES[::-1], cost)])
    one, other = [({"TILE": 1, "deep": True}, 1.0)], [({"deep": True, "TILE": 1}, 2.0)]
    assert order_digest([one]) == order_digest([other]) != order_digest([[({"TILE": 1, "deep": 1}, 1.0)]])


@pytest.mark.parametrize(
    ("cost", "least", "said"),
    [
        (None, 50, "test.ours runs its first config where it was not measured, 1.50 times as long as its fastest"),
        (lambda problem, config: 1.0, 50, ""),
        (None, 8, ""),
    ],
    ids=["neither", "a guess", "trees"],
)
def test_a_table_that_tells_no_configs_says_what_that_costs(declare, monkeypatch, cost, least, said):
    monkeypatch.setattr(config_trees, "LEAST", least)
    declare("test.ours", configs=TILES, dtypes=("bfloat16",), cost=cost)
    results = results_of(
        attention_cases(), lambda f: {one("test.ours", TILES[0]): 1.5, one("test.ours", TILES[1]): 1.0}
    )
    for case in results.cases.values():
        for entry in case.entries.values():
            entry.fingerprint = fingerprint_of(catalog.get().variants["test.ours"])
    assert "".join(table_of(results).unheard).startswith(said) and bool(table_of(results).unheard) == bool(said)


def test_what_was_tuned_is_what_runs_though_nothing_tells_configs(declare):
    declare("test.ours", configs=TILES, dtypes=("bfloat16",))
    cases = attention_cases()[:6]
    third = cases[2].problem(Target.named("H200"))
    slow, fast = one("test.ours", TILES[0]), one("test.ours", TILES[3])
    results = results_of(cases, lambda f: {slow: 1.5, fast: 1.0, one("theirs"): 1.2})
    for case in results.cases.values():
        for entry in case.entries.values():
            entry.fingerprint = fingerprint_of(catalog.get().variants["test.ours"])
    found = fit(results.of("attention"), results.machine)
    asked = beside_of([found]).neighbours(Rule(0, 0, (), (), nearest=found.weights))
    there = asked.ask(third.likeness())
    assert there.ranked(["theirs", "test.ours"], ()) == ["test.ours", "theirs"]
    assert there.configs("test.ours", TILES, None)[0] == TILES[3]
    beside = asked.ask(Case.of("attention", b=2, hq=8, s=1500, d=64).problem(Target.named("H200")).likeness())
    assert beside.ranked(["theirs", "test.ours"], ()) == ["theirs", "test.ours"]
    assert list(beside.configs("test.ours", TILES, None)) == TILES
    assert {entry.config.get("TILE") for _, entry in picks_left_out(found, Settings())} <= {None, TILES[0]["TILE"]}


def test_other_shapes_may_join_what_was_fitted_where_no_source_has_changed(shipped):
    """Fewer shapes have another digest of the order. It is noted anew, unless the configs may be others, too."""
    folder, made = shipped
    verified(shipped, made.text)
    raw = journal.read(folder / "h200" / "0001.jsonl")
    fewer = raw.of("attention")[1:]

    def kept_of(text):
        (folder / "attention.sm90.yaml").write_text(text, encoding="utf-8")
        (found,) = kept(load_files([folder / "attention.sm90.yaml"]).tables[0], fewer, raw.machine, other_shapes=True)
        return found

    before, today = kept_of(made.text), fingerprint_of(catalog.get().variants["test.ours"])
    again = fit(fewer, raw.machine, before=before)
    assert not again.moved and len(again.shapes) == len(fewer)
    assert today in made.text and kept_of(made.text.replace(today, today[::-1])) is None


def test_where_one_variant_moved_trees_for_configs_of_the_others_stay(declared, declare, tmp_path, monkeypatch):
    """And variants are chosen anew. Those of another source are fitted again, too."""
    declare("test.steady", configs=TILES, dtypes=("bfloat16",))
    both = ("test.ours", "test.steady")
    times = {one(name, TILES[at]): 1.0 + at / 10 for name in both for at in (0, 1)} | {one("theirs"): 3.0}
    results = results_of(attention_cases(), lambda facts: times)
    for case in results.cases.values():
        for entry in case.entries.values():
            if entry.variant in both:
                entry.fingerprint = fingerprint_of(catalog.get().variants[entry.variant])
    folder, made = shipped_of(results, tmp_path)
    verified((folder, made), made.text)
    raw = journal.read(folder / "h200" / "0001.jsonl")

    def kept_of(text):
        (folder / "attention.sm90.yaml").write_text(text, encoding="utf-8")
        return kept(load_files([folder / "attention.sm90.yaml"]).tables[0], raw.of("attention"), raw.machine)[0]

    assert kept_of(made.text).whole
    declared.insert(1, {"TILE": 3})
    stays = kept_of(made.text)
    assert not stays.whole and list(stays.config_trees) == ["test.steady"] and stays.trees is None
    asked = []
    monkeypatch.setattr(
        config_trees, "_fitted", lambda name, *more, real=config_trees._fitted: asked.append(name) or real(name, *more)
    )
    again = fit(raw.of("attention"), raw.machine, before=stays)
    assert asked == ["test.ours"] and again.config_trees["test.steady"] == stays.config_trees["test.steady"]
    assert not again.moved and again.weights
    source = fingerprint_of(catalog.get().variants["test.steady"])
    assert (
        source in made.text
        and kept_of(made.text.replace(f"test.steady: {source}", f"test.steady: {source[::-1]}")) is None
    )
