"""torch.func inside of torch.compile: the graph holds the ops as they are, with all that torch.func makes of them."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian, jvp, vjp, vmap

import registry

Q, K, V = torch.randn(3, 2, 4, 16, 8).unbind()
PACKED, WEIGHT, EXPERTS = torch.randn(16, 4, 8), torch.randn(8, 8), torch.randn(2, 8, 8)
STARTS = torch.tensor([0, 5, 16], dtype=torch.int32)
ENDS, ROWS = STARTS[1:], torch.arange(15, -1, -1)
VARLEN = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 11, "max_seqlen_k": 11}
OUT, LSE = registry.attention(Q, K, V, return_lse=True)


def gradient(op, *rest, **how):
    return grad(lambda x: op(x, *rest, **how).square().sum())


def one(q):
    return registry.attention(q[None], K[:1], V[:1])


def both(x):
    return registry.attention(registry.matmul(x, WEIGHT, activation="gelu"), K, V).sum()


def named(x):
    with registry.use("torch_math"):
        return registry.attention(x, K, V).square().sum()


CASES = {
    "attention": (gradient(registry.attention, K, V, causal=True, window=(3, None)), Q),
    "attention for a batch": (vmap(one), Q),
    "attention for each": (vmap(grad(lambda q: one(q).square().sum())), Q),
    "attention, vjp": (lambda q: vjp(lambda q: registry.attention(q, K, V), q)[1](q)[0], Q),
    "attention, its gradients": (vmap(lambda g: registry.attention.backward(g, Q, K, V, OUT, LSE)[1]), OUT[None]),
    "attention of a variant": (grad(named), Q),
    "sinks": (gradient(registry.attention, K, V, sinks=WEIGHT[0, :4]), Q),
    "key_lengths": (gradient(registry.attention, K, V, key_lengths=ENDS), Q),
    "packed": (gradient(registry.attention_varlen, PACKED, PACKED, **VARLEN), PACKED),
    "matmul": (gradient(registry.matmul, WEIGHT), Q),
    "matmul for a batch": (vmap(lambda x: registry.matmul(x, WEIGHT, bias=WEIGHT[0], activation="gelu")), Q),
    "matmul twice": (hessian(lambda x: registry.matmul(x, WEIGHT, activation="silu").sum()), Q[0, 0, :2]),
    "matmul forward": (lambda x: jvp(lambda x: registry.matmul(x, WEIGHT), (x,), (x,))[1], Q),
    "matmul with a gate": (gradient(registry.matmul, WEIGHT, activation="silu", gated=True), Q),
    "grouped_mm": (gradient(registry.grouped_mm, EXPERTS, offs=ENDS, rows=ROWS, activation="relu"), Q[0, 0]),
    "grouped_mm for a batch": (vmap(lambda x: registry.grouped_mm(x, EXPERTS, offs=ENDS)), Q[0]),
    "two ops": (grad(both), Q),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_transformed_is_compiled(case):
    function, given = CASES[case]
    torch._dynamo.reset()
    found = torch.compile(function, backend="eager", fullgraph=True)(given)
    torch.testing.assert_close(found, function(given))


@pytest.mark.parametrize("case", ["attention for a batch", "matmul", "matmul for a batch"])
def test_autograd_follows_it(case):
    function, given = CASES[case]
    leaf = given.clone().requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(f(leaf).square().sum(), leaf) for f in (compiled, function))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "what, given, message",
    [
        (
            lambda q: jvp(lambda q: registry.attention(q, K, V), (q,), (q,)),
            Q,
            "forward-mode differentiation of attention",
        ),
        (grad(lambda q: gradient(registry.attention, K, V)(q).sum()), Q, "a second derivative of attention"),
        (
            vmap(lambda q: registry.attention_varlen(q, PACKED, PACKED, **VARLEN)),
            PACKED[None],
            "vmap over attention_varlen",
        ),
    ],
    ids=["forward mode", "second", "vmap"],
)
def test_what_has_no_derivative_says_so(what, given, message, fullgraph):
    torch._dynamo.reset()
    error = torch._dynamo.exc.Unsupported if fullgraph else NotImplementedError
    with pytest.raises(error, match=f"{message} is not implemented"):
        torch.compile(what, backend="eager", fullgraph=fullgraph)(given)


@pytest.mark.parametrize("argnums", [0, (0, 1)], ids=str)
def test_slopes_have_no_derivative_and_say_so(argnums):
    def loss(slopes, q):
        return registry.attention_varlen(q, PACKED, PACKED, **VARLEN, alibi_slopes=slopes).sum()

    for function in (grad(loss, argnums), torch.compile(grad(loss, argnums), backend="eager", fullgraph=True)):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="alibi_slopes: got a tensor that requires grad"):
            function(torch.rand(4), PACKED)
