"""What decisions cost on the CPU, without allocation and launch: one made before, and one for a new shape.

The gates hold anywhere.

pytest benchmarks/test_dispatch_overhead.py
"""

from __future__ import annotations

import gc
import itertools
import resource
import sys
import time
import timeit
from pathlib import Path

import pytest
import torch
from fake_cuda import FakeCuda
from launch_support import fake_gpu
from new_shapes import decided, drawing
from slow_cores import arithmetic, many_functions, slower_by

import registry
from registry.dispatch.plan_cache import ENTRIES, forget_plans
from registry.dispatch.scope import EMPTY
from registry.ops.attention.op import attention
from registry.ops.known import op_named
from registry.ops.matmul.op import matmul
from registry.tuning.grids import grid

DECISION_US = 2.0
"""The budget of one such decision, in microseconds, on a quiet machine of the class that CI has."""
NEW_SHAPE_STEPS = 11_500
"""Of a plan for a shape not seen before, whose kernels are compiled (checks, Problem, decision, binding), in steps of
Python's bytecode, which are as many on every machine: in the median attention takes 10,400."""
NEW_SHAPE_US = 250.0
"""And in time. It was 150 us, which is what it should take, until a busy machine took 200 for the same steps, at work
that `slower_by` finds 1.16 times as slow."""
RANDOM_STEPS, SLOWEST_STEPS = 15_000, 30_000
"""The same without checks, for shapes drawn at random, each of another kind than the one before, in steps of Python's
bytecode, which are as many on every machine: in the median, and at the 95th percentile. Packed and paged batches take
12,100 and 23,100, products 6,100 and 14,300."""
RANDOM_US, SLOWEST_US = 600.0, 1200.0
"""And in time, which neighbours who share the caches stretch by more than what `slower_by` repeats."""
GROWN_US = 40.0
"""The budget of a plan where only a length grew, as a cache does by a token."""
LAUNCHED_STEPS = 1_900
"""Of a plan with its launch where only a length grew, over one of a length seen before: 1,690 for gluon_fa3."""
LAUNCHED_US = 80.0
"""And in time. It was 40: of the same steps some processes took 34 us, others 52 to 70, on one busy machine."""
SHAPES = 100_000
"""How many different shapes a process may meet: the memo keeps a part of them."""
FLAT_MIB, STALL_US = 16, 20_000
"""What meeting the later half of them may add to the process, and how long one call may take at most."""


@pytest.fixture
def tensors():
    q, k, v = torch.randn(3, 2, 4, 64, 64)
    registry.attention(q, k, v)
    registry.matmul(q[0, 0], k[0, 0])
    return q, k, v


def best_us(*functions, number=500, repeat=200):
    """The fastest of many short runs of each, in turns: what the code costs when nobody else has the core.

    By the thread's own clock, which stands still while others have it, and in runs shorter than a turn on a core.
    """
    clocks = [timeit.Timer(function, timer=time.thread_time) for function in functions]
    runs = [[clock.timeit(number) for clock in clocks] for _ in range(repeat)]
    return [min(taken) / number * 1e6 for taken in zip(*runs, strict=True)]


def check_budget(budget, taken, attempts=9, kinds=(arithmetic, many_functions)):
    """The gate: what `taken` gives, in microseconds, must once be within the budget. A core that is slower than the one
    the budget was set on, at work of these kinds, gets as much more: whether before or after, for it changes by the
    second."""
    slower = slower_by(*kinds)
    for _ in range(attempts):
        before, found, slower = slower, taken(), slower_by(*kinds)
        if found / max(before, slower) < budget:
            return
    each = ", ".join(f"{slower_by(kind):.2f} by {kind.__name__}" for kind in (arithmetic, many_functions))
    pytest.fail(f"{found:.2f} us on a core {slower:.2f} times as slow as that of the budget ({each})")


def attention_again(q, k, v, settings=(False, None, 0.0, False, None)):
    return lambda: attention.find_plan(settings, q, k, v)


def matmul_again(a, b, settings=(None, None, None)):
    return lambda: matmul.find_plan(settings, a, b)


def test_attention_decision(benchmark, tensors):
    plan = benchmark(attention_again(*tensors))
    assert plan is not None


