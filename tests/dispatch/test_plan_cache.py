"""How a call finds its plan: guard, facts, Problem; what is kept, what is forgotten, and who may look at once."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from made_up import math_run, qkv
from races import in_threads

import registry
from registry import InvalidArgument
from registry.dispatch import plan_cache
from registry.dispatch.plan import Plan
from registry.dispatch.plan_cache import PlanCache, forget_plans
from registry.ops.parts.memory import conditions
from registry.ops.tensors import ieee_float32, plain

MASKS = (False, None, 0.0, False, None)


def a_cache(make=None, limit=64):
    return PlanCache(
        make or (lambda settings, with_grad, tensors: Plan(None, None, None, None, with_grad)), plain, limit
    )


def pair(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs), torch.zeros(*shape, **kwargs)


# --- what tells plans apart ---------------------------------------------------------------------------------------


def test_equal_calls_share_a_plan_and_others_do_not():
    cache = a_cache()
    plan = cache.find("settings", *pair(4, 4))
    assert cache.find("settings", *pair(4, 4)) is plan
    others = {
        "settings": ("others", *pair(4, 4)),
        "shape": ("settings", *pair(2, 8)),
        "stride": ("settings", *(t.t() for t in pair(4, 4))),
        "dtype": ("settings", *pair(4, 4, dtype=torch.float64)),
        "one dtype": ("settings", torch.zeros(4, 4), torch.zeros(4, 4, dtype=torch.float64)),
        "grad": ("settings", *pair(4, 4, requires_grad=True)),
        "alignment": ("settings", torch.zeros(17)[1:].view(4, 4), torch.zeros(4, 4)),
        "number": ("settings", *pair(4, 4), torch.zeros(4, 4)),
    }
    found = {name: cache.find(*call) for name, call in others.items()}
    assert len({id(other) for other in (plan, *found.values())}) == len(found) + 1
    for name, call in others.items():
        assert cache.find(*call) is found[name], name
    assert found["grad"].with_grad and not plan.with_grad
    with torch.no_grad():
        assert not cache.find("settings", *others["grad"][1:]).with_grad


def test_bases_off_sixteen_bytes_have_guards_of_their_own(monkeypatch):
    """And only for tensors that lie exactly so."""
    cache, far = a_cache(), torch.zeros(17)
    near, other = far[:16].view(4, 4), torch.zeros(4, 4)
    calls = [
        (near, other),
        (far[1:].view(4, 4), other),
        (other, far[1:].view(4, 4)),
        (other, torch.zeros(18)[2:].view(4, 4)),
    ]
    found = [cache.find("settings", *call) for _ in range(2) for call in calls][:4]
    assert len(set(map(id, found))) == 4
    monkeypatch.setattr(cache, "by_facts", None)  # not asked again
    for _ in range(2):
        assert [cache.find("settings", *call) for call in calls] == found


def test_a_plan_that_writes_to_out_is_kept_by_a_guard_while_no_memory_is_shared(monkeypatch):
    memory = torch.randn(3, 4, 4)
    a, b, out = memory.clone()[0], memory.clone()[1], torch.empty(4, 4)
    bias, wanted = torch.randn(4), a @ b
    for _ in range(2):
        assert registry.matmul(a, b, out=out) is out
        assert registry.matmul(a, b, bias=bias, out=torch.empty(4, 4)).shape == (4, 4)
    with monkeypatch.context() as patch:
        patch.setattr(registry.matmul.plans, "by_facts", None)
        for _ in range(2):
            torch.testing.assert_close(registry.matmul(a, b, out=out.zero_()), wanted)
            torch.testing.assert_close(registry.matmul(a, b, bias=bias, out=out.zero_()), wanted + bias)
    torch.testing.assert_close(registry.matmul(a, b, out=a), wanted)  # a's old numbers are gone, the result is right
    leaf = torch.empty(4, 4, requires_grad=True)
    with pytest.raises(InvalidArgument, match="out.*requires grad"):
        registry.matmul(memory[0], memory[1], out=leaf)
    with torch.no_grad():
        registry.matmul(memory[0].clone(), memory[1].clone(), out=leaf)
    with pytest.raises(InvalidArgument, match="out.*requires grad"):
        registry.matmul(memory[0].clone(), memory[1].clone(), out=leaf)


def test_state_of_torch_tells_plans_apart():
    cache, tensors = a_cache(), pair(4, 4)
    plan = cache.find("settings", *tensors)
    precision = torch.get_float32_matmul_precision()
    for other in conditions(ieee=precision != "highest"), conditions(deterministic=True), registry.prefer("torch_math"):
        with other:
            assert cache.find("settings", *tensors) is not plan
    assert cache.find("settings", *tensors) is plan


@pytest.mark.parametrize("older", ["highest", "high"])
def test_both_of_torchs_ways_to_ask_for_float32_count(older):
    """Where both were used and disagree, torch's older getter raises."""
    cache, tensors, newer = a_cache(), pair(4, 4), torch.backends.cuda.matmul
    with conditions(ieee=True):
        torch.set_float32_matmul_precision(older)
        found = {}
        for asked in ("tf32", "ieee"):
            newer.fp32_precision = asked
            found[asked] = cache.find("settings", *tensors)
            assert ieee_float32() == (asked == "ieee")
            with conditions(ieee=True):
                assert ieee_float32()
            assert newer.fp32_precision == asked and cache.find("settings", *tensors) is found[asked]
            assert registry.matmul(*tensors).isfinite().all()
        assert found["tf32"] is not found["ieee"]


