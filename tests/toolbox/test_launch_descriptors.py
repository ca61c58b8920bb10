"""Tensor maps in the launcher: encoded once, and never for a geometry that is not there any more."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from races import in_threads

triton = pytest.importorskip("triton")

from launch_support import (  # noqa: E402
    bind_descriptors,
    copy_tile,
    described,
    descriptors,
    expect_descriptors,
    fake_gpu,
    needs_fake_cuda,
    shifted,
    tensor,
)
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from registry.errors import InvalidArgument  # noqa: E402
from registry.toolbox import call, launch, tensor_maps, triton_internals  # noqa: E402
from registry.toolbox.builds import Build, compile_build  # noqa: E402
from registry.toolbox.call import Call  # noqa: E402
from registry.toolbox.launch import Launcher, StandIn  # noqa: E402
from registry.toolbox.tensor_maps import boxed, rounded_to_tf32  # noqa: E402

pytestmark = needs_fake_cuda


cuda = pytest.fixture(fake_gpu)


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
    example = tensor_maps.with_base(example, tensor_maps.Address(0, example.base.dtype))
    maps = tensor_maps.TensorMaps(lambda d: encoded.append(d.base.data_ptr()) or d.base.data_ptr(), example)
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

    def work(i):
        for j in range(200):
            bound(memory[(i + j) % 8], memory[j % 8])

    before, encoded = cuda.launches, cuda.encoded
    in_threads(work, 8)
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


# --- float32 that the TMA unit rounds to tf32 ------------------------------------------------------------------------

FLOAT32, TFLOAT32 = 7, 11


def shifted_call(source=rounded_to_tf32, if_plain_maps={"ROUND": True}):  # noqa: B006
    """A source whose map rounds, or what is made of it else, and a target whose map does not."""
    plain, target = (
        TensorDescriptor(StandIn((64, 32), "float32", name=name), [64, 32], [32, 1], [64, 32]) for name in ("a", "out")
    )
    arguments = {"source": source(plain), "target": target, "shift": StandIn((1,), "float32", name="shift")}
    return Call(shifted, (1,), arguments, constants={"ROUND": False}, if_plain_maps=if_plain_maps)


def launched(cuda, launch, shift=0):
    """(element types of the two maps, the function) of one launch."""
    a, b, c = tensor(64, 32), tensor(64, 32), tensor(8)
    cuda.expect(*("128s", "i", "i", "q", "q") * 2, "Q")
    launch(a, b, c[shift:])
    assert cuda.parameters[0][0] == a.data_ptr()
    return cuda.element_types(), cuda.last.function


def function_of(rounds, alignment):
    """Of the kernel that rounds, or does not, for a shift of this alignment."""
    plain, shift = shifted_call().arguments["target"], StandIn((1,), "float32", alignment=alignment)
    launcher = Launcher(shifted, constants={"ROUND": rounds})
    return launcher.bind({"source": plain, "target": plain, "shift": shift}, (1,)).compiled.function


def otherwise(aligned=16):
    """Through `kernel[grid]`: Triton's own descriptors round since 3.8, before it the kernel does."""
    native = triton_internals.triton_rounds()
    return [TFLOAT32 if native else FLOAT32, FLOAT32], function_of(not native, aligned)


def test_maps_round_to_tf32(cuda):
    bound = shifted_call().bind(0)
    assert bound.fast
    assert launched(cuda, bound) == ([TFLOAT32, FLOAT32], function_of(False, 16))
    assert "-8192" not in bound.compiled.asm["ttir"]


def test_the_ordinary_launch_rounds_too(cuda):
    assert launched(cuda, shifted_call().plain()) == otherwise()


def test_an_unexpected_alignment_rounds_too(cuda):
    assert launched(cuda, shifted_call().bind(0), shift=1) == otherwise(4)


def test_an_unknown_launcher_rounds_too(cuda, monkeypatch):
    monkeypatch.setattr(triton_internals, "_FORMS", {})
    bound = shifted_call().bind(0)
    assert not bound.fast
    assert launched(cuda, bound) == otherwise()


def test_an_unknown_encoder_rounds_too(cuda, monkeypatch):
    monkeypatch.setattr(triton_internals, "encoder_can_round", lambda: False)
    for module in (call, launch, triton_internals):
        monkeypatch.setattr(module, "triton_rounds", lambda: False, raising=False)
    monkeypatch.setattr(triton_internals, "_TFLOAT32", "not to be used")
    bound = shifted_call().bind(0)
    assert bound.fast and "-8192" in bound.compiled.asm["ttir"]
    assert shifted_call().build("sm90").constants["ROUND"] is True


def test_rounding_and_plain_maps_of_one_address_differ(cuda):
    rounding, plain = shifted_call().bind(0), shifted_call().arguments["target"]
    bound = Launcher(shifted, constants={"ROUND": False}).bind({**shifted_call().arguments, "source": plain}, (1,))
    x, shift = tensor(64, 32), tensor(1)
    cuda.expect(*("128s", "i", "i", "q", "q") * 2, "Q")
    for one, kind in ((rounding, TFLOAT32), (bound, FLOAT32), (rounding, TFLOAT32)):
        one(x, x, shift)
        assert cuda.element_types() == [kind, FLOAT32]


def test_the_build_is_what_is_bound(cuda):
    assert shifted_call().build("sm90").constants["ROUND"] is False


def test_a_rounding_map_needs_a_kernel_that_can_do_without(cuda):
    for make in (Call.plain, Call.bind, lambda one: one.build("sm90")):
        with pytest.raises(TypeError, match="source.*if_plain_maps"):
            make(shifted_call(if_plain_maps={}))


# --- boxes of fewer rows than blocks --------------------------------------------------------------------------------


def boxed_call(rows=24, **changes):
    return shifted_call(lambda plain: boxed(plain, rows), **changes)


def test_a_box_may_have_fewer_rows(cuda):
    bound = boxed_call().bind(0)
    assert bound.fast and launched(cuda, bound)[1] == function_of(False, 16)
    assert cuda.boxes() == [(24, 32), (64, 32)]


def test_the_ordinary_launch_has_whole_boxes(cuda):
    assert launched(cuda, boxed_call().plain())[1] == function_of(True, 16)
    assert cuda.boxes() == [(64, 32), (64, 32)]


def test_an_unknown_encoder_has_whole_boxes(cuda, monkeypatch):
    monkeypatch.setattr(triton_internals, "encoder_can_box", lambda: False)
    assert launched(cuda, boxed_call().bind(0))[1] == function_of(True, 16)
    assert cuda.boxes() == [(64, 32), (64, 32)] and boxed_call().build("sm90").constants["ROUND"] is True


def test_a_box_fits_into_its_block():
    for rows in (0, 65):
        with pytest.raises(ValueError, match=f"a box of {rows} rows"):
            boxed_call(rows)
    with pytest.raises(TypeError, match="source.*if_plain_maps"):
        boxed_call(if_plain_maps={}).build("sm90")


def test_only_float32_is_rounded_to_tf32():
    with pytest.raises(TypeError, match="not torch.bfloat16"):
        rounded_to_tf32(TensorDescriptor(StandIn((64, 64), "bfloat16"), [64, 64], [64, 1], [64, 64]))
