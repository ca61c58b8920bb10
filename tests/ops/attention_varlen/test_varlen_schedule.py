"""A schedule is made once a step and shared by its calls; variants say what they share."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ragged import batch
from torch.utils.flop_counter import FlopCounterMode

import registry

varlen = registry.attention_varlen


@pytest.fixture
def counted(declare):
    """A variant that makes a list of a step's lengths, and hands it to its calls."""
    made, handed, bound = [], [], []

    def schedule(problem, config):
        bound.append(problem)

        def make(q, k, *, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table):
            made.append((problem.window, cu_seqlens_q.tolist()))
            return made[-1]

        return make

    def run(q, k, v, *, schedule, **given):
        handed.append(schedule)
        return torch.zeros_like(q), None

    claims = dict(dtypes=("float64",), kv_layouts=("packed",), gqa=True, window=True)
    declare("test.counted", op="attention_varlen", run=run, schedule=schedule, **claims)
    return made, handed, bound


def test_a_variant_makes_what_its_calls_share_once(counted):
    made, handed, bound = counted
    qkv, how = batch()
    plan = varlen.schedule(*qkv, **how)
    assert not made
    for window in (None, None, (2, 1), (2, 1), None):
        varlen(*qkv, **how, window=window, plan=plan, variant="test.counted")
    assert [window for window, _ in made] == [None, (2, 1)]
    assert handed == [made[0], made[0], made[1], made[1], made[0]]
    varlen(*qkv, **how, variant="test.counted")
    assert handed[-1] is None and len(made) == 2
    varlen(*qkv, **how, plan=varlen.schedule(*qkv, **how), variant="test.counted")
    assert len(made) == 3 and len(bound) == 2, "a step makes a list, and binds nothing that steps before it bound"


def test_a_call_of_other_lengths_is_refused_where_they_can_be_seen():
    """On a CPU: other tensors, and the same ones that were written to since. A GPU takes those of the schedule."""
    qkv, how = batch()
    plan = varlen.schedule(*qkv, **how)
    lie = how | {"cu_seqlens_q": torch.full_like(how["cu_seqlens_q"], 10**6)}
    for call in (varlen, varlen.explain):
        with pytest.raises(registry.InvalidArgument, match="plan: got a schedule of .* as cu_seqlens_q for a call of "):
            call(*qkv, **lie, plan=plan)
    with pytest.raises(registry.InvalidArgument, match="cu_seqlens_q"):
        varlen.schedule(*qkv, **lie)
    how["cu_seqlens_q"][1] -= 1
    with pytest.raises(registry.InvalidArgument, match="plan: got a schedule of .* as cu_seqlens_q for a call of "):
        varlen(*qkv, **how, plan=plan)


def test_a_schedule_of_another_step_is_refused():
    qkv, how = batch()
    others, other = batch(queries=(3, 3), keys=(4, 4))
    with pytest.raises(registry.InvalidArgument, match="plan: got a schedule of batch=2 for a call of batch=5"):
        varlen(*qkv, **how, plan=varlen.schedule(*others, **other))


@pytest.mark.parametrize(
    "mode",
    [lambda: FlopCounterMode(display=False), lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["counted", "autocast"],
)
def test_it_is_followed_under_a_mode_too(mode):
    qkv, how = batch(dtype=torch.float32)
    plan, expected = varlen.schedule(*qkv, **how), varlen(*qkv, **how)
    others = how | {"cu_seqlens_q": how["cu_seqlens_q"].flip(0), "cu_seqlens_k": how["cu_seqlens_k"].flip(0)}
    with mode():
        torch.testing.assert_close(varlen(*qkv, **how, plan=plan).float(), expected, rtol=0.05, atol=0.05)
        with pytest.raises(registry.InvalidArgument, match="plan: got a schedule of "):
            varlen(*qkv, **others, plan=plan)
        with pytest.raises(registry.InvalidArgument, match="plan: got a schedule of max_seqlen_q=7"):
            varlen(*qkv, **how | {"max_seqlen_q": 6}, plan=plan)


def test_a_compiled_call_passes_it_over():
    qkv, how = batch()
    plan = varlen.schedule(*qkv, **how)

    def call(q, k, v):
        return varlen(q, k, v, **how, plan=plan)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv), call(*qkv))


