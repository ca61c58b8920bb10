"""The grouped products under Triton's interpreter, against the op's definition in float64: no GPU needed.

This file runs itself once more, with TRITON_INTERPRET=1, in a process of its own.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from again import INTERPRETED

from registry import grouped_mm
from registry.ops.grouped_mm.draws import ends_of

pytestmark = pytest.mark.usefixtures("seeded")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def offsets(*ends):
    return torch.tensor(ends, dtype=torch.int32)


if INTERPRETED:
    from interpreter import check_product, matrix

    from registry.ops.grouped_mm.offsets import OFFSETS
    from registry.ops.parts.memory import conditions
    from registry.plugins.triton_grouped import config_of
    from registry.plugins.triton_grouped.host import HOST

    POINTERS = config_of(16, 32, 32, 4, 1, tma=False, group=2)
    DESCRIPTORS = config_of(16, 32, 32, 4, 2, tma=True, group=2)
    WAYS = pytest.mark.parametrize("config", [POINTERS, DESCRIPTORS], ids=["pointers", "descriptors"])

    def check(config, a, b, **given):
        check_product(partial(HOST.run, config=config), grouped_mm, a, b, **given)

    @WAYS
    @pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
    @pytest.mark.parametrize("dtype", [F16, BF16, F32])
    def test_groups_of_rows(config, layout, dtype):
        a, b = matrix(56, 40, layout[0], dtype), matrix(40, 64, layout[1], dtype, (4,))
        check(config, a, b, offs=offsets(5, 5, 40, 56))

    @WAYS
    @pytest.mark.parametrize("spread", ["even", "skewed", "empty", "short", "one", "lying"])
    def test_sizes_of_groups(config, spread):
        a, b = matrix(72, 48, "n"), matrix(48, 40, "t", batch=(7,))
        check(config, a, b, offs=offsets(*ends_of(spread, 7, 72)))

    @pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "tn in boxes"])
    @pytest.mark.parametrize("ends", [(8, 8, 40, 72), (7, 3, 90, 99), (0, 0, 0, 0)])
    def test_sums_over_groups(layout, ends):
        config = DESCRIPTORS if "boxes" in layout else POINTERS  # boxes start at multiples of 16 bytes
        check(config, matrix(40, 72, layout[0]), matrix(72, 48, layout[1]), offs=offsets(*ends))

    @WAYS
    @pytest.mark.parametrize("layout", ["nn", "tt"])
    def test_a_dimension_of_groups(config, layout):
        check(config, matrix(24, 40, layout[0], batch=(3,)), matrix(40, 48, layout[1], batch=(3,)))
        check(config, matrix(24, 40, "n", batch=(1,)).expand(3, -1, -1), matrix(40, 48, layout[1], batch=(3,)))

    @pytest.mark.parametrize("shape", [(1, 1, 1), (33, 65, 129), (20, 40, 1)])
    def test_ragged_shapes(shape):
        m, n, k = shape
        check(POINTERS, matrix(m, k, "n"), matrix(k, n, "t", batch=(2,)), offs=offsets(m // 2, m))
        check(POINTERS, matrix(m, k, "t"), matrix(k, n, "n"), offs=offsets(k // 3, k))

    @WAYS
    @pytest.mark.parametrize("activation, gated", [("relu", False), ("gelu", True), ("silu", True), ("", True)])
    def test_bias_activation_and_gate(config, activation, gated):
        a, b = matrix(48, 24, "n", BF16), matrix(24, 80, "t", BF16, (3,))
        fused = {"bias": torch.randn(3, 80).to(BF16), "activation": activation, "gated": gated}
        check(config, a, b, offs=offsets(9, 20, 41), **fused)
        check(config, matrix(20, 24, "n", BF16, (3,)), b, **fused)

    @WAYS
    @pytest.mark.parametrize("kind", [torch.int32, torch.int64])
    def test_gathered_rows(config, kind):
        a, b = matrix(20, 40, "n"), matrix(40, 64, "t", batch=(3,))
        rows = torch.randint(-4, 24, (50,)).to(kind)
        check(config, a, b, offs=offsets(9, 20, 41), rows=rows, activation="silu", gated=True)
        scales = {"scale_a": torch.rand(20), "scale_b": torch.rand(3, 64)}
        check(config, a, b, offs=offsets(9, 20, 41), rows=rows, **scales)

    @WAYS
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
    def test_fp8_with_scales(config, dtype):
        a, b = matrix(48, 64, "n", dtype), matrix(64, 48, "t", dtype, (3,))
        scales = {"scale_a": torch.rand(48) + 0.5, "scale_b": torch.rand(3, 48) + 0.5}
        check(config, a, b, offs=offsets(16, 17, 48), **scales)
        check(config, a, b, out_dtype=F16, offs=offsets(16, 17, 40), gated=True, activation="gelu", **scales)

    @WAYS
    def test_out_dtypes_and_strides(config):
        a, b, ends = matrix(32, 48, "n"), matrix(48, 64, "t", batch=(2,)), offsets(30, 31)
        check(config, a, b, out_dtype=F32, offs=ends)
        check(config, a, b, out=torch.empty(32, 128).half()[:, 32:96], offs=ends)
        check(config, a, b, out=torch.empty(64, 32).half().mT, offs=ends)
        check(config, a, b, offs=torch.stack([ends, ends], 1)[:, 0])

    @WAYS
    def test_kernels_say_what_they_had_to_put_right(config):
        a, b, rows = matrix(20, 40, "n"), matrix(40, 64, "t", batch=(3,)), torch.arange(24) - 2
        for given, said in (
            ({"offs": offsets(5, 5, 20)}, 0),
            ({"offs": offsets(5, 4, 20)}, 1),
            ({"offs": offsets(5, 5, 21)}, 1),
            ({"offs": offsets(5, 5, 24), "rows": rows}, 1),
            ({"offs": offsets(5, 5, 20), "rows": rows[2:22]}, 0),
        ):
            OFFSETS.taken()
            HOST.run(a, b, config=config, out_dtype=F16, **given)
            assert len(OFFSETS.taken()) == said, given

    def test_neighbours_of_a_group_may_be_anything():
        """Rows of other groups are read with a group's last block, and must not be in its sums."""
        a, b = matrix(40, 72, "t"), matrix(72, 48, "n")
        a[:, 20:30], b[20:30] = float("inf"), float("nan")
        for config in (POINTERS, DESCRIPTORS):
            out = HOST.run(a, b, config=config, out_dtype=F16, offs=offsets(20, 30, 72))
            want = grouped_mm.reference(a, b, offs=offsets(20, 30, 72))
            for g in (0, 2):
                assert torch.allclose(out[g].double(), want[g], atol=0.05), g

    @pytest.mark.parametrize("columns", [24, 20, 8])
    @pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn])
    def test_columns_are_whole_where_k_is_contiguous(columns, dtype):
        """Of what is read 16 bytes at a time along K, any number of rows and columns is."""
        a, b = matrix(40, 64, "n", dtype), matrix(64, columns, "t", dtype, (3,))
        check(POINTERS, a, b, offs=offsets(10, 24, 40), out_dtype=BF16)

    def test_rows_and_columns_of_gradients_are_whole_where_k_is_contiguous():
        check(POINTERS, matrix(20, 64, "n"), matrix(64, 28, "t"), offs=offsets(16, 40, 64), out_dtype=F16)

    @WAYS
    def test_float32_as_tf32(config):
        a, b = matrix(32, 48, "n", F32), matrix(48, 64, "t", F32, (2,))
        with conditions(ieee=False):
            out = HOST.run(a, b, config=config, out_dtype=F32, offs=offsets(10, 32))
        want = grouped_mm.reference(a, b, offs=offsets(10, 32))
        assert 1e-4 < float((out - want).norm() / want.norm()) < 4e-4
