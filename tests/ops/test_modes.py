"""Dispatch modes see every call, the warm ones too: selective checkpointing, fake tensors, flop counters, one's own."""

from __future__ import annotations

import contextlib
import functools
import sys
import types

import pytest
import torch
from ran import printed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import registry
from registry.ops.parts import counting

pytestmark = pytest.mark.usefixtures("quick_python")

OPS = torch.ops.registry
CU = torch.tensor([0, 3, 8], dtype=torch.int32)
LENGTHS = ((3, 3), (5, 5))


def packed(q, k, v, **how):
    """attention_varlen of two sequences, taken from (and given in) the shape of a batch of one."""
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    how = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 5, "max_seqlen_k": 5} | how
    return registry.attention_varlen(q, k, v, **how).transpose(0, 1)[None]


def product(q, k, v):
    return registry.matmul(registry.matmul(q, k.mT), v)


CALLS = {"attention": registry.attention, "attention_varlen": packed, "matmul": product}
each_call = pytest.mark.parametrize("name", CALLS)


def tensors(grad=False):
    return [torch.randn(1, 2, 8, 16, requires_grad=grad) for _ in range(3)]


@pytest.fixture(autouse=True)
def warm():
    """Plans and guards of the very calls below are there: nothing about them is a first time."""
    for grad in (False, True):
        for call in CALLS.values():
            for _ in range(2):
                call(*tensors(grad))


class Spy(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Overlooked(Spy):
    """torch's guards overlook modes that say what this one says, as checkpointing's do."""

    @classmethod
    def ignore_compile_internals(cls):
        return True


@each_call
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Spy, Overlooked])
def test_a_mode_of_ones_own_sees_warm_calls(name, grad, kind):
    qkv = tensors(grad)
    expected = CALLS[name](*qkv)
    with kind() as spy:
        found = CALLS[name](*qkv)
        if grad:
            found.sum().backward()
    torch.testing.assert_close(found, expected)
    assert f"registry.{name}.default" in spy.seen
    if grad and name != "matmul":
        assert f"registry.{name}_backward.default" in spy.seen


@each_call
@pytest.mark.parametrize("kind", [Spy, Overlooked])
def test_a_mode_that_is_entered_after_the_forward_sees_the_gradients(name, kind):
    qkv = tensors(grad=True)
    expected = torch.autograd.grad(CALLS[name](*qkv).sum(), qkv)
    loss = CALLS[name](*qkv).sum()
    with kind() as spy:
        found = torch.autograd.grad(loss, qkv)
    torch.testing.assert_close(found, expected)
    assert f"registry.{name}.default" in spy.seen or f"registry.{name}_backward.default" in spy.seen


@each_call
def test_fake_tensors_of_warm_shapes(name):
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = CALLS[name](*tensors(grad=True))
        found.sum().backward()
    assert found.shape == (1, 2, 8, 16) and type(found) is not torch.Tensor


@each_call
@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing_of_some_layers(name, saved):
    """Layer 0 is checkpointed and layer 1 is not, which keeps plans of the same shapes warm."""
    wanted = getattr(OPS, name).default
    seen = []

    def policy(context, op, *args, **kwargs):
        seen.append(op)
        keep = saved and op is wanted
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def model(q, k, v, selective):
        first = CALLS[name](q, k, v)
        if selective:
            first = checkpoint(CALLS[name], q, k, v, use_reentrant=False, context_fn=contexts)
        return CALLS[name](first, k, v).square().sum()

    qkv = tensors(grad=True)
    expected = torch.autograd.grad(model(*qkv, False), qkv)
    for _ in range(2):
        found = torch.autograd.grad(model(*qkv, True), qkv)
        torch.testing.assert_close(found, expected)
    assert wanted in seen


# --- gradients by name -----------------------------------------------------------------------------------------------


PACKED = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 5, "max_seqlen_k": 5}


