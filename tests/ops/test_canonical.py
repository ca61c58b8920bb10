"""Spellings that ask for the same thing are the same problem, so that the same variants may run it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import registry
from registry.dispatch import scope
from registry.ops.known import op_named

LENGTHS = st.integers(1, 12)
ATTENTION, VARLEN, MATMUL = (op_named(name) for name in ("attention", "attention_varlen", "matmul"))


def masks_alike(queries, keys):
    """Masks by what they hide at these lengths: all spellings in one list are one mask."""
    last = max(queries, keys)
    nothing = [
        {},
        {"window": (keys - 1, queries - 1)},
        {"window": last},
        {"window": (None, last)},
        {"window": (-1, -1)},
    ]
    causal = [{"causal": True}, {"window": (None, 0)}, {"causal": True, "window": last}, {"window": (keys - 1, 0)}]
    banded = [{"causal": True, "window": (1, 5)}, {"window": (1, 0)}, {"causal": True, "window": 1}]
    return [nothing + causal, banded] if queries == 1 else [nothing, causal, banded]


@settings(max_examples=40, deadline=None)
@given(
    queries=LENGTHS, keys=LENGTHS, heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]), softcap=st.sampled_from([0.0, 2.0])
)
def test_masks_of_attention(queries, keys, heads, softcap):
    q = torch.randn(2, heads[0], queries, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, heads[1], keys, 8, dtype=torch.float64)
    for spellings in masks_alike(queries, keys):
        problems = {ATTENTION.problem_of(q, k, v, softcap=softcap, **one)[0] for one in spellings}
        assert len(problems) == 1
        decided = [registry.attention.explain(q, k, v, softcap=softcap, **one) for one in spellings]
        assert len({(one.variant, str(one.config)) for one in decided}) == 1
        first, *others = (registry.attention(q, k, v, softcap=softcap, **one) for one in spellings)
        assert all(torch.equal(first, other) for other in others)
        grad = torch.randn_like(q)
        backward = {
            ATTENTION.backward.problem_of(grad, q, k, v, q, q[..., 0].float(), softcap=softcap, **one)[0]
            for one in spellings
        }
        assert len(backward) == 1
    problem = problems.pop()
    assert problem.gqa == (heads[0] != heads[1]) and problem.cross_length == (queries != keys)


@settings(max_examples=25, deadline=None)
@given(queries=LENGTHS, keys=LENGTHS, batch=st.integers(1, 3))
def test_masks_of_sequences(queries, keys, batch):
    """The host knows the longest of the sequences: a side that hides nothing from it hides nothing from any."""
    q = torch.randn(batch * queries, 4, 8)
    k, v = torch.randn(2, batch * keys, 2, 8)
    at = {
        "cu_seqlens_q": torch.arange(batch + 1, dtype=torch.int32) * queries,
        "cu_seqlens_k": torch.arange(batch + 1, dtype=torch.int32) * keys,
        "max_seqlen_q": queries,
        "max_seqlen_k": keys,
    }
    for spellings in masks_alike(queries, keys):
        assert len({VARLEN.problem_of(q, k, v, **at, **one)[0] for one in spellings}) == 1
        first, *others = (registry.attention_varlen(q, k, v, **at, **one) for one in spellings)
        assert all(torch.equal(first, other) for other in others)


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 6), n=st.integers(1, 6), k=st.integers(1, 6))
def test_products(m, n, k):
    """A batch of one is no batch, a vector is a matrix of one row or column, and its other stride says nothing."""
    a, b = torch.randn(m, k, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)
    known = MATMUL.problem_of(a, b)[0]
    assert not known.batched
    for one, other in ((a[None], b), (a[None], b[None]), (a[None, None], b[None])):
        problem = MATMUL.problem_of(one, other)[0]
        assert problem.facts() == known.facts()
        assert torch.equal(registry.matmul(one, other).view(m, n), registry.matmul(a, b))
    if m == 1:
        assert MATMUL.problem_of(a[0], b)[0].facts() == known.facts()
    for activation in (None, ""):
        assert MATMUL.problem_of(a, b, activation=activation)[0] == known


def test_a_problem_says_it_plainly_however_it_is_made():
    for kind, more in ((ATTENTION.problem_type, {}), (VARLEN.problem_type, {"kv": "packed"})):
        sizes = {"s": 1, "sk": 64} if not more else {"sq": 1, "sk": 64}
        made = kind.of_shape(registry.Target.named("H200"), hq=4, hkv=4, causal=True, window=(63, 0), **sizes, **more)
        assert not made.causal and made.window is None and not made.gqa
    assert scope.current.get() is scope.EMPTY
