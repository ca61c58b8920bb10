"""gluon_matmul_rows without a GPU: its machine code, its boxes, and which problems and configs it takes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from compiled import instructions, loop_spills
from launch_support import bound, boxes, needs_fake_cuda
from products import call_of, declared_configs_are_legal, fitting, gpu_for, product

from registry.plugins.gluon_matmul_rows import host, registry_variants
from registry.plugins.gluon_matmul_rows.cost import candidates, config
from registry.plugins.gluon_matmul_rows.kernel import matmul_rows

WITH_NEWEST_TRITON = r"widest|ordinary|\[97"
(VARIANT,) = registry_variants()


def problem(m=200, n=8192, k=8192, **more):
    return product(m, n, k, **more)


@pytest.mark.parametrize(
    "m, chosen, more",
    [
        (200, (2, 1, 128, 5, 2, True), {}),
        (232, (2, 1, 128, 5, 0, True), {"dtype": "float16"}),
        (232, (1, 1, 64, 6, 2, True), {}),
        (176, (3, 1, 192, 4, 1, True), {}),
        (256, (1, 1, 64, 5, 1, True), {}),
        (160, (2, 2, 256, 4, 1, True), {"bias": True, "activation": "gelu"}),
        (5, (1, 1, 64, 12, 4, True), {}),
        (96, (2, 1, 232, 5, 2, False), {}),
        (150, (3, 1, 176, 5, 1, False), {"bias": True}),
        (192, (3, 1, 136, 5, 2, False), {}),
        (200, (4, 1, 104, 5, 1, False), {"activation": "silu"}),
        (256, (2, 2, 160, 4, 1, False), {"bias": True, "activation": "gelu"}),
        (256, (2, 2, 96, 5, 3, False), {"dtype": "float16"}),
    ],
)
def test_widest_tiles(m, chosen, more):
    """Those with most registers. wgmma never waits for the one before it, and finds the ring where it looks for it."""
    found, cfg = fitting(VARIANT, problem(m, **more), config(*chosen))
    assert not found.spills or not loop_spills(found)
    asked = instructions(found)
    assert asked["wgmma"] % (4 * cfg.UNITS * cfg.CONSUMERS) == 0 and asked["TMA load"] >= 2 and 24 in found.setmaxnreg
    behind = found.shared - (cfg.STAGES * cfg.STAGE + cfg.BEYOND) * 1024
    assert behind < 1024, "the ring, which begins at a multiple of 1024, comes first"


cuda = gpu_for(matmul_rows)


def boxes_of(cuda, launch, m, chosen):
    return boxes(cuda, launch, call_of(host, problem(m, 512, 512), chosen), *("128s", "i", "i", "q", "q") * 2)


@needs_fake_cuda
@pytest.mark.parametrize("m, rows", [(96, 96), (97, 104), (250, 256)])
def test_boxes_have_the_rows_that_are_there(cuda, m, rows):
    assert boxes_of(cuda, bound, m, config(1, 1, 64, 4, 1, True)) == [(64, 64), (rows, 64)]
    assert boxes_of(cuda, bound, m, config(2, 1, 80, 4, 1, False)) == [(rows, 64), (80, 64)]


@needs_fake_cuda
def test_the_ordinary_launch_loads_by_eights(cuda):
    assert boxes_of(cuda, lambda call: call.plain(), 96, config(1, 1, 64, 4, 1, True)) == [(8, 64), (8, 64)]


def test_declared_configs_are_legal():
    of = lambda draw: (draw.randint(1, 256), 2 * draw.randint(1, 20000), 8 * draw.randint(1, 3000))  # noqa: E731
    declared_configs_are_legal(VARIANT, host, candidates, 4, lambda draw: problem(*of(draw)))


@pytest.mark.parametrize("more", [{"m": 257}, {"n": 8191}, {"layout": "nn"}, {"dtype": "float32"}, {"b": 2}])
def test_what_is_refused(more):
    assert VARIANT.reasons(problem(**more))
