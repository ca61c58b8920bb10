"""The thin launcher on a real GPU: results, streams, reused memory, graphs, threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from races import in_threads

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from launch_support import load_box, scale, store_box  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from registry.errors import CaptureError, InvalidArgument  # noqa: E402
from registry.toolbox.launch import Launcher, StandIn  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm90 GPU"
)


@triton.jit
def _copy(source, target, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    target.store([row, 0], source.load([row, 0]) + 1)


@triton.jit
def _copy_with_scratch(source, target, rows, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    read = tl.make_tensor_descriptor(source, [rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS])
    write = tl.make_tensor_descriptor(target, [rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS])
    row = tl.program_id(0) * ROWS
    write.store([row, 0], read.load([row, 0]) + 1)


@gluon.jit
def _copy_gluon(source, target, rows):
    row = gl.program_id(0) * source.block_type.shape[0]
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.block_type.nbytes)
    load_box(source, [row, 0], ready, tile)
    mbarrier.wait(ready, 0)
    mbarrier.invalidate(ready)
    store_box(target, [row, 0], tile)
    tma.store_wait(0)


def _random(*shape, dtype=torch.float32, device="cuda"):
    return torch.randn(*shape, device=device).to(dtype)


def _bind_scale(n, device=None):
    example = {"x": StandIn((n,), "float32"), "y": StandIn((n,), "float32"), "n": n, "factor": 1.0}
    grid = (triton.cdiv(n, 128),)
    return Launcher(scale, constants={"BLOCK": 128}).bind(example, grid, vary=("factor",), device=device)


def _bind_copy(kind, shape, rows=64):
    """A copy (the Triton kernel adds 1) of a bf16 matrix of this shape, by tensor maps, `rows` rows a block."""
    columns = shape[1]
    example, block = StandIn(shape, "bfloat16"), [rows, columns]
    strides = [columns, 1]
    grid = (triton.cdiv(shape[0], rows),)
    if kind == "gluon":
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
        one = GluonDescriptor(example, list(shape), strides, block, layout)
        return Launcher(_copy_gluon).bind({"source": one, "target": one, "rows": shape[0]}, grid), 0
    one = TensorDescriptor(example, list(shape), strides, block)
    return Launcher(_copy, constants={"ROWS": rows}).bind({"source": one, "target": one}, grid), 1


def test_triton_kernel():
    bound = _bind_scale(1000)
    assert bound.fast
    for factor in (2.0, -0.5):
        x, y = _random(1000), torch.full((1000,), float("nan"), device="cuda")
        bound(x, y, factor)
        assert torch.equal(y, x * factor)
        bound(x.data_ptr(), y.data_ptr(), factor * 2)
        assert torch.equal(y, x * (factor * 2))


@hopper
@pytest.mark.parametrize("kind", ["triton", "gluon"])
def test_descriptors(kind):
    bound, more = _bind_copy(kind, (256, 64))
    assert bound.fast
    for _ in range(3):
        x = _random(256, 64, dtype=torch.bfloat16)
        y = torch.full_like(x, float("nan"))
        bound(x, y)
        assert torch.equal(y, x + more)


def test_other_alignment():
    bound = _bind_scale(1000)
    x, y = _random(1001), torch.zeros(1001, device="cuda")
    bound(x[1:], y[1:], 3.0)
    assert torch.equal(y[1:], x[1:] * 3)
    assert y[0] == 0


@hopper
def test_misaligned_descriptor():
    bound, _ = _bind_copy("triton", (256, 64))
    memory = torch.zeros(256 * 64 + 8, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="multiple of 16"):
        bound(memory[1:], memory)


def test_current_stream_is_used():
    bound = _bind_scale(1 << 16)
    x, y = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.fill_(1.0)
        bound(x, y, 2.0)  # on any other stream it would read the zeros, long before the fill
    side.synchronize()
    assert torch.all(y == 2.0)


@hopper
@pytest.mark.parametrize("kind", ["triton", "gluon"])
def test_streams_together(kind):
    bound, more = _bind_copy(kind, (4096, 64))
    streams = [torch.cuda.Stream() for _ in range(4)]
    sources = [_random(4096, 64, dtype=torch.bfloat16) for _ in streams]
    targets = [torch.zeros_like(s) for s in sources]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, source, target in zip(streams, sources, targets, strict=True):
            with torch.cuda.stream(stream):
                bound(source, target)
    torch.cuda.synchronize()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source + more)


@hopper
@pytest.mark.parametrize("kind", ["triton", "gluon"])
def test_one_address_many_shapes(kind):
    """The same two buffers seen as other shapes, strides and blocks, in turns: never another geometry's map."""
    source, target = (torch.empty(1 << 18, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    shapes = [((1024, 64), 64), ((512, 128), 64), ((2048, 32), 64), ((1024, 64), 32), ((256, 64), 64)]
    bounds = [(shape, *_bind_copy(kind, shape, rows)) for shape, rows in shapes]
    for _ in range(3):
        for (rows, columns), bound, more in bounds:
            source.normal_()
            target.fill_(float("nan"))
            bound(source, target)
            count = rows * columns
            assert torch.equal(target[:count], source[:count] + more)
            assert torch.all(torch.isnan(target[count:]))


@hopper
def test_freed_and_reused_memory():
    """Allocate, free and allocate again, so that torch hands out the same addresses for other shapes."""
    bounds = {shape: _bind_copy("gluon", shape) for shape in ((1024, 64), (512, 128), (2048, 32), (128, 64))}
    seen: dict[int, set] = {}
    for _ in range(20):
        for shape, (bound, _) in bounds.items():
            x = _random(*shape, dtype=torch.bfloat16)
            y = torch.full_like(x, float("nan"))
            seen.setdefault(y.data_ptr(), set()).add(shape)
            bound(x, y)
            assert torch.equal(x, y)
            del x, y
    assert any(len(shapes) > 1 for shapes in seen.values())  # else this test shows nothing


@hopper
@pytest.mark.parametrize("kind", ["triton", "gluon"])
def test_graph_capture(kind):
    bound, more = _bind_copy(kind, (512, 64))
    x = _random(512, 64, dtype=torch.bfloat16)
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    bound(x, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bound(x, y)
        bound(y, z)
    for _ in range(2):
        x.copy_(_random(512, 64, dtype=torch.bfloat16))
        graph.replay()
        assert torch.equal(z, x + more + more)


def test_cold_bind_in_capture():
    warm = _bind_scale(1000)
    x, y = _random(1004), torch.zeros(1004, device="cuda")
    warm(x, y, 1.0)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with pytest.raises(CaptureError, match="never compiled"):
            _bind_scale(2000)
        with pytest.raises(CaptureError, match="other alignments"):
            warm(x[1:], y, 1.0)
        warm(x, y, 1.0)


@hopper
@pytest.mark.parametrize("kind", ["triton", "gluon"])
def test_threads(kind):
    """Threads that bind, then launch on their own streams, with addresses that come and go."""
    start = threading.Barrier(6)

    def work(i):
        shape = [(512, 64), (256, 128), (1024, 32)][i % 3]
        with torch.cuda.stream(torch.cuda.Stream()):
            start.wait()
            bound, more = _bind_copy(kind, shape)
            for _ in range(60):
                x = _random(*shape, dtype=torch.bfloat16)
                y = torch.full_like(x, float("nan"))
                bound(x, y)
                assert torch.equal(y, x + more)

    in_threads(work, 6)


@hopper
def test_global_scratch():
    """Descriptors made in the kernel need scratch memory from `triton.set_allocator` on some Triton versions."""
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    x = _random(256, 64, dtype=torch.bfloat16)
    y = torch.zeros_like(x)
    bound = Launcher(_copy_with_scratch, constants={"COLUMNS": 64, "ROWS": 64}).bind(
        {"source": x, "target": y, "rows": 256}, (4,)
    )
    assert bound.fast
    bound(x, y)
    assert torch.equal(y, x + 1)


def test_hooks():
    bound = _bind_scale(1000)
    x, y = _random(1000), torch.zeros(1000, device="cuda")
    seen = []

    def enter(metadata):
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(enter)
    try:
        bound(x, y, 2.0)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(enter)
    assert seen == ["scale"]
    assert torch.equal(y, x * 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_device():
    bounds = [_bind_scale(1000, device=i) for i in range(2)]
    for i, bound in enumerate(bounds):
        for current in range(2):
            with torch.cuda.device(current):
                x, y = _random(1000, device=f"cuda:{i}"), torch.zeros(1000, device=f"cuda:{i}")
                bound(x, y, 2.0)
                assert torch.equal(y, x * 2)
                assert torch.cuda.current_device() == current


@hopper
def test_processes_may_take_turns_on_a_gpu():
    """Data that lay in the memory of a barrier were lost there: docs/measured/ragged.md."""
    script, shapes = BENCHMARKS / "shared_gpu.py", BENCHMARKS / "shapes" / "shared_gpu.txt"
    command = [sys.executable, "-W", "ignore", script, "gluon_fa3_varlen_backward", shapes]
    ended = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(ended) == 5 and all(": well" in line for line in ended), ended
