"""Dense attention with key_lengths and sinks: the same tensors, through attention_varlen."""

from __future__ import annotations

import pytest
import torch
from ragged import by_hand, starts

import registry

B, S, SK, LENGTHS = 3, 5, 9, (9, 0, 6)


@pytest.fixture
def operands():
    torch.manual_seed(0)
    return torch.randn(B, 4, S, 8, dtype=torch.float64), *torch.randn(2, B, 2, SK, 8, dtype=torch.float64)


def expected(q, k, v, lengths, **how):
    rows = [torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]) for t in (k, v)]
    packed = q.transpose(1, 2).flatten(0, 1)
    out, lse = by_hand(packed, *rows, cu_seqlens_q=starts([S] * B), cu_seqlens_k=starts(lengths), **how)
    return out.view(B, S, 4, 8).transpose(1, 2), lse.view(4, B, S).transpose(0, 1)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (2, 1)}, {"scale": 0.3, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64, None])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("grad", [False, True])
def test_lengths_and_sinks(operands, grad, layout, kind, mask):
    sinks = torch.randn(4, dtype=torch.float64) if kind is not torch.int32 else None
    lengths = LENGTHS if kind else (SK,) * B
    want = expected(*operands, lengths, sinks=sinks, **mask)
    given = [t if layout == "bhsd" else t.transpose(1, 2).contiguous() for t in operands]
    given = [t.clone().requires_grad_(grad) for t in given]
    how = {"key_lengths": torch.tensor(LENGTHS, dtype=kind) if kind else None, "sinks": sinks}
    out, lse = registry.attention(*given, layout=layout, **how, **mask, return_lse=True)
    torch.testing.assert_close(out if layout == "bhsd" else out.transpose(1, 2), want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-6, atol=1e-6)
    if grad:
        out.sum().backward()
        unused = given[1].grad if layout == "bhsd" else given[1].grad.transpose(1, 2)
        assert all(torch.isfinite(t.grad).all() for t in given)
        assert kind is None or not unused[1].any() and not unused[2, :, 6:].any()


def test_it_is_explained_as_what_it_is(operands):
    decision = registry.attention.explain(*operands, key_lengths=torch.tensor(LENGTHS), causal=True)
    assert decision.problem.op == "attention_varlen" and decision.problem.kv_layout == "cache"
    assert registry.attention.explain(*operands, key_lengths=None).problem.op == "attention"


@pytest.mark.parametrize("wrong", [torch.tensor([1, 2]), torch.ones(B), [1, 2, 3], torch.tensor([1, 2, 10])])
def test_errors_name_key_lengths(operands, wrong):
    with pytest.raises(registry.InvalidArgument) as raised:
        registry.attention(*operands, key_lengths=wrong)
    assert raised.value.argument == "key_lengths"


def test_it_compiles(operands):
    lengths = torch.tensor(LENGTHS)

    def call(q, k, v):
        return registry.attention(q, k, v, key_lengths=lengths, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), call(*operands))


@pytest.mark.parametrize("grad", [False, True])
def test_a_compiled_function_names_key_lengths(operands, grad):
    compiled = torch.compile(lambda *given: registry.attention(*given[:3], key_lengths=given[3]), backend="eager")
    given = [t.clone().requires_grad_(grad) for t in operands]
    with pytest.raises(RuntimeError, match="key_lengths: got lengths out of bounds"):
        compiled(*given, torch.tensor([9, 10, 6]))
    compiled(*given, torch.tensor(LENGTHS))


@pytest.mark.parametrize("lengths", [(9, -1, 6), (9, 10, 6), (9, 2**32 + 3, 6)])
def test_lengths_that_lie_are_refused_by_their_name(operands, lengths):
    for call in (registry.attention, registry.attention.explain):
        with pytest.raises(registry.InvalidArgument) as raised:
            call(*operands, key_lengths=torch.tensor(lengths))
        assert raised.value.argument == "key_lengths"


def test_of_two_mistakes_a_call_and_explain_name_the_same():
    rows, lies = torch.ones(2, 3, 4), torch.tensor([0, 9], dtype=torch.int32)
    how = {"cu_seqlens_q": lies, "cu_seqlens_k": lies, "max_seqlen_q": 3, "max_seqlen_k": 3, "variant": "nobody"}
    for call in (registry.attention_varlen, registry.attention_varlen.explain):
        with pytest.raises(registry.UnknownVariant):
            call(rows, rows, rows, **how)
    for call in (registry.grouped_mm, registry.grouped_mm.explain):
        with pytest.raises(registry.UnknownVariant):
            call(rows[0], rows.mT, offs=torch.tensor([9, 1], dtype=torch.int32), variant="nobody")


def _twice_wrong():
    rows, weight, followed = torch.ones(2, 5, 8), torch.ones(2, 8, 12), torch.ones(5, 8, requires_grad=True)
    ends = torch.tensor([2, 5], dtype=torch.int32)
    packed = [torch.ones(5, 2, 8, requires_grad=True)] * 3
    step = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 5], dtype=torch.int32))
    step |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 5)
    scales = dict.fromkeys(("scale_a", "scale_b"), torch.ones(()))
    return {
        "bias": (registry.matmul, (rows, weight), {"bias": torch.ones(6), "out": torch.ones(2, 5, 6)}),
        "scale_a": (registry.matmul, (followed, weight[0]), {**scales, "out": 1}),
        "scale_a of groups": (registry.grouped_mm, (followed, weight), {"offs": ends, **scales, "out": 1}),
        "out": (registry.attention_varlen, packed, {**step, "plan": 1, "out": torch.zeros(5, 2, 8)}),
    }


