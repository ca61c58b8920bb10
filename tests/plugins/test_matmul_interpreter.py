"""The two Triton matmuls under Triton's interpreter, against a float64 product: no GPU needed.

This file runs itself once more, with TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from again import INTERPRETED

pytestmark = pytest.mark.usefixtures("seeded")
ENDS = torch.tensor([2**31 - 1, -(2**31), 2**31 - 2**24, 0, 7, -(2**31) + 2**24]).int().repeat(4)
"""A bias that sums go around with, modulo 2**32."""


def pointers(n=32, k=32, split=1, stages=2):
    return {"BLOCK_M": 16, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 2, "SPLIT": split, "num_warps": 4, "num_stages": stages}


def ahead(**given):
    """Blocks are loaded ahead into registers, the ragged one first."""
    return pointers(**given, stages=1)


def descriptors(m=16, n=32, k=32):
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": 2, "FLATTEN": True, "num_warps": 4, "num_stages": 2}


if INTERPRETED:
    from interpreter import check_product, matrix

    from registry import matmul
    from registry.ops.parts.memory import conditions
    from registry.plugins import triton_matmul, triton_matmul_tma
    from registry.toolbox.launch import StandIn

    by_pointers, by_descriptors = triton_matmul.host.HOST.run, triton_matmul_tma.HOST.run
    RUNS = {
        "pointers": (by_pointers, pointers),
        "ahead": (by_pointers, ahead),
        "descriptors": (by_descriptors, descriptors),
    }
    of_pointers = pytest.mark.parametrize("config", [pointers, ahead])

    def check(run, a, b, config, out_dtype=None, out=None, **epilogue):
        return check_product(partial(run, config=config), matmul, a, b, out, out_dtype, **epilogue)

    @pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
    @pytest.mark.parametrize("way", RUNS)
    def test_dtypes_and_layouts(way, dtype, layout):
        run, config = RUNS[way]
        a, b = matrix(48, 80, layout[0], dtype), matrix(80, 64, layout[1], dtype)
        check(run, a, b, config())

    @pytest.mark.parametrize(
        "shape", [(1, 1, 1), (1, 40, 33), (37, 1, 65), (19, 45, 1), (33, 65, 129), (16, 32, 32), (50, 7, 200)]
    )
    @pytest.mark.parametrize("layout", ["nn", "tt"])
    @of_pointers
    def test_ragged_shapes(config, shape, layout):
        m, n, k = shape
        check(by_pointers, matrix(m, k, layout[0]), matrix(k, n, layout[1]), config())

    @pytest.mark.parametrize("shape", [(1, 40, 40), (37, 8, 72), (19, 48, 8), (33, 72, 136)])
    def test_ragged_shapes_of_descriptors(shape):
        m, n, k = shape
        check(by_descriptors, matrix(m, k, "n"), matrix(k, n, "n"), descriptors())

    def test_columns_that_tma_cannot_store():
        check(by_descriptors, matrix(20, 40, "n"), matrix(40, 33, "t"), descriptors())

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    @pytest.mark.parametrize("scaling", ["scalar", "rowwise"])
    @pytest.mark.parametrize("way", RUNS)
    def test_fp8_with_scales(way, scaling, dtype):
        run, config = RUNS[way]
        a, b = matrix(32, 64, "n", dtype), matrix(64, 48, "t", dtype)
        of_all = {"scale_a": torch.tensor(0.5), "scale_b": torch.tensor(3.0)}
        of_rows = {"scale_a": torch.rand(32) + 0.5, "scale_b": torch.rand(48) + 0.5}
        scales = of_rows if scaling == "rowwise" else of_all
        check(run, a, b, config(), **scales)
        check(run, a, b, config(), out_dtype=torch.float16, bias=torch.randn(48).half(), **scales)

    @pytest.mark.parametrize("split, k", [(2, 200), (3, 224), (4, 65), (4, 200), (7, 224), (7, 65)])
    @of_pointers
    def test_split_k(config, split, k):
        a, b, bias = matrix(20, k, "n"), matrix(k, 40, "t"), torch.randn(40).half()
        first = check(by_pointers, a, b, config(split=split), bias=bias, activation="gelu")
        assert torch.equal(first, by_pointers(a, b, config=config(split=split), bias=bias, activation="gelu"))

    @of_pointers
    def test_split_k_of_int8(config):
        check(by_pointers, matrix(20, 200, "n", torch.int8), matrix(200, 40, "t", torch.int8), config(split=3))

    @pytest.mark.parametrize(
        "bias, activation, out_dtype",
        [
            ("plain", "", torch.float32),
            ("plain", "relu", torch.float16),
            ("float32", "silu", torch.float16),
            ("strided", "silu", torch.float32),
            ("", "gelu", torch.bfloat16),
            ("", "", torch.float16),
        ],
    )
    @pytest.mark.parametrize("way", RUNS)
    def test_int8_with_a_float_epilogue(way, bias, activation, out_dtype):
        """The sums turn into float32 before the bias is added, so nothing of a bias is cut off."""
        run, config = RUNS[way]
        a, b = matrix(20, 48, "n", torch.int8), matrix(48, 40, "t", torch.int8)
        vector = torch.randn(40, 3 if bias == "strided" else 1)[:, 0].to(
            torch.float32 if bias == "float32" else out_dtype
        )
        fused = {"bias": vector if bias else None, "activation": activation}
        check(run, a, b, config(), out_dtype, **fused)
        check(run, a, b, config(), out_dtype, torch.empty(40, 20, dtype=out_dtype).mT, **fused)
        scales = {"scale_a": torch.rand(20) / 16, "scale_b": torch.rand(40)}
        check(run, a, b, config(), out_dtype, **fused, **scales)

    def test_split_k_of_int8_with_a_float_epilogue():
        """One column in three batches: the shape on which this once did not compile."""
        a, b = matrix(30, 77, "n", torch.int8, (3,)), matrix(77, 1, "t", torch.int8, (3,))
        check(by_pointers, a, b, pointers(n=16, split=2), torch.float16, bias=torch.randn(1), activation="silu")

    @pytest.mark.parametrize("activation", ["", "relu"])
    @pytest.mark.parametrize("way", RUNS)
    def test_integers_stay_integers(way, activation):
        """Sums beyond 2^24, which float32 would round."""
        run, config = RUNS[way]
        a, b = torch.randint(120, 128, (16, 1216)).to(torch.int8), torch.full((24, 1216), 127, dtype=torch.int8).mT
        for bias in (torch.randint(-9, 9, (24,), dtype=torch.int32), ENDS):
            check(run, a, b, config(k=128), bias=bias, activation=activation)

    @pytest.mark.parametrize("activation", ["", "relu", "gelu", "silu"])
    @pytest.mark.parametrize("way", RUNS)
    def test_bias_and_activation(way, activation):
        run, config = RUNS[way]
        a, b = matrix(32, 48, "n", torch.bfloat16), matrix(48, 64, "n", torch.bfloat16)
        check(run, a, b, config(), bias=torch.randn(64).bfloat16(), activation=activation)

    @pytest.mark.parametrize("way", RUNS)
    @pytest.mark.parametrize("broadcast", ["", "a", "b"])
    def test_batches(way, broadcast):
        run, config = RUNS[way]
        a, b = matrix(24, 40, "n", batch=(3,)), matrix(40, 48, "t", batch=(3,))
        a = a[:1].expand(3, -1, -1) if broadcast == "a" else a
        b = b[:1].expand(3, -1, -1) if broadcast == "b" else b
        check(run, a, b, config())

    @of_pointers
    def test_any_strides(config):
        a, b = torch.randn(60, 90).half()[::2, 1::2], torch.randn(45, 120).half()[:, ::3]
        check(by_pointers, a, b, config())
        check(by_pointers, a, b, config(), out=torch.empty(40, 30).half().mT)

    @pytest.mark.parametrize("way", RUNS)
    def test_out_dtypes_and_strided_out(way):
        run, config = RUNS[way]
        a, b = matrix(32, 48, "n"), matrix(48, 64, "n")
        check(run, a, b, config(), out_dtype=torch.float32)
        check(run, a, b, config(), out=torch.empty(32, 128).half()[:, 32:96])

    @pytest.mark.parametrize("way", RUNS)
    def test_float32_follows_torchs_setting(way):
        run, config = RUNS[way]
        a, b = matrix(32, 48, "n", torch.float32), matrix(48, 64, "n", torch.float32)
        errors = {}
        for setting in ("highest", "high"):
            out = torch.full((32, 64), float("nan"))
            with conditions(ieee=setting == "highest"):
                run(a, b, config=config(), out=out, out_dtype=torch.float32)
            errors[setting] = ((out - a.double() @ b.double()).norm() / (a.double() @ b.double()).norm()).item()
        assert errors["highest"] < 1e-6
        # rounded to the nearest tf32, as cuBLAS does it: cutting off would have 7e-4
        assert 1e-4 < errors["high"] < 4e-4

    @pytest.mark.parametrize("way", RUNS)
    def test_what_tf32_rounds_stays_what_it_was(way):
        """Infinities and NaNs, whose rounded bits would be something else, and values that are tf32 already."""
        run, config = RUNS[way]
        a = torch.eye(32)
        b = torch.tensor([float("inf"), -float("inf"), float("nan"), -0.0, 1.5, 3.0e38, 2.0**-130]).repeat(32, 16)[
            :, :64
        ]
        b.view(torch.int32)[b.isnan()] = 0x7FFFFFFF  # the NaN that GPUs make
        out = torch.empty(1, 64)
        with conditions(ieee=False):
            run(a[:1, :1].contiguous(), b[:1].contiguous(), config=config(), out=out, out_dtype=torch.float32)
        expected = torch.where(b[:1].abs() == 3.0e38, out, b[:1])
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))

    # --- copies of what wgmma cannot read as it lies

    @pytest.mark.parametrize("last", [True, False], ids=["a", "b"])
    @pytest.mark.parametrize("dtype, batch", [(torch.float32, ()), (torch.float32, (3,)), (torch.int8, ())])
    def test_turned_copies(last, dtype, batch):
        from registry.plugins.gluon_matmul_ws.turn import along_k, copying

        x = matrix(70, 131, "t" if last else "n", dtype, batch)
        operand = StandIn.of_tensor("x", x)
        place = along_k(operand, last)
        found = torch.full((x.numel() * 2,), -1, dtype=dtype).as_strided(x.shape, place.strides)
        copying(operand, place, pdl=False).plain()(x, found)
        assert torch.equal(found, x) and place.strides[-1 if last else -2] == 1
        assert all(stride * dtype.itemsize % 16 == 0 for stride in place.strides if stride != 1)
