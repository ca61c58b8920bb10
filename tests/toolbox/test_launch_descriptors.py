"""Tensor maps in the launcher: encoded once, and never for a geometry that is not there any more."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

triton = pytest.importorskip("triton")

from launch_support import (  # noqa: E402
    bind_descriptors,
    copy_tile,
    described,
    descriptors,
    expect_descriptors,
    fake_gpu,
    needs_fake_cuda,
    tensor,
)
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from registry.errors import InvalidArgument  # noqa: E402
from registry.toolbox import tensor_maps, triton_internals  # noqa: E402
from registry.toolbox.builds import Build, compile_build  # noqa: E402
from registry.toolbox.launch import Launcher, StandIn  # noqa: E402

pytestmark = needs_fake_cuda


@pytest.fixture
def cuda(monkeypatch):
    yield from fake_gpu(monkeypatch)


def test_examples_are_not_kept_alive(cuda):
    x = tensor(64, 64)
    lost = weakref.ref(x)
    bound = Launcher(described, constants={"BLOCK": 64}).bind(
        {
            "source": TensorDescriptor.from_tensor(x, [64, 64]),
            "target": TensorDescriptor.from_tensor(x, [64, 64]),
            "rows": 64,
        },
        (1,),
    )
    del x
    gc.collect()
    assert lost() is None
    assert bound.fast


@pytest.mark.parametrize("kind", ["triton", "gluon"])
def test_maps_are_encoded_once_per_address(cuda, kind):
    example = StandIn((128, 64), "bfloat16")
    bound = bind_descriptors(kind, example, example)
    assert bound.fast
    a, b = tensor(128, 64, dtype=torch.bfloat16), tensor(128, 64, dtype=torch.bfloat16)
    expect_descriptors(cuda, kind)
    before = cuda.encoded
    bound(a, b)
    assert cuda.encoded == before + 2
    source, rows, columns, outer, inner = cuda.parameters[:5]
    assert (source[0], rows, columns, outer, inner) == (a.data_ptr(), 128, 64, 64, 1)
    assert cuda.parameters[5][0] == b.data_ptr()
    bound(a, b)
    bound(b, a)
    assert cuda.encoded == before + 2
    assert cuda.parameters[0][0] == b.data_ptr()


@pytest.mark.parametrize("kind", ["triton", "gluon"])
def test_descriptors_give_the_kernel_what_triton_gives_it(cuda, kind):
    a, b = tensor(128, 64, dtype=torch.bfloat16), tensor(128, 64, dtype=torch.bfloat16)
    bound = bind_descriptors(kind, a, b)
    expect_descriptors(cuda, kind)
    bound(a, b)
    ours = cuda.parameters, cuda.last.function
    pair = descriptors(kind, a, b, [64, 64])
    if kind == "gluon":
        copy_tile[(1,)](*pair)
    else:
        described[(1,)](*pair, 128, BLOCK=64)
    assert ours == (cuda.parameters, cuda.last.function)


@pytest.mark.parametrize("kind", ["triton", "gluon"])
def test_reused_address_with_another_shape_gets_its_own_map(cuda, kind):
    memory = torch.empty(1 << 16, dtype=torch.bfloat16)
    expect_descriptors(cuda, kind)
    shapes = [(128, 64), (64, 128), (256, 64), (128, 64)]
    for rows, columns in shapes:
        view = memory[: rows * columns].view(rows, columns)
        bound = bind_descriptors(kind, view, view)
        bound(view, view)
        words = cuda.parameters[0]
        assert words[0] == memory.data_ptr()
        assert words[2:4] == (columns, rows)
        assert words[12] == columns * 2
        assert cuda.parameters[1:5] == [rows, columns, columns, 1]


def test_same_shape_and_address_in_another_block_or_stride(cuda):
    memory = torch.empty(1 << 16, dtype=torch.bfloat16)
    expect_descriptors(cuda, "triton")
    small, large = (bind_descriptors("triton", *[StandIn((128, 64), "bfloat16")] * 2, block=(n, 64)) for n in (32, 64))
    wide = bind_descriptors("triton", *[StandIn((128, 64), "bfloat16", (256, 1))] * 2, block=(64, 64))
    view = memory[: 128 * 64].view(128, 64)
    boxes, strides = [], []
    for bound in (small, large, wide, small):
        bound(view, view)
        boxes.append(cuda.parameters[0][8])
        strides.append(cuda.parameters[0][12])
    assert boxes == [32, 64, 64, 32]
    assert strides == [128, 128, 512, 128]


def test_misaligned_descriptor_is_refused(cuda):
    bound = bind_descriptors("triton", *[StandIn((128, 64), "bfloat16")] * 2)
    memory = torch.empty(1 << 16, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="source.*multiple of 16"):
        bound(memory[1:], memory)


def test_maps_are_bounded_and_recent_ones_stay(monkeypatch):
    monkeypatch.setattr(tensor_maps, "LIMIT", 4)
    encoded = []
    example = TensorDescriptor(StandIn((64, 64), "bfloat16"), [64, 64], [64, 1], [64, 64])
    maps = tensor_maps.TensorMaps(
        lambda d: encoded.append(d.base.data_ptr()) or d.base.data_ptr(),
        tensor_maps.without_base(example),
        torch.bfloat16,
    )
    for pointer in range(0, 160, 16):
        assert maps[pointer] == pointer
        assert maps[0] == 0  # in use all the time
    assert encoded.count(0) == 1
    assert len(maps) + len(maps._old) <= 8
    assert maps[16] == 16
    assert encoded.count(16) == 2


def test_maps_die_with_the_kernels_that_use_them(cuda):
    bound = bind_descriptors("triton", *[StandIn((192, 64), "bfloat16")] * 2)
    count = len(tensor_maps._by_geometry)
    del bound
    gc.collect()
    assert len(tensor_maps._by_geometry) < count


def test_maps_under_threads(cuda):
    bound = bind_descriptors("triton", *[StandIn((128, 64), "bfloat16")] * 2)
    memory = [tensor(128, 64, dtype=torch.bfloat16) for _ in range(8)]
    cuda.expect()
    failures = []

    def work(i):
        try:
            for j in range(200):
                bound(memory[(i + j) % 8], memory[j % 8])
        except Exception as failure:
            failures.append(failure)

    before, encoded = cuda.launches, cuda.encoded
    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert cuda.launches == before + 1600
    assert cuda.encoded <= encoded + 8


def test_launch_metadata_sees_the_tensors(cuda, monkeypatch):
    seen = []
    monkeypatch.setattr(described, "launch_metadata", lambda grid, metadata, given: seen.append((grid, given)) or {})
    bound = bind_descriptors("triton", *[StandIn((128, 64), "bfloat16")] * 2)
    a, b = tensor(128, 64, dtype=torch.bfloat16), tensor(128, 64, dtype=torch.bfloat16)

    def enter(metadata):
        metadata.get()

    triton.knobs.runtime.launch_enter_hook.add(enter)
    try:
        bound(a, b)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(enter)
    ((grid, given),) = seen
    assert grid == (1, 1, 1)
    assert given["source"].base is a
    assert (given["rows"], given["BLOCK"]) == (128, 64)


def test_gluon_kernel_compiled_ahead_is_not_compiled_again(cuda, monkeypatch):
    source, target = descriptors("gluon", *[StandIn((320, 64), "bfloat16")] * 2, [32, 64])
    arguments = {"source": source, "target": target}
    compile_build(Build.of(copy_tile, arguments), "sm90")
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **about: hits.append(about["cache_hit"]))
    assert Launcher(copy_tile).bind(arguments, (1,)).fast
    assert hits == [True]


@pytest.mark.parametrize("kind", ["triton", "gluon"])
def test_falls_back_with_descriptors(cuda, monkeypatch, kind):
    monkeypatch.setattr(triton_internals, "_FORMS", {})
    bound = bind_descriptors(kind, *[StandIn((128, 64), "bfloat16")] * 2)
    assert not bound.fast
    a, b = tensor(128, 64, dtype=torch.bfloat16), tensor(128, 64, dtype=torch.bfloat16)
    expect_descriptors(cuda, kind)
    bound(a, b.data_ptr())
    assert (cuda.parameters[0][0], cuda.parameters[5][0]) == (a.data_ptr(), b.data_ptr())
