"""Operands whose rows lie so far apart that indices times strides leave 32 bits; and what else a GPU alone tells."""

from __future__ import annotations

import pytest
import torch

import registry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
APART = 4_400_000
"""Of 512 numbers: the last lies beyond 2^31 elements of the first."""


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def far(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count * APART, device="cuda", dtype=dtype).as_strided((count,), (APART,)).normal_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("variant", ["gluon_matmul_ws", "gluon_matmul_pairs", "triton_matmul", "triton_matmul_tma"])
def test_scales_far_apart(variant, dtype):
    a, b = torch.randn(512, 512, device="cuda").to(dtype), torch.randn(512, 512, device="cuda").to(dtype).t()
    scales = {"scale_a": far(512, torch.float32), "scale_b": torch.rand(512, device="cuda")}
    try:
        got = registry.matmul(a, b, **scales, out_dtype=torch.bfloat16, variant=variant)
    except registry.IllegalVariant as refusal:
        pytest.skip(str(refusal))
    want = a.double() @ b.double() * scales["scale_a"].double()[:, None] * scales["scale_b"].double()
    assert off(got, want) < 1e-2


@pytest.mark.parametrize("rows", [2, 512])
def test_a_bias_far_apart(rows):
    a, b = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16) for n in (rows, 512))
    bias = far(512, torch.bfloat16)
    want = a.double() @ b.t().double() + bias.double()
    for variant in ("triton_gemv", "triton_matmul", None):
        if rows == 2 or variant != "triton_gemv":
            assert off(registry.matmul(a, b.t(), bias=bias, variant=variant), want) < 1e-2


def test_columns_far_apart():
    step = 40_000_000
    q, k, v = (
        torch.empty(step * 59, device="cuda", dtype=torch.bfloat16)
        .as_strided((1, 1, 256, 59), (step, step, 1, step))
        .normal_()
        for _ in range(3)
    )
    got = registry.attention(q, k, v, variant="triton_padded")
    assert off(got, registry.attention.reference(q, k, v)) < 2e-2


@pytest.mark.parametrize("lies_far", ["q", "out"])
def test_heads_far_apart(lies_far):
    rows = torch.empty(64, 300_000, 128, device="cuda", dtype=torch.bfloat16)[:, :8].transpose(0, 1).normal_()
    q, out = (rows, None) if lies_far == "q" else (torch.randn_like(rows).contiguous(), rows)
    k, v = (torch.randn(8, 1024, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    how = {"cu_seqlens_q": torch.arange(9, device="cuda", dtype=torch.int32), "max_seqlen_q": 1, "max_seqlen_k": 1024}
    how |= {"seqused_k": torch.full((8,), 900, device="cuda", dtype=torch.int32), "causal": True}
    want = registry.attention_varlen.reference(q, k, v, **how)
    assert off(registry.attention_varlen(q, k, v, **how, out=out), want) < 1e-2
    with pytest.raises(registry.IllegalVariant, match="heads within"):
        registry.attention_varlen(q, k, v, **how, out=out, variant="gluon_decode")


@pytest.mark.parametrize("variant", ["gluon_decode", "triton_varlen_split", "triton_varlen", "gluon_fa3_cached"])
@pytest.mark.parametrize("first", ["with", "without"])
def test_a_table_in_a_wider_one_with_and_without_a_schedule(variant, first):
    q = torch.randn(4, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(512, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.randint(0, 512, (4, 256), device="cuda", dtype=torch.int32)[:, :32]
    how = {"cu_seqlens_q": torch.arange(5, device="cuda", dtype=torch.int32), "max_seqlen_q": 1, "max_seqlen_k": 512}
    how |= {"seqused_k": torch.full((4,), 500, device="cuda", dtype=torch.int32), "block_table": table, "causal": True}
    want = registry.attention_varlen.reference(q, k, v, **how)
    plan = registry.attention_varlen.schedule(q, k, v, **how)
    for one in ((plan, None) if first == "with" else (None, plan)) * 2:
        assert off(registry.attention_varlen(q, k, v, **how, plan=one, variant=variant), want) < 1e-2


@pytest.mark.parametrize("window", [33, 129, 1000])
def test_wide_heads_end_where_a_group_passes_the_last_blocks(window):
    """One group of a tile sees none of its last blocks, and waits for the next tile before it lets go of its own."""
    q, k, v = (torch.randn(2, 8, 2049, d, device="cuda", dtype=torch.float16) for d in (576, 576, 160))
    problem, _ = registry.attention.problem_of(q, k, v, causal=True, window=(window, 0))
    variant = registry.variants()["gluon_fa3_wide"]
    want = registry.attention.reference(q, k, v, causal=True, window=(window, 0))
    for config in variant.legal_configs(problem):
        got, _ = registry.attention.bind(variant, problem, config)(q, k, v, scale=576**-0.5)
        torch.cuda.synchronize()
        assert off(got, want) < 5e-3, config
