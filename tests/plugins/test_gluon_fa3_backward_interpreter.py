"""gluon_fa3_backward's plain kernels under Triton's interpreter: LSE and delta as terms of products, dQ in its order.

It runs itself once more with TRITON_INTERPRET=1 (see again.py).
"""

from __future__ import annotations

import pytest
import torch
from again import INTERPRETED, run_interpreted

if not INTERPRETED:

    def test_interpreted():
        run_interpreted(__file__)

else:
    import triton
    import triton.language as tl

    from registry.plugins.gluon_fa3.backward import sums

    @triton.jit
    def _alone():
        tl.static_assert(True)  # the interpreter looks for tl in the globals

    HEADS, ROWS, WIDTH, BLOCK = 2, 70, 64, 64

    @pytest.mark.parametrize("scale", [0.37, -2.0, 1e-30, 1e4])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_terms_add_up(monkeypatch, dtype, scale):
        monkeypatch.setitem(sums.before.fn.__globals__, "after_previous_kernel", _alone)  # waits for no other kernel
        made = torch.Generator().manual_seed(0)
        out, grad_out = (torch.randn(1, HEADS, ROWS, WIDTH, generator=made).to(dtype) for _ in range(2))
        lse = 20 * torch.randn(1, HEADS, ROWS, generator=made)
        lse[0, 0, 3] = -torch.inf
        blocks = HEADS * -(-ROWS // BLOCK)
        stats = torch.full((blocks, BLOCK, 16), torch.nan, dtype=torch.bfloat16)
        strides = HEADS * ROWS * WIDTH, ROWS * WIDTH, WIDTH
        sizes = ROWS, HEADS, blocks // HEADS
        sums.before[(blocks * BLOCK // 16,)](
            out, grad_out, lse, None, stats, None, None, *strides, *strides, *sizes, scale,
            HEAD_DIM_V=WIDTH, PADDED=WIDTH, PADDED_V=WIDTH, GRAD_LSE=False, SUMS=False, TURNS=False, FOLDED=True,
            BLOCK_M=BLOCK, ROWS=16,
        )  # fmt: skip
        terms = stats.double().view(HEADS, -1, 16)
        assert terms.isfinite().all() and (terms[..., 6:] == 0).all()
        found_lse, found_delta = terms[:, :ROWS, :3].sum(-1), terms[:, :ROWS, 3:6].sum(-1)
        nobody = torch.zeros(HEADS, ROWS, dtype=torch.bool)
        nobody[0, 3] = True
        torch.testing.assert_close(found_lse[~nobody], lse[0].double()[~nobody] / scale, rtol=2**-22, atol=0)
        assert (found_lse[nobody] * scale > 1e7).all() and (terms[:, ROWS:, 0] * scale > 1e7).all()
        delta = (out.double() * grad_out.double()).sum(-1)[0]
        torch.testing.assert_close(found_delta, delta, rtol=1e-5, atol=1e-4)

    @pytest.mark.parametrize("block, columns, width", [(128, 64, 64), (64, 64, 128), (64, 32, 64)])
    def test_dq_comes_into_order(monkeypatch, block, columns, width):
        monkeypatch.setitem(sums.after.fn.__globals__, "after_previous_kernel", _alone)
        blocks = -(-ROWS // block)
        parts = torch.randn(HEADS, blocks, 2, 64, columns, generator=torch.Generator().manual_seed(0))
        rows, column = torch.arange(64)[:, None], torch.arange(columns)[None, :]
        thread = rows % 64 // 16 * 32 + rows % 8 * 4 + column % 8 // 2  # of a matrix warp group
        places = (column // 8 * 128 + thread) * 4 + rows % 16 // 8 * 2 + column % 2  # 16 bytes a thread, in turn
        handed_over = torch.empty(HEADS, blocks, 2, 64 * columns)
        handed_over[..., places.flatten()] = parts.flatten(-2)
        dq = torch.full((1, HEADS, ROWS, width), torch.nan)
        strides = HEADS * ROWS * width, ROWS * width, width
        sums.after[(2 * HEADS * blocks,)](
            handed_over, dq, *strides, ROWS, HEADS, blocks, 0.5,
            HEAD_DIM=width, PADDED=width, BLOCK_M=block, COLUMNS=columns,
        )  # fmt: skip
        beside = block == 64  # parts are halves of the columns, else of the rows
        whole = parts.permute(0, 1, 3, 2, 4) if beside else parts
        torch.testing.assert_close(dq[0], 0.5 * whole.reshape(HEADS, blocks * block, width)[:, :ROWS])
