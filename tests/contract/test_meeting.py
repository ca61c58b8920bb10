"""Whether claims let a problem through, told quickly: what the rules say in full."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from registry import Target
from registry.contract.capability import reasons_against
from registry.contract.meeting import meets
from registry.contract.problem import OperandFact
from registry.ops.known import op_named
from registry.tuning.grids import grid

H100 = Target.named("H100")


def moved(draw: random.Random, one: OperandFact) -> OperandFact:
    """The same matrix elsewhere: at another address, with other distances between what it has."""
    strides = [draw.choice((stride, stride, stride + draw.choice((1, 2, 4, 8)), 1)) for stride in one.strides]
    shape = [draw.choice((size, size, size, 1)) for size in one.shape]
    return replace(one, shape=tuple(shape), strides=tuple(strides), base_alignment=draw.choice((16, 16, 8, 2)))


@pytest.mark.parametrize("op", ["attention", "attention_backward", "attention_varlen", "grouped_mm", "matmul"])
def test_what_is_told_at_a_glance_is_what_the_reasons_say(op):
    draw, variants = random.Random(op), op_named(op).variants.values()
    for case in grid(op, "random:773:40"):
        asked = case.problem(H100)
        words = {"head_dim": 72, "head_dim_v": 40, "softcap": 2000.0, "page_size": 24, "out_dtype": "float32"}
        others = [replace(asked, **{name: value}) for name, value in words.items() if hasattr(asked, name)]
        others += [replace(asked, operands=tuple(moved(draw, one) for one in asked.operands)) for _ in range(8)]
        for one in others:
            found = {v.name: meets(v.requires, one) for v in variants}
            assert found == {v.name: not reasons_against(v.requires, one) for v in variants}, one
