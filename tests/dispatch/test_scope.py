"""use, prefer and record hold where they were opened: in this thread, this task, and the backward of this forward."""

from __future__ import annotations

import asyncio
import copy
import pickle

import pytest
import torch
from made_up import qkv
from races import in_threads

import registry
from registry import IllegalVariant, InvalidArgument, RegistryError, UnknownVariant, notices
from registry.dispatch.scope import EMPTY, current, went_elsewhere


def ran(*tensors, **kwargs):
    with registry.record() as recorder:
        registry.attention(*(tensors or qkv()), **kwargs)
    return next(iter(recorder.counts["attention"]))


def test_use_forces_and_ends():
    before = ran()
    with registry.use("torch_math"):
        assert ran() == "torch_math"
        with registry.use("torch_cpu"):
            assert ran() == "torch_cpu"
        assert ran() == "torch_math"
    assert ran() == before


def test_use_concerns_only_the_op_of_the_variant():
    with registry.use("torch_math"):
        assert registry.matmul(torch.ones(2, 3), torch.ones(3, 2)).shape == (2, 2)


def test_use_raises_with_the_reasons():
    with registry.use("torch_flash"), pytest.raises(IllegalVariant, match="arch"):
        registry.attention(*qkv())


def test_use_of_an_unknown_name_raises_at_once():
    with pytest.raises(UnknownVariant), registry.use("nothing"):
        pass
    with pytest.raises(UnknownVariant), registry.prefer(["torch_math", "nothing"]):
        pass


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (lambda: registry.use("torch_math", "torch_cpu"), "use: got torch_math and torch_cpu, both of attention"),
        (lambda: registry.use(["torch_math"]), "use: got a list; allowed: names, each an argument of its own"),
        (lambda: registry.prefer(3), "names: got 3; allowed: the name of a variant, or a list of names"),
    ],
    ids=["two of one op", "a list", "a number"],
)
def test_names_that_are_none_are_refused(block, said):
    with pytest.raises(InvalidArgument) as raised, block():
        pass
    assert str(raised.value).startswith(said)
    with pytest.raises(UnknownVariant, match="no variant 3 of any op"), registry.prefer([3]):
        pass
    with registry.use("torch_math", "torch_math", "torch_matmul"):
        assert ran() == "torch_math"


@pytest.mark.parametrize("value", [10**18, -(10**5000)], ids=["long", "very long"])
def test_a_pinned_config_of_very_long_integers_is_refused(declare, value):
    declare("test.tiled", configs=[{"B": 1}, {"B": 2}])
    said = "config: got .*integers of 18 digits at most"
    with pytest.raises(InvalidArgument, match=said), registry.use("test.tiled", config={"B": value}):
        registry.attention(*qkv())


def test_use_can_pin_the_config(declare):
    declare("test.tiled", configs=[{"B": 1}, {"B": 2}])
    with registry.use("test.tiled", config={"B": 2}):
        assert registry.attention.explain(*qkv()).config == {"B": 2}


def test_variant_argument_beats_use():
    with registry.use("torch_math"):
        assert ran(variant="torch_cpu") == "torch_cpu"


def test_prefer_takes_the_first_legal_and_reports_a_fallback():
    with registry.prefer(["torch_math"]):
        assert ran() == "torch_math"
    with registry.prefer(["torch_flash", "torch_math"]):
        assert ran() == "torch_math"
    with registry.prefer(["torch_flash"]):
        decision = registry.attention.explain(*qkv())
        registry.attention(*qkv())
        registry.attention(*qkv())
    assert decision.fallback_from == ("torch_flash",)
    fallbacks = {text: n for text, n in notices.counts().items() if "torch_flash" in text}
    assert len(fallbacks) == 1 and next(iter(fallbacks.values())) == 2
    assert "fallback" in str(decision)
    told = "preferred torch_flash is illegal for attention on cpu (cpu): dtype=float32, batch=1, heads_q=2"
    assert next(iter(fallbacks)).startswith(told) and next(iter(fallbacks)).endswith(": torch_cpu ran instead")


def test_fallbacks_of_other_sizes_are_counted_with_the_first():
    """A server meets a thousand lengths."""
    with registry.prefer(["torch_flash"]):
        for size in (4, 5, 6):
            registry.attention(*[torch.ones(1, 2, size, 8)] * 3)
    (count,) = [count for text, count in notices.counts().items() if "torch_flash" in text]
    assert count == 3


def test_a_preference_inside_another_comes_first_and_hides_nothing():
    with registry.prefer(["torch_math", "torch_cpu"]):
        with registry.prefer(["torch_flash"]):
            assert ran() == "torch_math"
            assert registry.attention.explain(*qkv()).fallback_from == ()
        with registry.prefer("torch_cpu"):
            assert ran() == "torch_cpu"
        assert ran() == "torch_math"


