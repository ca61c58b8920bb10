"""Kernels that are found without Triton's own look-up are those that Triton would find."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from launch_support import bind_descriptors, bind_scale, descriptors, fake_gpu, needs_fake_cuda, scale
from triton.experimental import gluon
from triton.tools.tensor_descriptor import TensorDescriptor

from registry.toolbox import known_kernels
from registry.toolbox.launch import Launcher, StandIn
from registry.toolbox.tensor_maps import Address, boxed

pytestmark = needs_fake_cuda

LENGTH = tl.constexpr(4)


@triton.jit(do_not_specialize=["plain"], do_not_specialize_on_alignment=["loose"])
def of_many(pointer, described, plain, loose, size, number, given, BLOCK: tl.constexpr, other=None):
    tl.store(pointer + tl.arange(0, BLOCK), plain + LENGTH)


@gluon.jit
def of_layouts(described):
    pass


@pytest.fixture
def cuda(monkeypatch):
    yield from fake_gpu(monkeypatch, of_many, of_layouts)


def triton_key(kernel, given, **options):
    """What Triton's own caches go by."""
    from triton.runtime.jit import compute_cache_key

    _, keys, _, _, binder = kernel.device_caches[0]
    _, specialization, rest = binder(**given, **options)
    return compute_cache_key(keys, specialization, rest)


INTEGERS = [1, 0, 2, 15, 16, 17, 160, -1, -16, 2**31 - 1, 2**31, 2**32, 2**40 + 1, -(2**31), -(2**31) - 1, 2**63, True]


def drawn(draw):
    dtype, rows = draw.choice(["float16", "bfloat16", "float32"]), draw.choice([16, 64])
    shape = [draw.choice([1, 16, 37, 4096]), 64]
    base = draw.choice([StandIn(shape, dtype), Address(draw.choice([0, 16, 256]), getattr(torch, dtype))])
    described = TensorDescriptor(StandIn(shape, dtype), shape, [draw.choice([64, 128]), 1], [rows, 64])
    described.base = base
    return {
        "pointer": draw.choice([StandIn((8,), dtype), StandIn((8,), dtype, alignment=8), Address(8, torch.int8)]),
        "described": draw.choice([described, StandIn((8,), dtype)]),
        "plain": draw.choice(INTEGERS),
        "loose": draw.choice(INTEGERS),
        "size": draw.choice([*INTEGERS, None]),
        "number": draw.choice([0.0, 1.0, 1, 16]),
        "given": draw.choice([(1, 16), (1, 17), (16, 1), (1.0, 16), (True, 16), (1, (16, 1)), (1, (16, True)), None]),
        "BLOCK": draw.choice([16, 32]),
        "other": draw.choice([None, 7]),
    }


def test_what_has_one_key_here_has_one_of_tritons(cuda):
    draw = random.Random(3)
    theirs, few = {}, draw.choices([drawn(draw) for _ in range(60)], k=60)
    for _ in range(4000):
        first, second = draw.choice(few), drawn(draw)
        given = {name: (first if draw.random() < 0.9 else second)[name] for name in first}
        key = tuple(known_kernels.kinds(of_many, given))
        assert theirs.setdefault(key, triton_key(of_many, given)) == triton_key(of_many, given)
    assert len(theirs) < 3900  # the same key came again and again


def test_layouts_are_told_apart(cuda):
    for first, second in [("float16", "bfloat16"), ("float16", "float16")]:
        one, other = (descriptors("gluon", *[StandIn((64, 64), dtype)] * 2, [64, 64])[0] for dtype in (first, second))
        other.layout = type(other.layout)(32, other.layout.element_bitwidth, 2) if first == second else other.layout
        keys = [known_kernels.kinds(of_layouts, {"described": described}) for described in (one, other)]
        assert keys[0] != keys[1]
        assert triton_key(of_layouts, {"described": one}) != triton_key(of_layouts, {"described": other})


def test_boxes_are_told_apart():
    one = TensorDescriptor(StandIn((64, 64), "float16"), [64, 64], [64, 1], [64, 64])
    assert known_kernels.block(one) != known_kernels.block(boxed(one, 8))
    longer = TensorDescriptor(StandIn((999, 64), "float16"), [999, 64], [128, 1], [64, 64])
    assert known_kernels.block(one) == known_kernels.block(longer)


