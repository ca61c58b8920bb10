"""Calls of which one argument is something else: right or refused, and the same cold, warm and explained."""

from __future__ import annotations

import pytest
from drawn import CALLED, HOSTILE, TENSORS, cases, close, outcome, same
from hypothesis import given
from hypothesis import strategies as st

import registry
from registry.ops.known import op_named
from registry.ops.parts.workload import workload


@pytest.mark.parametrize("op", CALLED)
@given(data=st.data())
def test_an_argument_that_is_none_is_named(op, data):
    work = workload(data.draw(cases(op)), "cpu")
    given_ = {name: value for name, value in work.front_door().items() if value is not None}
    name = data.draw(st.sampled_from(sorted(given_)))
    value = given_[name]
    if hasattr(value, "dim") and data.draw(st.booleans()):
        try:
            bad = data.draw(TENSORS)(value)
        except (RuntimeError, IndexError, TypeError):
            return
    else:
        bad = data.draw(HOSTILE)
    check(op_named(op), {**given_, name: bad}, name, lambda: op_named(op)(**given_))


@pytest.mark.parametrize("op", CALLED)
@given(data=st.data())
def test_options_that_are_none_are_named(op, data):
    import inspect

    work = workload(data.draw(cases(op)), "cpu")
    options = [p.name for p in inspect.signature(op_named(op).__call__).parameters.values() if p.kind is p.KEYWORD_ONLY]
    name = data.draw(st.sampled_from(options))
    check(
        op_named(op), {**work.front_door(), name: data.draw(HOSTILE)}, name, lambda: op_named(op)(**work.front_door())
    )


def check(op, arguments, name, warm_up):
    """Cold, after a good call, and again."""
    registry.forget_plans()
    cold = outcome(op, **arguments)
    outcome(warm_up)
    after, again = outcome(op, **arguments), outcome(op, **arguments)
    assert same(cold, after) and same(after, again)
    explained = outcome(op.explain, **arguments)
    if cold[0] != "gave":
        assert cold == explained
        assert cold[1] and len(cold[1]) < 20_000
        if cold[0] == "InvalidArgument":
            assert cold[1].isprintable() or "\n" in cold[1]
    else:
        want = outcome(op.reference, **{k: v for k, v in arguments.items() if k not in ("variant", "out")})
        if want[0] == "gave" and not any(getattr(one, "is_meta", False) for one in arguments.values()):
            assert close(cold[1], want[1]), name
