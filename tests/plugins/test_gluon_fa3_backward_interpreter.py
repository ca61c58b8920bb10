"""gluon_fa3_backward's plain kernels under Triton's interpreter: LSE and delta as terms of products, dQ in its order.

It runs itself once more with TRITON_INTERPRET=1 (see again.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from again import INTERPRETED

if INTERPRETED:
    import interpreter  # noqa: F401
    import triton
    import triton.language as tl

    from registry.plugins.gluon_fa3.backward import sums
    from registry.plugins.gluon_fa3.varlen import sums as packed

    @triton.jit
    def _alone():
        tl.static_assert(True)  # the interpreter looks for tl in the globals

    HEADS, KEY_HEADS, ROWS, WIDTH, BLOCK = 2, 1, 70, 64, 64

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
            out, grad_out, lse, None, stats, None, None, *strides, *strides, *sizes, 0, scale,
            HEAD_DIM_V=WIDTH, PADDED=WIDTH, PADDED_V=WIDTH, GRAD_LSE=False, SUMS=False, TURNS=False, FOLDED=True,
            BLOCK_M=BLOCK, ROWS=16, KEYS=False,
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

    def as_handed_over(parts):
        """[..., 64, columns] in the order of a matrix warp group's registers: 16 bytes a thread, in turn."""
        columns = parts.shape[-1]
        rows, column = torch.arange(64)[:, None], torch.arange(columns)[None, :]
        thread = rows % 64 // 16 * 32 + rows % 8 * 4 + column % 8 // 2
        places = (column // 8 * 128 + thread) * 4 + rows % 16 // 8 * 2 + column % 2
        made = torch.empty(*parts.shape[:-2], 64 * columns)
        made[..., places.flatten()] = parts.flatten(-2)
        return made

    @pytest.mark.parametrize("keys", [False, True])
    @pytest.mark.parametrize("block, columns, width", [(128, 64, 64), (64, 64, 128), (64, 32, 64)])
    def test_sums_come_into_order(monkeypatch, block, columns, width, keys):
        """dQ's, and of tiles that were divided dK's and dV's."""
        monkeypatch.setitem(sums.after.fn.__globals__, "after_previous_kernel", _alone)
        made = torch.Generator().manual_seed(0)
        blocks, key_blocks, of_a_row = -(-ROWS // block), -(-ROWS // 128), width // columns
        parts = torch.randn(HEADS, blocks, 2, 64, columns, generator=made)
        key_parts = torch.randn(KEY_HEADS, key_blocks, 2, 2, of_a_row, 64, columns, generator=made)
        handed_over = [as_handed_over(parts).flatten(), as_handed_over(key_parts).flatten()]
        units = HEADS * blocks * 2
        dq = torch.full((1, HEADS, ROWS, width), torch.nan)
        dk, dv = (torch.full((1, KEY_HEADS, ROWS, width), torch.nan) for _ in range(2))
        strides = HEADS * ROWS * width, ROWS * width, width
        sizes = ROWS, HEADS, blocks, ROWS, KEY_HEADS, key_blocks, units, 0.5
        sums.after[(units + keys * key_parts.numel() // (64 * columns),)](
            torch.cat(handed_over), dq, dk, dv, *strides, *strides, *strides, *sizes, HEAD_DIM=width, HEAD_DIM_V=width,
            PADDED=width, PADDED_V=width, BLOCK_M=block, COLUMNS=columns, KEYS=keys,
        )  # fmt: skip
        beside = block == 64  # parts are halves of the columns, else of the rows
        whole = parts.permute(0, 1, 3, 2, 4) if beside else parts
        torch.testing.assert_close(dq[0], 0.5 * whole.reshape(HEADS, blocks * block, width)[:, :ROWS])
        for i, (found, scale) in enumerate(((dk, 0.5), (dv, 1.0))):
            rows = key_parts[:, :, :, i].movedim(3, 4).reshape(KEY_HEADS, key_blocks * 128, width)[:, :ROWS]
            assert found.isnan().all() if not keys else torch.equal(found[0], scale * rows)

    def test_sums_of_divided_tiles_begin_at_zero(monkeypatch):
        monkeypatch.setitem(sums.before.fn.__globals__, "after_previous_kernel", _alone)
        out = torch.zeros(1, HEADS, ROWS, WIDTH)
        lse = torch.zeros(1, HEADS, ROWS)
        blocks, more = HEADS * -(-ROWS // BLOCK), 21  # not as many as there are programs, nor a multiple
        stats = torch.zeros(blocks, BLOCK, 16, dtype=torch.bfloat16)
        found = torch.full((blocks * BLOCK * WIDTH + (more + 1) * 16 * WIDTH,), torch.nan)
        strides = HEADS * ROWS * WIDTH, ROWS * WIDTH, WIDTH
        sums.before[(blocks * BLOCK // 16,)](
            out, out, lse, None, stats, found, None, *strides, *strides, ROWS, HEADS, blocks // HEADS, more, 1.0,
            HEAD_DIM_V=WIDTH, PADDED=WIDTH, PADDED_V=WIDTH, GRAD_LSE=False, SUMS=True, TURNS=False, FOLDED=True,
            BLOCK_M=BLOCK, ROWS=16, KEYS=True,
        )  # fmt: skip
        assert (found[: -16 * WIDTH] == 0).all() and found[-16 * WIDTH :].isnan().all()

    @pytest.mark.parametrize("folded", [False, True])
    def test_rows_of_sequences_without_keys_count_as_nobodys_whatever_their_sink(monkeypatch, folded):
        """The sweep for dQ has one key for them, which the mask does not hide."""
        monkeypatch.setitem(packed.before_packed.fn.__globals__, "after_previous_kernel", _alone)
        made = torch.Generator().manual_seed(0)
        lengths, keys, sink = [70, 5, 0, 40], [3, 0, 2, 0], -1e4
        starts, key_starts = ([0, *itertools.accumulate(of)] for of in (lengths, keys))
        total, row_blocks = starts[-1], starts[-1] // BLOCK + len(lengths)
        out, grad_out = (torch.randn(total, HEADS, WIDTH, generator=made).half() for _ in range(2))
        lse = torch.randn(HEADS, total, generator=made)
        lse[:, starts[1] : starts[2]] = lse[:, starts[3] :] = sink
        lse[1, 3] = 3e38  # of a sink, too: no term may be infinite
        width = 16 if folded else 2
        stats = torch.full((HEADS * row_blocks * BLOCK, width), torch.nan, dtype=torch.bfloat16 if folded else None)
        delta = torch.full((HEADS, total), torch.nan)
        cu_q, cu_k = (torch.tensor(of, dtype=torch.int32) for of in (starts, key_starts))
        packed.before_packed[(HEADS * row_blocks * BLOCK // 32,)](
            out, grad_out, lse, None, stats, None, None, cu_q, HEADS * WIDTH, WIDTH, HEADS * WIDTH, WIDTH,
            len(lengths), total, row_blocks, 0, 0.125, delta, cu_k, sum(keys),
            HEAD_DIM_V=WIDTH, PADDED=WIDTH, PADDED_V=WIDTH, GRAD_LSE=False, SUMS=False, TURNS=False, FOLDED=folded,
            BLOCK_M=BLOCK, ROWS=32, CHUNK=32, KEYS=False, SINKS=True,
        )  # fmt: skip
        torch.testing.assert_close(delta, (out.float() * grad_out.float()).sum(-1).T)
        if folded:
            assert stats.isfinite().all()
            found = stats.float().view(HEADS, -1, 16)[..., :3].sum(-1) * 0.125
        else:
            found = stats.view(HEADS, row_blocks, 2, BLOCK)[:, :, 0].flatten(1) / 1.4426950408889634
        for b, length in enumerate(lengths):
            first = (starts[b] // BLOCK + b) * BLOCK
            own, expected = found[:, first : first + length], lse[:, starts[b] : starts[b + 1]]
            nobody = (expected > 1e30) | (keys[b] == 0)
            assert (own[nobody] > 1e30).all()
            torch.testing.assert_close(own[~nobody], expected[~nobody], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("keys", [False, True])
    def test_packed_sums_come_into_order(monkeypatch, keys):
        """Each sequence has row blocks of its own, and its key blocks their places in the list; one is empty."""
        monkeypatch.setitem(packed.after_packed.fn.__globals__, "after_previous_kernel", _alone)
        made = torch.Generator().manual_seed(0)
        lengths, of_a_row = [70, 0, 150, 1], WIDTH // 32
        starts = [0, *itertools.accumulate(lengths)]
        row_blocks = starts[-1] // BLOCK + len(lengths)
        listed = [(n, b) for b in (2, 0, 3) for n in range(-(-lengths[b] // 128))]
        key_list = torch.tensor(
            [[len(listed), *[0] * 7], *([n, starts[b + 1], lengths[b], *[0] * 5] for n, b in listed)]
        )
        parts = torch.randn(HEADS, row_blocks, 2, 64, 32, generator=made)
        key_parts = torch.randn(len(listed) + 1, KEY_HEADS, 2, 2 * of_a_row, 64, 32, generator=made)  # and one beyond
        units = HEADS * row_blocks * 2
        dq = torch.full((starts[-1], HEADS, WIDTH), torch.nan)
        dk, dv = (torch.full((starts[-1], KEY_HEADS, WIDTH), torch.nan) for _ in range(2))
        strides = HEADS * WIDTH, WIDTH, KEY_HEADS * WIDTH, WIDTH, KEY_HEADS * WIDTH, WIDTH
        packed.after_packed[(units + keys * key_parts.numel() // (64 * 32),)](
            torch.cat([as_handed_over(parts).flatten(), as_handed_over(key_parts).flatten()]), dq, dk, dv,
            torch.tensor(starts, dtype=torch.int32), key_list.int(), *strides,
            len(lengths), starts[-1], row_blocks, KEY_HEADS, units, 0.5,
            HEAD_DIM=WIDTH, HEAD_DIM_V=WIDTH, PADDED=WIDTH, PADDED_V=WIDTH, BLOCK_M=BLOCK, BLOCK_N=128, COLUMNS=32,
            CHUNK=32, KEYS=keys,
        )  # fmt: skip
        rows = parts.permute(0, 1, 3, 2, 4).reshape(HEADS, row_blocks, 64, WIDTH)
        for b, length in enumerate(lengths):
            first = starts[b] // BLOCK + b
            own = rows[:, first : first + -(-length // BLOCK)].reshape(HEADS, -1, WIDTH)[:, :length]
            torch.testing.assert_close(dq[starts[b] : starts[b + 1]], 0.5 * own.movedim(0, 1))
        if not keys:
            assert dk.isnan().all() and dv.isnan().all()
            return
        for at, (n, b) in enumerate(listed):
            here = slice(starts[b] + n * 128, min(starts[b] + n * 128 + 128, starts[b + 1]))
            for half, (found, scale) in enumerate(((dk, 0.5), (dv, 1.0))):
                columns = key_parts[at, :, :, half * of_a_row : (half + 1) * of_a_row].movedim(2, 3)
                whole = columns.reshape(KEY_HEADS, 128, WIDTH)[:, : here.stop - here.start]
                assert torch.equal(found[here], scale * whole.movedim(0, 1))
