"""gluon_matmul_row_pairs without a GPU: its machine code, its boxes and clusters, and what it takes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from compiled import instructions, mentions, resources
from launch_support import needs_fake_cuda
from products import call_of, declared_configs_are_legal, fitting, gpu_for, launched, meetings, product

from registry.plugins.gluon_matmul_row_pairs import host, registry_variants
from registry.plugins.gluon_matmul_row_pairs.cost import candidates, config
from registry.plugins.gluon_matmul_row_pairs.kernel import matmul_row_pairs
from registry.toolbox.launch import NoClusters

WITH_NEWEST_TRITON = r"widest|alone|ordinary|\[129"
(VARIANT,) = registry_variants()


def problem(m=200, n=8192, k=8192, **more):
    return product(m, n, k, **more)


@pytest.mark.parametrize(
    "m, chosen, more",
    [
        (256, (2, 256, 4, False), {}),
        (200, (2, 232, 5, False), {"dtype": "float16"}),
        (110, (1, 256, 5, False), {"bias": True, "activation": "gelu"}),
        (256, (2, 128, 7, True), {"bias": True}),
        (136, (1, 64, 12, True), {"dtype": "float16"}),
    ],
)
def test_widest_tiles(m, chosen, more):
    """Those with most registers. wgmma never waits for the one before it, and finds the ring where it looks for it."""
    found, cfg = fitting(VARIANT, problem(m, **more), config(*chosen))
    assert not found.spills
    asked = instructions(found)
    assert asked["wgmma"] % (4 * cfg.CONSUMERS) == 0 and asked["TMA load"] == 2 and 24 in found.setmaxnreg
    beside = found.shared - (cfg.STAGES * cfg.STAGE + cfg.BEYOND + 1) * 1024
    assert beside < 1024, "the ring, which begins at a multiple of 1024, comes first"
    assert meetings(found) >= cfg.CONSUMERS + 2


def test_a_kernel_that_is_launched_alone_meets_nobody():
    p = problem(256)
    found = resources(call_of(host, p, config(2, 128, 7, True)).alone().build(p.target), p.target)
    assert meetings(found) == mentions(found, "mapa") == 0
    assert not found.spills and found.shared <= p.target.shared_memory


cuda = gpu_for(matmul_row_pairs)
FORMATS = (*("128s", "i", "i", "q", "q") * 2, *"QiiiiiQ")
"""Of its parameters; the kernel's own instructions look for maps at 0 and 5."""


def call(m, chosen):
    return call_of(host, problem(m, 512, 512), config(*chosen))


@needs_fake_cuda
@pytest.mark.parametrize(
    "m, chosen, both, grid",
    [
        (96, (2, 128, 4, True), [(64, 64), (48, 64)], 8),
        (129, (2, 128, 4, True), [(64, 64), (72, 64)], 8),
        (250, (2, 88, 4, False), [(128, 64), (48, 64)], 12),  # eight columns come twice
        (65, (1, 64, 4, False), [(40, 64), (32, 64)], 16),
    ],
)
def test_a_pair_shares_out_the_rows_and_each_brings_half_of_the_columns(cuda, m, chosen, both, grid):
    assert launched(cuda, call(m, chosen), FORMATS) == (both, grid, 2)


@needs_fake_cuda
def test_the_ordinary_launch_has_single_ctas(cuda):
    made = call(200, (2, 128, 4, True))
    assert launched(cuda, made, FORMATS, lambda call: call.alone().plain()) == ([(8, 64)] * 2, 8, 1)
    with pytest.raises(TypeError, match="clusters"):
        made.plain()


@needs_fake_cuda
def test_where_a_bound_launch_has_no_clusters_it_has_single_ctas(cuda, monkeypatch):
    monkeypatch.setattr(matmul_row_pairs, "pre_run_hooks", [lambda *_, **__: None])  # which it leaves to kernel[grid]
    p, chosen = problem(200, 512, 512), config(2, 128, 4, True)
    with pytest.raises(NoClusters, match="hooks"):
        call_of(host, p, chosen).bind(0)
    cuda.expect(*FORMATS)
    out = host.HOST.prepare(p, chosen)(torch.empty(200, 512).bfloat16(), torch.empty(512, 512).bfloat16().t())
    assert (cuda.boxes(), cuda.last.grid[0], cuda.last.cluster) == ([(8, 64)] * 2, 8, 1) and out.shape == (200, 512)


def test_declared_configs_are_legal():
    of = lambda draw: (draw.randint(65, 256), 2 * draw.randint(1, 20000), 8 * draw.randint(1, 3000))  # noqa: E731
    declared_configs_are_legal(VARIANT, host, candidates, 4, lambda draw: problem(*of(draw)))


@pytest.mark.parametrize("more", [{"m": 64}, {"m": 257}, {"n": 8191}, {"layout": "nn"}, {"dtype": "float32"}, {"b": 2}])
def test_what_is_refused(more):
    assert VARIANT.reasons(problem(**more))