def saved(name):
    """(an op of gradients, what it takes, how)."""
    if name == "attention":
        q, k, v = tensors()
        out, lse = registry.attention(q, k, v, causal=True, return_lse=True)
        return registry.attention.backward, [torch.randn_like(out), q, k, v, out, lse], {"causal": True}
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    how = PACKED | {"causal": True, "sinks": torch.randn(2)}
    out, lse = registry.attention_varlen(q, k, v, **how, return_lse=True)
    return registry.attention_varlen.backward, [torch.randn_like(out), q, k, v, out, lse], how


by_name = pytest.mark.parametrize("name", ["attention", "attention_varlen"])


@by_name
@pytest.mark.parametrize("way", ["mode", "compiled", "compiled, by Inductor", "make_fx", "autocast", "function mode"])
def test_gradients_by_name(name, way):
    backward, given, how = saved(name)
    expected = backward(*given, **how)
    call = functools.partial(backward, **how)
    if way.startswith("compiled"):
        found = torch.compile(call, backend="inductor" if "by" in way else "aot_eager", fullgraph=True)(*given)
    elif way == "make_fx":
        found = make_fx(call)(*given)(*given)
    elif way == "mode":
        with Spy() as spy:
            found = call(*given)
        assert spy.seen.count(f"registry.{name}_backward.default") == 1
    else:
        with torch.autocast("cpu", torch.bfloat16) if way == "autocast" else torch.device("cpu"):
            found = call(*given)
    close = {"rtol": 0.1, "atol": 0.1} if way == "autocast" else {}  # which torch's own operations are under, too
    torch.testing.assert_close(tuple(found), expected, **close)


@by_name
@pytest.mark.parametrize("where", ["fake", "meta"])
def test_gradients_by_name_of_tensors_without_memory(name, where):
    backward, given, how = saved(name)
    expected = backward(*given, **how)
    with FakeTensorMode() if where == "fake" else contextlib.nullcontext() as mode:
        turned = mode.from_tensor if where == "fake" else (lambda x: x.to("meta"))
        given = [turned(x) for x in given]
        how = {n: turned(x) if isinstance(x, torch.Tensor) else x for n, x in how.items()}
        found = backward(*given, **how)
        assert [x.shape for x in found] == [x.shape for x in expected]
        with pytest.raises(registry.InvalidArgument, match="lse: got shape"):
            backward(*given[:5], given[5][..., :-1], **how)


def test_gradients_by_name_under_vmap():
    backward, (grad, *given), how = saved("attention")
    grads = torch.stack([grad, grad.cos(), grad * 2])
    found = torch.func.vmap(lambda grad: backward(grad, *given, **how)[1])(grads)
    torch.testing.assert_close(found, torch.stack([backward(grad, *given, **how)[1] for grad in grads]))


@by_name
def test_the_variant_of_gradients_by_name_holds_under_a_mode(name):
    backward, given, how = saved(name)
    variant = {"attention": "torch_math_backward", "attention_varlen": "torch_varlen_math_backward"}[name]
    with Spy(), registry.record() as ran:
        backward(*given, **how, variant=variant)
        with registry.use(variant):
            backward(*given, **how)
    assert ran.counts == {f"{name}_backward": {variant: 2}}
    with Spy(), pytest.raises(registry.IllegalVariant):
        backward(*given, **how, variant="triton_fa2_backward" if name == "attention" else "triton_varlen_backward")
    compiled = torch.compile(functools.partial(backward, **how, variant=variant), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="'variant', .*None in a compiled function"):
        compiled(*given)


# --- floating-point operations ---------------------------------------------------------------------------------------


def counted(function, *inputs):
    with FlopCounterMode(display=False) as counter:
        function(*inputs).sum().backward()
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


def test_attention_counts_as_torch_does_where_nothing_is_masked():
    q, k, v = tensors(grad=True)
    found = counted(registry.attention, q, k, v)
    pairs = 2 * 8 * 8
    assert found == {"registry.attention": 4 * pairs * 16, "registry.attention_backward": 10 * pairs * 16}
    assert found["registry.attention"] == sdpa_flop_count(q.shape, k.shape, v.shape)
    assert found["registry.attention_backward"] == sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)


