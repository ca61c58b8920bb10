"""What attention means, whatever runs it: masks, LSE, layouts, gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import registry
from registry.ops.attention.oracle import visible
from registry.ops.attention.problem import AttentionProblem
from registry.ops.parts.masks import canonical_mask, canonical_window, check_window, visible_pairs
from registry.ops.parts.memory import conditions

H200 = registry.Target.named("H200")

CPU = registry.Target.named("cpu")


def brute_force(q, k, v, causal, scale, window, softcap):
    """Attention by loops over single rows: an oracle of the oracle."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    shift = k.shape[2] - q.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                keys = [
                    j
                    for j in range(k.shape[2])
                    if (not causal or j <= i + shift)
                    and (window is None or window[0] == -1 or j >= i + shift - window[0])
                    and (window is None or window[1] == -1 or j <= i + shift + window[1])
                ]
                if not keys:
                    continue
                scores = (k[b, h // group, keys] @ q[b, h, i]).double() * scale
                scores = torch.tanh(scores / softcap) * softcap if softcap else scores
                lse[b, h, i] = torch.logsumexp(scores, 0)
                out[b, h, i] = torch.softmax(scores, 0) @ v[b, h // group, keys]
    return out, lse


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [None, (2, 1), (-1, 2), (3, -1), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3)])
def test_the_oracle_by_brute_force(lengths, causal, window, softcap):
    q = torch.randn(1, 4, lengths[0], 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 2, lengths[1], 8, dtype=torch.float64)
    expected = brute_force(q, k, v, causal, 0.3, window, softcap)
    found = registry.attention.reference(
        q, k, v, causal=causal, window=window, softcap=softcap, scale=0.3, return_lse=True
    )
    torch.testing.assert_close(found, expected)
    ran = registry.attention(q, k, v, causal=causal, window=window, softcap=softcap, scale=0.3, return_lse=True)
    torch.testing.assert_close(ran[0], expected[0])
    torch.testing.assert_close(ran[1], expected[1].float())


def test_rows_without_keys_are_zero_and_their_gradients_too():
    q = torch.randn(1, 1, 6, 8, requires_grad=True)
    k, v = (torch.randn(1, 1, 2, 8, requires_grad=True) for _ in range(2))
    out, lse = registry.attention(q, k, v, causal=True, return_lse=True)
    assert torch.all(out[:, :, :4] == 0) and torch.all(lse[:, :, :4] == -math.inf)
    (out.sum() + lse[:, :, 4:].sum()).backward()
    assert torch.all(q.grad[:, :, :4] == 0)
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts(layout):
    shape = (2, 3, 5, 8) if layout == "bhsd" else (2, 5, 3, 8)
    q, k, v = torch.randn(3, *shape)
    out, lse = registry.attention(q, k, v, layout=layout, return_lse=True)
    assert out.shape == shape and lse.shape == (2, 3, 5)
    reference = registry.attention.reference(q, k, v, layout=layout)
    torch.testing.assert_close(out.double(), reference, rtol=1e-5, atol=1e-5)
    assert registry.attention.explain(q, k, v, layout=layout).problem.layout == layout


@pytest.mark.parametrize("how", [{}, {"softcap": 2.0}, {"variant": "torch_math"}], ids=str)
@pytest.mark.parametrize("dv", [8, 4])
def test_a_result_lies_in_memory_as_q_does(how, dv):
    """So what is made of a call's result need not know which variant ran."""
    given = tuple(torch.randn(2, 5, 3, d) for d in (8, 8, dv))
    for layout in ("bshd", "bhsd"):
        assert registry.attention(*given, layout=layout, **how).is_contiguous()
    assert registry.attention(*(t.transpose(1, 2) for t in given), **how).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_the_reference_takes_no_heads(kv_heads):
    q, k = torch.randn(2, 0, 5, 8), torch.randn(2, kv_heads, 5, 8)
    out, lse = registry.attention(q, k, k, return_lse=True)
    wanted = registry.attention.reference(q, k, k, return_lse=True, dtype=torch.float32)
    torch.testing.assert_close((out, lse), wanted)


def test_one_window_has_one_spelling():
    assert canonical_window(check_window(None), False) == (False, None)
    assert canonical_window(check_window(4), False) == (False, (4, 4))
    assert canonical_window(check_window(4), True) == (True, (4, 0))
    assert canonical_window(check_window((None, 0)), False) == (True, None)
    assert canonical_window(check_window((None, None)), True) == (True, None)
    assert canonical_window(check_window((7, 0)), False) == (True, (7, 0))
    assert canonical_window(check_window([-1, 3]), True) == (True, None)


LENGTHS = [(s, sk) for s in range(1, 7) for sk in range(1, 7)]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_one_mask_has_one_spelling_and_what_hides_nothing_is_not_there(lengths):
    """By counting: what is seen stays the same, row by row, and two masks that show the same are spelt the same."""
    spelt = {}
    sides = range(-1, 9)
    for causal, left, right in itertools.product((False, True), sides, sides):
        seen = visible(*lengths, causal, (left, right), torch.device("cpu"))
        canonical = canonical_mask(causal, (left, right), *lengths)
        plain = visible(*lengths, *canonical, torch.device("cpu"))
        assert torch.equal(seen, torch.ones_like(seen) if plain is None else plain), (causal, left, right)
        assert canonical_mask(*canonical, *lengths) == canonical
        assert spelt.setdefault(tuple(seen.flatten().tolist()), canonical) == canonical
        problem = AttentionProblem.of_shape(CPU, s=lengths[0], sk=lengths[1], d=8, causal=causal, window=(left, right))
        assert (problem.causal, problem.window) == canonical
    assert spelt[(True,) * (lengths[0] * lengths[1])] == (False, None)
    assert (canonical_mask(True, None, *lengths) == (True, None)) == (lengths[0] > 1)


@pytest.mark.parametrize("through", ["eager", "torch"])
@pytest.mark.parametrize(
    ("lengths", "asked", "plain"),
    [
        ((1, 5), {"causal": True}, (False, None)),
        ((1, 5), {"causal": True, "window": 2}, (False, (2, -1))),
        ((1, 5), {"window": (4, 0)}, (False, None)),
        ((3, 5), {"window": 4}, (False, None)),
        ((3, 5), {"window": (4, 0)}, (True, None)),
        ((5, 3), {"window": (2, 3)}, (False, (-1, 3))),
        ((5, 3), {"causal": True}, (True, None)),
    ],
)
def test_a_mask_that_hides_nothing_asks_nothing_of_kernels_forward_or_backward(lengths, asked, plain, through):
    q, k, v = (torch.randn(1, 2, s, 8, dtype=torch.double) for s in (lengths[0], lengths[1], lengths[1]))
    expected = registry.attention.reference(q, k, v, **asked)
    torch.testing.assert_close(expected, registry.attention.reference(q, k, v, causal=plain[0], window=plain[1]))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(registry.attention.reference(*leaves, **asked).sum(), leaves)
    with registry.record() as recorder:
        if through == "torch":
            left, right = check_window(asked.get("window")) or (-1, -1)
            masks = (asked.get("causal", False), 1 / math.sqrt(8), left, right, 0.0)
            out, _ = torch.ops.registry.attention(*leaves, *masks, True, None)
        else:
            out = registry.attention(*leaves, **asked)
        grads = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, wanted)
    assert {ran.op for ran in recorder.launches} == {"attention", "attention_backward"}
    assert {(ran.problem.causal, ran.problem.window) for ran in recorder.launches} == {plain}
    explained = registry.attention.explain(q, k, v, **asked).problem
    assert (explained.causal, explained.window) == plain


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (2, 1), (0, 3), (-1, 2), (2, -1), (9, 9)])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1), (0, 3), (3, 0)])
def test_visible_pairs_counts_the_mask(lengths, causal, window):
    causal, window = canonical_window(window, causal)
    seen = visible(*lengths, causal, window, torch.device("cpu"))
    assert visible_pairs(*lengths, causal, window) == (lengths[0] * lengths[1] if seen is None else int(seen.sum()))


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_lse", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"causal": True}, {"window": (2, 1)}, {"softcap": 3.0}, {"causal": True, "layout": "bshd"}]
)
def test_gradients_match_the_oracle(settings, use_lse):
    layout = settings.get("layout", "bhsd")
    shape = (2, 4, 6, 8) if layout == "bhsd" else (2, 6, 4, 8)
    kv = (2, 2, 6, 8) if layout == "bhsd" else (2, 6, 2, 8)
    q, k, v = (torch.randn(*s, requires_grad=True) for s in (shape, kv, kv))
    grad = torch.randn(shape)

    def gradients(result, *leaves):
        out, lse = result
        loss = (out * grad.to(out.dtype)).sum() + (lse.sum() if use_lse else 0.0)
        return torch.autograd.grad(loss, leaves)

    found = gradients(registry.attention(q, k, v, return_lse=True, **settings), q, k, v)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = gradients(registry.attention.reference(*doubles, return_lse=True, **settings), *doubles)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_the_backward_dispatches_by_itself():
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    with registry.use("torch_math"), registry.record() as recorder:
        registry.attention(q, k, v).sum().backward()
    assert recorder.counts["attention_backward"] == {"torch_cpu_backward": 1}
    assert registry.attention.backward.name == "attention_backward"


