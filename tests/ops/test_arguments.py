"""Bad input gets a clear error before any launch; empty input gets the right empty answer."""

from __future__ import annotations

import math

import pytest
import torch

import registry
from registry import InvalidArgument


def t(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


Q = (2, 4, 8, 16)
BAD_ATTENTION = {
    "q of three dimensions": ((t(4, 8, 16), t(*Q), t(*Q)), {}, "q"),
    "k of five dimensions": ((t(*Q), t(1, *Q), t(*Q)), {}, "k"),
    "q is a list": (([1.0], t(*Q), t(*Q)), {}, "q"),
    "q is an integer tensor": ((torch.ones(Q, dtype=torch.int64), t(*Q), t(*Q)), {}, "q"),
    "q is sparse": ((t(*Q).to_sparse(), t(*Q), t(*Q)), {}, "q"),
    "dtypes differ": ((t(*Q), t(*Q, dtype=torch.float16), t(*Q)), {}, "k"),
    "devices differ": ((t(*Q), t(*Q), t(*Q).to("meta")), {}, "v"),
    "batches differ": ((t(*Q), t(1, 4, 8, 16), t(*Q)), {}, "k"),
    "heads do not divide": ((t(*Q), t(2, 3, 8, 16), t(2, 3, 8, 16)), {}, "k"),
    "no kv heads": ((t(*Q), t(2, 0, 8, 16), t(2, 0, 8, 16)), {}, "k"),
    "k and v heads differ": ((t(*Q), t(*Q), t(2, 2, 8, 16)), {}, "v"),
    "k and v lengths differ": ((t(*Q), t(2, 4, 9, 16), t(*Q)), {}, "v"),
    "head_dims differ": ((t(*Q), t(2, 4, 8, 32), t(*Q)), {}, "k"),
    "head_dim zero": ((t(2, 4, 8, 0), t(2, 4, 8, 0), t(*Q)), {}, "q"),
    "NaN scale": ((t(*Q),) * 3, {"scale": math.nan}, "scale"),
    "infinite scale": ((t(*Q),) * 3, {"scale": math.inf}, "scale"),
    "scale a string": ((t(*Q),) * 3, {"scale": "1"}, "scale"),
    "negative window": ((t(*Q),) * 3, {"window": -1}, "window"),
    "negative side": ((t(*Q),) * 3, {"window": (4, -2)}, "window"),
    "window of three": ((t(*Q),) * 3, {"window": (1, 2, 3)}, "window"),
    "window of floats": ((t(*Q),) * 3, {"window": [1.5, 2.0]}, "window"),
    "window a dict": ((t(*Q),) * 3, {"window": {"left": 1}}, "window"),
    "negative softcap": ((t(*Q),) * 3, {"softcap": -1.0}, "softcap"),
    "NaN softcap": ((t(*Q),) * 3, {"softcap": math.nan}, "softcap"),
    "softcap a list": ((t(*Q),) * 3, {"softcap": [1.0]}, "softcap"),
    "causal a string": ((t(*Q),) * 3, {"causal": "yes"}, "causal"),
    "unknown layout": ((t(*Q),) * 3, {"layout": "bsdh"}, "layout"),
}


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("case", BAD_ATTENTION)
def test_attention_refuses(case, grad):
    tensors, kwargs, argument = BAD_ATTENTION[case]
    if grad:
        if not all(
            isinstance(x, torch.Tensor) and x.is_floating_point() and x.layout is torch.strided for x in tensors
        ):
            pytest.skip("cannot require grad")
        tensors = tuple(x.detach().requires_grad_() for x in tensors)
    for call in (registry.attention, registry.attention.explain):
        with pytest.raises(InvalidArgument) as caught:
            call(*tensors, **kwargs)
        assert caught.value.argument == argument
        assert "allowed" in str(caught.value)


def test_a_refused_call_leaves_no_plan():
    before = len(registry.attention.plans)
    for tensors, kwargs, _ in BAD_ATTENTION.values():
        with pytest.raises(InvalidArgument):
            registry.attention(*tensors, **kwargs)
    assert len(registry.attention.plans) == before


BAD_MATMUL = {
    "inner sizes differ": ((t(3, 4), t(5, 6)), {}, "b"),
    "a without dimensions": ((torch.tensor(1.0), t(5, 6)), {}, "a"),
    "b is a number": ((t(3, 4), 2.0), {}, "b"),
    "dtypes differ": ((t(3, 4), t(4, 5, dtype=torch.float64)), {}, "b"),
    "devices differ": ((t(3, 4), t(4, 5).to("meta")), {}, "b"),
    "complex": ((t(3, 4).to(torch.complex64), t(4, 5).to(torch.complex64)), {}, "a"),
    "batches do not broadcast": ((t(2, 3, 4), t(3, 4, 5)), {}, "b"),
    "bias of a wrong length": ((t(3, 4), t(4, 5)), {"bias": t(4)}, "bias"),
    "unknown activation": ((t(3, 4), t(4, 5)), {"activation": "swish"}, "activation"),
    "activation a list": ((t(3, 4), t(4, 5)), {"activation": ["relu"]}, "activation"),
    "out_dtype a string": ((t(3, 4), t(4, 5)), {"out_dtype": "float16"}, "out_dtype"),
    "only one scale": ((t(3, 4), t(4, 5)), {"scale_a": torch.tensor(1.0)}, "scale_b"),
    "scale of a wrong length": ((t(3, 4), t(4, 5)), {"scale_a": t(2), "scale_b": t(5)}, "scale_a"),
    "scales of two kinds": ((t(3, 4), t(4, 5)), {"scale_a": torch.tensor(1.0), "scale_b": t(5)}, "scale_b"),
    "out of a wrong shape": ((t(3, 4), t(4, 5)), {"out": t(3, 4)}, "out"),
    "out of a wrong dtype": ((t(3, 4), t(4, 5)), {"out": t(3, 5, dtype=torch.float64)}, "out"),
    "batched out of a wrong shape": ((t(2, 3, 4), t(2, 4, 5)), {"out": t(2, 3, 4)}, "out"),
}


@pytest.mark.parametrize("case", BAD_MATMUL)
def test_matmul_refuses(case):
    tensors, kwargs, argument = BAD_MATMUL[case]
    for call in (registry.matmul, registry.matmul.explain):
        with pytest.raises(InvalidArgument) as caught:
            call(*tensors, **kwargs)
        assert caught.value.argument == argument


# --- empty tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("q", "kv"),
    [((0, 4, 8, 16),) * 2, ((2, 4, 0, 16), (2, 4, 8, 16)), ((2, 4, 8, 16), (2, 4, 0, 16)), ((2, 0, 8, 16),) * 2],
)
def test_empty_attention(q, kv, grad):
    q, k, v = t(*q).requires_grad_(grad), t(*kv).requires_grad_(grad), t(*kv).requires_grad_(grad)
    with registry.record() as recorder:
        out, lse = registry.attention(q, k, v, return_lse=True)
    assert out.shape == q.shape and torch.all(out == 0)
    assert lse.shape == q.shape[:3] and lse.dtype is torch.float32 and torch.all(lse == -math.inf)
    assert recorder.counts == {"attention": {"(none)": 1}}
    assert registry.attention.explain(q, k, v).variant == "(none)"
    if grad:
        out.sum().backward()
        assert torch.all(q.grad == 0) and torch.all(k.grad == 0)


@pytest.mark.parametrize(
    ("a", "b"),
    [((0, 4), (4, 5)), ((3, 0), (0, 5)), ((3, 4), (4, 0)), ((0, 3, 4), (4, 5)), ((0,), (0,)), ((2, 0, 3), (2, 3, 4))],
)
def test_empty_matmul(a, b):
    a, b = t(*a), t(*b)
    expected = torch.matmul(a, b)
    torch.testing.assert_close(registry.matmul(a, b), expected)
    bias = torch.ones(b.shape[-1] if b.dim() > 1 else 1)
    result = registry.matmul(a, b, bias=bias, activation="relu") if a.dim() > 1 else expected
    assert result.shape == expected.shape
    if expected.numel() and a.dim() > 1:
        assert torch.all(result == 1)
