"""Variants that wait for the device: a capture refuses them by name, each time, and nothing else changes."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch

import registry
from registry import testing
from registry.dispatch import plan
from registry.dispatch.plan_cache import forget_plans
from registry.errors import CaptureError
from registry.ops.parts.trials import draw
from registry.testing.repeated import graph, no_graph


@pytest.fixture
def capture(monkeypatch):
    """Whether the current stream is being captured, as the dispatcher sees it."""
    state = {"on": False}
    monkeypatch.setattr(plan, "capturing", lambda: state["on"])
    forget_plans()
    yield state
    forget_plans()


def operands(rows=8):
    return torch.randn(rows, 4), torch.randn(2, 4, 6), {"offs": torch.tensor([3, rows], dtype=torch.int32)}


def test_a_capture_refuses_them(capture):
    a, b, groups = operands()
    want = registry.grouped_mm.reference(a, b, **groups)
    for captured in (True, False, True, True, False):  # the first launch, then later ones of the same plan
        capture["on"] = captured
        if captured:
            with pytest.raises(CaptureError, match="torch_loop reads values that are on the device"):
                registry.grouped_mm(a, b, **groups, variant="torch_loop")
        else:
            found = registry.grouped_mm(a, b, **groups, variant="torch_loop")
            torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def test_it_is_asked_of_each_problem(capture):
    """Of one op a variant may wait for some problems only: no offsets, nothing to wait for."""
    a, b = torch.randn(2, 8, 4), torch.randn(2, 4, 6)
    registry.grouped_mm(a, b, variant="torch_loop")
    capture["on"] = True
    torch.testing.assert_close(registry.grouped_mm(a, b, variant="torch_loop"), a @ b)


def test_a_prepared_launch_is_refused_too(capture, declare):
    def prepare(problem, config):
        return lambda q, k, v, **given: (q.clone(), None)

    declare(waits=lambda problem: True, prepare=prepare, layouts=("bhsd",))
    q = torch.randn(1, 1, 4, 8)
    for captured in (False, True, False):
        capture["on"] = captured
        with pytest.raises(CaptureError, match="test.kernel reads values") if captured else contextlib.nullcontext():
            assert torch.equal(registry.attention(q, q, q, variant="test.kernel"), q)


@pytest.mark.parametrize("waits", [None, lambda problem: True, lambda problem: False])
def test_the_kit_asks_a_graph_to_take_them_or_to_refuse_them(waits, declare):
    variant = declare(waits=waits, layouts=("bhsd",))
    made = dataclasses.replace(testing._subject(variant, None, "quick", False), device=torch.device("cuda"))
    trials = draw(made.variant, made.op, made.kit, made.target, made.size).trials
    (check,) = [one for one in testing._under_load(made, trials, 2) if one.name.startswith("CUDA graph")]
    assert check.call.func is (no_graph if waits is not None and waits(None) else graph)


@pytest.mark.parametrize(
    ("waits", "some", "of_causal"),
    [(None, True, None), (lambda problem: problem.causal, True, False), (lambda problem: True, False, False)],
)
def test_the_kit_launches_back_to_back_what_does_not_wait(waits, some, of_causal, declare):
    """It is asked of each problem, for some may wait and others not."""
    variant = declare(waits=waits, layouts=("bhsd",), causal=True)
    made = dataclasses.replace(testing._subject(variant, None, "quick", False), device=torch.device("cuda"))
    trials = draw(made.variant, made.op, made.kit, made.target, made.size).trials
    checks = [one for one in testing._under_load(made, trials, 2) if one.name.startswith("back to back")]
    assert bool(checks) is some
    assert of_causal is None or any("causal" in check.traits for check in checks) is of_causal


@pytest.mark.parametrize("tells", [True, False])
def test_who_waits_must_say_so(tells, capture, declare, monkeypatch):
    """A capture that goes through is a failure of who says that it waits."""

    @contextlib.contextmanager
    def captured(_graph):
        capture["on"] = True
        try:
            yield
        finally:
            capture["on"] = False

    monkeypatch.setattr(torch.cuda, "graph", captured)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    variant = declare(waits=lambda problem: tells, layouts=("bhsd",))
    subject = testing._subject(variant, None, "quick", False)
    trial = draw(subject.variant, subject.op, subject.kit, subject.target, subject.size).trials[0]
    assert no_graph(subject, trial).complaints == (
        () if tells else ("it says that it waits for the device, and a CUDA graph captured it",)
    )
