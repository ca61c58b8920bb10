"""Bad input gets a clear error before any launch; empty input gets the right empty answer."""

from __future__ import annotations

import math

import numpy as np
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
    "no dimension in v": ((t(*Q), t(*Q), t(2, 4, 8, 0)), {}, "v"),
    "layout is an array": ((t(*Q), t(*Q), t(*Q)), {"layout": np.ones(2)}, "layout"),
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
    "window of a list": ((t(*Q),) * 3, {"window": ([], 1)}, "window"),
    "window a dict": ((t(*Q),) * 3, {"window": {"left": 1}}, "window"),
    "negative softcap": ((t(*Q),) * 3, {"softcap": -1.0}, "softcap"),
    "softcap that is zero in float32": ((t(*Q),) * 3, {"softcap": 1e-46}, "softcap"),
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
    """Settings that cannot be a key are among them."""
    for op, bad in ((registry.attention, BAD_ATTENTION), (registry.matmul, BAD_MATMUL)):
        before = len(op.plans)
        for tensors, kwargs, _ in bad.values():
            with pytest.raises(InvalidArgument):
                op(*tensors, **kwargs)
        assert len(op.plans) == before


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


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 0, 3, 4), (2, 0, 4, 5)),
        ((0, 3, 4), (0, 4, 5)),
        ((2, 0, 3, 4), (4, 5)),
        ((0, 0, 3, 4), (4, 5)),
        ((2, 3, 3, 0), (2, 3, 0, 5)),
        ((3, 4), (2, 0, 4, 5)),
        ((2, 1, 0, 4), (1, 3, 4, 5)),
    ],
)
def test_empty_batches_are_torchs(a, b, grad):
    a, b = t(*a).requires_grad_(grad), t(*b).requires_grad_(grad)
    found, wanted = registry.matmul(a, b), torch.matmul(a, b)
    torch.testing.assert_close(found, wanted)
    if grad:
        torch.testing.assert_close(*(torch.autograd.grad(x.sum(), (a, b)) for x in (found, wanted)))
    else:
        assert registry.matmul(a, b, out=torch.empty_like(wanted)).shape == wanted.shape


# --- the same answer cold and with a kept plan ------------------------------------------------------------------------

LIKE_ANOTHER = {
    "causal=1": ({"causal": True}, {"causal": 1}),
    "causal=0": ({"causal": False}, {"causal": 0}),
    "return_lse=1": ({"return_lse": True}, {"return_lse": 1}),
    "softcap=True": ({"softcap": 1.0}, {"softcap": True}),
    "window of bools": ({"window": (1, 2)}, {"window": (True, 2)}),
    "window of floats": ({"window": (1, 2)}, {"window": (1.0, 2)}),
}


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("case", LIKE_ANOTHER)
def test_what_equals_a_kept_argument_is_judged_anew(case, grad):
    kept, asked = LIKE_ANOTHER[case]
    q = t(*Q).requires_grad_(grad)
    messages = []
    for warm in (False, True):
        if warm:
            registry.attention(q, q.clone(), q.clone(), **kept)
        for call in (registry.attention, registry.attention.explain):
            with pytest.raises(InvalidArgument) as caught:
                call(q, q.clone(), q.clone(), **asked)
            messages.append(str(caught.value))
    assert len(set(messages)) == 1


@pytest.mark.parametrize("case", ["scale", "softcap"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 1e300])
def test_numbers_beyond_float32_are_refused(case, value):
    for call in (registry.attention, registry.attention.explain, registry.attention.reference):
        with pytest.raises(InvalidArgument, match=case):
            call(*(t(*Q),) * 3, **{case: value})


class Unspeakable:
    def __repr__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("value", [10**5000, Unspeakable(), "\x1b[31m", np.ones(3), "x" * 5000], ids=lambda v: type(v))
@pytest.mark.parametrize(
    "name",
    ["causal", "return_lse", "scale", "softcap", "window", "layout", "variant", "activation", "scale_a", "gated"],
)
def test_an_error_can_always_be_read(name, value):
    """It is short and printable, whatever was passed."""
    q, a = t(*Q), t(4, 4)
    offs, b = torch.tensor([4], dtype=torch.int32), t(1, 4, 4)
    call = {
        "activation": lambda **bad: registry.matmul(a, a, **bad),
        "scale_a": lambda **bad: registry.matmul(a, a, scale_b=torch.tensor(1.0), **bad),
        "gated": lambda **bad: registry.grouped_mm(a, b, offs=offs, **bad),
    }.get(name, lambda **bad: registry.attention(q, q, q, **bad))
    if name == "window" and isinstance(value, int):
        call(window=value)  # as good as unlimited
    elif name == "variant" and isinstance(value, str):
        with pytest.raises(registry.UnknownVariant):
            call(variant=value)
    else:
        with pytest.raises(InvalidArgument, match=name) as caught:
            call(**{name: value})
        assert len(str(caught.value)) < 600 and str(caught.value).isprintable()


@pytest.mark.parametrize("variant", [5, ["torch_math"], b"torch_math"])
def test_a_variant_is_asked_for_by_its_name(variant):
    with pytest.raises(InvalidArgument, match="variant"):
        registry.attention(*(t(*Q),) * 3, variant=variant)
    with pytest.raises(InvalidArgument, match="variant"):
        registry.matmul(t(3, 4), t(4, 5), variant=variant)


