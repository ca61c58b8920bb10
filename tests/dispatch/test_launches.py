"""Launches of grown lengths: made of one that was bound before, they are what would be bound anew."""

import itertools
import random

import pytest

pytest.importorskip("triton")

import torch
from launch_support import bound_in_full, fake_gpu, needs_fake_cuda

import registry
from registry.contract.target import Target
from registry.dispatch import alike, launches
from registry.dispatch.plan_cache import forget_plans
from registry.ops.attention.op import attention
from registry.ops.known import op_named
from registry.ops.matmul.op import matmul
from registry.toolbox.bound_launch import scope_of

gpu = pytest.fixture(fake_gpu)
pytestmark = needs_fake_cuda
H200 = Target.named("H200")


@pytest.fixture(autouse=True)
def on_h200(monkeypatch):
    monkeypatch.setattr(Target, "of", staticmethod(lambda device: H200))
    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def counted(monkeypatch):
    """Launches by how they came about."""
    found = {"resized": 0, "bound": 0}
    of = launches.Launches.of

    def counting(self, sizes, in_full):
        made = of(self, sizes, in_full)
        found["bound" if made is None else "resized"] += 1
        return made

    monkeypatch.setattr(launches.Launches, "of", counting)
    return found


def formats(compiled):
    """What a kernel takes, as struct formats."""
    for kind in compiled.src.signature.values():
        if kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            yield from ("128s", *"i" * rank, *"q" * rank)
        elif kind != "constexpr":
            yield "Q" if kind.startswith("*") else {"i32": "i", "i64": "q", "fp32": "f"}[kind]


def launched(gpu, plan, tensors, kinds, **given):
    """All that the last kernel of a call is given, with names in the place of addresses."""
    gpu.expect()
    plan.launch(*tensors, **given)  # binds
    gpu.expect(*kinds)
    results = plan.launch(*tensors, **given)
    results = results if isinstance(results, tuple) else (results,)
    known = {one.data_ptr(): f"in {at}" for at, one in enumerate(tensors)}
    known |= {one.data_ptr(): f"out {at}" for at, one in enumerate(results) if one is not None}

    def named(how, value):
        if isinstance(value, tuple):
            return (known[value[0]], *value[1:])
        return known.get(value, "memory of its own") if how == "Q" and value else value

    geometry = [(one.shape, one.stride(), one.dtype) for one in results if one is not None]
    last = gpu.last
    given = [*map(named, kinds, gpu.parameters)]
    return last.function, [*last.grid], last.cluster, last.threads, last.shared, given, geometry


def check(gpu, op, settings, tensors, **given):
    """A plan of the op's cache launches what a plan made in full does."""
    plan, fresh = op.find_plan(settings, *tensors), op.new_plan(settings, False, tensors)
    gpu.expect()
    with bound_in_full():
        fresh.launch(*tensors, **given)
    scope = scope_of(fresh.launch)
    last = scope[max(name for name in scope if name.startswith("launch_"))]
    kinds = [*formats(scope_of(last)["slow_"].compiled)]
    assert launched(gpu, plan, tensors, kinds, **given) == launched(gpu, fresh, tensors, kinds, **given)
    return plan, fresh


def heads(length, heads_kv, queries, dense, d=64):
    """Of head dim 64, with which a kernel compiles in half the time that it takes with 128."""
    q = torch.empty(1, 8, queries or length, d, dtype=torch.bfloat16)
    k = torch.empty(1, heads_kv, length if dense else 8192, d, dtype=torch.bfloat16)[:, :, :length]
    return q, k, torch.empty_like(k) if dense else torch.empty(1, heads_kv, 8192, d, dtype=k.dtype)[:, :, :length]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("variant", "d"), [("triton_fa2", 64), ("gluon_fa3", 64), ("triton_split", 128)])
def test_a_cache_that_grows_is_launched_as_if_bound_anew(variant, d, dense, gpu, counted):
    settings = (True, None, 0.0, False, None)
    with registry.use(variant):
        for length in range(1000, 1300):
            tensors = heads(length, 2, 1, dense, d)
            check(gpu, attention, settings, tensors, scale=0.5)
    assert counted["resized"] > 270 and counted["bound"] < 20, counted


@pytest.mark.parametrize("variant", ["triton_fa2", "gluon_fa3"])
def test_outputs_and_grids_follow_the_lengths(variant, gpu, counted):
    """Queries and keys grow; gluon_fa3 stores by a tensor map alone."""
    settings = (False, None, 0.0, True, None)
    with registry.use(variant):
        for length in range(300, 420):
            tensors = heads(length, 8, None, True)
            check(gpu, attention, settings, tensors, scale=0.5)
    assert counted["resized"] > 90, counted


