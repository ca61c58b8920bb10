"""The thin launcher, over real compiled kernels and a driver that records launches in the place of a GPU."""

from __future__ import annotations

import ctypes
import timeit
from pathlib import Path

import forked
import pytest
import torch
from ran import printed

triton = pytest.importorskip("triton")

from launch_support import (  # noqa: E402
    bind_descriptors,
    bind_scale,
    copy_tile,
    defaults,
    descriptors,
    fake_gpu,
    needs_fake_cuda,
    nothing,
    scale,
    tensor,
)

from registry import notices  # noqa: E402
from registry.errors import CaptureError, InvalidArgument  # noqa: E402
from registry.toolbox import launch, triton_internals  # noqa: E402
from registry.toolbox.bound_launch import function  # noqa: E402
from registry.toolbox.builds import Build, compile_build  # noqa: E402
from registry.toolbox.launch import Launcher, StandIn  # noqa: E402

pytestmark = [needs_fake_cuda, pytest.mark.usefixtures("quick_python")]


cuda = pytest.fixture(fake_gpu)


@pytest.fixture
def in_capture(monkeypatch):
    def start():
        monkeypatch.setattr(launch, "capturing", lambda: True)

    return start


def test_passes_addresses_scalars_grid_and_stream(cuda):
    bound = bind_scale()
    assert bound.fast
    assert bound.parameters == ("x", "y", "factor")
    x, y = tensor(1024), tensor(1024)
    cuda.expect("Q", "Q", "i", "f")
    cuda.stream = 77
    bound(x, y, 2.5)
    assert cuda.parameters == [x.data_ptr(), y.data_ptr(), 1024, 2.5]
    assert list(cuda.last.grid) == [8, 1, 1]
    assert cuda.last.threads == 64
    assert cuda.last.stream == 77
    assert cuda.last.function == bound.compiled.function
    cuda.stream = 78
    bound(x.data_ptr(), y.data_ptr(), factor=0.5)
    assert cuda.parameters == [x.data_ptr(), y.data_ptr(), 1024, 0.5]
    assert cuda.last.stream == 78


def test_gives_the_kernel_what_triton_gives_it(cuda):
    x, y = tensor(1024), tensor(1024)
    cuda.expect("Q", "Q", "i", "f")
    bound = bind_scale()
    bound(x, y, 2.5)
    ours = (cuda.parameters, list(cuda.last.grid), cuda.last.threads, cuda.last.function, cuda.last.shared)
    scale[(8,)](x, y, 1024, 2.5, BLOCK=128, num_warps=2)
    assert ours == (cuda.parameters, list(cuda.last.grid), cuda.last.threads, cuda.last.function, cuda.last.shared)


def test_clusters_are_the_drivers_not_the_kernels(cuda):
    """A kernel that was compiled for single CTAs; the grid counts clusters."""
    example = {"x": StandIn((1024,), "float32"), "y": StandIn((1024,), "float32"), "n": 1024, "factor": 1.0}
    options = {"constants": {"BLOCK": 128}, "options": {"num_warps": 2}}
    bound = Launcher(scale, **options, cluster=2).bind(example, (4,), vary=("factor",))
    x, y = tensor(1028), tensor(1024)
    cuda.expect("Q", "Q", "i", "f")
    bound(x, y, 2.0)
    assert (list(cuda.last.grid), cuda.last.cluster) == ([8, 1, 1], 2)
    Launcher(scale, **options).bind(example, (4,), vary=("factor",))(x, y, 2.0)  # the same compiled kernel
    assert (list(cuda.last.grid), cuda.last.cluster) == ([4, 1, 1], 1)
    with pytest.raises(InvalidArgument, match="aligned"):
        bound(x[1:], y, 2.0)