@pytest.mark.parametrize("case", _twice_wrong())
def test_of_two_wrong_arguments_a_call_and_explain_name_the_same(case):
    op, given, how = _twice_wrong()[case]
    for call in (op, op.explain):
        with pytest.raises(registry.InvalidArgument) as raised:
            call(*given, **how)
        assert raised.value.argument == case.partition(" ")[0]


def test_gradients_of_sinks_without_a_key_are_as_exact_as_they_are():
    sinks = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    q, k = torch.zeros(1, 1, 64, 8, dtype=torch.float64), torch.zeros(1, 1, 0, 8, dtype=torch.float64)
    weights = torch.rand(1, 1, 64)
    _, lse = registry.attention(q, k, k, sinks=sinks, return_lse=True)
    (found,) = torch.autograd.grad(lse, sinks, weights)
    torch.testing.assert_close(found.item(), weights.double().sum().item(), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("bad", [None, [1.0], torch.ones(3), torch.ones(2, 3, 4, 5, 6)], ids=lambda bad: type(bad))
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_operand_is_named(operands, place, bad):
    given = [*operands]
    given[place] = bad
    with pytest.raises(registry.InvalidArgument) as raised:
        registry.attention(*given, key_lengths=torch.tensor(LENGTHS))
    assert raised.value.argument == "qkv"[place]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_reference_takes_what_the_call_takes(operands, layout):
    given = [t if layout == "bhsd" else t.transpose(1, 2).contiguous() for t in operands]
    how = {"key_lengths": torch.tensor(LENGTHS), "sinks": torch.randn(4, dtype=torch.float64), "layout": layout}
    found = registry.attention(*given, **how, return_lse=True)
    want = registry.attention.reference(*given, **how, return_lse=True)
    torch.testing.assert_close(found[0], want[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1].double(), want[1].double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_nothing_behind_the_keys_reaches_a_gradient(operands, layout, softcap):
    q, *kv = (t if layout == "bhsd" else t.transpose(1, 2).contiguous() for t in operands)
    sinks, how = torch.randn(4, dtype=torch.float64), {"layout": layout, "softcap": softcap}

    def gradients(of, behind):
        leaves = [t.clone() for t in (q, *kv, sinks)]
        for t in leaves[1:3]:
            (t if layout == "bhsd" else t.transpose(1, 2))[2, :, 6:] = behind
        leaves = [t.requires_grad_() for t in leaves]
        found = of(*leaves[:3], sinks=leaves[3], key_lengths=torch.tensor(LENGTHS), **how)
        return torch.autograd.grad(found.sum(), leaves)

    wanted = gradients(registry.attention.reference, 0.0)
    torch.testing.assert_close(gradients(registry.attention, float("nan")), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", [None, torch.tensor(LENGTHS)], ids=["all keys", "key_lengths"])
def test_sinks_alone_have_a_gradient(operands, lengths):
    def total(sinks, of=registry.attention):
        return of(*operands, sinks=sinks, key_lengths=lengths).square().sum()

    given = torch.randn(4, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(total(given), given)
    (want,) = torch.autograd.grad(total(given, registry.attention.reference), given)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.func.grad(total)(given.detach()), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", [{"key_lengths": torch.tensor(LENGTHS)}, {"sinks": torch.zeros(4)}], ids=lambda h: [*h])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_autocast_is_asked_before_dtypes_are_compared(operands, layout, how):
    q, k, v = (t if layout == "bhsd" else t.transpose(1, 2).contiguous() for t in operands)
    q, k, v = q.float().requires_grad_(), k.bfloat16(), v.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        out = registry.attention(q, k, v, layout=layout, **how)
        assert registry.attention.explain(q, k, v, layout=layout, **how).problem.dtype == "bfloat16"
    plain = registry.attention(q.bfloat16(), k, v, layout=layout, **how)
    assert out.dtype is torch.bfloat16 and torch.equal(out, plain)
    out.float().sum().backward()
    assert q.grad.dtype is torch.float32 and q.grad.any()
    with pytest.raises(registry.InvalidArgument, match="q's dtype float32"):
        registry.attention(q, k, v, layout=layout, **how)


@pytest.mark.parametrize("grad", [False, True])
def test_another_default_device_changes_nothing(operands, grad):
    given, lengths = [t.requires_grad_(grad) for t in operands], torch.tensor(LENGTHS)
    want = registry.attention(*given, key_lengths=lengths)
    with torch.device("meta"):
        assert torch.equal(registry.attention(*given, key_lengths=lengths), want)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("grad", [False, True])
def test_lengths_may_be_strided_and_expanded(operands, grad, kind):
    given = [t.requires_grad_(grad) for t in operands]
    for lengths in (torch.tensor(5, dtype=kind).expand(B), torch.tensor([9, 7, 0, 7, 6, 7], dtype=kind)[::2]):
        want = registry.attention(*given, key_lengths=lengths.clone())
        assert torch.equal(registry.attention(*given, key_lengths=lengths), want)
