"""What a kernel's integers cannot hold, and grids that end, is refused beforehand; no GPU needed."""

from __future__ import annotations

import pytest
import torch

import registry

H200 = registry.Target.named("H200")
BF16 = torch.bfloat16


def meta(shape, strides=None, dtype=BF16):
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty(1, dtype=dtype, device="meta").as_strided(shape, strides)


def said(op, variant, *tensors, **call):
    problem, _ = op.problem_of(*tensors, target=H200, **call)
    found = registry.variants()[variant]
    configs = found.configs(problem) if callable(found.configs) else found.configs
    return " ".join(map(str, found.refusals(problem, configs[0])))


@pytest.mark.parametrize("lies_far", ["q", "out", ""])
def test_heads_far_apart(lies_far):
    near, away = meta((8, 64, 128)), meta((8, 64, 128), (128, 300_000 * 128, 1))
    q, out = (away if lies_far == name else near for name in ("q", "out"))
    how = {"cu_seqlens_q": meta((9,), dtype=torch.int32), "seqused_k": meta((8,), dtype=torch.int32), "out": out}
    reasons = said(
        registry.attention_varlen,
        "gluon_decode",
        q,
        *[meta((8, 1024, 8, 128))] * 2,
        max_seqlen_q=1,
        max_seqlen_k=1024,
        **how,
    )
    assert ("heads within 2^31 elements" in reasons) == bool(lies_far), reasons


@pytest.mark.parametrize("batch", [65_535, 65_536])
@pytest.mark.parametrize("dtype", [torch.int8, BF16])
def test_matrices_beyond_the_grid_of_a_copy(batch, dtype):
    a = meta((batch, 64, 64), dtype=dtype)
    reasons = said(registry.matmul, "gluon_matmul_ws", a, a)
    assert ("the copy's grid ends there" in reasons) == (batch > 65_535 and dtype is torch.int8), reasons


@pytest.mark.parametrize("batch", [1023, 1024])
def test_heads_beyond_the_grid(batch):
    q = meta((batch, 64, 64, 64))
    assert ("the grid ends there" in said(registry.attention, "triton_autows", q, q, q)) == (batch == 1024)


@pytest.mark.parametrize(
    ("seqlen", "window", "hangs"), [(2049, (33, 0), True), (2049, None, False), (129, (33, 0), False)]
)
def test_wide_heads_whose_next_tile_would_wait_for_this_one(seqlen, window, hangs):
    """Blocks of 32 under a window, one of values at a time: where tiles are drawn, the last group would never end."""
    q, v = meta((3, 4, seqlen, 576)), meta((3, 4, seqlen, 160))
    problem, _ = registry.attention.problem_of(q, q, v, causal=True, window=window, target=H200)
    variant = registry.variants()["gluon_fa3_wide"]
    one_slot = {config["v_slots"] == 1: config for config in variant.configs(problem)}
    assert bool(variant.refusals(problem, one_slot[True])) == hangs
    assert not variant.refusals(problem, one_slot[False])
