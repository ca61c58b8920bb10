"""The copy of the first factor under Triton's interpreter: K in the order in which the second factor has its turns.

This file runs itself once more, with TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED
from test_matmul_across import by_phases, operand

if INTERPRETED:
    from registry.plugins.gluon_matmul_ws.across.copy import UNIT, copy_of, copying
    from registry.toolbox import integers

    @pytest.mark.parametrize("block", [64, 32])
    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("pitch", [67, 70, 36], ids=str)
    @pytest.mark.parametrize("batch", [{}, {"b": 3}], ids=str)
    def test_copies_are_in_the_order_of_turns(block, turned, pitch, batch):
        like = operand(35, 617, turned=turned, **batch)
        classes = UNIT // integers.gcd(UNIT, pitch)
        to = copy_of(like, block, classes)
        source = torch.empty_strided(like.shape, like.strides, dtype=torch.float16).copy_(torch.randn(like.shape))
        made = torch.empty_strided(to.shape, to.strides, dtype=torch.float16).fill_(float("nan"))
        call = copying(like, to, block, classes, pitch)
        call.constants["PDL"] = False
        call.plain()(source, made)
        assert torch.equal(made, by_phases(source, pitch, classes, block))