def test_only_some_inputs_need_grad():
    q = torch.randn(1, 1, 4, 8)
    k = torch.randn(1, 1, 4, 8, requires_grad=True)
    registry.attention(q, k, q).sum().backward()
    assert k.grad is not None and q.grad is None


def test_the_definition_takes_no_number_of_the_host():
    """A CUDA graph that is being captured copies none to the GPU; `torch_math` is the definition itself."""
    copied = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            copied.extend([func] if func is torch.ops.aten.lift_fresh.default else [])
            return func(*args, **(kwargs or {}))

    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    for how in ({"causal": True}, {"window": (2, 0), "softcap": 5.0}, {"sinks": torch.zeros(4)}, {}):
        with Seen():
            registry.attention.reference(q, k, v, return_lse=True, **how)
    assert not copied


def test_no_grad_and_inference_mode():
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        assert not registry.attention(q, k, v).requires_grad
    with torch.inference_mode():
        assert registry.attention(q, k, v).is_inference()
    assert registry.attention(q, k, v).requires_grad


def test_deterministic_mode_is_part_of_the_problem(declare):
    declare("test.racy", arch=("cpu",))
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    registry.attention(q, k, v, variant="test.racy")
    with conditions(deterministic=True), pytest.raises(registry.IllegalVariant, match="deterministic"):
        registry.attention(q, k, v, variant="test.racy")


