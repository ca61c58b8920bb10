"""The gate before the tuner's timer: what the tolerance of a block lets through, and what it does not."""

from __future__ import annotations

import math

import pytest
import torch

from registry.ops.parts.judging import BLOCK, Expected, Tolerance, Yardstick


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    return Tolerance(1e-2).measure(got, want).error


def test_rows_that_are_left_over_count_with_those_before_them():
    """A last row whose terms cancel out is off by their rounding, which is much of what is left of it."""
    want = torch.randn(3, 7 * BLOCK + 1, 64, dtype=torch.float64)
    want[:, -1] *= 0.01
    got = want + 1e-4 * torch.randn_like(want)
    alone = (got - want)[:, -1].norm(dim=-1) / want[:, -1].norm(dim=-1)
    assert float(alone.max()) > 5e-3
    assert error_of(got, want) < 1e-3


@pytest.mark.parametrize("rows", [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 5 * BLOCK + 63])
@pytest.mark.parametrize("row", [0, -1])
def test_one_wrong_row_is_seen(rows, row):
    want = torch.randn(2, rows, 64, dtype=torch.float64)
    got = want.clone()
    got[1, row] = 0.0
    assert error_of(got, want) > 0.05


def test_numbers_that_are_off_together_are_few():
    """A row of gradients is off with the one delta of its query, however many columns it has."""
    want = torch.ones(1, 64, dtype=torch.float64)
    off = Yardstick(want * (1 + 1e-3)), Yardstick(want * (1 + 1e-3), alone=1)
    assert [bool(one.measure(want * (1 + 3e-3), want).complaints) for one in off] == [True, False]
    assert Yardstick(want * (1 + 1e-3), alone=1).measure(want * (1 + 1e-2), want).complaints


@pytest.mark.parametrize("value, wrong", [(68496.8, False), (-68496.8, False), (60000.0, True)])
def test_what_a_dtype_cannot_hold_may_be_infinite(value, wrong):
    """As of int8 products with large scales, given as float16."""
    want = torch.tensor([1.0, value, 3.0], dtype=torch.float64)
    model = want.to(torch.float16)
    got = torch.tensor([1.0, math.copysign(math.inf, value), 3.0], dtype=torch.float16)
    assert bool(Yardstick(model, floor=1e-3).measure(got, want).complaints) == wrong
    assert Yardstick(model, floor=1e-3).measure(-got, want).complaints
    assert Yardstick(model, floor=1e-3).measure(got * torch.tensor([2.0, 1.0, 1.0]), want).complaints


@pytest.mark.parametrize(
    "value, size, wrong", [(torch.inf, 2e4, False), (torch.inf, 2e3, True), (torch.nan, 2e4, True)]
)
def test_what_nobody_compares_is_infinite_only_where_the_dtype_ends_near(value, size, wrong):
    """Of many matrices a few are compared; the others are looked at for what cannot be."""
    whole = torch.full((3, 4, 8), size, dtype=torch.float64)
    part = Expected("out", whole[0], Yardstick(whole[0]), torch.float16, index=(0,), shape=(3, 4, 8))
    got = whole.half()
    got[2, 1, 3] = value
    assert bool(part.misfit(got)) == wrong