def test_matmul_decision(benchmark, tensors):
    plan = benchmark(matmul_again(tensors[0][0, 0], tensors[1][0, 0]))
    assert plan is not None


def test_a_decision_made_before_is_within_its_budget(tensors):
    q, k, v = tensors
    for decision in (attention_again(q, k, v), matmul_again(q[0, 0], k[0, 0])):
        check_budget(DECISION_US, lambda decision=decision: best_us(decision)[0], kinds=[arithmetic])


H200 = registry.Target.named("H200")


def new_shapes(count=2048):
    """Calls of lengths not seen before, as on an H200: all that is done for one but compiling and launching."""
    tensors = [torch.empty(1, 8, 1 + length, 128, dtype=torch.bfloat16, device="meta") for length in range(count)]
    sums = [torch.empty(1, 8, 1 + length, device="meta") for length in range(count)]
    turn = itertools.count()

    def one_more():
        q = tensors[next(turn) % count]
        return attention._plan(*attention.problem_of(q, q, q, causal=True, target=H200), False)

    def one_more_gradient():
        q = tensors[next(turn) % count]
        lse = sums[q.shape[2] - 1]
        return attention.backward._plan(*attention.backward.problem_of(q, q, q, q, q, lse, target=H200), False)

    def one_more_product():
        a = tensors[next(turn) % count][0, 0]
        return matmul._plan(*matmul.problem_of(a, a.mT, target=H200), False)

    return {"attention": one_more, "attention_backward": one_more_gradient, "matmul": one_more_product}


@pytest.mark.parametrize("op", new_shapes(1))
def test_a_new_shape(benchmark, op):
    assert benchmark(new_shapes()[op]).decision.variant


@pytest.mark.parametrize("op", new_shapes(1))
def test_a_new_shape_is_within_its_budget(op):
    new = new_shapes()[op]
    new()
    steps = sorted(steps_of(new) for _ in range(99))
    assert steps[50] < NEW_SHAPE_STEPS
    check_budget(NEW_SHAPE_US, lambda: best_us(new, number=50, repeat=40)[0])


DRAWS = [f"random:{seed}:500" for seed in range(660101, 660104)]
"""Shapes that no table was fitted to."""