@pytest.mark.parametrize("how", [{"causal": True}, {"window": (2, 1)}, {"window": (None, 2), "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("lengths", [(8, 8), (4, 8)])
def test_masked_pairs_are_not_counted(how, lengths):
    q, k, v = (torch.randn(2, heads, length, 16) for heads, length in ((4, lengths[0]), (2, 8), (2, 8)))
    problem, _ = registry.attention.problem_of(q, k, v, **how)
    q.requires_grad_()
    found = counted(lambda *qkv: registry.attention(*qkv, **how), q, k, v)
    forward = registry.attention.flops(problem)
    assert forward < 4 * 2 * 4 * lengths[0] * 8 * 16
    assert found == {"registry.attention": forward, "registry.attention_backward": 2.5 * forward}


def test_packed_sequences_count_by_their_lengths():
    forward = 4 * 16 * 2 * sum(n * (n + 1) // 2 for n, _ in LENGTHS)
    found = counted(lambda *qkv: packed(*qkv, causal=True), *tensors(grad=True))
    assert found == {"registry.attention_varlen": forward, "registry.attention_varlen_backward": 2.5 * forward}


def test_packed_sequences_that_nobody_can_see_count_by_their_share():
    q, k, v = (torch.empty(8, 2, 16, device="meta") for _ in range(3))
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    with FlopCounterMode(display=False) as counter:
        registry.attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=5, max_seqlen_k=5)
    assert counter.get_total_flops() == 4 * 16 * 2 * (2 * 4 * 4)


def test_a_cache_counts_by_what_is_used_of_it():
    q, cache = torch.randn(2, 2, 16), torch.randn(2, 32, 2, 16)
    cu, used = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([7, 20], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        registry.attention_varlen(
            q, cache, cache, cu_seqlens_q=cu, seqused_k=used, max_seqlen_q=1, max_seqlen_k=32, causal=True
        )
    assert counter.get_total_flops() == 4 * 16 * 2 * (7 + 20)


def test_products_count_as_torch_counts_them():
    a, b = torch.randn(3, 4, 5, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    ours, theirs = counted(registry.matmul, a, b), counted(torch.matmul, a, b)
    assert set(ours) == {"registry.matmul"} and sum(ours.values()) == sum(theirs.values()) == 3 * 2 * 3 * 4 * 5 * 6


def test_formulas_are_there_where_the_counter_was_imported_first():
    program = """
import torch
from torch.utils.flop_counter import FlopCounterMode
import registry
with FlopCounterMode(display=False) as mode:
    registry.matmul(torch.ones(2, 3), torch.ones(3, 4))
assert mode.get_total_flops() == 48
"""
    printed(sys.executable, "-c", program, timeout=120)


def test_formulas_wait_for_the_counter(monkeypatch):
    """As where `registry` is imported first: a module of that name is handed the formulas once it has been run."""
    handed = {}
    counter = types.SimpleNamespace(
        register_flop_formula=lambda op, get_raw: functools.partial(handed.__setitem__, str(op))
    )
    monkeypatch.setattr(counting, "_waiting", {})
    monkeypatch.delitem(sys.modules, "torch.utils.flop_counter")
    counting.counted("matmul", len)
    (finder,) = (f for f in sys.meta_path if isinstance(f, counting._WhenImported))
    assert not handed
    spec = finder.find_spec("torch.utils.flop_counter", None)
    assert finder not in sys.meta_path
    ran = []
    monkeypatch.setattr(spec.loader, "_inner", types.SimpleNamespace(exec_module=ran.append))
    spec.loader.exec_module(module := types.SimpleNamespace(**vars(counter), __spec__=None))
    assert ran == [module] and handed == {"registry.matmul": len}
