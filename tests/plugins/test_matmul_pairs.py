"""gluon_matmul_pairs without a GPU: its machine code, boxes and clusters, and which problems and configs it takes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton")

from compiled import instructions, reading, resources
from launch_support import bound, boxes, fake_gpu, needs_fake_cuda

from registry import Target
from registry.ops.matmul.calls import MATMUL
from registry.ops.matmul.problem import MatmulProblem
from registry.plugins.gluon_matmul_pairs import candidates, config, host, registry_variants
from registry.plugins.gluon_matmul_pairs.kernel import matmul_pairs_of_tiles
from registry.toolbox.builds import Build

WITH_NEWEST_TRITON = r"tile|alone|ordinary|half"
(VARIANT,) = registry_variants()


def problem(m=4096, n=4096, k=4096, layout="nt", **more):
    return MatmulProblem.of_shape(Target.named("H200"), m=m, n=n, k=k, layout=layout, **more)


TILES = sorted({(one["HIGH"], one["WIDTH"], one["SWAP"]) for m in (4096, 300, 750) for one in candidates(problem(m))})


@pytest.mark.parametrize("at", range(len(TILES)))
def test_each_tile(at):
    """wgmma never waits for the one before it, all accumulators stay in registers, and half a factor goes to both."""
    high, width, swap = TILES[at]
    chosen = config(high, width, 1 if swap or at % 3 == 0 else 2, swap)
    p = problem(dtype=("bfloat16", "float16")[at % 2])
    assert not VARIANT.reasons(p) and not list(VARIANT.requires.rule(p, chosen))
    (build,) = VARIANT.builds(p, chosen)
    found, cfg = resources(build, p.target), build.constants["cfg"]
    assert not [line for line in found.ptxas_warnings if "C75" in line], "wgmma serialised"
    assert not found.spills
    assert found.shared <= VARIANT.requires.shared_memory(p, chosen) <= min(found.shared + 512, p.target.shared_memory)
    assert found.registers * found.threads <= VARIANT.requires.registers(p, chosen) <= 65536
    asked = instructions(found)
    assert asked["wgmma"] % (8 * cfg.UNITS) == 0 and asked["TMA load"] == 2 and {24, 240} < set(found.setmaxnreg)
    beside = found.shared - (cfg.STAGES * cfg.STAGE + 1 + cfg.UNITS * cfg.STORES * cfg.PIECE // 4) * 1024
    assert beside < 1024, "what the kernel sets aside, which begins at a multiple of 1024, comes first"


@pytest.fixture
def cuda(monkeypatch):
    yield from fake_gpu(monkeypatch, matmul_pairs_of_tiles)


MAPS = ("128s", "i", "i", "q", "q") * 3
"""Where the kernel's own instructions look for them: parameters 0, 5 and 10."""


def launched(cuda, p, chosen, launch=bound):
    (call,) = host.call(p, chosen, MATMUL.operands(p), 1.0)
    found = boxes(cuda, launch, call, *MAPS, "i", "i", "i")
    return found, list(cuda.last.grid)[0], cuda.last.cluster


@needs_fake_cuda
def test_pairs_are_clusters_and_bring_half_of_what_they_share(cuda):
    """Of narrow tiles, which compile in a tenth of the time that the widest take."""
    found, *grid = launched(cuda, problem(1000, 696, 512), config(256, 64, 2))
    assert found == [(256, 64), (32, 64), (128, 64)] and grid == [2 * 2 * 11, 2]
    found, *grid = launched(cuda, problem(1000, 696, 512), config(128, 96, 1))
    assert found == [(64, 64), (96, 64), (64, 32)] and grid == [2 * 8 * 4, 2]
    found, *grid = launched(cuda, problem(1000, 696, 512), config(128, 96, 2))
    assert found == [(128, 64), (48, 64), (64, 32)] and grid == [2 * 4 * 8, 2]
    found, *grid = launched(cuda, problem(300, 696, 512), config(128, 96, 1, swap=True))
    assert found == [(64, 64), (96, 64), (96, 64)] and grid == [2 * 3 * 4, 2]


@needs_fake_cuda
def test_the_ordinary_launch_has_single_ctas(cuda):
    found, *grid = launched(cuda, problem(1000, 696, 512), config(128, 64, 2), lambda call: call.alone().plain())
    assert found == [(8, 64)] * 3 and grid == [8 * 11, 1]
    with pytest.raises(TypeError, match="clusters"):
        launched(cuda, problem(1000, 696, 512), config(128, 64, 2), lambda call: call.plain())


@reading
def _meetings(found):
    return found.ptx.count("barrier.cluster.wait")


def test_a_kernel_that_is_launched_alone_meets_nobody():
    """`barrier.cluster` of a launch without clusters takes the hardware barrier of the default partition."""
    p = problem()
    (call,) = host.call(p, config(128, 128, 2), MATMUL.operands(p), 1.0)
    assert _meetings(resources(call.build(p.target), p.target)) >= 8
    alone = call.alone()
    for constants in (alone.constants, alone.if_plain_maps):
        build = Build.of(call.kernel, alone.example(), constants=constants, options=call.options, arch=p.target)
        assert _meetings(resources(build, p.target)) == 0


def test_declared_configs_are_legal():
    draw = random.Random(0)
    for _ in range(200):
        p = problem(draw.randint(129, 20000), 8 * draw.randint(1, 4000), 8 * draw.randint(1, 3000))
        found = candidates(p)
        assert not VARIANT.reasons(p) and VARIANT.legal_configs(p) == found[:4]
        for one in found:
            (call,) = host.call(p, one, MATMUL.operands(p), 1.0)
            assert call.grid[0] * call.cluster <= p.target.sm_count


@pytest.mark.parametrize(
    "more", [{"m": 128}, {"n": 4090}, {"layout": "nn"}, {"dtype": "float32"}, {"bias": True}, {"b": 2}]
)
def test_what_is_refused(more):
    assert VARIANT.reasons(problem(**more))
