"""What a variant answers of a problem: its legal configs, its guesses, and what is no answer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from registry import DeclarationError, Requires, Target, Variant, notices
from registry.contract.noted import Notes
from registry.ops.attention.problem import AttentionProblem

H100 = Target.named("H100")


def problem(**shape):
    return AttentionProblem.of_shape(shape.pop("target", H100), **shape)


@pytest.mark.parametrize("name", ["v" * 101, "Acme.flash", "acme.flash.two", "acme.", ""])
def test_a_name_that_no_table_could_hold_is_none(name):
    with pytest.raises(DeclarationError, match="Variant.name: got .*; allowed: lower-case words"):
        Variant(name, op="attention", run=lambda: None, requires=Requires())
    assert Variant("acme." + "v" * 95, op="attention", run=lambda: None, requires=Requires())


def test_a_variant_is_legal_if_one_config_is():
    requires = Requires(
        arch=("any",),
        dtypes=("bfloat16",),
        head_dim=(1, 512),
        layouts=("bhsd",),
        shared_memory=lambda problem, config: config["bytes"],
    )
    variant = Variant(
        "test.v", op="attention", run=lambda: None, requires=requires, configs=[{"bytes": 10**6}, {"bytes": 10}]
    )
    assert variant.reasons(problem()) == []
    assert variant.legal_configs(problem()) == [{"bytes": 10}]
    tight = Variant("test.v", op="attention", run=lambda: None, requires=requires, configs=[{"bytes": 10**6}])
    assert [r.code for r in tight.reasons(problem())] == ["resources"]


@pytest.mark.parametrize(
    ("claims", "settings", "said"),
    [
        (dict(rule=lambda problem, config: True), {}, "Requires.rule: got True; allowed: a list of Reasons"),
        (dict(rule=lambda problem, config: ["no"]), {}, "Requires.rule: got str; allowed: Reasons"),
        (dict(shared_memory=lambda problem, config: "48 KiB"), {}, "Requires.shared_memory: got '48 KiB'; allowed: a"),
        (dict(registers=lambda problem, config: None), {}, "Requires.registers: got None; allowed: a function that"),
        ({}, dict(configs=lambda problem: None), "configs: got None of its function; allowed: a list of dicts"),
        ({}, dict(configs=lambda problem: {"rows": 64}), "configs: got {'rows': 64} of its function"),
        ({}, dict(configs=lambda problem: [{"keep": math.nan}]), "config {'keep': nan}; allowed: a flat dict of"),
    ],
)
def test_answers_of_another_kind_make_their_variant_illegal_and_are_named(claims, settings, said):
    requires = Requires(arch=("any",), dtypes=("bfloat16",), head_dim=(1, 512), layouts=("bhsd",), **claims)
    variant = Variant("test.v", op="attention", run=lambda: None, requires=requires, **settings)
    (reason,) = variant.reasons(problem())
    assert reason.code == "declaration"
    assert said in str(reason)
    assert variant.first_legal(problem()) is None


def test_a_variant_guesses_by_its_best_config_and_nothing_of_what_it_does_not_know():
    def cost(asked, config):
        return {64: 3.0, 128: 2.0}[config["rows"]] * asked.head_dim

    known = [{"rows": 64}, {"rows": 128}]
    variant = Variant("test.v", op="attention", run=lambda: None, requires=Requires(), configs=known, cost=cost)
    assert variant.guess(problem(d=8)) == 16.0
    assert replace(variant, configs=[{"rows": 32}]).guess(problem()) is None
    assert replace(variant, cost=None).guess(problem()) is None
    assert replace(variant, configs=lambda asked: []).guess(problem()) is None
    with Notes(), pytest.raises(KeyError):  # what fails then says nothing of the question
        replace(variant, configs=[{"rows": 32}]).guess(problem())


@pytest.mark.parametrize("given", [math.nan, math.inf, 0, -1.0, None, "long", torch.tensor(3.0)])
def test_what_is_no_finite_number_above_zero_is_no_guess_and_is_said_once(given):
    """Kept in a table it would have the next process lose all that was measured."""
    notices.clear()
    known = [{"rows": 64}, {"rows": 128}]
    cost = lambda asked, config: given if config["rows"] == 128 else 2  # noqa: E731
    variant = Variant("test.v", op="attention", run=lambda: None, requires=Requires(), configs=known, cost=cost)
    one = problem()
    assert variant.guess(one) is None and [variant.costs(one)(config) for config in known] == [2.0, None]
    said = f"Variant test.v: cost: got {float(given) if given == 0 else given!r}, which is no guess; allowed: a finite"
    (notice,) = notices.counts()
    assert notice.startswith(said)


def test_a_cost_that_raises_guesses_nothing_and_is_blamed_for_its_own_configs_alone():
    notices.clear()

    def cost(asked, config):
        raise SystemExit(3)

    known = [{"rows": 64}]
    variant = Variant("test.v", op="attention", run=lambda: None, requires=Requires(), configs=known, cost=cost)
    assert (
        variant.costs(one := problem())({"columns": 8}) is None and variant.guess(one) is None and not notices.counts()
    )
    assert variant.costs(one)(known[0]) is None
    (said,) = notices.counts()
    assert said.startswith("the declaration of test.v failed for") and "SystemExit: 3 (test_variant.py:" in said

    def interrupted(asked, config):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(variant, cost=interrupted).costs(one)(known[0])


def test_a_variant_works_out_once_what_a_decision_asks_several_times():
    asked = []

    def configs(about):
        asked.append("configs")
        return [{"rows": 64}, {"rows": 128}]

    def cost(about, config):
        asked.append(config["rows"])
        return float(config["rows"])

    requires = Requires(arch=("any",), dtypes=("bfloat16",), head_dim=(1, 512), layouts=("bhsd",))
    variant = Variant("test.v", op="attention", run=lambda: None, requires=requires, configs=configs, cost=cost)
    one, other = problem(), problem()
    assert variant.may_run(one) and variant.guess(one) == 64.0
    assert [variant.costs(one)(config) for config in variant.configs_for(one)] == [64.0, 128.0]
    assert variant.first_legal(one) == {"rows": 64} and asked == ["configs", 64, 128]
    variant.configs_for(one).clear()
    assert len(variant.configs_for(one)) == 2, "each has a list of its own"
    assert [variant.costs(other)(config) for config in variant.configs_for(other)] == [64.0, 128.0]
    assert asked == ["configs", 64, 128] * 2 and variant.costs(one)({"rows": 3}) == 3.0
    assert replace(variant, requires=Requires(arch=("sm75",))).may_run(one) is False
    assert replace(variant, cost=None).costs(one) is None
