"""Drawn problems of every op: against its oracle, cold against warm against a fresh process, and as explained."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import torch
from drawn import CALLED, cases, outcome, same, verdict
from hypothesis import given, settings
from hypothesis import strategies as st

import registry
from registry.ops.known import all_ops, op_named
from registry.ops.parts.cases import Case
from registry.ops.parts.workload import workload

pytestmark = pytest.mark.usefixtures("quick_python")

FRESH = """
import json, pickle, sys
sys.path[:0] = json.loads(sys.argv[1])
from test_fuzz_problems import ask
sys.stdout.buffer.write(pickle.dumps([ask(*one) for one in json.load(sys.stdin)]))
"""


def ask(op, data):
    """A call of a case through the front door."""
    work = workload(Case.from_data(data), "cpu")
    with work.settings():
        return outcome(op_named(op), **work.front_door())


@pytest.mark.parametrize("op", CALLED)
@given(data=st.data())
def test_drawn_problems_meet_the_oracle_cold_and_warm(op, data):
    case = data.draw(cases(op))
    work = workload(case, "cpu")
    with work.settings():
        registry.forget_plans()
        with registry.record() as ran:
            cold = outcome(op_named(op), **work.front_door())
        explained = outcome(op_named(op).explain, **work.front_door())
        warm = outcome(op_named(op), **work.front_door())
    assert same(cold, warm)
    if cold[0] == "gave":
        assert explained[1].variant in ran.counts.get(op, {}) or not ran.counts
        found = verdict(work, cold[1])
        assert found.ok, (case.text, found)
    else:
        assert explained == cold


@given(data=st.data())
@settings(max_examples=1)
def test_a_fresh_process_answers_alike(data):
    drawn = [(op, data.draw(cases(op)).data()) for op in CALLED for _ in range(8)]
    here = [ask(*one) for one in drawn]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, json.dumps(sys.path)],
        input=json.dumps(drawn).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    there = pickle.loads(done.stdout)
    assert [one for one, a, b in zip(drawn, here, there, strict=True) if not same(a, b)] == []


@pytest.mark.parametrize("op", sorted(all_ops()))
@given(data=st.data())
def test_a_problem_is_explained_on_every_target(op, data):
    case = data.draw(cases(op))
    for name in ("cpu", "sm80", "H100", "B200"):
        decided = outcome(op_named(op).explain, case.problem(registry.Target.named(name)))
        if decided[0] == "gave":
            assert decided[1].variant in registry.variants() and str(decided[1]) and decided[1].to_dict()
            assert [c.variant for c in decided[1].candidates if c.rank == 0] == [decided[1].variant]
        else:
            assert decided[0] == "NoLegalVariant"
        assert torch.is_grad_enabled()
