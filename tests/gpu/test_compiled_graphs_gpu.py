"""torch.compile's own CUDA graphs, which warm up with all that a call allocates in a pool of theirs."""

from __future__ import annotations

import pytest
import torch

import registry

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_they_take_no_memory_that_is_kept():
    """They count what lives in their pool, and raise for what they do not know."""
    import torch._inductor.config as inductor

    assert inductor.triton.slow_path_cudagraph_asserts
    calls = [
        [torch.randn(1, h, s, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv"]
        for h, s in ((32, 4096), (16, 2048))
    ]
    want = [torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True) for qkv in calls]
    compiled = torch.compile(
        lambda q, k, v: registry.attention(q * 1.0, k, v, causal=True) + 0.0, mode="reduce-overhead", dynamic=False
    )
    for _ in range(6):
        for qkv, one in zip(calls, want, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            assert (compiled(*qkv).float() - one.float()).abs().max() < 0.05
