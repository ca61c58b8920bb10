"""Compiling without a GPU, and what is read from the result."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from ran import printed

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from compiled import resources  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma  # noqa: E402
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor  # noqa: E402

from registry.contract.target import Target  # noqa: E402
from registry.toolbox import builds, sass  # noqa: E402
from registry.toolbox.builds import Build, compile_build, gpu_target, inspect, occupancy  # noqa: E402
from registry.toolbox.launch import StandIn  # noqa: E402

_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@triton.jit
def _product(a, b, c, k, stride, BLOCK: tl.constexpr, STEP: tl.constexpr):
    rows, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for at in range(0, k, STEP):
        inner = at + tl.arange(0, STEP)
        left = tl.load(a + rows[:, None] * stride + inner[None, :])
        right = tl.load(b + inner[:, None] * BLOCK + columns[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * BLOCK + columns[None, :], tl.exp2(total).to(tl.bfloat16))


@gluon.jit
def _fetch(source, out):
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, source.block_type.nbytes)
    _load(source, [0, 0], ready, tile)
    mbarrier.wait(ready, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows, columns = gl.arange(0, 64, gl.SliceLayout(1, layout)), gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out + rows[:, None] * 64 + columns[None, :], tile.load(layout))


def _product_build(block=128, step=64, **options):
    meta = {name: torch.empty(1 << 20, dtype=torch.bfloat16, device="meta") for name in "abc"}
    constants = {"BLOCK": block, "STEP": step}
    return Build.of(_product, {**meta, "k": 512, "stride": 512}, constants=constants, options=options)


def _fetch_build():
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    source = GluonDescriptor(StandIn((256, 64), "bfloat16"), [256, 64], [64, 1], [64, 64], layout)
    return Build.of(_fetch, {"source": source, "out": StandIn((64, 64), "bfloat16")}, options={"num_warps": 4})


@pytest.fixture(scope="module")
def product():
    return inspect(compile_build(_product_build(num_warps=4, num_stages=3), "sm90"))


def test_build_of_a_call_is_the_build_written_by_hand():
    derived = _product_build(num_warps=4)
    written = Build(
        _product,
        signature={"a": "*bf16", "b": "*bf16", "c": "*bf16", "k": "i32", "stride": "i32"},
        constants={"BLOCK": 128, "STEP": 64},
        alignment=dict.fromkeys(["a", "b", "c", "k", "stride"], 16),
        options={"num_warps": 4},
    )
    assert derived == written
    assert hash(derived) == hash(written)
    assert derived.source().hash() == written.source().hash()


def test_build_of_a_call_follows_tritons_specialisation():
    given = {"a": StandIn((9,), "float16", alignment=2), "b": StandIn((9,), "float16"), "c": StandIn((9,), "float16")}
    build = Build.of(_product, {**given, "k": 1, "stride": 24}, constants={"BLOCK": 16, "STEP": 16})
    assert build.signature["a"] == "*fp16"
    assert dict(build.alignment) == {"b": 16, "c": 16}
    assert build.constants["k"] == 1
    assert build.signature["k"] == "constexpr"


def test_build_refuses_wrong_parameters():
    with pytest.raises(ValueError, match=r"unknown parameters \['x'\], missing parameters \['b'"):
        Build(_product, signature={"a": "*bf16", "x": "i32"})


def test_build_unwraps_an_autotuner():
    tuned = triton.autotune([triton.Config({"BLOCK": 128, "STEP": 64})], key=["k"])(_product)
    signature = {"a": "*bf16", "b": "*bf16", "c": "*bf16", "k": "i32", "stride": "i32"}
    assert Build(tuned, signature, {"BLOCK": 16, "STEP": 16}).kernel is _product


@triton.jit(do_not_specialize=["free"])
def _mixed(x, y, free, flag, wide, BLOCK: tl.constexpr, NAME: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at + free + wide, tl.load(x + at), mask=flag)


@pytest.mark.parametrize(
    "changes",
    [{}, {"x": StandIn((64,), "float32", alignment=4)}, {"free": 7, "flag": False, "wide": 2**40}, {"free": 1}],
)
def test_compiled_ahead_is_what_the_jit_looks_for(changes):
    """Same source, attributes and types, so the same key in Triton's cache."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(gpu_target("sm90"))
    arguments = {"x": StandIn((64,), "float32"), "y": StandIn((64,), "float32"), "free": 64, "flag": True, "wide": 50}
    arguments |= changes
    constants = {"BLOCK": 64, "NAME": "Dot"}
    options = {"num_warps": 4, "num_stages": 3, "debug": False, "instrumentation_mode": ""}
    binder = create_function_from_signature(_mixed.signature, _mixed.params, backend)
    bound, found, _ = binder(**arguments, **constants, **options)
    parsed, *rest = _mixed._pack_args(backend, options, bound, found, options)
    theirs = triton.compiler.ASTSource(_mixed, *rest)
    build = Build.of(_mixed, arguments, constants=constants, options={"num_warps": 4, "num_stages": 3})
    ours = build.source("sm90")
    assert (ours.signature, ours.constants, ours.attrs) == (theirs.signature, theirs.constants, theirs.attrs)
    assert ours.hash() == theirs.hash()
    assert backend.parse_options(dict(build.options)).hash() == parsed.hash()