@pytest.mark.parametrize("far", [2**30, 2**31, 2**62, 2**63 - 1, 2**63, 2**64])
@pytest.mark.parametrize("side", ["both", "left", "right"])
def test_far_windows_are_unlimited(far, side):
    window = {"both": far, "left": (far, 0), "right": (2, far)}[side]
    plain = {"both": {}, "left": {"causal": True}, "right": {"window": (2, None)}}[side]
    q, k, v = t(1, 2, 6, 8), t(1, 2, 9, 8), t(1, 2, 9, 8)
    wanted = registry.attention.reference(q, k, v, **plain).float()
    torch.testing.assert_close(registry.attention.reference(q, k, v, window=window).float(), wanted)
    torch.testing.assert_close(registry.attention(q, k, v, window=window), wanted)


def test_a_window_may_be_a_list():
    leaves = [t(1, 2, 6, 8).requires_grad_() for _ in range(3)]
    found, wanted = (torch.autograd.grad(registry.attention(*leaves, window=w).sum(), leaves) for w in ([2, 1], (2, 1)))
    torch.testing.assert_close(found, wanted)
    saved = registry.attention(*leaves, window=[2, 1], return_lse=True)
    grads = registry.attention.backward(torch.ones(1, 2, 6, 8), *leaves, *saved, scale=8**-0.5, window=[2, 1])
    torch.testing.assert_close(grads, wanted)


GRADIENTS = {
    "grad_out": [None, [1.0], t(1, 2, 1, 8), t(1, 2, 6, 8, dtype=torch.float64), t(1, 2, 6, 8).to("meta"), t(8)],
    "out": [None, t(1, 2, 6, 4), t(1, 2, 6, 8, dtype=torch.float64), t(6, 8)],
    "lse": [None, t(1, 2, 2), t(1, 2, 6, dtype=torch.float64), t(1, 2, 6, 1)],
    "grad_lse": [1.0, t(1, 2, 2), t(1, 2, 6, dtype=torch.float64)],
    "scale": [math.nan, math.inf, "1", True],
    "q": [None, t(6, 8)],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_by_name_refuse_what_the_forward_did_not_save(name):
    q, k, v = (t(1, 2, 6, 8) for _ in range(3))
    out, lse = registry.attention(q, k, v, return_lse=True)
    good = {"grad_out": torch.ones_like(out), "q": q, "k": k, "v": v, "out": out, "lse": lse, "scale": 8**-0.5}
    for bad in GRADIENTS[name]:
        for call in (registry.attention.backward, registry.attention.backward.explain):
            with pytest.raises(InvalidArgument) as caught:
                call(**good | {name: bad})
            assert caught.value.argument == name


def test_gradients_by_name_take_the_scale_of_the_forward():
    q, k, v = (t(1, 2, 6, 8) for _ in range(3))
    saved = registry.attention(q, k, v, return_lse=True)
    ours, wanted = (registry.attention.backward(q, q, k, v, *saved, scale=scale) for scale in (None, 8**-0.5))
    torch.testing.assert_close(ours, wanted)


# --- tensors of other kinds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(3))
def test_a_nested_tensor_is_refused_when_plans_are_kept(place):
    """torch's guards, which find a kept plan, abort the process at one."""
    tensors = [t(1, 2, 4, 8) for _ in range(3)]
    nested = torch.nested.nested_tensor([torch.ones(4, 8), torch.ones(4, 8)])
    assert nested.numel() == tensors[0].numel()
    for _ in range(2):
        registry.attention(*tensors)
    tensors[place] = nested
    with pytest.raises(InvalidArgument, match="nested"):
        registry.attention(*tensors)


def test_a_nested_bias_is_refused():
    nested = torch.nested.nested_tensor([torch.ones(8), torch.ones(8)])
    with pytest.raises(InvalidArgument, match="bias: got a nested"):
        registry.matmul(t(4, 8), t(8, 8), bias=nested)


@pytest.mark.parametrize("name", ["a", "b", "bias", "out"])
def test_a_parameter_of_a_lazy_module_is_refused_by_name(name):
    given = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
    given[name] = torch.nn.UninitializedParameter(requires_grad=False)
    for call in (registry.matmul, registry.matmul.explain):
        with pytest.raises(registry.InvalidArgument, match=f"{name}: got UninitializedParameter"):
            call(**given)


@pytest.mark.parametrize("name", ["a", "b", "out"])
@pytest.mark.parametrize("bad", [None, 1, "text", (2**63, 2**63), [1.0]], ids=str)
def test_matmul_names_what_is_no_tensor(name, bad):
    """Fresh, and beside a kept plan."""
    good = {"a": t(4, 8), "b": t(8, 4), "out": torch.empty(4, 4)}
    if (name, bad) == ("out", None):
        return
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=name):
            registry.matmul(**{**good, name: bad})
        with pytest.raises(InvalidArgument, match=name):
            registry.matmul(**{k: v for k, v in {**good, name: bad}.items() if k != "out" or name == "out"})
        registry.matmul(**good)
        registry.matmul(good["a"], good["b"])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.int8], ids=str)
def test_a_negative_scale_of_what_has_no_minus(dtype):
    """Its sign goes into q, which torch cannot negate: the call is refused as `explain` says, in the same words."""
    q = torch.ones(1, 1, 2, 16).to(dtype)
    refused = []
    for ask in (registry.attention, registry.attention.explain):
        with pytest.raises(registry.RegistryError) as error:
            ask(q, q, q, scale=-1)
        refused.append((type(error.value), str(error.value)))
    assert refused[0] == refused[1]
