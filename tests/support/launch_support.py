"""Kernels, a GPU that is none, and helpers for the launcher's tests."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import tempfile
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from fake_cuda import FakeCuda
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from registry import notices
from registry.toolbox import triton_internals
from registry.toolbox.arithmetic import to_tf32
from registry.toolbox.bound_before import BoundBefore
from registry.toolbox.launch import Launcher, StandIn

needs_fake_cuda = pytest.mark.skipif(not FakeCuda.possible(), reason="needs gcc, Python's headers and no real GPU")

# Triton 3.9 has other names for the same two copies.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@triton.jit
def scale(x, y, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def defaults(x, n, shift=3, BLOCK: tl.constexpr = 32):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, at + shift, mask=at < n)


@triton.jit
def described(source, target, rows, BLOCK: tl.constexpr):
    for row in range(0, rows, BLOCK):
        target.store([row, 0], source.load([row, 0]))


@triton.jit
def shifted(source, target, shift, ROUND: tl.constexpr):
    tile = source.load([0, 0])
    if ROUND:
        tile = to_tf32(tile)
    target.store([0, 0], tile + tl.load(shift))


@triton.jit
def nothing():
    pass


@gluon.jit
def copy_tile(source, target):
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.block_type.nbytes)
    load_box(source, [0, 0], ready, tile)
    mbarrier.wait(ready, 0)
    mbarrier.invalidate(ready)
    store_box(target, [0, 0], tile)
    tma.store_wait(0)


@functools.cache
def _library() -> tuple[FakeCuda, Path]:
    folder = tempfile.TemporaryDirectory(prefix="fake-cuda-")
    atexit.register(folder.cleanup)
    return FakeCuda.build(Path(folder.name)), Path(folder.name)  # a process can hold one libcuda


def fake_gpu(monkeypatch, *kernels):
    """For a fixture: one GPU that records launches, and a launcher and kernels that know nothing yet."""
    fake, folder = _library()
    notices.clear()
    triton_internals.internals.cache_clear()
    gc.freeze()  # what is there by now is not this test's: to look through all of it takes longer than most tests
    with fake.installed(monkeypatch, folder):
        fake.expect()  # the test before may have told of parameters that this one's kernels do not have
        yield fake
        for kernel in (scale, defaults, described, shifted, nothing, copy_tile, *kernels):
            kernel.device_caches.clear()  # these hold this test's driver, and what it has loaded
        gc.collect()
    triton_internals.internals.cache_clear()


def bound(call):
    """The quick launch of a call."""
    found = call.bind(0)
    assert found.fast
    return found


def boxes(gpu, launch, call, *formats):
    """Those of the tensor maps that a launch of the call gives its kernel, whose parameters are of these formats."""
    gpu.expect(*formats)
    launch(call)(*[1 << 20] * len(call.varying()))
    return gpu.boxes()


@contextlib.contextmanager
def bound_in_full():
    """Launches are bound in full, whatever was bound before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundBefore, "launch", lambda self, calls, given, device, bind: bind())
        yield


def tensor(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype)


def bind_scale(n=1024, vary=("factor",), **changes):
    example = {"x": StandIn((n,), "float32"), "y": StandIn((n,), "float32"), "n": n, "factor": 1.0} | changes
    return Launcher(scale, constants={"BLOCK": 128}, options={"num_warps": 2}).bind(example, (8,), vary=vary)


def descriptors(kind, first, second, block):
    if kind == "gluon":
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        return [GluonDescriptor(t, list(t.shape), list(t.stride()), block, layout) for t in (first, second)]
    return [TensorDescriptor(t, list(t.shape), list(t.stride()), block) for t in (first, second)]


def bind_descriptors(kind, first, second, block=(64, 64)):
    source, target = descriptors(kind, first, second, list(block))
    if kind == "gluon":
        return Launcher(copy_tile).bind({"source": source, "target": target}, (1,))
    rows = {"rows": first.shape[0]}
    return Launcher(described, constants={"BLOCK": block[0]}).bind({"source": source, "target": target} | rows, (1,))


def expect_descriptors(cuda, kind):
    one = ("128s", "i", "i", "q", "q")
    cuda.expect(*one, *one, *(() if kind == "gluon" else ("i",)))
