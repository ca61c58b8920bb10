"""Launches back to back, where a capture is none: a CPU has no CUDA graphs."""

import contextlib

import pytest
import torch
from test_testing_kit import CLAIMS, right

from registry import Requires, Variant, testing
from registry.ops.parts.trials import draw
from registry.testing import repeated
from registry.testing.repeated import AT_ONCE, back_to_back


class Replayed:
    """A graph whose launches ran while it was captured."""

    count = 0

    def replay(self):
        Replayed.count += 1


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("fails_after", [AT_ONCE // 2, 10 * AT_ONCE])
def test_a_launch_that_fails_behind_others(deterministic, fails_after, monkeypatch):
    launches = 0

    def wrong_some_day(q, k, v, **features):
        nonlocal launches
        launches += 1
        out, lse = right(q, k, v, **{name: one for name, one in features.items() if name != "deterministic"})
        return (out if launches < fails_after else out + 1.0), lse

    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(repeated, "LONGEST_S", 0.01)
    requires = Requires(**CLAIMS, deterministic=deterministic)
    variant = Variant("test.some_day", op="attention", run=wrong_some_day, requires=requires)
    subject = testing._subject(variant, None, "quick", False)
    trial = draw(subject.variant, subject.op, subject.kit, subject.target, subject.size).trials[0]
    before = Replayed.count
    found = back_to_back(subject, trial)
    assert launches == 1 + AT_ONCE
    assert Replayed.count > before
    assert bool(found.complaints) is (fails_after < AT_ONCE)
