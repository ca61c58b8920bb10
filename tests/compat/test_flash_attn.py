"""FlashAttention's functions by their documented meaning, against float64 by hand."""

from __future__ import annotations

import pytest
import torch
from flash_masks import HEADS, KV_HEADS, MASKS, B, D, S, close, even, ours, packed
from ragged import KEYS, QUERIES, by_hand, starts

import registry
from registry.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("extra", ["", "alibi", "sinks"])
def test_dense(mask, extra):
    q, k, v = torch.randn(B, S, HEADS, D), *torch.randn(2, B, 7, KV_HEADS, D)
    features = {"alibi": {"alibi_slopes": torch.rand(HEADS)}, "sinks": {"s_aux": torch.randn(HEADS)}}.get(extra, {})
    out, lse, probabilities = flash_attn_func(q, k, v, **mask, **features, return_attn_probs=True)
    assert probabilities is None and out.shape == q.shape and lse.shape == (B, HEADS, S)
    how = {"sinks": features.get("s_aux"), "alibi_slopes": features.get("alibi_slopes")}
    lengths = {"cu_seqlens_q": even(B, S), "cu_seqlens_k": even(B, 7)}
    want, want_lse = by_hand(packed(q), packed(k), packed(v), **lengths, **how, **ours(mask))
    close(packed(out), want)
    close(lse, want_lse.unflatten(1, (B, S)).transpose(0, 1))
    close(flash_attn_func(q, k, v, **mask, **features), want.view_as(q))


def test_gradients_of_all_three_ways():
    q, k, v = torch.randn(B, S, HEADS, D), *torch.randn(2, B, S, KV_HEADS, D)
    found = []
    for call in (
        lambda q, k, v: flash_attn_func(q, k, v, causal=True),
        lambda q, k, v: flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.zeros(HEADS)),
        lambda q, k, v: flash_attn_varlen_func(
            packed(q), packed(k), packed(v), even(B, S), even(B, S), S, S, causal=True
        ).view_as(q),
    ):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        found.append(torch.autograd.grad(call(*leaves).square().sum(), leaves))
    for grads in found[1:]:
        torch.testing.assert_close(grads, found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_packed(mask):
    q, k, v = torch.randn(sum(QUERIES), HEADS, D), *torch.randn(2, sum(KEYS), KV_HEADS, D)
    slopes, sinks = torch.rand(HEADS), torch.randn(HEADS)
    lengths = (starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS))
    out, lse, _ = flash_attn_varlen_func(
        q, k, v, *lengths, **mask, alibi_slopes=slopes, learnable_sink=sinks, return_attn_probs=True
    )
    how = {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1], "sinks": sinks, "alibi_slopes": slopes}
    want, want_lse = by_hand(q, k, v, **how, **ours(mask))
    close(out, want)
    close(lse, want_lse)


def test_parts_of_packed_sequences():
    """seqused_q and seqused_k: the first so many of each sequence."""
    q, k, v = torch.randn(7, HEADS, D), *torch.randn(2, 9, KV_HEADS, D)
    used_q, used_k = [2, 4], [3, 5]
    given = {name: torch.tensor(n, dtype=torch.int32) for name, n in (("seqused_q", used_q), ("seqused_k", used_k))}
    out = flash_attn_varlen_func(q, k, v, starts([3, 4]), starts([4, 5]), 4, 5, causal=True, **given)
    rows_q, rows_k = [0, 1, 3, 4, 5, 6], [0, 1, 2, 4, 5, 6, 7, 8]
    lengths = {"cu_seqlens_q": starts(used_q), "cu_seqlens_k": starts(used_k)}
    want, _ = by_hand(q[rows_q], k[rows_k], v[rows_k], **lengths, causal=True)
    close(out[rows_q], want)
    assert torch.all(out[2] == 0)


@pytest.mark.parametrize("used", [{}, {"seqused_q": torch.tensor([2, 4], dtype=torch.int32)}], ids=["all", "used"])
def test_rows_behind_the_last_sequence_are_refused_by_the_numbers_that_were_given(used):
    q, k = torch.randn(9, HEADS, D), torch.randn(9, KV_HEADS, D)
    for rows_q, rows_k, name in ((q, k[:7], "cu_seqlens_q"), (q[:7], k, "cu_seqlens_k")):
        with pytest.raises(
            registry.InvalidArgument, match="numbers that rise from 0 to 9, the rows there are"
        ) as raised:
            flash_attn_varlen_func(rows_q, rows_k, rows_k, starts([3, 4]), starts([3, 4]), 4, 4, **used)
        assert raised.value.argument == name and "7" in str(raised.value)


def test_pages_of_a_packed_call():
    q, pages_k, pages_v = torch.randn(sum(QUERIES), HEADS, D), *torch.randn(2, 20, 4, KV_HEADS, D)
    table = torch.randperm(20)[:15].view(5, 3).to(torch.int32)
    lengths = (starts(QUERIES), starts(KEYS), max(QUERIES), max(KEYS))
    out = flash_attn_varlen_func(q, pages_k, pages_v, *lengths, causal=True, block_table=table)
    seqused = torch.tensor(KEYS, dtype=torch.int32)
    how = {"cu_seqlens_q": lengths[0], "seqused_k": seqused, "block_table": table}
    close(out, by_hand(q, pages_k, pages_v, **how, causal=True)[0])
    other = flash_attn_varlen_func(
        q, pages_k, pages_v, lengths[0], None, *lengths[2:], causal=True, page_table=table, seqused_k=seqused
    )
    torch.testing.assert_close(other, out)