def test_what_a_made_launch_does_not_answer_is_bound_in_full(gpu, counted):
    """Another sign of the scale, and memory that is aligned otherwise than that of its call."""
    settings = (True, None, 0.0, False, None)
    with registry.use("triton_fa2"):
        for length in range(1000, 1012):
            tensors = heads(length, 2, 1, True)
            plan, fresh = check(gpu, attention, settings, tensors, scale=0.5)
            for scale in (-0.5, 0.0):
                before = gpu.launches
                plan.launch(*tensors, scale=scale)
                made = gpu.parameters
                fresh.launch(*tensors, scale=scale)
                assert gpu.launches == before + 2
                others = [how != "Q" for how in gpu.formats]
                assert [*itertools.compress(made, others)] == [*itertools.compress(gpu.parameters, others)]
            off = torch.empty(tensors[0].numel() + 4, dtype=torch.bfloat16)[4:].view(tensors[0].shape)
            before = gpu.launches
            plan.launch(off, *tensors[1:], scale=0.5)
            assert gpu.launches == before + 1
    assert counted["resized"] > 5, counted


def test_host_code_that_takes_integers_alone_is_bound_each_time(gpu, counted, monkeypatch):
    from registry.plugins.triton_fa2 import host

    plain = host.heads_per_section

    def only_integers(problem, masked, head_bytes, heads, tiles, group=1):
        assert type(tiles) is int
        return plain(problem, masked, head_bytes, heads, tiles, group)

    monkeypatch.setattr(host, "heads_per_section", only_integers)
    with registry.use("triton_fa2"):
        for length in range(1000, 1012):
            tensors = heads(length, 2, 1, True)
            attention.find_plan((True, None, 0.0, False, None), *tensors).launch(*tensors, scale=0.5)
    assert counted["resized"] == 0 < counted["bound"]


def test_launches_of_several_kernels(gpu, counted):
    """The gradients: two kernels, and what the first leaves to the second."""
    backward = op_named("attention_backward")
    settings = (False, None, 0.0, False, None)
    with registry.use("triton_fa2_backward"):
        for length in range(300, 400):
            q, k, v = heads(length, 8, None, True)
            tensors = torch.empty_like(q), q, k, v, torch.empty_like(q), torch.empty(q.shape[:3])
            check(gpu, backward, settings, tensors, scale=0.5)
    assert counted["resized"] > 50, counted


def test_new_shapes_take_a_launch_that_is_known(gpu, counted, monkeypatch):
    """Lengths of queries and keys that are decided in full."""
    monkeypatch.setattr(alike._Kind, "looks", lambda self: True)
    draw, settings = random.Random(5), (True, None, 0.0, False, None)
    with registry.use("triton_fa2"):
        for _ in range(120):
            q = torch.empty(1, 8, draw.randint(2, 300), 64, dtype=torch.bfloat16)
            k = torch.empty(1, 8, draw.randint(2, 300), 64, dtype=torch.bfloat16)
            check(gpu, attention, settings, (q, k, torch.empty_like(k)), scale=0.5)
    assert counted["resized"] > 50, counted


def test_launches_are_looked_for_where_that_pays():
    """Where one is found for every third plan, each eighth looks; where for each, all do again."""
    kind, looks = alike._Kind(), []
    for number in range(600):
        looks.append(kind.looks())
        if looks[-1]:
            kind.looked(found=number >= 300 or number % 3 == 0)
    assert all(looks[:8]) and sum(looks[100:300]) <= 30 and all(looks[500:])


@pytest.mark.parametrize(
    ("variant", "rows"), [("gluon_matmul_row_pairs", (161, 209)), ("gluon_matmul_pairs", (500, 700))]
)
def test_clusters_stay_clusters(variant, rows, gpu, counted):
    """Of products that differ in rows."""
    settings, b = (None, None, None), torch.empty(512, 256, dtype=torch.bfloat16).t()
    with registry.use(variant):
        for m in range(*rows):
            check(gpu, matmul, settings, (torch.empty(m, 256, dtype=torch.bfloat16), b))
            assert gpu.last.cluster == 2
    assert counted["resized"] > counted["bound"] > 0, counted


def test_ranges_of_k_are_added_up_as_if_bound_anew(gpu, counted):
    """Two launches, of which the second is compared; the memory between them grows with the rows."""
    settings, b = (None, None, None), torch.empty(128, 4096, dtype=torch.bfloat16).t()
    with registry.use("gluon_matmul_pairs"):
        for m in range(200, 330):
            _, fresh = check(gpu, matmul, settings, (torch.empty(m, 4096, dtype=torch.bfloat16), b))
            assert sum(name.startswith("launch_") for name in scope_of(fresh.launch)) == 2
    assert counted["resized"] > counted["bound"] > 0, counted
