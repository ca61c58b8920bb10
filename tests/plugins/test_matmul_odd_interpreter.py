"""The copy of the second factor under Triton's interpreter: K in the order in which the first factor is multiplied.

This file runs itself once more, with TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED
from test_matmul_odd import ordered

if INTERPRETED:
    from registry import Target
    from registry.ops.matmul.calls import MATMUL
    from registry.ops.parts.cases import Case
    from registry.plugins.gluon_matmul_ws.host import sides
    from registry.plugins.gluon_matmul_ws.odd.copy import copy_of, copying

    @pytest.mark.parametrize("layout", ["nn", "nt"])
    @pytest.mark.parametrize("batch", [{}, {"b": 3}], ids=str)
    def test_copies_are_in_the_order_of_the_first_factor(layout, batch):
        p = Case.of("matmul", m=130, n=35, k=117, layout=layout, dtype="float16", **batch).problem(Target.named("H100"))
        second = sides({"SWAP": False, "BLOCK_N": 64}, MATMUL.operands(p))[1]
        to = copy_of(second)
        source = torch.randn(second.shape).half()
        source = torch.empty_strided(second.shape, second.strides, dtype=torch.float16).copy_(source)
        made = torch.empty_strided(to.shape, to.strides, dtype=torch.float16).fill_(float("nan"))
        call = copying(second, to)
        call.constants["PDL"] = False
        call.plain()(source, made)
        assert torch.equal(made.reshape(-1, *made.shape[-2:]), ordered(source.reshape(-1, *source.shape[-2:])))