REFUSED = [
    (dict(dropout_p=0.1), "dropout_p"),
    (dict(deterministic=True), "deterministic"),
    (dict(alibi_slopes=torch.zeros(B, HEADS)), "alibi_slopes"),
    (dict(s_aux=torch.zeros(HEADS), learnable_sink=torch.zeros(HEADS)), "learnable_sink"),
    (dict(qv=torch.zeros(1)), "qv"),
    (dict(attention_chunk=4), "attention_chunk"),
    (dict(window_size=3), "window_size"),
    (dict(window_size=(True, 2)), "window_size"),
    (dict(window_size=((1,), 2)), "window_size"),
    (dict(causal=1), "causal"),
    (dict(softcap="a"), "softcap"),
    (dict(softcap=True), "softcap"),
    (dict(softmax_scale=10**400), "softmax_scale"),
    (dict(dropout_p=torch.ones(2)), "dropout_p"),
    (dict(alibi_slopes=[1.0]), "alibi_slopes"),
    (dict(return_attn_probs=1), "return_attn_probs"),
    (dict(learnable_sink=torch.zeros(1)), "learnable_sink"),
    (dict(s_aux=torch.zeros(1)), "s_aux"),
]


@pytest.mark.parametrize("given, name", REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_done_is_refused_by_name(given, name):
    q = torch.randn(B, S, HEADS, D)
    with pytest.raises(registry.InvalidArgument) as raised:
        flash_attn_func(q, q, q, **given)
    assert raised.value.argument == name and raised.value.allowed


def test_hints_are_taken_and_unknown_words_are_not():
    q = torch.randn(B, S, HEADS, D)
    flash_attn_func(q, q, q, num_splits=3, pack_gqa=True, sm_margin=8)
    with pytest.raises(TypeError, match="banana"):
        flash_attn_func(q, q, q, banana=1)


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
@pytest.mark.parametrize("bad", [None, 3, [1, 2], torch.ones(2, 2, dtype=torch.int64)], ids=lambda value: type(value))
def test_parts_name_what_is_no_tensor(name, bad):
    good = {name: torch.randn(8, HEADS, D) for name in "qkv"} | {
        name: starts((3, 5)) for name in ("cu_seqlens_q", "cu_seqlens_k")
    }
    good |= {name: torch.tensor((2, 5), dtype=torch.int32) for name in ("seqused_q", "seqused_k")}
    if bad is None and name.startswith("seqused"):
        return
    with pytest.raises(registry.InvalidArgument) as raised:
        flash_attn_varlen_func(**good | {name: bad}, max_seqlen_q=5, max_seqlen_k=5)
    assert raised.value.argument == name


@pytest.mark.parametrize("bad", ["ends", torch.ones(3), torch.ones(2, 2, dtype=torch.int32)], ids=type)
def test_starts_beside_pages_are_checked_too(bad):
    pages, table = torch.randn(2, 4, HEADS, D), torch.tensor([[0], [1]], dtype=torch.int32)
    used = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(registry.InvalidArgument) as raised:
        flash_attn_varlen_func(
            torch.randn(2, HEADS, D), pages, pages, starts((1, 1)), bad, 1, 4, seqused_k=used, block_table=table
        )
    assert raised.value.argument == "cu_seqlens_k"


@pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
@pytest.mark.parametrize("used", [(-1, 5), (3, 6)])
def test_more_cannot_be_used_than_there_is(name, used):
    q = torch.randn(8, HEADS, D)
    with pytest.raises(registry.InvalidArgument) as raised:
        flash_attn_varlen_func(
            q, q, q, starts((3, 5)), starts((3, 5)), 5, 5, **{name: torch.tensor(used, dtype=torch.int32)}
        )
    assert raised.value.argument == name


@pytest.mark.parametrize("name", ["block_table", "page_table"])
def test_a_table_beside_packed_keys_is_what_is_refused(name):
    q, k = torch.randn(5, HEADS, D), torch.randn(5, KV_HEADS, D)
    table = {name: torch.zeros(1, 1, dtype=torch.int32)}
    with pytest.raises(registry.InvalidArgument, match=rf"^{name}: got a tensor for k of \(5, "):
        flash_attn_varlen_func(q, k, k, starts([5]), starts([5]), 5, 5, **table)


def test_shapes_are_told_in_the_order_that_is_asked_for():
    flat, q, k = torch.randn(5, HEADS, D), torch.randn(B, S, HEADS, D), torch.randn(B, 7, KV_HEADS, D)
    for slopes in (None, torch.rand(HEADS)):
        with pytest.raises(registry.InvalidArgument, match="v: got length 3; allowed: k's length 7"):
            flash_attn_func(q, k, k[:, :3], alibi_slopes=slopes)
    with pytest.raises(registry.InvalidArgument, match="allowed: 4: batch, length, heads, head_dim"):
        flash_attn_func(flat, flat, flat)
    with pytest.raises(registry.InvalidArgument, match="allowed: 4: batch, heads, length, head_dim"):
        registry.attention(flat, flat, flat)
