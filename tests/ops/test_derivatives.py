"""Every derivative is right, or says that there is none: never zeros."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.autograd import forward_ad

import registry
from registry.compat import flash_attn

MASKS = [{}, {"causal": True}, {"window": 2}, {"softcap": 2.0}]
TRANSFORMS = {"jacfwd": torch.func.jacfwd, "jacrev": torch.func.jacrev, "hessian": torch.func.hessian}
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def doubles(*shapes, grad=False):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*s, dtype=torch.float64, generator=generator).requires_grad_(grad) for s in shapes]


# --- products: their derivatives are products ------------------------------------------------------------------------

ENDS = {"offs": torch.tensor([2, 2, 6], dtype=torch.int32)}
GATHERED = {"offs": torch.tensor([2, 2, 5], dtype=torch.int32), "rows": torch.tensor([1, 1, 4, 3, 0, 2])}
PRODUCTS = {
    "matrices": ("matmul", ((4, 5), (5, 3)), {}),
    "batches": ("matmul", ((2, 4, 5), (2, 5, 3)), {}),
    "rows of a batch, bias and silu": ("matmul", ((2, 4, 5), (5, 3), (3,)), {"activation": "silu"}),
    "a vector": ("matmul", ((5,), (5, 3)), {}),
    "bias and gelu": ("matmul", ((4, 5), (5, 3), (3,)), {"activation": "gelu"}),
    "gated, bias and silu": ("matmul", ((4, 5), (5, 6), (6,)), {"activation": "silu", "gated": True}),
    "groups of rows": ("grouped_mm", ((6, 4), (3, 4, 2)), ENDS),
    "groups as a batch": ("grouped_mm", ((3, 4, 5), (3, 5, 2)), {}),
    "groups of the inner size": ("grouped_mm", ((4, 6), (6, 2)), ENDS),
    "groups, bias and silu": ("grouped_mm", ((6, 4), (3, 4, 2), (3, 2)), {**ENDS, "activation": "silu"}),
    "gathered, gated": ("grouped_mm", ((5, 4), (3, 4, 4), (3, 4)), {**GATHERED, "activation": "gelu", "gated": True}),
}
each_product = pytest.mark.parametrize("case", PRODUCTS)


def product(case):
    """(the op, its definition, what they are given)."""
    name, shapes, how = PRODUCTS[case]
    op = getattr(registry, name)
    ours, theirs = (lambda a, b, bias=None, f=f: f(a, b, bias=bias, **how) for f in (op, op.reference))
    return ours, theirs, tuple(doubles(*shapes))


@each_product
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_products_under_functorch(transform, case):
    ours, theirs, given = product(case)
    every = tuple(range(len(given)))
    found, wanted = (TRANSFORMS[transform](lambda *x, f=f: f(*x).sum(0), argnums=every)(*given) for f in (ours, theirs))
    torch.testing.assert_close(found, wanted)


@each_product
def test_products_of_dual_tensors(case):
    ours, theirs, given = product(case)
    tangents = tuple(x.flip(0) for x in given)
    ours(*given)  # a plan is kept: its guard must not take a dual tensor for a plain one
    _, wanted = torch.func.jvp(theirs, given, tangents)
    with forward_ad.dual_level():
        result = ours(*map(forward_ad.make_dual, given, tangents))
        torch.testing.assert_close(forward_ad.unpack_dual(result).tangent, wanted)
        assert forward_ad.unpack_dual(ours(*given)).tangent is None


@each_product
def test_products_once_and_twice(case):
    ours, _, given = product(case)
    leaves = [x.requires_grad_() for x in given]
    assert torch.autograd.gradcheck(ours, leaves) and torch.autograd.gradgradcheck(ours, leaves)


@each_product
def test_products_under_vmap(case):
    ours, theirs, given = product(case)
    two = [(x, x.flip(0)) for x in given]
    mapped = torch.func.vmap(ours)(*map(torch.stack, two))
    torch.testing.assert_close(mapped, torch.stack([theirs(*one) for one in zip(*two, strict=True)]))
    a, *rest = given
    shared = torch.func.vmap(lambda a: ours(a, *rest), in_dims=-1)(torch.stack(two[0], -1))
    torch.testing.assert_close(shared, torch.stack([theirs(a, *rest) for a in two[0]]))


def test_no_entries_under_vmap():
    """Each entry has a product of its own where a bias, or ends, are mapped; of none the form is known all the same."""
    a, b, bias = doubles((0, 3, 4), (4, 5), (0, 5), grad=True)

    def product(a, bias):
        return registry.matmul(a, b, bias=bias)

    found = torch.vmap(product)(a, bias)
    assert (found.shape, found.dtype) == ((0, 3, 5), torch.float64)
    grads = torch.autograd.grad(found.sum(), (a, b, bias))
    assert [grad.shape for grad in grads] == [(0, 3, 4), (4, 5), (0, 5)] and not grads[1].any()
    assert torch.vmap(product, out_dims=1)(a, bias).shape == (3, 0, 5)
    rows, weights, ends = torch.ones(6, 4), torch.ones(2, 4, 5), torch.zeros(0, 2, dtype=torch.int32)
    assert torch.vmap(lambda offs: registry.grouped_mm(rows, weights, offs=offs))(ends).shape == (0, 6, 5)


@pytest.mark.parametrize("name", ["matmul", "grouped_mm"])
def test_scales_and_out_of_a_product_have_no_derivative(name):
    op, a = getattr(registry, name), torch.randn(6, 4)
    grouped = name == "grouped_mm"
    b, how = (torch.randn(3, 4, 2), ENDS) if grouped else (torch.randn(4, 2), {})
    scales = {"scale_a": torch.ones(6), "scale_b": torch.ones(3, 2) if grouped else torch.ones(2)}
    with pytest.raises(NotImplementedError, match="scale_a"):
        torch.func.jvp(lambda a: op(a, b, **scales, **how), (a,), (a,))
    for one in scales:
        followed = scales | {one: scales[one].clone().requires_grad_()}
        for call in (op, op.explain, torch.compile(op, backend="eager")):
            for _ in ("cold", "warm"):
                with pytest.raises(registry.InvalidArgument, match=f"{one}: got a tensor that requires grad"):
                    call(a, b, **followed, **how)
                with torch.no_grad():
                    op(a, b, **followed, **how)
    a.requires_grad_()
    for given in (scales, {"out": torch.empty(6, 2)}):
        with pytest.raises(registry.InvalidArgument, match=next(iter(given))):
            op(a, b, **given, **how)


# --- attention: first derivatives in reverse mode --------------------------------------------------------------------


@pytest.mark.parametrize("masks", MASKS, ids=str)
@pytest.mark.parametrize("lengths", [(5, 5), (4, 6)])
def test_float64_gradients_have_the_accuracy_of_float64(masks, lengths):
    sq, sk = lengths
    shapes = (1, 2, sq, 8), (1, 2, sk, 8), (1, 2, sk, 8)
    leaves = doubles(*shapes, grad=True)
    ours, theirs = (
        torch.autograd.grad(attention(*leaves, **masks).square().sum(), leaves)
        for attention in (registry.attention, registry.attention.reference)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda *x: registry.attention(*x, **masks), leaves, atol=1e-8, rtol=1e-7)


def test_every_float64_backward_is_as_accurate():
    leaves = doubles(*[(1, 2, 40, 8)] * 3, grad=True)
    wanted = torch.autograd.grad(registry.attention.reference(*leaves).square().sum(), leaves)
    for name in ("torch_cpu_backward", "torch_math_backward"):
        with registry.use(name):
            found = torch.autograd.grad(registry.attention(*leaves).square().sum(), leaves)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_attention_under_jacrev():
    q, k, v = doubles(*[(1, 2, 4, 8)] * 3)
    found, wanted = (torch.func.jacrev(f)(q, k, v) for f in (registry.attention, registry.attention.reference))
    torch.testing.assert_close(found, wanted)


def second(q, k, v):
    return torch.func.grad(lambda q: torch.func.grad(lambda q: registry.attention(q, k, v).square().sum())(q).sum())(q)


REFUSED = {
    "jvp": lambda q, k, v: torch.func.jvp(registry.attention, (q, k, v), (q, k, v)),
    "jacfwd": lambda q, k, v: torch.func.jacfwd(registry.attention)(q, k, v),
    "hessian": lambda q, k, v: torch.func.hessian(lambda q: registry.attention(q, k, v).sum())(q),
    "grad of grad": second,
    "jvp of vjp": lambda q, k, v: torch.func.jvp(
        lambda c: torch.func.vjp(registry.attention, q, k, v)[1](c), (q,), (q,)
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_attention_says_what_it_cannot_differentiate(what):
    q, k, v = doubles(*[(1, 2, 4, 8)] * 3)
    with pytest.raises(NotImplementedError, match="attention is not implemented; allowed: .*reference"):
        REFUSED[what](q, k, v)


def test_dual_tensors_are_refused():
    q, k, v = doubles(*[(1, 2, 4, 8)] * 3)
    registry.attention(q, k, v)
    with forward_ad.dual_level():
        assert registry.attention(q, k, v).shape == q.shape
        with pytest.raises(NotImplementedError, match="forward-mode"):
            registry.attention(forward_ad.make_dual(q, q), k, v)


@pytest.mark.parametrize("autocast", [False, True], ids=["eager", "through the torch op"])
def test_a_penalty_on_gradients_is_refused(autocast):
    """With create_graph=True a gradient that cannot be differentiated must not count as a constant."""
    q, k, v = (x.float() for x in doubles(*[(1, 2, 4, 8)] * 3))
    q.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = registry.attention(q, k, v).float()
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative of attention"):
        (out.sum() + grad.square().sum()).backward()


def test_a_graph_of_the_gradients_may_be_made():
    q, k, v = doubles(*[(1, 2, 4, 8)] * 3, grad=True)
    found = torch.autograd.grad(registry.attention(q, k, v).sum(), (q, k, v), create_graph=True)
    wanted = torch.autograd.grad(registry.attention(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close([g.detach() for g in found], list(wanted))


@pytest.mark.parametrize("what", ["jvp", "jacfwd", "jacrev", "hessian", "double", "dual", "vmap"])
@pytest.mark.parametrize("form", ["varlen", "ragged", "compat"])
def test_attention_over_sequences_says_what_it_cannot_differentiate(form, what):
    """Whatever the front door, cold and with a kept plan."""
    q = torch.randn(2, 6, 2, 4, dtype=torch.float64)
    starts = torch.tensor([0, 6, 12], dtype=torch.int32)
    how = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 6, "max_seqlen_k": 6}
    call = {
        "varlen": lambda q: registry.attention_varlen(*[q.flatten(0, 1)] * 3, **how),
        "ragged": lambda q: registry.attention(q, q, q, layout="bshd", key_lengths=torch.tensor([6, 3])),
        "compat": lambda q: flash_attn.flash_attn_func(q, q, q, s_aux=torch.ones(2, dtype=torch.float64)),
    }[form]

    def double():
        leaf = q.clone().requires_grad_()
        (first,) = torch.autograd.grad(call(leaf).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.sum(), leaf)

    def dual():
        with forward_ad.dual_level():
            return call(forward_ad.make_dual(q, q))

    ask = {
        "jvp": lambda: torch.func.jvp(call, (q,), (q,)),
        "jacfwd": lambda: torch.func.jacfwd(call)(q),
        "jacrev": lambda: torch.func.jacrev(call)(q),
        "hessian": lambda: torch.func.hessian(lambda q: call(q).sum())(q),
        "vmap": lambda: torch.func.vmap(call)(torch.stack([q, q])),
        "double": double,
        "dual": dual,
    }[what]
    for warm in (False, True):
        if warm:
            call(q), call(q.clone().requires_grad_()).sum().backward()
        with pytest.raises(NotImplementedError, match="allowed: "):
            ask()


# --- gradients in batches, as torch.autograd makes them: not functorch, which `vmap` above is ------------------------

EVEN = {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32), "max_seqlen_q": 3, "max_seqlen_k": 3}
EVEN["cu_seqlens_k"] = EVEN["cu_seqlens_q"]
HEADS = ((2, 2, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8))
BATCHED = {case: (product(case)[0], shapes) for case, (_, shapes, _) in PRODUCTS.items()} | {
    "attention": (lambda *x: registry.attention(*x, causal=True), HEADS),
    "LSE": (lambda q, k: registry.attention(q, k, k, return_lse=True)[1], HEADS[:2]),
    "sinks": (lambda *x: registry.attention(*x[:3], sinks=x[3]), (*HEADS, (2,))),
    "key lengths": (lambda *x: registry.attention(*x, key_lengths=torch.tensor([5, 2])), HEADS),
    "packed": (lambda *x: registry.attention_varlen(*x, **EVEN), ((5, 2, 8), (5, 1, 8), (5, 1, 8))),
}


@pytest.mark.parametrize("case", BATCHED)
def test_batches_of_gradients(case):
    call, shapes = BATCHED[case]
    leaves = doubles(*shapes, grad=True)
    for _ in ("cold", "warm"):
        out = call(*leaves)
        grads = torch.randn(3, *out.shape, dtype=torch.float64)
        wanted = [torch.autograd.grad(out, leaves, one, retain_graph=True) for one in grads]
        found = torch.autograd.grad(out, leaves, grads, is_grads_batched=True)
        torch.testing.assert_close(found, tuple(map(torch.stack, zip(*wanted, strict=True))))


@pytest.mark.parametrize("case", ["matrices", "attention", "packed"])
def test_vectorized_jacobians(case):
    call, shapes = BATCHED[case]
    given = tuple(doubles(*shapes))
    found, wanted = (torch.autograd.functional.jacobian(call, given, vectorize=how) for how in (True, False))
    torch.testing.assert_close(found, wanted)


# --- gradients that are asked for by name ----------------------------------------------------------------------------


def by_name(form):
    """(an op of gradients with all that it takes but these, grad_out, q, sinks)"""
    grad, q, k, v = doubles(*[(1, 2, 5, 8) if form == "attention" else (5, 2, 8)] * 4)
    (sinks,) = doubles((2,))
    if form == "attention":
        out, lse = registry.attention(q, k, v, return_lse=True)
        return lambda grad, q, _: registry.attention.backward(grad, q, k, v, out, lse), [grad, q, sinks]
    out, lse = registry.attention_varlen(q, k, v, return_lse=True, sinks=sinks, **EVEN)
    varlen = registry.attention_varlen.backward
    return lambda grad, q, sinks: varlen(grad, q, k, v, out, lse, sinks=sinks, **EVEN), [grad, q, sinks]


@pytest.mark.parametrize("which", [0, 1, 2], ids=["grad_out", "q", "sinks"])
@pytest.mark.parametrize("form, variant", [("attention", "torch_math_backward"), ("attention", ""), ("packed", "")])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_by_name_have_no_derivative(form, variant, which, compiled):
    """They are there, and whoever differentiates them is told so, by whichever variant."""
    if form == "attention" and which == 2:
        pytest.skip("it has no sinks")
    call, given = by_name(form)
    wanted = call(*given)
    given[which].requires_grad_()
    with registry.use(variant) if variant else contextlib.nullcontext():
        found = (torch.compile(call, backend="aot_eager") if compiled else call)(*given)
        with torch.no_grad():
            assert not call(*given)[0].requires_grad
    torch.testing.assert_close(tuple(x.detach() for x in found), tuple(wanted))
    with pytest.raises(NotImplementedError, match="second derivative of attention"):
        (found[0].square().sum() + given[which].sum()).backward()


@pytest.mark.parametrize("way", ["eager", "warm", "grad", "made inside", "jvp", "autocast", "device"])
def test_key_lengths_that_lie_are_called_so_whatever_follows_the_call(way):
    q = torch.randn(2, 3, 2, 4)
    lengths = torch.tensor([3, 2])
    call = functools.partial(registry.attention, q, q, q)
    with contextlib.ExitStack() as around:
        if way == "warm":
            call(key_lengths=lengths - 1)
        elif way == "autocast":
            around.enter_context(torch.autocast("cpu", enabled=False))
        elif way == "device":
            around.enter_context(torch.device("cpu"))
        ways = {
            "grad": lambda: torch.func.grad(lambda x: registry.attention(x, x, x, key_lengths=lengths).sum())(q),
            "made inside": lambda: torch.func.grad(
                lambda x: registry.attention(x, x, x, key_lengths=torch.tensor([3, 2])).sum()
            )(q),
            "jvp": lambda: torch.func.jvp(lambda x: registry.attention(x, x, x, key_lengths=lengths), (q,), (q,)),
        }
        with pytest.raises(registry.InvalidArgument, match="key_lengths: got 3 in entry 0; allowed: 0 to 2, the keys"):
            ways.get(way, lambda: call(key_lengths=lengths))()


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_gradients_by_name_take_any_scale_and_kernels_are_given_positive_ones(scale):
    """As the forward has it: a sign moves into q."""
    q, k, v, grad = torch.randn(4, 1, 2, 9, 16)
    out, lse = registry.attention(q, k, v, scale=scale, causal=True, return_lse=True)
    packed = [t[0].transpose(0, 1).contiguous() for t in (grad, q, k, v, out)]
    starts = torch.tensor([0, 9], dtype=torch.int32)
    lengths = dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=9, max_seqlen_k=9)
    expected = registry.attention.backward.reference(grad, q, k, v, scale=scale, causal=True)
    dense = registry.attention.backward(grad, q, k, v, out, lse, scale=scale, causal=True)
    ragged = registry.attention_varlen.backward(*packed, lse[0], **lengths, scale=scale, causal=True)
    for own, same, want in zip(dense, ragged, expected, strict=True):
        torch.testing.assert_close(own, want.float(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(same.transpose(0, 1)[None], want.float(), atol=1e-5, rtol=1e-5)


# --- of the LSE of rows that see no key ------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("op", ["attention", "attention_varlen"])
def test_what_comes_to_the_lse_of_a_row_without_keys_goes_nowhere(op, compiled):
    """It is -inf whatever q and k are; the gradient of `logaddexp` of two such is NaN."""
    causal, rows, keys = {"causal": True}, 12, 5

    def call(q, k, v):
        if op == "attention":
            return registry.attention(q, k, v, **causal, return_lse=True)
        ends = {"cu_seqlens_q": [0, rows], "cu_seqlens_k": [0, keys]}
        ends = {name: torch.tensor(given, dtype=torch.int32) for name, given in ends.items()}
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        return registry.attention_varlen(
            *packed, **ends, max_seqlen_q=rows, max_seqlen_k=keys, **causal, return_lse=True
        )

    found = []
    for poison in (0.0, float("nan")):
        q, k, v = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (rows, keys, keys + 1))
        q, k, v = q.requires_grad_(), k.requires_grad_(), v[:, :, :keys].contiguous().requires_grad_()
        made = torch.compile(call, backend="aot_eager") if compiled else call
        out, lse = made(q, k, v)
        unseen = torch.isneginf(lse)
        assert int(unseen.sum()) == 2 * (rows - keys)
        grad_lse = torch.ones_like(lse).masked_fill(unseen, poison)
        torch.autograd.backward([out, lse], [torch.ones_like(out), grad_lse])
        found.append([q.grad, k.grad, v.grad])
    for clean, poisoned in zip(*found, strict=True):
        assert torch.equal(clean, poisoned)
