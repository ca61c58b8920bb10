"""What torch.func does to calls: maps over nothing, and functionalize, which differentiates nothing."""

from __future__ import annotations

import pytest
import torch

import registry

STARTS = torch.tensor([0, 3, 8], dtype=torch.int32)
STEP = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), STARTS) | {"max_seqlen_q": 5, "max_seqlen_k": 5}
ROWS, WEIGHT, HEADS = torch.randn(8, 4), torch.randn(4, 6), torch.randn(2, 4, 8, 16)


def gated(rows):
    return registry.matmul(rows, WEIGHT, activation="silu", gated=True)


def grouped(rows):
    return registry.grouped_mm(rows, WEIGHT.expand(2, 4, 6), offs=STARTS[1:], activation="gelu")


def packed(heads):
    rows = heads[0].transpose(0, 1)
    return registry.attention_varlen(rows, rows, rows, **STEP)


CALLS = {
    "matmul": (lambda rows: registry.matmul(rows, WEIGHT), ROWS),
    "gated": (gated, ROWS),
    "grouped_mm": (grouped, ROWS),
    "attention": (lambda heads: registry.attention(heads, heads, heads, causal=True), HEADS),
    "attention_varlen": (packed, HEADS),
}


@pytest.mark.parametrize("name", CALLS)
def test_functionalize(name):
    """No autograd.Function has a rule for it, so calls take the torch op; its wrappers hide who is followed."""
    call, given = CALLS[name]
    wanted_leaf, leaf = (given.clone().requires_grad_() for _ in range(2))
    wanted, found = call(wanted_leaf), torch.func.functionalize(call)(leaf)
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    torch.testing.assert_close(leaf.grad, wanted_leaf.grad)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.functionalize(call)(given), wanted)


@pytest.mark.parametrize("shape", [(3, 2, 4, 0, 16), (0, 2, 4, 6, 16), (3, 0, 4, 6, 16)], ids=str)
def test_a_map_over_nothing(shape):
    """Of no queries, no entries, or batches of none: as the calls one by one, of which there may be none."""
    q, k = torch.randn(shape), torch.randn(*shape[:2], 2, 8, 16)
    out, lse = torch.vmap(lambda *given: registry.attention(*given, return_lse=True))(q, k, k)
    assert out.shape == shape and lse.shape == shape[:-1]
    for place in range(3):
        grad = torch.vmap(torch.func.grad(lambda *given: registry.attention(*given).sum(), argnums=place))(q, k, k)
        assert grad.shape == (q, k, k)[place].shape and not grad.any()


def test_a_map_over_the_last_dimension_but_one_of_one_operand():
    q, k = torch.randn(2, 4, 6, 3, 16), torch.randn(2, 4, 8, 16)
    found = torch.vmap(registry.attention, in_dims=(-2, None, None), out_dims=-2)(q, k, k)
    torch.testing.assert_close(found[..., 1, :], registry.attention(q[..., 1, :], k, k))