def test_defaults_constants_and_grid_function(cuda):
    bound = Launcher(defaults).bind({"x": StandIn((32,), "int32"), "n": 20}, lambda a: (a["n"] // a["BLOCK"] + 1, 5))
    x = tensor(32, dtype=torch.int32)
    cuda.expect("Q", "i", "i")
    bound(x)
    assert cuda.parameters == [x.data_ptr(), 20, 3]
    assert list(cuda.last.grid) == [1, 5, 1]


def test_kernel_without_arguments_and_empty_grid(cuda):
    cuda.expect()
    before = cuda.launches
    Launcher(nothing).bind({}, (3,))()
    assert cuda.launches == before + 1
    Launcher(nothing).bind({}, (0,))()
    assert cuda.launches == before + 1


def test_other_alignment_takes_the_slow_way(cuda):
    bound = bind_scale()
    x, y = tensor(1028), tensor(1028)
    cuda.expect("Q", "Q", "i", "f")
    bound(x[1:], y, 2.0)
    assert cuda.parameters == [x.data_ptr() + 4, y.data_ptr(), 1024, 2.0]
    assert cuda.last.function != bound.compiled.function


def test_stand_in_of_lower_alignment_takes_any_address(cuda):
    bound = bind_scale(x=StandIn((1024,), "float32", alignment=4))
    x, y = tensor(1028), tensor(1024)
    cuda.expect("Q", "Q", "i", "f")
    for given in (x[1:], x):
        bound(given, y, 2.0)
        assert cuda.last.function == bound.compiled.function


@pytest.mark.parametrize("example, fits, differs", [(64, 48, 50), (1, 1, 2), (50, 51, None), (50, 48, None)])
def test_varying_integers_keep_their_specialisation(cuda, example, fits, differs):
    bound = bind_scale(n=example, vary=("n", "factor"))
    x, y = tensor(1024), tensor(1024)
    cuda.expect(*(("Q", "Q", "f") if example == 1 else ("Q", "Q", "i", "f")))
    bound(x, y, fits, 1.0)
    assert cuda.last.function == bound.compiled.function
    if differs is not None:
        bound(x, y, differs, 1.0)
        assert cuda.last.function != bound.compiled.function


def test_varying_integer_out_of_range_is_widened_not_cut(cuda):
    bound = bind_scale(n=50, vary=("n", "factor"))
    x, y = tensor(1024), tensor(1024)
    cuda.expect("Q", "Q", "q", "f")
    bound(x, y, 2**40 + 1, 1.0)
    assert cuda.parameters[2] == 2**40 + 1


def test_hooks_are_taken(cuda):
    bound = bind_scale()
    x, y = tensor(1024), tensor(1024)
    cuda.expect("Q", "Q", "i", "f")
    seen = []
    runtime = triton.knobs.runtime

    def enter(metadata):
        seen.append(("enter", metadata.get()["name"], cuda.launches))

    def leave(metadata):
        seen.append(("exit", metadata.get()["name"], cuda.launches))

    runtime.launch_enter_hook.add(enter)
    runtime.launch_exit_hook.add(leave)
    before = cuda.launches
    try:
        bound(x, y, 2.0)
    finally:
        runtime.launch_enter_hook.remove(enter)
        runtime.launch_exit_hook.remove(leave)
    assert seen == [("enter", "scale", before), ("exit", "scale", before + 1)]
    bound(x, y, 2.0)
    assert len(seen) == 2


def test_plain_function_as_hook(cuda, monkeypatch):
    bound = bind_scale()
    seen = []
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", seen.append)
    cuda.expect("Q", "Q", "i", "f")
    bound(tensor(1024), tensor(1024), 1.0)
    assert len(seen) == 1


@pytest.mark.parametrize("alignment", [16, 4])
def test_what_was_compiled_ahead_is_not_compiled_again(cuda, monkeypatch, alignment):
    x, y = StandIn((96,), "float32", alignment=alignment), StandIn((96,), "float32")
    arguments = {"x": x, "y": y, "n": 96, "factor": 1.0}
    constants, options = {"BLOCK": 32}, {"num_warps": 8}
    compile_build(Build.of(scale, arguments, constants=constants, options=options), "sm90")
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: hits.append(about["cache_hit"]))
    assert Launcher(scale, constants=constants, options=options).bind(arguments, (1,)).fast
    assert hits == [True]


def test_cold_bind_in_capture_raises(cuda, in_capture):
    in_capture()
    with pytest.raises(CaptureError, match="scale was never compiled"):
        bind_scale()


def test_capture_takes_warm_calls_and_refuses_other_alignment(cuda, in_capture):
    bound = bind_scale()
    x, y = tensor(1028), tensor(1028)
    in_capture()
    cuda.expect("Q", "Q", "i", "f")
    bound(x, y, 1.0)
    with pytest.raises(CaptureError, match="other alignments"):
        bound(x[1:], y, 1.0)


def test_other_device_is_switched_for_the_launch(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "devices", 2)
    seen = []
    bound = Launcher(scale, constants={"BLOCK": 128}).bind(
        {"x": StandIn((64,), "float32"), "y": StandIn((64,), "float32"), "n": 64, "factor": 1.0}, (1,), device=1
    )
    monkeypatch.setitem(bound.__globals__, "raw_stream_", lambda index: seen.append((index, cuda.device)) or 0)
    cuda.expect("Q", "Q", "i", "f")
    bound(tensor(64).data_ptr(), tensor(64).data_ptr())
    assert seen == [(1, 1)]
    assert cuda.device == 0
    with pytest.raises(InvalidArgument, match="x: got a tensor on cpu; allowed: cuda:1, where this was bound"):
        bound(tensor(64), tensor(64))


@pytest.mark.parametrize("kind, times", [("triton", 3), ("gluon", 4)])
def test_costs_a_fraction_of_tritons_launch(cuda, kind, times):
    """Host work only, the driver being a recorder. Measured here: 8 and 11 times less."""
    a, b = (tensor(128, 64, dtype=torch.bfloat16) for _ in range(2))
    cuda.expect()
    if kind == "gluon":
        bound, pair = bind_descriptors("gluon", a, b), descriptors("gluon", a, b, [64, 64])
        ours, theirs = lambda: bound(a, b), lambda: copy_tile[(1,)](*pair)
    else:
        bound = bind_scale()
        ours, theirs = lambda: bound(a, b, 1.0), lambda: scale[(8,)](a, b, 1024, 1.0, BLOCK=128, num_warps=2)
    ours(), theirs()
    best = [min(timeit.repeat(call, number=200, repeat=15)) for call in (ours, theirs)]
    assert best[0] * times < best[1]


MOVED = {
    "_FORMS": {},
    "_JIT_CALL": "other",
    "_DESCRIPTOR_ARGUMENTS": "other",
    "_RUNNER_NEEDS": ("gone",),
    "c_launcher": lambda runner: None,
}


@pytest.mark.parametrize("what", MOVED)
def test_falls_back_where_triton_moved(cuda, monkeypatch, what):
    said = []
    monkeypatch.setattr(triton_internals, what, MOVED[what])
    monkeypatch.setattr(notices.log, "warning", said.append)
    bound, again = bind_scale(), bind_scale(vary=())
    assert not bound.fast
    assert bound.parameters == ("x", "y", "factor")
    (text,) = said
    assert "slower path" in text
    x, y = tensor(1028), tensor(1028)
    cuda.expect("Q", "Q", "i", "f")
    bound(x[1:], y.data_ptr(), factor=3.0)
    assert cuda.parameters == [x.data_ptr() + 4, y.data_ptr(), 1024, 3.0]
    again(x, y)
    assert cuda.parameters == [x.data_ptr(), y.data_ptr(), 1024, 1.0]


def test_kernels_with_pre_run_hooks_fall_back(cuda, monkeypatch):
    seen = []
    monkeypatch.setattr(scale, "pre_run_hooks", [lambda *a, **k: seen.append(k["n"])])
    bound = bind_scale()
    assert not bound.fast
    cuda.expect("Q", "Q", "i", "f")
    bound(tensor(1024), tensor(1024), 1.0)
    assert seen == [1024, 1024]


def test_refuses_what_it_cannot_bind(cuda):
    with pytest.raises(TypeError, match="not a plain JIT function"):
        Launcher(triton.autotune([triton.Config({"BLOCK": 32})], key=[])(defaults))
    with pytest.raises(TypeError, match="no parameters"):
        bind_scale(colour=3)
    with pytest.raises(TypeError, match="no parameters"):
        bind_scale(vary=("colour",))
    with pytest.raises(TypeError, match="tuple with tensors"):
        bind_scale(n=(tensor(1),))
    bound = bind_scale()
    with pytest.raises(TypeError, match="missing 1 required"):
        bound(tensor(1), tensor(1))


def test_stand_in_is_like_a_tensor():
    one = StandIn((2, 3, 4), "bfloat16")
    assert one.dtype is torch.bfloat16
    assert one.stride() == torch.empty(2, 3, 4).stride()
    assert one.stride(0) == 12
    assert StandIn((), "float32").stride() == ()
    assert StandIn((4,), torch.int8, alignment=2).data_ptr() == 2


def test_import_takes_no_triton():
    code = "import sys, registry.toolbox.launch, registry.toolbox.builds; print('triton' in sys.modules)"
    root = Path(launch.__file__).parents[2]
    assert printed(forked.python(early=True), "-c", code, cwd=root) == "False\n"


def test_what_a_launch_calls_may_import_from_c():
    """As torch does in the first `contiguous()` that copies on a GPU: C looks for built-ins in the caller's module."""
    imported = ctypes.pythonapi.PyImport_ImportModule
    imported.restype, imported.argtypes = ctypes.py_object, [ctypes.c_char_p]
    made = function("launch()", ["return imported(b'json')"], {"imported": imported}, "kernel")
    assert made().__name__ == "json"
