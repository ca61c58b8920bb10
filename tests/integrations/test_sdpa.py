"""torch's scaled_dot_product_attention through our doors gives what torch gives, and what is not run is counted."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from races import in_threads
from ran import printed
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as by_name

import registry
from registry.integrations import sdpa

pytestmark = pytest.mark.usefixtures("quick_python")

RUN = [
    ("plain", (2, 4, 6, 8), (2, 4, 9, 8), {}),
    ("scale", (2, 4, 6, 8), (2, 4, 9, 8), {"scale": 0.3}),
    ("causal", (2, 4, 6, 8), (2, 4, 6, 8), {"is_causal": True}),
    ("causal, more keys", (2, 4, 6, 8), (2, 4, 9, 8), {"is_causal": True}),
    ("gqa", (2, 4, 6, 8), (2, 2, 9, 8), {"enable_gqa": True}),
    ("three dimensions", (4, 6, 8), (4, 9, 8), {}),
    ("lower right", (2, 4, 6, 8), (2, 4, 9, 8), {"attn_mask": causal_lower_right(6, 9)}),
    ("upper left", (2, 4, 6, 8), (2, 4, 9, 8), {"attn_mask": causal_upper_left(6, 9)}),
]
ELSEWHERE = [
    ("a dense mask", (2, 4, 6, 8), (2, 4, 9, 8), {"attn_mask": torch.ones(6, 9, dtype=torch.bool).tril()}),
    ("is_causal with more queries than keys", (2, 4, 9, 8), (2, 4, 6, 8), {"is_causal": True}),
    ("shapes that broadcast", (2, 4, 6, 8), (1, 4, 9, 8), {}),
    ("tensors that have neither three nor four dimensions", (6, 8), (9, 8), {}),
    ("a scale that is no number of float32's", (2, 4, 6, 8), (2, 4, 9, 8), {"scale": torch.tensor(0.3)}),
    ("a scale that is no number of float32's", (2, 4, 6, 8), (2, 4, 9, 8), {"scale": True}),
    ("a scale that is no number of float32's", (2, 4, 6, 8), (2, 4, 9, 8), {"scale": float("nan")}),
    ("heads of no columns", (2, 4, 6, 0), (2, 4, 9, 0), {}),
    ("no heads of keys", (2, 4, 6, 8), (2, 0, 9, 8), {"enable_gqa": True}),
]


def operands(q_shape, k_shape):
    torch.manual_seed(0)
    return [torch.randn(*s, requires_grad=True) for s in (q_shape, k_shape, k_shape)]


def results(qkv, how):
    out = functional.scaled_dot_product_attention(*qkv, **how)
    return out, *torch.autograd.grad(out.square().sum(), qkv)


@pytest.mark.parametrize(("name", "q", "k", "how"), RUN, ids=[r[0] for r in RUN])
def test_replaced(name, q, k, how):
    qkv = operands(q, k)
    expected = results(qkv, how)
    with sdpa.replaced(), registry.record() as recorder:
        found = results(qkv, how)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert set(recorder.counts) == {"attention", "attention_backward"}
    assert [sum(c.values()) for c in recorder.counts.values()] == [1, 1]
    functional.scaled_dot_product_attention(*qkv, **how)
    assert sum(sum(c.values()) for c in recorder.counts.values()) == 2  # not after the block


def test_three_dimensions_lie_in_memory_as_torch_has_them():
    q, k = torch.randn(6, 4, 8).transpose(0, 1), torch.randn(9, 4, 8).transpose(0, 1)
    with sdpa.replaced():
        found = functional.scaled_dot_product_attention(q, k, k)
    assert found.stride() == functional.scaled_dot_product_attention(q, k, k).stride()


def test_a_block_can_be_entered_again_and_inside_itself():
    block, torchs = sdpa.replaced(), functional.scaled_dot_product_attention
    for _ in range(2):
        with block, registry.record() as recorder:
            with block:
                pass
            results(operands((2, 4, 6, 8), (2, 4, 9, 8)), {})
        assert set(recorder.counts) == {"attention", "attention_backward"}
        assert functional.scaled_dot_product_attention is torchs


@pytest.mark.parametrize(("why", "q", "k", "how"), ELSEWHERE, ids=[e[0] for e in ELSEWHERE])
def test_what_stays_with_torch_is_counted(why, q, k, how):
    qkv = operands(q, k)
    expected = results(qkv, how)
    with sdpa.replaced(), registry.record() as recorder:
        found = results(qkv, how)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert recorder.counts == {"elsewhere": {f"sdpa: {why}": 1}}


def test_what_only_torchs_definition_can_stays_with_torch():
    """Gradients of gradients, and forward mode."""
    qkv = operands((2, 4, 6, 8), (2, 4, 9, 8))
    tangents = [torch.randn_like(x) for x in qkv]

    def penalty():
        out = functional.scaled_dot_product_attention(*qkv)
        first = torch.autograd.grad(out.square().sum(), qkv, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), qkv)

    def forward_mode():
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x.detach(), t) for x, t in zip(qkv, tangents, strict=True)]
            return forward_ad.unpack_dual(functional.scaled_dot_product_attention(*duals)).tangent

    def jvp():
        plain = tuple(x.detach() for x in qkv)
        return torch.func.jvp(lambda *x: functional.scaled_dot_product_attention(*x), plain, tuple(tangents))

    with sdpa_kernel(SDPBackend.MATH):
        for call in (penalty, forward_mode, jvp):
            expected = call()
            with sdpa.replaced(), registry.record() as recorder:
                torch.testing.assert_close(call(), expected)
            assert recorder.counts == {"elsewhere": {"sdpa: sdpa_kernel(SDPBackend.MATH)": 1}}
    for call in (forward_mode, jvp):
        with pytest.raises(Exception) as theirs:
            call()
        with sdpa.replaced(), registry.record() as recorder, pytest.raises(type(theirs.value)) as ours:
            call()
        assert str(ours.value) == str(theirs.value)
        assert recorder.counts == {"elsewhere": {"sdpa: tangents of forward mode": 1}}
    with forward_ad.dual_level(), sdpa.replaced(), registry.record() as recorder:  # which none of these tensors has
        functional.scaled_dot_product_attention(*[x.detach() for x in qkv])
    assert set(recorder.counts) == {"attention"}


def test_values_of_no_columns_stay_with_torch():
    q = torch.randn(1, 2, 8, 16)
    with sdpa.replaced():
        assert functional.scaled_dot_product_attention(q, q, q[..., :0]).shape == (1, 2, 8, 0)


@pytest.mark.parametrize(
    "given",
    [
        {"query": None},
        {"value": [1.0]},
        {"dropout_p": 2},
        {"enable_gqa": "yes"},
        {"attn_mask": causal_upper_left(4, 4), "is_causal": True},
        {"attn_mask": causal_lower_right(3, 5)},
    ],
    ids=str,
)
def test_what_torch_refuses_is_refused_by_torch(given):
    q, k, v = (t.detach() for t in operands((1, 2, 4, 8), (1, 2, 6, 8)))
    asked = {"query": q, "key": k, "value": v} | given
    with pytest.raises(Exception) as theirs:
        functional.scaled_dot_product_attention(**asked)
    with sdpa.replaced(), pytest.raises(type(theirs.value)) as ours:
        functional.scaled_dot_product_attention(**asked)
    assert re.sub(r" \(position \d\)", "", str(ours.value)) == str(theirs.value)


@pytest.mark.parametrize("bias", [causal_lower_right(6, 9), causal_upper_left(6, 9)], ids=["lower", "upper"])
def test_a_causal_bias_that_stays_with_torch_keeps_its_meaning(bias):
    """torch finds its function for it by name, which is replaced: for other threads, too."""
    q, k, v = torch.randn(2, 4, 6, 8), *torch.randn(2, 1, 4, 9, 8)

    def call(_=0):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    expected = call()
    with sdpa.replaced():
        found, in_another = call(), *in_threads(call, 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(in_another, expected)


@pytest.mark.parametrize("bias", [causal_lower_right(6, 9), causal_upper_left(6, 9)], ids=["lower", "upper"])
def test_a_function_that_was_imported_by_its_name_stays_torchs(bias):
    """In a block and beside it, a causal bias finds torch's own by whatever name."""
    qkv = operands((2, 4, 6, 8), (2, 4, 9, 8))

    def call(_=0):
        out = by_name(*qkv, attn_mask=bias)
        return out, *torch.autograd.grad(out.square().sum(), qkv)

    expected = call()
    with sdpa.replaced():
        found, in_another = call(), *in_threads(call, 1)
    for each in (found, in_another, call()):
        assert type(each[0]) is torch.Tensor
        torch.testing.assert_close(each, expected)


