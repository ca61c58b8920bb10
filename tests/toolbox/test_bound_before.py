"""A launch that is filled into one that was bound before passes what one bound in full does."""

import dataclasses
import gc
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch
import triton
from launch_support import bound_in_full, defaults, described, descriptors, fake_gpu, needs_fake_cuda, scale, tensor
from triton.backends.compiler import GPUTarget

from registry.contract.noted import Notes
from registry.errors import CaptureError
from registry.toolbox import bound_before
from registry.toolbox import launch as launch_module
from registry.toolbox.bound_before import BoundBefore
from registry.toolbox.bound_launch import scope_of
from registry.toolbox.call import Call, Host, Interface, Kept, PerCall
from registry.toolbox.launch import Launcher, NoClusters, StandIn

gpu = pytest.fixture(fake_gpu)
pytestmark = needs_fake_cuda
OP = Interface(
    tensors=("x",),
    scale=True,
    results=("y",),
    operands=lambda problem: {"x": StandIn((problem.n,), "float32", name="x")},
    problem_of=lambda *tensors, **given: None,
)
CONFIG = {"warps": 2, "factor": 2.0}


def calls(problem, config, given, scale_of_call):
    block = 128 if scale_of_call > 0 else 64
    y = StandIn((problem.n,), torch.float32, name="y")
    arguments = {"x": given["x"], "y": y, "n": problem.n, "factor": PerCall("scale", config["factor"])}
    return [Call(scale, (-(-problem.n // block),), arguments, {"BLOCK": block}, {"num_warps": config["warps"]})]


@pytest.fixture
def filled(monkeypatch):
    """How many launches were filled in."""
    found, fill = [], bound_before._Reference.filled
    monkeypatch.setattr(bound_before._Reference, "filled", lambda *given: found.append(1) or fill(*given))
    return found


def launched(gpu, host, n, config=CONFIG, **given):
    gpu.expect("Q", "Q", "i", "f")
    x = tensor(n)
    y = host.prepare(SimpleNamespace(n=n), config)(x, scale=0.5, **given)
    pointers = {x.data_ptr(): "x", y.data_ptr(): "y"}
    values = [pointers.get(value, value) for value in gpu.parameters]
    last = gpu.last
    return values, y.shape, [*last.grid], last.threads, last.function


def test_sizes_of_one_kernel_are_filled_in(gpu, filled):
    host = Host(OP, calls)
    found = [launched(gpu, host, n) for n in (1008, 1024, 2000, 48)]
    assert len(filled) == 3
    with bound_in_full():
        assert [launched(gpu, host, n) for n in (1008, 1024, 2000, 48)] == found
    assert len(filled) == 3


def test_other_kernels_words_and_factors_are_bound_in_full(gpu, filled):
    host = Host(OP, calls)
    first = launched(gpu, host, 1008)
    odd = launched(gpu, host, 1007)
    assert odd[0][2] == 1007 and odd[-1] != first[-1]  # n is specialised
    assert launched(gpu, host, 1008, CONFIG | {"warps": 4})[3] == 128
    assert launched(gpu, host, 1008, CONFIG | {"factor": 4.0})[0][3] == 2.0
    assert not filled
    assert launched(gpu, host, 1009)[0][2] == 1009 and len(filled) == 1


def test_what_a_filled_launch_does_not_answer_is_bound_in_full(gpu, filled):
    """A scale of another sign, and memory that is aligned otherwise."""
    host = Host(OP, calls)
    launched(gpu, host, 1008)
    launch = host.prepare(SimpleNamespace(n=2000), CONFIG)
    assert len(filled) == 1
    for _ in range(2):
        launch(tensor(2000), scale=-0.5)
        assert [*gpu.last.grid] == [32, 1, 1] and gpu.parameters[3] == -1.0
    off, before = torch.empty(2001)[1:], gpu.launches
    launch(off, scale=0.5)
    assert gpu.launches == before + 1 and gpu.parameters[0] == off.data_ptr() and [*gpu.last.grid] == [16, 1, 1]


def test_tensor_maps_are_made_of_other_sizes(gpu, filled):
    def mapped(problem, config, given, factor):
        source, target = descriptors("triton", given["x"], StandIn((problem.n, 64), "bfloat16", name="y"), [64, 64])
        return [Call(described, (1,), {"source": source, "target": target, "rows": problem.n}, {"BLOCK": 64})]

    of_rows = dataclasses.replace(OP, operands=lambda problem: {"x": StandIn((problem.n, 64), "bfloat16", name="x")})
    host, one = Host(of_rows, mapped), ("128s", "i", "i", "q", "q")
    gpu.expect(*one, *one, "i")
    for n in (64, 128, 640):
        x = tensor(n, 64, dtype=torch.bfloat16)
        y = host.prepare(SimpleNamespace(n=n), {})(x, scale=1.0)
        source = gpu.parameters[0]
        assert source[0] == x.data_ptr() and source[2:4] == (64, n) and y.shape == (n, 64)
        assert gpu.parameters[1:5] == [n, 64, 64, 1] and gpu.parameters[-1] == n
    assert len(filled) == 2


def test_memory_that_is_kept_is_that_of_each_call(gpu, filled):
    def with_kept(problem, config, given, factor):
        (one,) = calls(problem, config, given, factor)
        kept = Kept((problem.n,), "float32", "y", lambda like: problem.kept)
        return [dataclasses.replace(one, arguments={**one.arguments, "y": kept})]

    host = Host(OP, with_kept)
    gpu.expect("Q", "Q", "i", "f")
    for n in (1008, 1024):
        problem = SimpleNamespace(n=n, kept=tensor(n))
        assert host.prepare(problem, CONFIG)(tensor(n), scale=1.0) is problem.kept
        assert gpu.parameters[1] == problem.kept.data_ptr()
    assert len(filled) == 1


def test_kernels_that_were_forgotten_are_bound_anew(gpu, filled):
    host = Host(OP, calls)
    launched(gpu, host, 1008)
    scale.device_caches.clear()
    launched(gpu, host, 1024)
    assert not filled
    launched(gpu, host, 2000)
    assert len(filled) == 1


def test_kernels_that_are_known_may_be_bound_while_a_graph_is_captured(gpu, filled, monkeypatch):
    host = Host(OP, calls)
    launched(gpu, host, 1008)
    monkeypatch.setattr(launch_module, "capturing", lambda: True)
    gpu.expect("Q", "Q", "i", "f")
    assert host.prepare(SimpleNamespace(n=1024), CONFIG)(tensor(1024), scale=0.5).shape == (1024,) and filled
    with bound_in_full():
        assert host.prepare(SimpleNamespace(n=1024), CONFIG)(tensor(1024), scale=0.5).shape == (1024,)
    with pytest.raises(CaptureError):
        host.prepare(SimpleNamespace(n=1024), CONFIG | {"warps": 8})


def test_hooks_are_told_of_filled_launches(gpu, filled):
    """Also while a graph is captured, where nothing may be compiled."""
    host, seen = Host(OP, calls), []
    launched(gpu, host, 1008)
    launch = host.prepare(SimpleNamespace(n=1024), CONFIG)

    def enter(metadata):
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(enter)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch_module, "capturing", lambda: True)
            launch(tensor(1024), scale=0.5)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(enter)
    assert seen == ["scale"] and filled


def test_keys_are_settled_before_a_kernel_is_hashed(gpu, monkeypatch):
    """A hash that was found otherwise would not go with those of the kernels that are hashed after it."""
    order, kind = [], type(scale)
    hashed = kind.__hash__
    monkeypatch.setattr(kind, "__hash__", lambda self: order.append("hashed") or hashed(self))
    for module in (bound_before, launch_module):
        monkeypatch.setattr(module, "settle_keys", lambda: order.append("settled"))
    for n in (1008, 1024):
        launched(gpu, Host(OP, calls), n)
        assert order[0] == "settled" and "hashed" in order
        order.clear()


def test_launches_that_are_kept_are_few_and_hold_no_calls(gpu, monkeypatch):
    monkeypatch.setattr(bound_before, "MOST", 3)
    host = Host(OP, calls)
    for warps in (1, 2, 4, 8, 16):
        launched(gpu, host, 1008, CONFIG | {"warps": warps})
    assert len(host._before._known) <= 3
    launch = host.prepare(SimpleNamespace(n=2000), CONFIG)
    gc.collect()
    held = [one for one in gc.get_objects() if type(one) is Call]
    assert not held and launch is not None


def test_two_hosts_share_nothing():
    assert Host(OP, calls)._before is not Host(OP, calls)._before
    assert isinstance(Host(OP, calls)._before, BoundBefore)


def test_operands_that_change_places_are_told_apart(gpu, filled):
    def swapped(problem, config, given, factor):
        x, y = given["x"], StandIn((problem.n,), "float32", name="y")
        places = {"y": x, "x": y} if problem.swapped else {"x": x, "y": y}
        rest = {"n": problem.n, "factor": PerCall("scale", 1.0)}
        return [Call(scale, (1,), {**places, **rest}, {"BLOCK": 128}, {"num_warps": 2})]

    host = Host(OP, swapped)
    gpu.expect("Q", "Q", "i", "f")
    for n, other in ((1008, False), (1024, True), (2000, False)):
        x = tensor(n)
        y = host.prepare(SimpleNamespace(n=n, swapped=other), {})(x, scale=1.0)
        assert gpu.parameters[:2] == [one.data_ptr() for one in ((y, x) if other else (x, y))]
    assert len(filled) == 1


@pytest.mark.parametrize("where", ["arguments", "constants"])
def test_integers_are_filled_in_wherever_a_call_says_them(gpu, filled, where):
    def shifted(problem, config, given, factor):
        said = {} if problem.shift is None else {"shift": problem.shift}
        y = StandIn((problem.n,), "float32", name="y")
        more, constants = (said, {}) if where == "arguments" else ({}, said)
        return [Call(defaults, (1,), {"x": y, "n": problem.n, **more}, constants)]

    host = Host(OP, shifted)
    gpu.expect("Q", "i", "i")
    for n, shift in ((1008, None), (1024, 5), (2000, 7), (1024, None)):
        host.prepare(SimpleNamespace(n=n, shift=shift), {})(tensor(n), scale=1.0)
        assert gpu.parameters[1:] == [n, 3 if shift is None else shift]
    assert len(filled) == 3


def test_factors_that_are_equal_but_not_the_same_are_told_apart(gpu, filled):
    host = Host(OP, calls)
    for factor in (1.0, 1, 0.0, -0.0):
        host.prepare(SimpleNamespace(n=1008), CONFIG | {"factor": factor})
    assert not filled


def test_hooks_that_came_later_see_other_sizes(gpu, filled, monkeypatch):
    host, seen = Host(OP, calls), []
    launched(gpu, host, 1008)
    monkeypatch.setattr(scale, "pre_run_hooks", [lambda *args, **kwargs: seen.append(1)])
    host.prepare(SimpleNamespace(n=1024), CONFIG)
    assert seen and not filled


def test_what_is_bound_later_is_bound_for_the_same_device_and_config(gpu, filled, monkeypatch):
    host = Host(OP, calls)
    launched(gpu, host, 1008)
    config = {**CONFIG}
    launch = host.prepare(SimpleNamespace(n=1024), config)
    monkeypatch.setattr(gpu, "device", 1)
    config["warps"] = 4
    assert filled and scope_of(scope_of(launch)["launch_0"])["slow_"].index == 0
    launch(tensor(1024), scale=-1.0)
    assert gpu.last.threads == 64


def test_launches_of_other_calls_are_not_filled_in(gpu, filled, monkeypatch):
    """Where clusters turn out to be impossible, what is bound is the call without them."""

    def clustered(problem, config, given, factor):
        (alone,) = calls(problem, config, given, factor)
        return [dataclasses.replace(alone, cluster=2, grid=(1,), alone=lambda: alone)]

    bind = Launcher.bind

    def without_clusters(self, *given, **more):
        if self.cluster > 1:
            bind(self, *given, **more)
            raise NoClusters
        return bind(self, *given, **more)

    monkeypatch.setattr(Launcher, "bind", without_clusters)
    host = Host(OP, clustered)
    for n in (1008, 2000):
        assert launched(gpu, host, n)[2] == [-(-n // 128), 1, 1]


def test_other_arguments_than_a_kernel_has_are_refused(gpu):
    def misspelt(problem, config, given, factor):
        (one,) = calls(problem, config, given, factor)
        return [dataclasses.replace(one, arguments={**one.arguments, **problem.more})]

    host = Host(OP, misspelt)
    host.prepare(SimpleNamespace(n=1008, more={}), CONFIG)
    with pytest.raises(TypeError, match="'m'"):
        host.prepare(SimpleNamespace(n=1024, more={"m": 3}), CONFIG)


def test_grids_are_of_integers(gpu, filled):
    def halves(problem, config, given, factor):
        (one,) = calls(problem, config, given, factor)
        return [dataclasses.replace(one, grid=(problem.n / 32,))]

    host, before = Host(OP, halves), gpu.launches
    assert [launched(gpu, host, n)[2] for n in (1008, 1040)] == [[31, 1, 1], [32, 1, 1]]
    assert len(filled) == 1
    host.prepare(SimpleNamespace(n=16), CONFIG)(tensor(16), scale=1.0)  # of no blocks
    assert gpu.launches == before + 2


def of_rows(problem, config, given, factor):
    source, target = descriptors("triton", given["x"], StandIn((64, 64), "bfloat16", name="y"), [64, 64])
    return [Call(described, (1,), {"source": source, "target": target, "rows": problem.n}, {"BLOCK": 64})]


OP_OF_ROWS = dataclasses.replace(OP, operands=lambda problem: {"x": StandIn((problem.n, 64), "bfloat16", name="x")})


def test_tensor_maps_of_the_same_sizes_are_shared(gpu, filled):
    host, one = Host(OP_OF_ROWS, of_rows), ("128s", "i", "i", "q", "q")
    gpu.expect(*one, *one, "i")
    first, second = [scope_of(scope_of(host.prepare(SimpleNamespace(n=n), {}))["launch_0"]) for n in (64, 128)]
    assert filled and first["maps_a1_"] is second["maps_a1_"] and first["maps_a0_"] is not second["maps_a0_"]


def test_tensor_maps_that_are_passed_as_addresses_are_bound_in_full(gpu, filled, monkeypatch):
    """Kernels for GPUs without a TMA unit take the sizes twice."""
    target = GPUTarget("cuda", 80, 32)
    monkeypatch.setattr(type(triton.runtime.driver.active), "get_current_target", lambda self: target)
    described.device_caches.clear()
    host = Host(OP_OF_ROWS, of_rows)
    for n in (128, 192):
        launch = host.prepare(SimpleNamespace(n=n), {})
        inner = scope_of(scope_of(launch)["launch_0"])
        assert [value for name, value in inner.items() if name.startswith("rest_a0_")].count(n) == 2
    assert not filled
    notes = Notes()
    (size,) = notes.sizes([128])
    with notes:
        resizing = host.prepare.of_any_size(SimpleNamespace(n=size), SimpleNamespace(n=128), {})
    resizing.bind()
    values = [{name: eval(code, {"x": [192]}) for name, code in codes.items()} for codes in resizing.numbers]
    assert resizing.resized(values, lambda: launch).launch() is launch
