"""Shapes of which a table is least sure: those on which the parts of what it knows disagree."""

from __future__ import annotations

import pytest

from registry import Target
from registry.ops.known import all_ops
from registry.tuning import unsure
from registry.tuning.grids import grid

H200 = Target.named("H200")
MEASURED = sorted(name for name, op in all_ops().items() if op.tuning.draws)


def opinion(**lost: float) -> dict[tuple[str, int], float]:
    return {(name, 0): each for name, each in lost.items()}


def test_what_the_pick_of_one_loses_is_what_the_other_expects():
    one, other = opinion(a=0.0, b=0.3), opinion(a=0.2, b=0.0)
    assert unsure._lost(one, other) == pytest.approx(0.2)
    assert unsure._lost(other, one) == pytest.approx(0.3)
    assert unsure._lost(one, opinion(a=0.0, b=0.1)) == 0.0
    assert unsure._lost(one, opinion(b=0.0, c=0.2)) == 0.0, "what only one of them knows is not compared"
    assert unsure._lost(one, opinion(a=9.0, b=0.0)) == unsure.CAP


@pytest.mark.parametrize("op", MEASURED)
def test_those_are_kept_of_which_the_shipped_tables_are_least_sure(op):
    cases = grid(op, "random:5:24")
    kept = unsure.least_sure(cases, H200, 6)
    assert kept == [case for case in cases if case in kept] and len(kept) == 6
    doubts = {case: unsure.doubt(case, H200) for case in cases}
    assert min(doubts[case] for case in kept) >= max(doubts[case] for case in cases if case not in kept)


def test_where_no_table_knows_anything_every_shape_is_worth_measuring():
    case = grid("matmul", "random:5:1")[0]
    assert unsure.doubt(case, Target.named("cpu")) == float("inf")