def test_the_page_runs():
    page = (Path(__file__).parents[3] / "docs" / "varlen.md").read_text(encoding="utf-8")
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "varlen.md", "exec"), namespace)
    assert namespace["out"].shape == (3, 1, 8, 64) and namespace["cache_k"][2, 9].equal(namespace["new"][2, 0])


def test_gradients_follow_a_schedule():
    (q, k, v), how = batch()
    plan = varlen.schedule(q, k, v, **how)
    leaf = q.clone().requires_grad_()
    varlen(leaf, k, v, **how, plan=plan).sum().backward()
    (expected,) = torch.autograd.grad(varlen.reference(q.requires_grad_(), k, v, **how).sum(), q)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("plan", [1, "plan", torch.ones(2)], ids=lambda plan: type(plan))
def test_a_plan_is_a_schedule(plan):
    qkv, how = batch()
    for call in (varlen, varlen.explain):
        with pytest.raises(registry.InvalidArgument, match="plan: got"):
            call(*qkv, **how, plan=plan)


def test_a_call_that_has_one_is_explained():
    qkv, how = batch()
    plan = varlen.schedule(*qkv, **how)
    assert varlen.explain(*qkv, **how, plan=plan).variant == varlen.explain(*qkv, **how).variant
    with pytest.raises(registry.InvalidArgument, match="plan"):
        varlen.explain(*qkv, **how | {"max_seqlen_q": 100, "max_seqlen_k": 3 * how["max_seqlen_k"]}, plan=plan)


def test_lengths_that_changed_since_into_lies_are_seen_on_a_cpu():
    qkv, how = batch()
    plan = varlen.schedule(*qkv, **how)
    how["cu_seqlens_k"][1] = 2**31 - 1
    with pytest.raises(registry.InvalidArgument, match="cu_seqlens_k"):
        varlen(*qkv, **how, plan=plan)


@pytest.mark.parametrize("first", ["scheduled", "not"])
def test_calls_with_and_without_a_schedule_have_launches_of_their_own(first, declare):
    """A launch may hold on to the strides of the tensors that it meets first, and a schedule has a table of its own."""
    strides = []

    def prepare(problem, config):
        known = []

        def launch(q, k, v, *, scale, cu_seqlens_q, seqused_k, block_table):
            known.append(block_table.stride())
            strides.append(known[0] == block_table.stride())
            return torch.zeros_like(q), None

        return launch

    run = lambda *tensors, config, **given: prepare(None, config)(*tensors, **given)  # noqa: E731
    declare(
        "test.held",
        op="attention_varlen",
        run=run,
        prepare=prepare,
        dtypes=("float64",),
        kv_layouts=("paged",),
        page_size=(1, 64),
        gqa=True,
    )
    qkv, how = batch("paged")
    wide = torch.zeros(how["block_table"].shape[0], 64, dtype=torch.int32)
    wide[:, : how["block_table"].shape[1]] = how["block_table"]
    how["block_table"] = wide[:, : how["block_table"].shape[1]]
    plan = varlen.schedule(*qkv, **how)
    plans = (plan, None) if first == "scheduled" else (None, plan)
    for one in plans * 2:
        varlen(*qkv, **how, plan=one, variant="test.held")
    assert strides == [True] * 4


def test_a_schedule_of_another_table_is_refused():
    qkv, how = batch("paged", page=64)
    plan = varlen.schedule(*qkv, **how)
    more = how | {"block_table": torch.nn.functional.pad(how["block_table"], (0, 3))}
    width = how["block_table"].shape[1]
    said = f"plan: got a schedule of {width} pages a sequence for a call of {width + 3}"
    for call in (varlen, varlen.explain):
        with pytest.raises(registry.InvalidArgument, match=said):
            call(*qkv, **more, plan=plan)


def test_a_schedule_stays_on_its_device():
    qkv, how = batch()
    plan = varlen.schedule(*qkv, **how)
    problem, _ = varlen.problem_of(*qkv, **how)
    with pytest.raises(registry.InvalidArgument, match="on cpu for a call on cuda:1"):
        plan.check(problem, torch.device("cuda:1"), None)