def asked(monkeypatch, kernel=scale):
    """How often Triton is asked."""
    calls = []
    warmup = type(kernel).warmup
    monkeypatch.setattr(type(kernel), "warmup", lambda *a, **k: calls.append(a[0]) or warmup(*a, **k))
    return calls


def test_triton_is_asked_once(cuda, monkeypatch):
    calls = asked(monkeypatch)
    first = bind_scale(n=1024)
    assert [bind_scale(n=n).compiled for n in (32, 48, 1 << 20)] == [first.compiled] * 3
    assert len(calls) == 1
    others = [bind_scale(n=n).compiled for n in (1, 33, 2**33)]
    assert len({id(one) for one in (first.compiled, *others)}) == 4
    assert len(calls) == 4
    bind_descriptors("triton", *[StandIn((128, 64), "bfloat16")] * 2)
    bind_descriptors("triton", *[StandIn((192, 64), "bfloat16")] * 2)
    assert len(calls) == 5


def test_options_and_debugging_are_told_apart(cuda, monkeypatch):
    calls = asked(monkeypatch)
    example = {"x": StandIn((8,), "float32"), "y": StandIn((8,), "float32"), "n": 8, "factor": 1.0}
    for options in ({"num_warps": 1}, {"num_warps": 2}, {"num_warps": 2, "num_stages": 2}):
        Launcher(scale, constants={"BLOCK": 8}, options=options).bind(example, (1,))
    assert len(calls) == 3
    for switch, number in ((scale, 4), (triton.knobs.runtime, 5)):
        with monkeypatch.context() as patch:
            patch.setattr(switch, "debug", True)
            Launcher(scale, constants={"BLOCK": 8}, options={"num_warps": 1}).bind(example, (1,))
        assert len(calls) == number


def test_a_constant_that_changed_is_tritons_to_refuse(cuda, monkeypatch):
    given = {"pointer": StandIn((16,), "int64"), "described": None, "loose": 1, "size": 1, "number": 1.0, "given": None}

    def bind(plain):
        return Launcher(of_many, constants={"BLOCK": 16}).bind(given | {"plain": plain}, (1,))

    bind(3)
    bind(4)
    monkeypatch.setitem(globals(), "LENGTH", tl.constexpr(5))
    with pytest.raises(RuntimeError, match="LENGTH has changed"):
        bind(5)


def test_emptied_caches_are_asked_anew(cuda, monkeypatch):
    calls = asked(monkeypatch)
    bind_scale(n=64)
    scale.device_caches.clear()
    bind_scale(n=64)
    assert len(calls) == 2


def test_hooks_before_a_launch_see_each_call(cuda, monkeypatch):
    calls = asked(monkeypatch)
    monkeypatch.setattr(scale, "pre_run_hooks", [lambda *args, **kwargs: None])
    for n in (64, 80):
        bind_scale(n=n)
    assert len(calls) == 2


def test_hooks_that_change_how_is_compiled_are_asked_each_time(cuda, monkeypatch):
    calls = asked(monkeypatch)
    bind_scale(n=64)
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *stages: ("key", ""), raising=False)
    bind_scale(n=64)
    assert len(calls) == 2


def test_what_is_kept_is_bounded(cuda, monkeypatch):
    monkeypatch.setattr(known_kernels, "MOST", 3)
    for n in (64, 1, 33, 2**33, 2**34 + 1):
        bind_scale(n=n)
    assert len(scale.__dict__[known_kernels._KNOWN]) <= 3


def test_constants_without_a_hash_are_left_to_triton(cuda):
    made = []
    assert known_kernels.kernel_for(scale, {"BLOCK": []}, {}, 0, lambda: made.append(1) or "compiled") == "compiled"
    assert made == [1]


def test_a_kernel_that_was_not_compiled_is_asked_for_anew(cuda):
    """A hook of Triton's may say that it is compiled already, and nothing comes back."""
    given = {"x": StandIn((8,), "float32"), "y": StandIn((8,), "float32"), "n": 8, "factor": 1.0, "BLOCK": 8}
    for made in (None, "compiled"):
        assert known_kernels.kernel_for(scale, given, {}, 0, lambda made=made: made) == made
