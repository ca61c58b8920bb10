"""A clock that is none: made-up variants say how long they take."""

from __future__ import annotations

import pytest
from made_up import math_run

import registry
from registry import trying
from registry.dispatch.tried import tried
from registry.tuning.timing import summary


@pytest.fixture(autouse=True)
def forgets():
    yield
    tried.held = {}
    registry.forget_plans()


@pytest.fixture
def clock(monkeypatch):
    """Nanoseconds that launches add to; those of shipped variants take a second."""

    class Clock:
        now = 0
        ran: list[str] = []

        def takes(self, name, us, fails=None):
            def run(*args, **kwargs):
                self.ran.append((name, kwargs["config"].get("B")))
                if fails is not None:
                    raise fails
                self.now += 1000 * (us(kwargs["config"]) if callable(us) else us)
                return math_run(*args, **kwargs)

            return run

    class Timer:
        def sample(self, launches, settle_ms, measure_ms):
            before = found.now
            launches[0]()
            return summary([(found.now - before) / 1e6 or 1e3])

    found = Clock()
    found.ran = []
    monkeypatch.setattr(trying, "_timer", lambda device: Timer())
    return found


@pytest.fixture
def ranked(put_in_force, tmp_path):
    """Puts a table in force that has these variants in this order."""

    def put(*names, op="attention"):
        text = f"op: {op}\narch: cpu\nrules:\n- use: [{', '.join(names)}]\n"
        (tmp_path / f"{op}.cpu.yaml").write_text(text, encoding="utf-8")
        put_in_force(tmp_path)

    return put


@pytest.fixture
def three(declare, clock, ranked):
    """The table has them in the order a, b, c; b is the fastest."""
    for name, us in (("test.a", 30), ("test.b", 10), ("test.c", 20)):
        declare(name, run=clock.takes(name, us), lse=True)
    ranked("test.a", "test.b", "test.c", "torch_math")