def test_resources_of_a_product(product):
    assert product.arch == 90
    assert 64 < product.registers <= 255
    assert product.threads == 128
    assert product.shared == 3 * 2 * 128 * 64 * 2
    assert product.spills == product.stack == 0
    assert product.counts["HGMMA"] > 0
    assert product.counts["HMMA"] == 0
    assert product.counts["cp.async"] > 0
    assert product.counts["MUFU"] >= 128
    assert product.counts["TMA"] == 0
    assert product.blocks_per_sm == 2
    assert product.occupancy == 2 * 128 / 2048
    assert product.ptxas_warnings == ()
    assert "wgmma" in product.ptx
    assert "HGMMA" in product.sass


def test_the_loop_of_a_product(product):
    hot = [loop for loop in product.loops if loop.tensor_core]
    assert len(hot) == 1
    assert hot[0].innermost
    assert hot[0].counts["HGMMA"] == product.counts["HGMMA"]
    assert hot[0].spills == ()
    assert sass.loop_spills(product.sass) == []


def test_older_arch_uses_older_instructions():
    found = inspect(compile_build(_product_build(64, 32, num_warps=4), "sm80"), warnings=False)
    assert found.arch == 80
    assert found.counts["HMMA"] > 0
    assert found.counts["HGMMA"] == 0
    assert any(loop.tensor_core for loop in found.loops)


def test_gluon_with_a_tensor_descriptor():
    found = inspect(compile_build(_fetch_build(), Target.named("H100")))
    assert found.counts["TMA load"] == 1
    assert found.counts["SYNCS"] > 0
    assert found.shared >= 64 * 64 * 2


def test_spills_are_seen():
    """Far too few registers for the tile: also the hot loop spills."""
    build = _product_build(num_warps=4, maxnreg=64)
    while_compiling = resources(build, "sm80").resources
    found = inspect(compile_build(build, "sm80"))
    as_it_compiled, asked_again = dataclasses.asdict(while_compiling), dataclasses.asdict(found)
    del as_it_compiled["cubin"], asked_again["cubin"]  # names its source's folder: a kept build had it elsewhere
    assert as_it_compiled == asked_again, "what ptxas said"
    assert found.registers <= 64
    assert found.spill_stores > 0
    assert found.spill_loads > 0
    assert found.spills == found.spill_stores + found.spill_loads
    assert found.stack > 0
    assert found.counts["LDL"] > 0
    assert sass.loop_spills(found.sass)


@pytest.mark.parametrize(
    "given, number", [("sm90", 90), ("sm_90a", 90), (90, 90), ("90", 90), ("sm100f", 100), (Target.named("H100"), 90)]
)
def test_targets(given, number):
    assert gpu_target(given).arch == number
    assert gpu_target(gpu_target(given)) == gpu_target(given)