@pytest.mark.parametrize("make", [lambda: registry.use("torch_math"), lambda: registry.prefer("torch_math")])
def test_a_block_can_be_entered_again_inside_itself_and_by_others(make):
    block = make()
    with block:
        with block:
            assert ran() == "torch_math"
        with registry.use("torch_cpu"), block:
            pass
        assert ran() == "torch_math"
        assert in_threads(lambda _: block(ran)(), 2) == ["torch_math"] * 2
    assert ran() == "torch_cpu"
    with pytest.raises(KeyError), block, block:
        raise KeyError
    assert ran() == "torch_cpu"


@pytest.mark.parametrize("what", [None, 5, "torch_math", torch.nn.Linear], ids=str)
def test_a_block_is_a_decorator_of_functions_alone(what):
    """A class would be one no more."""
    for make in (lambda: registry.use("torch_math"), registry.record):
        with pytest.raises(InvalidArgument, match="^function: got .*; allowed: a function"):
            make()(what)
    assert registry.use("torch_math")(torch.nn.Linear(2, 2))(torch.ones(1, 2)).shape == (1, 2)


def stepping(block):
    with block as found:
        yield found
        yield found


def test_blocks_may_end_in_any_order():
    first, second = stepping(registry.use("torch_math")), stepping(registry.prefer("torch_math"))
    first_record, second_record = stepping(registry.record()), stepping(registry.record())
    recorders = [next(one) for one in (first, second, first_record, second_record)][2:]
    first_record.close()
    first.close()
    assert ran() == "torch_math" and registry.attention.explain(*qkv()).because == "preferred"
    registry.attention(*qkv())
    second.close()
    assert ran() == "torch_cpu"
    registry.attention(*qkv())
    second_record.close()
    assert [one.counts for one in recorders] == [{}, {"attention": {"torch_math": 2, "torch_cpu": 2}}]
    assert current.get() is EMPTY


def test_a_block_that_ends_in_another_thread_says_so():
    block = registry.use("torch_math")
    with block, pytest.raises(RegistryError, match="ends in another thread or task"):
        in_threads(lambda _: block.__exit__(None, None, None), 1)
    assert ran() == "torch_cpu"


def test_a_block_as_a_decorator_of_what_runs_later():
    block = registry.use("torch_math")

    @block
    async def later():
        await asyncio.sleep(0)
        return ran()

    async def main():
        return await asyncio.gather(later(), asyncio.to_thread(ran)), ran()

    assert asyncio.run(main()) == (["torch_math", "torch_cpu"], "torch_cpu")

    def steps():
        yield ran()

    async def later_steps():
        yield ran()

    for one in (steps, later_steps):
        with pytest.raises(InvalidArgument, match=f"{one.__name__}, a generator"):
            block(one)


def test_the_backward_runs_in_the_scope_of_its_forward():
    q, k, v = qkv(requires_grad=True)
    with registry.use("torch_math", "torch_math_backward"), registry.record() as recorder:
        out = registry.attention(q, k, v)
    in_threads(lambda _: out.sum().backward(), 1)  # a thread that knows nothing of the block
    assert recorder.counts == {"attention": {"torch_math": 1}, "attention_backward": {"torch_math_backward": 1}}


def test_threads_do_not_inherit_or_leak():
    with registry.use("torch_math"):
        assert in_threads(lambda _: ran(), 1) == ["torch_cpu"]
        assert ran() == "torch_math"


def test_tasks_do_not_leak():
    async def task(name, barrier):
        with registry.use(name):
            await barrier.wait()
            await asyncio.sleep(0)
            return ran()

    async def main():
        barrier = _Barrier(2)
        return await asyncio.gather(task("torch_math", barrier), task("torch_cpu", barrier))

    assert asyncio.run(main()) == ["torch_math", "torch_cpu"]


class _Barrier:
    """asyncio.Barrier for Python 3.10."""

    def __init__(self, parties):
        self._missing, self._open = parties, asyncio.Event()

    async def wait(self):
        self._missing -= 1
        if self._missing == 0:
            self._open.set()
        await self._open.wait()


def test_record_counts_problems():
    q, k, v = qkv()
    with registry.record() as recorder:
        for _ in range(3):
            registry.attention(q, k, v)
        registry.attention(q, k, v, causal=True)
    assert sorted(recorder.problems.values()) == [1, 3]
    assert sum(recorder.counts["attention"].values()) == 4


def test_records_nest():
    with registry.record() as outer:
        ran()
        with registry.record() as inner:
            ran()
    assert sum(outer.counts["attention"].values()) == 2
    assert sum(inner.counts["attention"].values()) == 1


def test_what_ran_can_be_copied_and_sent_to_another_process():
    with registry.record() as recorder:
        registry.attention(*qkv())
        went_elsewhere("a door", "a reason")
        sent, copied = pickle.loads(pickle.dumps(recorder)), copy.deepcopy(recorder)
        registry.attention(*qkv())
    for other in (sent, copied):
        assert other.counts == {"attention": {"torch_cpu": 1}, "elsewhere": {"a door: a reason": 1}}
        assert list(other.problems) == list(recorder.problems)
        other.add(registry.attention.explain(*qkv()))
        assert other.counts == recorder.counts  # it counts on, and for itself
    assert recorder.counts["attention"] == {"torch_cpu": 2}
