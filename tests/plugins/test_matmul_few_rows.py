"""The boxes of gluon_matmul_ws: no more rows than there are, and whole blocks through Triton's own launches."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from launch_support import bound, boxes, needs_fake_cuda
from products import call_of, gpu_for, product

from registry.plugins.gluon_matmul_ws import config, host
from registry.plugins.gluon_matmul_ws.kernel import matmul_ws

WITH_NEWEST_TRITON = r"\[29|ordinary|columns"


cuda = gpu_for(matmul_ws)


def boxes_of(cuda, launch, m, **more):
    """Those of a, of both parts of b, and of the result."""
    call = call_of(host, product(m, 512, 512), config("coop", 128, 48, 4, **more))
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
