"""Calls that differ in sizes alone: what is decided from one that was alike is what would have been decided in full."""

import random

import pytest
import torch

import registry
from registry.contract.target import Target
from registry.dispatch import alike, answers
from registry.dispatch.plan_cache import PlanCache
from registry.dispatch.quarantine import quarantine
from registry.ops.known import op_named

H200 = Target.named("H200")


@pytest.fixture
def on_h200(monkeypatch):
    """Tensors without memory count as an H200's: nothing is launched."""
    monkeypatch.setattr(Target, "of", staticmethod(lambda device: H200))


@pytest.fixture
def counted(monkeypatch):
    """Plans by how they came about."""
    found = {"alike": 0, "full": 0}
    plan = alike.Alike.plan

    def counting(self, kind, sizes, with_grad):
        made = plan(self, kind, sizes, with_grad)
        found["full" if made is None else "alike"] += 1
        return made

    monkeypatch.setattr(alike.Alike, "plan", counting)
    return found


def heads(length, hq=8, hkv=8, d=128, batch=1, dtype=torch.bfloat16, dense=True):
    q = torch.empty(batch, hq, length, d, dtype=dtype)
    k = torch.empty(batch, hkv, length if dense else 8192, d, dtype=dtype)[:, :, :length]
    return q, k, torch.empty_like(k)


def caches(op):
    """A cache of the op's plans of its own."""
    return PlanCache(op.new_plan, op.eager, alike=alike.Alike(op))


def check(op, cache, settings, tensors):
    """The plan is that of a decision made in full."""
    plan = cache.by_facts(settings, *tensors)
    full = op.new_plan(settings, False, tensors)
    known, expected = plan.decision, full.decision
    assert (known.variant, known.config, known.because) == (expected.variant, expected.config, expected.because)
    assert known.problem == expected.problem and plan.default == full.default
    return known, expected


def draws(op, draw, near):
    """A call, with sizes a little off."""
    size = lambda most: int(2 ** draw.uniform(0, most)) + near.randrange(4)  # noqa: E731
    if op.name == "matmul":
        unit = draw.choice((1, 64, 64, 64))  # what divides sizes decides, too
        m, n, k = unit * size(13 if unit == 1 else 10), unit * 2 ** draw.randrange(6), unit * 2 ** draw.randrange(6)
        dtype = draw.choice((torch.bfloat16, torch.float32))
        a, b = torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype)
        return (draw.choice((None, "silu")), None, None), (a, b if draw.random() < 0.5 else b.mT.contiguous().mT)
    masks = draw.choice(((False, None), (True, None), (False, (64, 64)), (False, (300, 0))))
    hkv, d = draw.choice((1, 4)), draw.choice((64, 64, 128))
    q, k, v = heads(size(9), 8, hkv, d, draw.choice((1, 3)), dense=draw.random() < 0.5)
    q = torch.empty(q.shape[0], 8, draw.choice((1, q.shape[2])), d, dtype=q.dtype)
    if op.name == "attention":
        return (*masks, 0.0, False, None), (q, k, v)
    return (*masks, 0.0, False, None), (torch.empty_like(q), q, k, v, torch.empty_like(q), torch.empty(q.shape[:3]))


@pytest.mark.parametrize("name", ["attention", "attention_backward", "matmul"])
@pytest.mark.parametrize("seed", range(2))
def test_random_calls_are_decided_as_in_full(name, seed, on_h200, counted, monkeypatch):
    monkeypatch.setattr(answers.Answers, "wanted", lambda self, sizes: True)
    op, draw = op_named(name), random.Random(seed)
    cache = caches(op)
    for number in range(60):
        for _ in range(10):
            settings, tensors = draws(op, random.Random(f"{seed} {number}"), draw)
            check(op, cache, settings, tensors)
    assert counted["alike"] > 5, counted


@pytest.mark.parametrize("dense", [True, False])
def test_a_cache_that_grows_by_a_token_is_seldom_decided_in_full(dense, on_h200, counted):
    op, q = op_named("attention"), torch.empty(1, 32, 1, 128, dtype=torch.bfloat16)
    cache = caches(op)
    for length in range(900, 1300):
        _, k, v = heads(length, dense=dense)
        check(op, cache, (True, None, 0.0, False, None), (q, k, v))
    assert counted["full"] <= 24 and counted["alike"] >= 376, counted


def test_reasons_are_those_of_a_decision_in_full(on_h200):
    """What explain and errors say of a decision that was made for another length is said of this one."""
    op, cache = op_named("attention"), caches(op_named("attention"))
    for length in (500, 501, 502, 777):
        known, expected = check(op, cache, (True, (2000, 0), 0.0, False, None), heads(length))
    assert str(known) == str(expected) and known.to_dict() == expected.to_dict()


def test_a_rule_that_takes_integers_alone_is_asked_each_time(declare, counted):
    def rule(problem, config):
        assert type(problem.seqlen_k) is int
        return ()

    declare("test.plain", rule=rule)
    for length in range(10, 30):
        q, k, v = heads(length, d=64, dtype=torch.float32)
        registry.attention(q, k, v, variant="test.plain")
    assert counted == {"alike": 0, "full": 20}
    assert not [text for text in registry.notices.counts() if "test.plain" in text]


def test_a_rule_of_sizes_is_heeded_at_each_length(declare):
    def rule(problem, config):
        if problem.seqlen_k % 8 == 0 or problem.seqlen_k > 40:
            yield registry.Reason("test", "seqlen_k", problem.seqlen_k, "others")

    declare("test.some", rule=rule)
    for length in range(10, 60):
        q, k, v = heads(length, d=64, dtype=torch.float32)
        with registry.prefer("test.some"), registry.record() as ran:
            registry.attention(q, k, v)
        assert ("test.some" in ran.counts["attention"]) == (length % 8 != 0 and length <= 40), length
        assert [problem.seqlen_k for problem in ran.problems] == [length]


def test_what_was_known_before_a_quarantine_is_not_known_after(on_h200):
    op, cache = op_named("attention"), caches(op_named("attention"))
    settings = (True, None, 0.0, False, None)
    for length in range(1024, 1030):
        plan = cache.by_facts(settings, *heads(length))
    first = plan.decision.variant
    quarantine.add(first, plan.decision.problem, RuntimeError("no"))
    try:
        known, expected = check(op, cache, settings, heads(1031))
        assert known.variant != first
    finally:
        quarantine.clear()


def test_kinds_are_bounded(on_h200, monkeypatch):
    monkeypatch.setattr(alike, "MOST", 16)
    cache = caches(op_named("attention"))
    for number in range(60):
        for length in (64, 65, 66):
            cache.by_facts((False, (number, 7), 0.0, False, None), *heads(length))
    assert 0 < len(cache._alike) <= 16
