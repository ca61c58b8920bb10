"""gluon_matmul_rows without a GPU: its machine code, its boxes, and which problems and configs it takes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton")

from compiled import instructions, loop_spills, resources
from launch_support import bound, boxes, fake_gpu, needs_fake_cuda

from registry import Target
from registry.ops.matmul.calls import MATMUL
from registry.ops.matmul.problem import MatmulProblem
from registry.plugins.gluon_matmul_rows import host, registry_variants
from registry.plugins.gluon_matmul_rows.cost import candidates, config
from registry.plugins.gluon_matmul_rows.kernel import matmul_rows

WITH_NEWEST_TRITON = r"widest|ordinary|\[97"
(VARIANT,) = registry_variants()


def problem(m=200, n=8192, k=8192, layout="nt", **more):
    return MatmulProblem.of_shape(Target.named("H200"), m=m, n=n, k=k, layout=layout, **more)


@pytest.mark.parametrize(
    "m, chosen, more",
    [
        (200, (2, 1, 128, 5, 2, True), {}),
        (232, (2, 1, 128, 5, 0, True), {"dtype": "float16"}),
        (232, (1, 1, 64, 6, 2, True), {}),
        (176, (3, 1, 192, 4, 1, True), {}),
        (256, (1, 1, 64, 5, 1, True), {}),
        (160, (2, 2, 256, 4, 1, True), {}),
        (5, (1, 1, 64, 12, 4, True), {}),
        (96, (2, 1, 232, 5, 2, False), {}),
        (150, (3, 1, 176, 5, 1, False), {}),
        (192, (3, 1, 136, 5, 2, False), {}),
        (200, (4, 1, 104, 5, 1, False), {}),
        (256, (2, 2, 160, 4, 1, False), {}),
        (256, (2, 2, 96, 5, 3, False), {"dtype": "float16"}),
    ],
)
def test_widest_tiles(m, chosen, more):
    """Those with most registers. wgmma never waits for the one before it, and finds the ring where it looks for it."""
    p, chosen = problem(m, **more), config(*chosen)
    assert not VARIANT.reasons(p) and not list(VARIANT.requires.rule(p, chosen))
    (build,) = VARIANT.builds(p, chosen)
    found, cfg = resources(build, p.target), build.constants["cfg"]
    assert not [line for line in found.ptxas_warnings if "C75" in line], "wgmma serialised"
    assert not found.spills or not loop_spills(found)
    assert found.shared <= VARIANT.requires.shared_memory(p, chosen) <= min(found.shared + 512, p.target.shared_memory)
    assert found.registers * found.threads <= VARIANT.requires.registers(p, chosen) <= 65536
    asked = instructions(found)
    assert asked["wgmma"] % (4 * cfg.UNITS * cfg.CONSUMERS) == 0 and asked["TMA load"] >= 2 and 24 in found.setmaxnreg
    behind = found.shared - (cfg.STAGES * cfg.STAGE + cfg.BEYOND) * 1024
    assert behind < 1024, "the ring, which begins at a multiple of 1024, comes first"


@pytest.fixture
def cuda(monkeypatch):
    yield from fake_gpu(monkeypatch, matmul_rows)


def boxes_of(cuda, launch, m, chosen):
    p = problem(m, 512, 512)
    (call,) = host.call(p, chosen, MATMUL.operands(p), 1.0)
    return boxes(cuda, launch, call, *("128s", "i", "i", "q", "q") * 2)


@needs_fake_cuda
@pytest.mark.parametrize("m, rows", [(96, 96), (97, 104), (250, 256)])
def test_boxes_have_the_rows_that_are_there(cuda, m, rows):
    assert boxes_of(cuda, bound, m, config(1, 1, 64, 4, 1, True)) == [(64, 64), (rows, 64)]
    assert boxes_of(cuda, bound, m, config(2, 1, 80, 4, 1, False)) == [(rows, 64), (80, 64)]


@needs_fake_cuda
def test_the_ordinary_launch_loads_by_eights(cuda):
    assert boxes_of(cuda, lambda call: call.plain(), 96, config(1, 1, 64, 4, 1, True)) == [(8, 64), (8, 64)]


def test_declared_configs_are_legal():
    draw = random.Random(0)
    for _ in range(200):
        m, n, k = draw.randint(1, 256), 2 * draw.randint(1, 20000), 8 * draw.randint(1, 3000)
        p = problem(m, n, k)
        assert not VARIANT.reasons(p)
        found = candidates(p)
        assert found and VARIANT.legal_configs(p)[0] == found[0], (m, n, k)
        assert all(not list(VARIANT.requires.rule(p, one)) for one in found), (m, n, k)
        assert all(VARIANT.requires.shared_memory(p, one) <= p.target.shared_memory for one in found), (m, n, k)
        for one in found:
            (call,) = host.call(p, one, MATMUL.operands(p), 1.0)
            assert call.grid[0] <= p.target.sm_count


@pytest.mark.parametrize("more", [{"m": 257}, {"n": 8191}, {"layout": "nn"}, {"dtype": "float32"}, {"bias": True}])
def test_what_is_refused(more):
    assert VARIANT.reasons(problem(**more))