def test_inference_mode_gets_a_guard_of_its_own(monkeypatch):
    """A model is often tried outside of inference mode first; the plan is the same, but torch's guards differ."""
    cache = a_cache()
    plan = cache.find("settings", *pair(4, 4))
    assert cache.find("settings", *pair(4, 4)) is plan
    with torch.inference_mode():
        tensors = pair(4, 4)
        assert cache.find("settings", *tensors) is plan
        monkeypatch.setattr(cache, "by_facts", None)
        assert cache.find("settings", *tensors) is plan
    assert cache.find("settings", *pair(4, 4)) is plan


def test_optional_tensors_have_their_places():
    cache, (a, b) = a_cache(), pair(4, 4)
    plans = {cache.by_facts("settings", a, b, *rest) for rest in ((), (a, None), (None, a), (a, a))}
    assert len(plans) == 4


def test_one_tensor_in_two_places():
    cache, (a, _) = a_cache(), pair(4, 4)
    plan = cache.find("settings", a, a)
    assert cache.find("settings", a, a) is plan


def test_a_backward_launch_is_bound_for_its_gradients_dtype(declare):
    """A launch that is bound for a float32 gradient must not be handed another one, which the op refuses."""
    bound = []

    def prepare(problem, config):
        bound.append(problem.operands[3].dtype)
        return lambda grad_out, q, k, v, out, lse, *, scale, **_: (q, k, v)

    declare("test.bound", op="attention_backward", run=lambda *a, **k: None, prepare=prepare, lse=True)
    q, k, v = qkv()
    out, lse = registry.attention(q, k, v, return_lse=True)
    given = (q, k, v, out, lse)
    registry.attention.backward(torch.ones_like(out), *given, scale=0.25, variant="test.bound")
    with pytest.raises(registry.InvalidArgument, match="grad_out: got float64"):
        registry.attention.backward(torch.ones_like(out).double(), *given, scale=0.25, variant="test.bound")
    registry.attention.backward(torch.ones_like(out), *given, scale=0.25, variant="test.bound")
    assert bound == ["float32"]


def test_a_window_given_as_a_list_is_kept_under_its_tuple():
    q, k, v = qkv()
    for _ in range(2):
        registry.attention(q, k, v, window=(3, 1))
    before = len(registry.attention.plans)
    expected = registry.attention(q, k, v, window=(3, 1))
    assert torch.equal(registry.attention(q, k, v, window=[3, 1]), expected)
    assert len(registry.attention.plans) == before


# --- who must see the call ----------------------------------------------------------------------------------------


def test_selective_checkpointing_keeps_what_it_was_told_to(declare):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    runs = []

    def run(*args, **kwargs):
        runs.append(1)
        return math_run(*args, **kwargs)

    declare("test.counted", run=run, lse=True)

    def policy(context, op, *args, **kwargs):
        ours = op is torch.ops.registry.attention.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = qkv(requires_grad=True)
    for _ in range(2):
        with registry.use("test.counted"):
            registry.attention(q, k, v)
            runs.clear()
            out = checkpoint(
                lambda q, k, v: registry.attention(q * 2, k, v).sin(),
                *(q, k, v),
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )
            out.sum().backward()
        assert len(runs) == 1


def test_subclasses_and_fakes_find_nothing():
    cache = a_cache()
    meta = torch.zeros(4, 4, device="meta")
    cache.find("settings", *pair(4, 4))
    assert cache.find("settings", meta, meta) is None
    assert cache.find("settings", 1.0, "two") is None
    with torch.device("cpu"):  # a function mode
        assert cache.find("settings", *pair(4, 4)) is None