@pytest.mark.slow(3)
def test_what_is_first_compiled_in_a_block_is_right_then_and_later():
    """torch keeps a list of its functions from the first time that one is compiled."""
    code = """if True:
        import torch
        from torch.nn import functional
        from torch.nn.attention.bias import causal_upper_left
        from torch.nn.functional import scaled_dot_product_attention as by_name
        from registry.integrations import sdpa

        q, k, v, bias = torch.randn(2, 4, 6, 8), *torch.randn(2, 2, 4, 9, 8), causal_upper_left(6, 9)
        ways = [
            lambda: by_name(q, k, v, attn_mask=bias),
            lambda: functional.scaled_dot_product_attention(q, k, v, attn_mask=bias),
        ]
        compiled = [torch.compile(way, backend="aot_eager") for way in ways]
        with sdpa.replaced():
            found = [way() for way in compiled]
        for out in (*found, *(way() for way in compiled)):
            torch.testing.assert_close(out, ways[0](), rtol=1e-4, atol=1e-5)
    """
    printed(sys.executable, "-c", code, timeout=120)


def test_errors_name_the_argument_as_torch_does():
    q, k, v = operands((1, 2, 4, 8), (1, 2, 6, 8))
    with sdpa.replaced(), pytest.raises(registry.InvalidArgument) as raised:
        functional.scaled_dot_product_attention(q, k.half(), v)
    assert raised.value.argument == "key"


