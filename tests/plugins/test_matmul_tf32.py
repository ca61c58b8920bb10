"""float32 operands of the products over tensor maps: the maps round them to tf32, and not what is stored."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from launch_support import needs_fake_cuda
from products import call_of, gpu_for, product

from registry.plugins import triton_matmul_tma
from registry.plugins.gluon_matmul_ws import configs, host
from registry.plugins.gluon_matmul_ws.kernel import matmul_ws
from registry.toolbox.triton_internals import triton_rounds

WITH_NEWEST_TRITON = r"."
FLOAT32, TFLOAT32, BFLOAT16 = 7, 11, 9


cuda = gpu_for(matmul_ws, triton_matmul_tma._matmul_tma)


def calls_of(module, found, **shape):
    problem = product(512, 512, 512, **shape)
    return call_of(module, problem, found(problem)[0])


def element_types(cuda, call, launch):
    formats = []
    for value in call.arguments.values():
        if hasattr(value, "block_shape"):
            rank = len(value.shape)
            formats += ["128s", *["i"] * rank, *["q"] * rank]
    cuda.expect(*formats)
    launch(*[1 << 20] * len(call.varying()))
    return cuda.element_types()


KINDS = {"gluon_matmul_ws": (host, configs, 3), "triton_matmul_tma": (triton_matmul_tma, triton_matmul_tma.configs, 2)}


@needs_fake_cuda
@pytest.mark.parametrize("name", KINDS)
def test_float32_operands_are_rounded_by_their_maps(cuda, name):
    module, found, operands = KINDS[name]
    call = calls_of(module, found, dtype="float32")
    bound = call.bind(0)
    assert bound.fast
    assert element_types(cuda, call, bound) == [TFLOAT32] * operands + [FLOAT32]
    assert "-8192" not in bound.compiled.asm["ttgir"]


@needs_fake_cuda
@pytest.mark.parametrize("name", KINDS)
def test_the_ordinary_launch_rounds_too(cuda, name):
    module, found, operands = KINDS[name]
    call = calls_of(module, found, dtype="float32")
    native = triton_rounds()
    assert element_types(cuda, call, call.plain()) == [TFLOAT32 if native else FLOAT32] * operands + [FLOAT32]
    launched = call.kernel.device_caches[0][0].values()
    assert [("-8192" in one.asm["ttgir"]) for one in launched] == [not native]


@needs_fake_cuda
@pytest.mark.parametrize("name", KINDS)
def test_other_dtypes_are_left_alone(cuda, name):
    module, found, operands = KINDS[name]
    call = calls_of(module, found, dtype="bfloat16")
    assert element_types(cuda, call, call.bind(0)) == [BFLOAT16] * (operands + 1)