# --- what is kept -------------------------------------------------------------------------------------------------


def test_a_full_cache_drops_the_oldest_and_is_bounded_by_guards_too():
    cache, b = a_cache(limit=16), torch.zeros(1)
    first = cache.find("settings", torch.zeros(1), b)
    for size in range(2, 100):
        last = cache.find("settings", torch.zeros(size), b)
        assert len(cache) <= 16
    assert cache.find("settings", torch.zeros(99), b) is last
    assert cache.find("settings", torch.zeros(1), b) is not first


def test_more_layouts_than_guards_are_still_found():
    cache, b = a_cache(), torch.zeros(1)
    calls = [torch.zeros(64, size)[:, :1] for size in range(1, 2 * plan_cache.GUARDS)]
    plans = [cache.find("settings", a, b) for a in calls]
    assert [cache.find("settings", a, b) for a in calls] == plans and len(set(map(id, plans))) == len(plans)


def test_a_call_gets_a_guard_when_it_comes_again():
    """Who draws a new shape each time would pay for one that nobody asks."""
    cache, tensors = a_cache(), pair(4, 4)
    cache.find("settings", *tensors)
    assert len(cache) == 1
    cache.find("settings", *tensors)
    assert len(cache) == 2


def test_registering_forgets_old_plans(declare):
    registry.attention(*qkv())
    declare("test.new", arch=("cpu",))
    assert len(registry.attention.plans) == 0


def test_a_guard_for_a_plan_that_was_forgotten_meanwhile_is_not_kept():
    cache = a_cache()
    tensors = pair(4, 4)
    cache.find("settings", *tensors)
    add_guard = cache._add_guard

    def forget_first(*args):
        forget_plans()
        add_guard(*args)

    cache._add_guard = forget_first
    cache.find("settings", *tensors)
    assert len(cache) == 0


# --- threads ------------------------------------------------------------------------------------------------------


def test_threads_make_a_plan_once():
    made = []

    def slowly(settings, with_grad, tensors):
        made.append(1)
        time.sleep(0.05)
        return Plan(None, None, None)

    cache, tensors = a_cache(slowly), pair(4, 4)
    found = in_threads(lambda _: cache.find("settings", *tensors), 8)
    assert len(made) == 1 and len(set(map(id, found))) == 1


def test_discovery_does_not_run_under_the_lock(monkeypatch):
    """A plugin may register variants, which forgets plans, or call an op, while another thread's call waits for it."""
    free = []

    class Discovering:
        def get(self):
            other = threading.Thread(target=lambda: (forget_plans(), free.append(True)), daemon=True)
            other.start()
            other.join(60)  # which a busy machine does not take; who waits for the lock would wait for ever

    monkeypatch.setattr(plan_cache, "catalog", Discovering())
    a_cache().find("settings", *pair(4, 4))
    assert free == [True]


def test_making_a_plan_may_ask_for_another():
    def make(settings, with_grad, tensors):
        return cache.by_facts("inner", *tensors) if settings == "outer" else Plan(None, None, None)

    cache = a_cache(make)
    assert cache.find("outer", *pair(4, 4)) is cache.find("inner", *pair(4, 4))


# --- launches -----------------------------------------------------------------------------------------------------


def test_the_first_launch_replaces_itself(declare):
    prepared = []

    def prepare(problem, config):
        prepared.append(problem)
        return lambda q, k, v, *, scale: (q + scale, None)

    declare("test.bound", prepare=prepare)
    tensors = qkv()
    plan = registry.attention.find_plan((*MASKS[:4], "test.bound"), *tensors)
    assert prepared == []
    first = plan.launch
    for _ in range(2):
        assert torch.equal(plan.launch(*tensors, scale=1.0)[0], tensors[0] + 1.0)
    assert torch.equal(first(*tensors, scale=1.0)[0], tensors[0] + 1.0)  # a thread may hold on to it
    assert plan.launch != first and len(prepared) == 1


def test_a_first_launch_that_fails_is_watched_again(declare):
    tries = []

    def prepare(problem, config):
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not a matter of compiling")
        return lambda q, k, v, *, scale: (q, None)

    declare("test.moody", prepare=prepare)
    tensors = qkv()
    with pytest.raises(ValueError, match="compiling"):
        registry.attention(*tensors, variant="test.moody")
    assert torch.equal(registry.attention(*tensors, variant="test.moody"), tensors[0])
