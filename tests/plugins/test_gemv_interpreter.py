"""Products of few rows or columns under Triton's interpreter, against float64: wherever the long operand lies.

This file runs itself once more, with TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from again import INTERPRETED

pytestmark = pytest.mark.usefixtures("seeded")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)


def matrix(rows, columns, letter, dtype, batch=(), pad=0, offset=0):
    """One that lies among NaNs: its pitch `pad` elements more than it takes, its first `offset` after the start."""
    inner, outer = (columns, rows) if letter == "n" else (rows, columns)
    pitch = inner + pad
    strides = (outer * pitch, pitch, 1) if letter == "n" else (outer * pitch, 1, pitch)
    entries = batch[0] if batch else 1
    around = torch.full((entries * outer * pitch + offset + 16,), 77 if dtype == torch.int8 else float("nan")).to(dtype)
    found = around.as_strided((entries, rows, columns), strides, offset)
    found.copy_(torch.randint(-9, 9, found.shape) if dtype == torch.int8 else torch.randn(found.shape))
    return found if batch else found[0]


if INTERPRETED:
    from interpreter import check_product

    from registry import matmul
    from registry.plugins import triton_gemv
    from registry.plugins.triton_gemv import host
    from registry.toolbox.launch import StandIn

    def small(a, b, split=1):
        """A config of little tiles, several of them."""
        side = host.sides({"a": StandIn.of_tensor("a", a), "b": StandIn.of_tensor("b", b)})
        if side.along_k:
            return triton_gemv.config_of(2, 32 * side.unit, 4, split)
        return triton_gemv.config_of(64, 2 * host.pass_of(side, 64, 4), 4, split)

    def check(a, b, split=1, out=None, out_dtype=None, **given):
        run = partial(host.HOST.run, config=small(a, b, split))
        check_product(run, matmul, a, b, out, out_dtype, **given)

    @pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_dtypes_and_layouts(dtype, layout):
        columns = {"n": 75, "t": 19}[layout[1]]  # several tiles, the last one ragged
        a, b = matrix(3, 72, layout[0], dtype), matrix(72, columns, layout[1], dtype)
        check(a, b)
        check(b.mT, a.mT, split=2)

    @pytest.mark.parametrize("pad, offset", [(0, 0), (1, 0), (8, 0), (0, 1), (3, 5), (4, 4)])
    @pytest.mark.parametrize(
        "m, n, k, letter", [(1, 67, 130, "n"), (2, 64, 64, "n"), (1, 19, 130, "t"), (2, 16, 64, "t")]
    )
    def test_wherever_it_starts(m, n, k, letter, pad, offset):
        b = matrix(k, n, letter, torch.bfloat16, (), pad, offset)
        check(matrix(m, k, "n", torch.bfloat16, (), 0, 1), b, split=2)

    @pytest.mark.parametrize("m, n, k", [(1, 1, 1), (1, 1, 300), (8, 4, 1), (3, 8, 9), (1, 130, 1), (7, 3, 33)])
    @pytest.mark.parametrize("layout", ["nn", "tt"])
    def test_tiny(m, n, k, layout):
        check(matrix(m, k, layout[0], torch.float16), matrix(k, n, layout[1], torch.float16), split=3)

    @pytest.mark.parametrize("letter", "nt")
    @pytest.mark.parametrize("broadcast", ["", "a", "b"])
    def test_batches(letter, broadcast):
        a, b = matrix(2, 40, "n", torch.float16, (3,), 1), matrix(40, 21, letter, torch.float16, (3,))
        a = a[:1].expand(3, -1, -1) if broadcast == "a" else a
        b = b[:1].expand(3, -1, -1) if broadcast == "b" else b
        check(a, b)

    @pytest.mark.parametrize("turned", [False, True])
    def test_epilogue(turned):
        a, b = matrix(4, 50, "n", torch.float16), matrix(50, 70, "n", torch.float16)
        a, b = (b.mT, a.mT) if turned else (a, b)
        bias = torch.randn(b.shape[1], 2).half()[:, 0]
        check(a, b, 2, torch.empty(b.shape[1], a.shape[0]).mT, torch.float32, activation="silu", bias=bias)
        wide = torch.zeros(a.shape[0], 100).half()
        check(a, b, 2, wide[:, 9 : 9 + b.shape[1]], activation="silu", bias=bias)
        assert not wide[:, :9].any() and not wide[:, 9 + b.shape[1] :].any()

    def test_integers_stay_integers():
        """Sums beyond 2^24, which float32 would round."""
        a, b = torch.full((2, 1216), 127).to(torch.int8), torch.randint(120, 128, (1216, 24)).to(torch.int8)
        check(a, b, bias=torch.randint(-9, 9, (24,), dtype=torch.int32))

    def test_the_same_sums_each_time():
        a, b = matrix(3, 500, "n", torch.float16), matrix(500, 45, "n", torch.float16)
        first, second = (host.HOST.run(a, b, config=small(a, b, 5)) for _ in range(2))
        assert torch.equal(first, second)