def test_float32_precision_is_part_of_the_problem(declare):
    declare("test.tf32", arch=("cpu",), ieee=False)
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    with pytest.raises(registry.IllegalVariant, match="ieee"):
        registry.attention(q, k, v, variant="test.tf32")
    with conditions(ieee=False):
        registry.attention(q, k, v, variant="test.tf32")


@pytest.mark.parametrize("heads_first", [True, False])
def test_windows_that_move_on_by_one_element(heads_first):
    """Their strides are 1 twice: torch's own attention lays out a result by them, and writes it in another order."""
    signal = torch.randn(2, 20, requires_grad=True)
    windows = signal.unfold(1, 8, 1)[:, None]
    windows = windows if heads_first else windows.transpose(1, 2)
    copied = windows.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    candidates = registry.attention.explain(windows, windows, windows).candidates
    (refused,) = (one for one in candidates if one.variant == "torch_cpu")
    assert "call .contiguous() on q: its rows overlap" in str(refused.reasons[0])

    out, expected = registry.attention(windows, windows, windows), registry.attention(copied, copied, copied)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    gradient = torch.randn(2, 20).unfold(1, 8, 1)[:, None] if heads_first else torch.randn(out.shape)
    (found,) = torch.autograd.grad(out, windows, gradient)
    torch.testing.assert_close(found, torch.autograd.grad(expected, copied, gradient)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", [50.0, 1e4, 1e8, 1e30])
def test_high_softcaps_go_to_who_bends_scores_exactly(cap):
    """A kernel's tanh is off by 1e-7 of the softcap, whatever the score."""
    q, k, v = torch.randn(3, 1, 2, 40, 64)
    want = registry.attention.reference(q, k, v, softcap=cap)
    assert (registry.attention(q, k, v, softcap=cap) - want).norm() < 1e-5 * want.norm()
    decision = registry.attention.explain(
        registry.attention.problem_of(*[x.bfloat16() for x in (q, k, v)], softcap=cap, target=H200)[0]
    )
    refused = [c.variant for c in decision.candidates if any("up to 1000.0" in str(r) for r in c.reasons)]
    assert (decision.variant == "torch_math" and "gluon_fa3" in refused) if cap > 1000 else not refused
