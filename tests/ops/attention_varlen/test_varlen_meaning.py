"""What attention over ragged batches means, whatever runs it: masks, sinks, slopes, layouts, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from ragged import KEYS, QUERIES, batch, by_hand

import registry
from registry.ops.attention_varlen.arguments import coarse

varlen = registry.attention_varlen
pytestmark = pytest.mark.usefixtures("seeded")
CPU = ("torch_varlen_each", "torch_varlen_math")
MASKS = [
    {},
    {"causal": True},
    {"window": (2, 1)},
    {"window": (-1, 1)},
    {"causal": True, "window": (3, 0)},
    {"softcap": 2.0},
    {"scale": 0.7},
]


def with_features(how, sinks, alibi):
    found = dict(how)
    found |= {"sinks": torch.randn(4, dtype=torch.float64)} if sinks else {}
    return found | ({"alibi_slopes": torch.rand(4)} if alibi else {})


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("sinks, alibi", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("layout", ["packed", "cache", "paged"])
def test_the_oracle_and_the_cpu_variants_by_hand(layout, sinks, alibi, mask):
    qkv, how = batch(layout, dv=6 if layout == "paged" else None)
    how = with_features(how | mask, sinks, alibi)
    expected = by_hand(*qkv, **how)
    torch.testing.assert_close(varlen.reference(*qkv, **how, return_lse=True), expected)
    for name in CPU:
        if name == "torch_varlen_each" and ("softcap" in mask or layout == "paged"):
            continue  # which it does not claim: another head dim of v
        out, lse = varlen(*qkv, **how, return_lse=True, variant=name)
        torch.testing.assert_close((out, lse.double()), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sinks, alibi", [(False, False), (True, True)])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "softcap": 1.5}], ids=str)
def test_gradients_are_those_of_the_oracle(mask, sinks, alibi):
    (q, k, v), how = batch()
    how = with_features(how | mask, sinks, alibi)
    names = ["q", "k", "v", *(["sinks"] if sinks else [])]
    leaves = [t.clone().requires_grad_() for t in (q, k, v, *([how["sinks"]] if sinks else []))]
    exact = [t.detach().clone().requires_grad_() for t in leaves]
    results = []
    for call, operands in ((varlen, leaves), (varlen.reference, exact)):
        given = how | ({"sinks": operands[3]} if sinks else {})
        out, lse = call(*operands[:3], **given, return_lse=True)
        seen = torch.where(torch.isfinite(lse), lse, 0.0).double()
        weights = torch.arange(out.numel(), dtype=torch.float64).view_as(out).sin()
        total = (out * weights).sum() + (seen * torch.arange(seen.numel()).view_as(seen).cos()).sum()
        results.append(torch.autograd.grad(total, operands))
    for name, got, want in zip(names, *results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"d{name}: {text}")


def test_a_dense_batch_is_attentions():
    q, k, v = torch.randn(3, 2, 4, 9, 16)
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    starts = torch.tensor([0, 9, 18], dtype=torch.int32)
    lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=9, max_seqlen_k=9)
    out, lse = varlen(*packed, **lengths, causal=True, return_lse=True)
    expected = registry.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out.view(2, 9, 4, 16).transpose(1, 2), expected[0])
    torch.testing.assert_close(lse.view(4, 2, 9).transpose(0, 1), expected[1])


def test_queries_without_keys():
    """0, and the sink (or -inf) for an LSE; where keys are fewer than queries, and where there are none."""
    qkv, how = batch(queries=(4, 2), keys=(2, 0))
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    for given, right in ((None, torch.full((4,), -math.inf)), (sinks, sinks.float())):
        out, lse = varlen(*qkv, **how, causal=True, sinks=given, return_lse=True)
        assert torch.all(out[[0, 1, 4, 5]] == 0)
        torch.testing.assert_close(lse[:, [0, 1, 4, 5]], right[:, None].expand(4, 4))
        assert torch.all(out[2:4] != 0)


def test_sinks_without_end():
    """One of +inf has all of the weight, of rows without keys too; one of -inf is none."""
    qkv, how = batch(queries=(4, 2), keys=(2, 0))
    how |= {"causal": True, "return_lse": True}
    plain, plain_lse = varlen.reference(*qkv, **how)
    sinks = torch.tensor([math.inf, -math.inf, math.inf, -math.inf], dtype=torch.float64)
    want, want_lse = plain.clone(), plain_lse.clone()
    want[:, ::2], want_lse[::2] = 0.0, math.inf
    torch.testing.assert_close(varlen.reference(*qkv, **how, sinks=sinks), (want, want_lse))
    for name in CPU:
        out, lse = varlen(*qkv, **how, sinks=sinks, variant=name)
        torch.testing.assert_close((out, lse.double()), (want, want_lse), rtol=1e-6, atol=1e-6)


def test_gradients_beside_sinks_without_end():
    qkv, how = batch(queries=(4, 2), keys=(2, 0))
    leaves = [t.clone().requires_grad_() for t in (*qkv, torch.tensor([math.inf, -math.inf, 0.5, 1.0]).double())]
    results = []
    for call in (varlen.reference, varlen):
        out, lse = call(*leaves[:3], **how, causal=True, sinks=leaves[3], return_lse=True)
        results.append(torch.autograd.grad(out.double().square().sum() + lse[2:].double().sum(), leaves))
    exact, found = results
    assert all(g.isfinite().all() for g in exact)
    assert not exact[0][:, 0].any() and not exact[3][:2].any() and exact[3][2:].all()
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", ["cache", "paged"])
@pytest.mark.parametrize("kind", ["tensor", "head", "token"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_caches(dtype, kind, layout):
    (q, k, v), how = batch(layout, dtype=torch.float32)
    size = 0.02 if dtype is torch.int8 else 1.0
    shape = {"tensor": (1,), "head": (2,), "token": tuple(k.shape[:-1])}[kind]
    scales = [(torch.rand(shape) + 0.5) * size for _ in range(2)]
    stored = [torch.nan_to_num(t / 0.02 if dtype is torch.int8 else t).to(dtype) for t in (k, v)]
    wide = [s.view(-1, 1) if kind != "token" else s[..., None] for s in scales]
    plain = [t.double() * s.double() for t, s in zip(stored, wide, strict=True)]
    expected = by_hand(q, *plain, **how, causal=True)
    given = {"k_scale": scales[0], "v_scale": scales[1]}
    torch.testing.assert_close(varlen.reference(q, *stored, **how, **given, causal=True), expected[0])
    for name in CPU:
        out = varlen(q, *stored, **how, **given, causal=True, variant=name)
        torch.testing.assert_close(out.double(), expected[0], rtol=1e-4, atol=1e-5)


def test_out_is_written_and_returned():
    qkv, how = batch("paged")
    out = torch.full_like(qkv[0], math.nan)
    assert varlen(*qkv, **how, out=out) is out
    torch.testing.assert_close(out, varlen(*qkv, **how))


def test_one_query_a_sequence_is_never_causal():
    qkv, how = batch("paged", queries=(1,) * len(KEYS))
    assert varlen.explain(*qkv, **how, causal=True).problem == varlen.explain(*qkv, **how).problem


def test_maxima_are_bounds():
    """Larger ones change nothing, and no more is asked of a kernel than the tensors can hold."""
    qkv, how = batch()
    wide = how | {"max_seqlen_q": 10**6, "max_seqlen_k": 10**6}
    torch.testing.assert_close(varlen(*qkv, **wide, causal=True), varlen(*qkv, **how, causal=True))
    problem = varlen.explain(*qkv, **wide).problem
    assert (problem.max_seqlen_q, problem.max_seqlen_k) == (sum(QUERIES), sum(KEYS))


def test_a_growing_cache_is_one_problem_for_many_steps():
    assert [coarse(n) for n in (1, 64, 65, 1000, 1024, 1025, 4097, 131072)] == [
        64,
        64,
        128,
        1024,
        1024,
        1152,
        4608,
        131072,
    ]
    assert all(n <= coarse(n) <= 1.125 * n + 64 for n in range(1, 5000))
    (q, _, _), how = batch("cache")
    k, v = torch.randn(2, len(KEYS), 500, 2, 8, dtype=torch.float64)
    made = len(varlen.plans)
    for longest in range(257, 289):
        varlen(q, k, v, **how | {"max_seqlen_k": longest})
    assert len(varlen.plans) <= made + 2  # one by its facts, and the guard that finds it sooner
    assert varlen.explain(q, k, v, **how | {"max_seqlen_k": 499}).problem.max_seqlen_k == 500


def test_windows_that_move_on_by_one_element():
    """Whose strides are 1 twice, which torch's own kernel takes for another order."""
    windows = torch.randn(2, 22).unfold(1, 8, 1).transpose(0, 1)
    starts = torch.tensor([0, 5, 15], dtype=torch.int32)
    how = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 10, "max_seqlen_k": 10}
    copied = windows.clone(memory_format=torch.contiguous_format)
    torch.testing.assert_close(varlen(*[windows] * 3, **how), varlen(*[copied] * 3, **how), rtol=1e-4, atol=1e-5)


def test_no_gradient_through_a_cache_but_its_call_works():
    (q, k, v), how = batch("paged")
    out = varlen(q.requires_grad_(), k, v, **how)
    with pytest.raises(NotImplementedError, match="over a cache"):
        out.sum().backward()