def test_no_target_for_the_cpu():
    with pytest.raises(ValueError, match="'cpu' is not an NVIDIA architecture"):
        gpu_target(Target.named("cpu"))


@pytest.mark.parametrize(
    "arch, threads, registers, shared, blocks",
    [
        ("sm90", 128, 32, 0, 16),  # warps: 64 per SM
        ("sm90", 128, 168, 0, 3),  # registers: 168 * 32 rounds to 5376 per warp
        ("sm90", 384, 168, 232448, 1),  # shared memory, all of it
        ("sm90", 32, 16, 0, 32),  # blocks
        ("sm90", 1024, 255, 0, 0),  # does not fit
        ("sm89", 128, 32, 50176, 2),
        ("sm999", 128, 32, 0, 12),  # as the newest that is known
    ],
)
def test_occupancy(arch, threads, registers, shared, blocks):
    assert occupancy(arch, threads, registers, shared)[0] == blocks


SPIN = """
.text.kernel:
        /*0000*/                   MOV R1, R2 ;
.L_outer_1:
        /*0010*/                   STL [R1], R4 ;
.L_x_2:
        /*0020*/              @!P0 BRA `(.L_x_9) ;
.L_x_3:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, !UPT ;
        /*0040*/                   LDL.LU R5, [R1+0x4] ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/               @P2 BRA `(.L_outer_1) ;
        /*0070*/                   EXIT ;
.L_x_9:
        /*0080*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0 ;
        /*0090*/              @!P0 BRA `(.L_x_9) ;
        /*00a0*/                   BRA `(.L_x_3) ;
"""


def test_loops_with_the_waiting_moved_out_of_line():
    """ptxas puts the spinning part of a wait behind the end of the kernel: part of the loop, and no loop around it."""
    found = sass.loops(SPIN)
    assert [(loop.address, loop.instructions, loop.innermost) for loop in found] == [
        (0x10, 9, False),
        (0x20, 7, True),
        (0x80, 2, True),
    ]
    assert [loop.tensor_core for loop in found] == [1, 1, 0]
    assert sass.loop_spills(SPIN) == ["0x0040 LDL.LU R5, [R1+0x4]"]
    assert len(sass.loop_spills(SPIN, innermost=False)) == 2


def test_sass_without_code():
    assert sass.loops("") == []
    assert sass.opcodes("no code here") == {}


def test_bundled_tool_errors_are_reported(tmp_path):
    with pytest.raises(RuntimeError, match="nvdisasm failed"):
        builds._tool("nvdisasm", tmp_path / "missing")


def test_ptxas_warnings_are_kept(product, monkeypatch):
    log = "ptxas info : Potential Performance Loss: wgmma.mma_async are serialized due to C7510\nptxas info : 8 bytes"
    real = builds._tool
    monkeypatch.setattr(builds, "_tool", lambda name, *rest: log if name.startswith("ptxas") else real(name, *rest))
    found = inspect(compile_build(_product_build(num_warps=4, num_stages=3)))
    assert len(found.ptxas_warnings) == 1
    assert "C7510" in found.ptxas_warnings[0]


ONE_KEY = """
import importlib, sys
from registry.toolbox.kernel_keys import settle_keys
assert settle_keys()
named = {name: importlib.import_module("registry.plugins.triton_varlen." + name) for name in ("split", "prefill")}
kernels = {name: getattr(named[name], name) for name in sys.argv[1:]}
print(sorted((name, kernel.cache_key) for name, kernel in kernels.items()))
"""


def test_a_kernel_has_one_key_whichever_was_hashed_first(quick_python):
    """What one process compiled is found by the next: keys hang neither on the order nor on addresses."""
    keys = set()
    for order in (("split", "prefill"), ("prefill", "split")):
        keys.add(printed(sys.executable, "-c", ONE_KEY, *order))
    assert len(keys) == 1
