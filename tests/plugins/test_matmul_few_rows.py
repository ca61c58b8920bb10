"""The boxes of gluon_matmul_ws: no more rows than there are, and whole blocks through Triton's own launches."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from launch_support import bound, boxes, fake_gpu, needs_fake_cuda

from registry import Target
from registry.ops.matmul.calls import MATMUL
from registry.ops.matmul.problem import MatmulProblem
from registry.plugins.gluon_matmul_ws import config, host
from registry.plugins.gluon_matmul_ws.kernel import matmul_ws

WITH_NEWEST_TRITON = r"\[29|ordinary|columns"


@pytest.fixture
def cuda(monkeypatch):
    yield from fake_gpu(monkeypatch, matmul_ws)


def boxes_of(cuda, launch, m, **more):
    """Those of a, of both parts of b, and of the result."""
    problem = MatmulProblem.of_shape(Target.named("H200"), m=m, n=512, k=512, layout="nt")
    (call,) = host.call(problem, config("coop", 128, 48, 4, **more), MATMUL.operands(problem), 1.0)
    formats = [("128s", "i", "i", "i", "q", "q", "q") for value in call.arguments.values() if hasattr(value, "shape")]
    return boxes(cuda, launch, call, *(one for each in formats[:4] for one in each))


@needs_fake_cuda
@pytest.mark.parametrize("m, rows", [(96, 48), (128, 64), (29, 16), (150, 40), (300, 64)])
def test_boxes_have_the_rows_that_are_there(cuda, m, rows):
    assert boxes_of(cuda, bound, m) == [(1, rows, 64), (1, 32, 64), (1, 16, 64), (1, rows, 16)]


@needs_fake_cuda
def test_the_ordinary_launch_has_whole_boxes(cuda):
    """And does not store rows of a neighbour by TMA."""
    assert boxes_of(cuda, lambda call: call.plain(), 96)[:3] == [(1, 64, 64), (1, 32, 64), (1, 16, 64)]
    (launched,) = matmul_ws.device_caches[0][0].values()
    assert "async_tma_copy_local_to_global" not in launched.asm["ttgir"]
    assert re.findall(r"barrier_expect %\w+, (\d+)", launched.asm["ttgir"]) == [str((2 * 64 + 48) * 128)]


@needs_fake_cuda
def test_columns_as_rows_have_whole_boxes(cuda):
    """And rows as columns no more than there are."""
    assert boxes_of(cuda, bound, 41, swap=True) == [(1, 64, 64), (1, 32, 64), (1, 16, 64), (1, 16, 64)]
