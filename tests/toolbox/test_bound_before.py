"""A launch that is filled into one that was bound before passes what one bound in full does."""

import dataclasses
import gc
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

import torch
import triton
from launch_support import bound_in_full, described, descriptors, fake_gpu, needs_fake_cuda, scale, tensor

from registry.errors import CaptureError
from registry.toolbox import bound_before
from registry.toolbox import launch as launch_module
from registry.toolbox.bound_before import BoundBefore
from registry.toolbox.call import Call, Host, Interface, Kept, PerCall
from registry.toolbox.launch import StandIn

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