def test_dropout_stays_with_torch():
    qkv = operands((1, 2, 4, 8), (1, 2, 4, 8))
    with sdpa.replaced(), registry.record() as recorder:
        functional.scaled_dot_product_attention(*qkv, dropout_p=0.5)
    assert recorder.counts == {"elsewhere": {"sdpa: dropout of attention weights": 1}}


def test_torch_still_says_what_is_wrong():
    q, k, v = operands((1, 2, 4, 8), (1, 2, 4, 16))
    with pytest.raises(Exception) as theirs:
        functional.scaled_dot_product_attention(q, k, v)
    with sdpa.replaced(), pytest.raises(Exception) as ours:
        functional.scaled_dot_product_attention(q, k, v)
    assert theirs.value is not None and "head_dim 16" in str(ours.value)


def test_modules_of_torch_and_threads():
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)

    def elsewhere(_):
        with registry.record() as recorder:
            functional.scaled_dot_product_attention(x[None], x[None], x[None])
        return recorder.counts

    expected, _ = attention(x, x, x, need_weights=False)
    with sdpa.replaced(), registry.record() as recorder:
        found, _ = attention(x, x, x, need_weights=False)
        seen = in_threads(elsewhere, 1)
    torch.testing.assert_close(found, expected)
    assert set(recorder.counts) == {"attention"} and seen == [{}]


@pytest.mark.slow(2, together="inductor")
def test_a_compiled_function():
    torch._dynamo.reset()
    qkv = [x.detach() for x in operands((2, 4, 6, 8), (2, 4, 6, 8))]
    compiled = torch.compile(
        lambda *qkv: functional.scaled_dot_product_attention(*qkv, is_causal=True), backend="aot_eager", fullgraph=True
    )
    expected = functional.scaled_dot_product_attention(*qkv, is_causal=True)
    with sdpa.replaced(), registry.record() as recorder:
        torch.testing.assert_close(compiled(*qkv), expected)
    assert set(recorder.counts) == {"attention"}
    torch._dynamo.reset()
    with sdpa.replaced(), sdpa_kernel(SDPBackend.MATH), registry.record() as recorder:
        torch.testing.assert_close(compiled(*qkv), expected)
    assert "attention" not in recorder.counts


# --- as torch's flash attention ---------------------------------------------------------------------------------------


@pytest.fixture
def flash():
    sdpa.register_flash()
    torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    yield
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_flash_attention_of_torch(flash):
    for variant in ("torch_math", "torch_cpu"):  # the latter is torch's own flash attention
        for how in ({}, {"is_causal": True}):
            qkv = operands((2, 4, 6, 8), (2, 4, 6, 8))
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                expected = results(qkv, how)
            with registry.use(variant, f"{variant}_backward"), registry.record() as recorder:
                found = results(qkv, how)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            ran = {"attention": {variant: 1}, "attention_backward": {f"{variant}_backward": 1}}
            assert recorder.counts == ran


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_flash_attention_of_torch_hands_back_masks(flash):
    qkv, mask = operands((2, 4, 6, 8), (2, 4, 6, 8)), torch.randn(6, 6)
    with registry.record() as recorder:
        results(qkv, {"attn_mask": mask})
    assert recorder.counts == {"elsewhere": {"flash attention: a dense mask": 2}}
    with registry.record() as recorder:
        results(qkv, {"scale": float("inf")})
    assert recorder.counts == {"elsewhere": {"flash attention: a scale that is no number of float32's": 2}}


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_gradients_of_doubles_that_torch_attended_before():
    """Their LSE is of doubles, too, where ours is of float32."""
    q = torch.randn(1, 2, 8, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(q, q, q).sum(), q)
    before = torch.nn.functional.scaled_dot_product_attention(q, q, q).sum()
    sdpa.register_flash()
    torch.nn.attention.activate_flash_attention_impl(sdpa.NAME)
    try:
        (found,) = torch.autograd.grad(before, q)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_torch_has_its_own_back():
    assert torch.nn.attention.current_flash_attention_impl() is None
    with registry.record() as recorder:
        results(operands((2, 4, 6, 8), (2, 4, 6, 8)), {})
    assert recorder.counts == {}


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_for_cuda_have_the_signature_of_torch(causal):
    """Only what they hand over: no GPU is here."""
    op = torch.ops.aten._scaled_dot_product_flash_attention
    q, k, v = (x.detach() for x in operands((2, 4, 6, 8), (2, 4, 6, 8)))
    found = sdpa.cuda_forward(q, k, v, 0.0, causal, False, scale=None)
    assert len(found) == len(op.default._schema.returns)
    names = [a.name for a in torch.ops.aten._scaled_dot_product_flash_attention_backward.default._schema.arguments]
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = found
    values = (torch.ones_like(out), q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, seed, offset)
    grads = sdpa.cuda_backward(*values, scale=None)
    assert names == [*list(sdpa.cuda_backward.__annotations__)[:14], "scale"]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(functional.scaled_dot_product_attention(*leaves, is_causal=causal).sum(), leaves)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
