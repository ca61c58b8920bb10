"""The kit reads the machine code of what a variant compiles, for what no test of values is sure to see."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from registry import Target
from registry.testing.checks import builds_compile
from registry.toolbox import builds

GOOD = dict(shared=1024, lent_barriers=[], touched_in_flight=[])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({}, ""),
        (dict(shared=1 << 20), "takes 1048576 bytes of shared memory"),
        (dict(lent_barriers=[128]), "sets up a barrier at bytes 128 of shared memory for which nobody waits"),
        (dict(touched_in_flight=["0x1be0 F2FP R76, R55, R54"]), "in 1 instructions, first 0x1be0 F2FP R76, R55, R54"),
    ],
)
def test_it_says_what_is_wrong_with_a_build(monkeypatch, wrong, said):
    monkeypatch.setattr(builds, "compile_build", lambda build, arch: build)
    monkeypatch.setattr(builds, "inspect", lambda compiled: SimpleNamespace(**{**GOOD, **wrong}))
    variant = SimpleNamespace(builds=lambda problem, config: [SimpleNamespace(name="kernel")])
    subject = SimpleNamespace(variant=variant, target=Target.named("H100"))
    trial = SimpleNamespace(problem=None, config={}, about="a product")
    complaints = builds_compile(subject, trial).complaints
    assert [said in complaint for complaint in complaints] == [True] * bool(said)