def random_shapes(op, draw):
    """What a plan took of each of these shapes but the first, which has tables read, in microseconds: in the median and
    at the 95th percentile."""
    gc.collect()
    found = sorted(decided(op, draw)[1:])
    return found[len(found) // 2], found[int(len(found) * 0.95)]


@pytest.mark.parametrize("op", drawing("random"))
def test_random_shapes_are_within_their_budget(op):
    """Each is asked about once, as in a process that serves: what the best of many runs takes is another matter."""
    tried = []
    for draw in DRAWS:
        slower = slower_by(arithmetic, many_functions)
        median, late = random_shapes(op, draw)
        slower = max(slower, slower_by(arithmetic, many_functions), 1.0)
        if median / slower < RANDOM_US and late / slower < SLOWEST_US:
            return
        tried.append(f"{median:.0f}, {late:.0f} on a core {slower:.2f} times as slow as that of the budget")
    pytest.fail("us in the median and at the 95th percentile: " + "; ".join(tried))


def steps_of(work):
    """How many steps of bytecode it takes."""
    steps = 0

    def trace(frame, event, argument):
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return steps


@pytest.mark.parametrize("op", drawing("random"))
def test_random_shapes_take_few_steps(op):
    asked = op_named(op)
    first, *others = [case.problem(H200) for case in grid(op, "random:660101:200")]
    asked._plan(first, EMPTY, False)
    steps = sorted(steps_of(lambda problem=problem: asked._plan(problem, EMPTY, False)) for problem in others)
    assert steps[len(steps) // 2] < RANDOM_STEPS
    assert steps[int(len(steps) * 0.95)] < SLOWEST_STEPS


def grown_lengths(monkeypatch, length=1000, launched=False):
    """One query over a cache that is a token longer each time: its decision, as on an H200, and its launch."""
    monkeypatch.setattr(registry.Target, "of", staticmethod(lambda device: H200))
    q = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16)
    k, v = torch.empty(2, 1, 8, 1, 128, dtype=torch.bfloat16).expand(2, 1, 8, SHAPES + 2048, 128)
    if launched:  # tensor maps want strides; what nobody writes to takes no memory
        k, v = torch.empty(2, 1, 8, 1 << 14, 128, dtype=torch.bfloat16)
    turn = itertools.count(length) if isinstance(length, int) else length

    def one_more():
        grown = next(turn)
        keys, values = k[:, :, :grown], v[:, :, :grown]
        plan = attention.find_plan((True, None, 0.0, False, None), q, keys, values)
        return plan.launch(q, keys, values, scale=0.1) if launched else plan

    return one_more


def test_a_grown_length(benchmark, monkeypatch):
    assert benchmark(grown_lengths(monkeypatch)).decision.variant


def test_a_grown_length_is_within_its_budget(monkeypatch):
    grown = grown_lengths(monkeypatch)
    check_budget(GROWN_US, lambda: best_us(grown, number=50, repeat=40)[0])


def test_a_cache_that_grows_costs_little_in_the_mean(monkeypatch, tokens=1000):
    """With all tokens at which it is decided anew, and by what is noted of each such decision."""
    grown = grown_lengths(monkeypatch, length=4000)
    for _ in range(tokens // 2):
        grown()
    check_budget(4 * GROWN_US, lambda: best_us(grown, number=tokens, repeat=1)[0], attempts=3)


@pytest.fixture
def gpu(monkeypatch):
    """Triton's own driver over one that launches nothing; what it is given is looked at in tests/dispatch."""
    pytest.importorskip("triton")
    if not FakeCuda.possible():
        pytest.skip("needs gcc, Python's headers and no real GPU")
    yield from fake_gpu(monkeypatch)
    forget_plans()


@pytest.mark.parametrize("variant", ["gluon_fa3", "triton_fa2"])
def test_a_grown_length_is_launched_within_its_budget(variant, monkeypatch, gpu):
    """Decided, bound and launched, over a launch of a length that was there before."""
    gpu.expect()
    with registry.use(variant):
        grown = grown_lengths(monkeypatch, 1026, launched=True)
        seen = grown_lengths(monkeypatch, itertools.repeat(1026), launched=True)
        for _ in range(130):  # the first compile, and show what the others have in common
            grown()
        steps = sorted(steps_of(grown) for _ in range(99))
        assert steps[50] - steps_of(seen) < LAUNCHED_STEPS

        def beyond_a_warm_call():
            taken, warm = best_us(grown, seen, number=12, repeat=120)
            return taken - warm

        check_budget(LAUNCHED_US, beyond_a_warm_call)


def resident_mib():
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of its process from /proc")
def test_many_shapes_take_no_more_memory_than_some(nothing):
    """Without the collector, whose turns are those of everything in the process: what is dropped is gone at once."""
    q, memory = torch.empty(1, 2, 1, 8), torch.empty(1, 2, 1, 8).expand(1, 2, SHAPES + 1, 8)
    taken, resident = [], {}
    gc.collect()
    gc.disable()
    try:
        for length in range(1, SHAPES + 1):
            k = memory[:, :, :length]
            start = time.thread_time()
            registry.attention(q, k, k, variant=nothing)
            taken.append((time.thread_time() - start) * 1e6)
            if length in (SHAPES // 5, SHAPES):
                resident[length] = resident_mib()
    finally:
        gc.enable()
    assert len(attention.plans) <= ENTRIES
    assert resident[SHAPES] - resident[SHAPES // 5] < FLAT_MIB
    assert max(taken[100:]) < STALL_US, f"{sorted(taken[100:])[-9:]}"


@pytest.fixture
def nothing():
    """A variant that does nothing."""
    variant = registry.Variant(
        "bench.nothing",
        op="attention",
        run=lambda q, k, v, *, scale, config: (q, None),
        requires=registry.Requires(
            arch=("any",),
            dtypes=("float32",),
            head_dim=(1, 512),
            layouts=("bhsd", "strided"),
            cross_length=True,
            ieee=True,
        ),
    )
    registry.register(variant)
    yield variant.name
    registry.unregister(variant.name)


def test_whole_call_of_a_kernel_that_does_nothing(benchmark, tensors, nothing):
    with registry.use(nothing):
        benchmark(registry.attention, *tensors)
