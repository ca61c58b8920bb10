"""gluon_matmul_pairs without a GPU: its machine code, boxes and clusters, and which problems and configs it takes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from compiled import instructions, mentions, resources
from launch_support import needs_fake_cuda
from products import call_of, declared_configs_are_legal, fitting, gpu_for, launched, meetings, product

from registry.plugins.gluon_matmul_pairs import MOST, candidates, config, host, registry_variants
from registry.plugins.gluon_matmul_pairs.kernel import matmul_exact_pairs, matmul_pairs_of_tiles
from registry.toolbox.builds import Build

WITH_NEWEST_TRITON = r"tile|alone|ordinary|half.*chosen0"
(VARIANT,) = registry_variants()


def problem(m=4096, n=4096, k=4096, **more):
    return product(m, n, k, **more)


def _tiles():
    """(HIGH, WIDTH, SWAP, TURNS): of each kind of tiles the narrowest, the widest, and those of uneven pieces."""
    kinds = {}
    for sizes in ((4096,), (300,), *((m, 43008) for m in (130, 150, 190))):
        for one in candidates(problem(*sizes)):
            kinds.setdefault((one["HIGH"], one["SWAP"], one["TURNS"]), set()).add(one["WIDTH"])
    for (high, swap, turns), widths in sorted(kinds.items()):
        ends = {min(widths), max(widths)}
        yield from ((high, width, swap, turns) for width in sorted(widths) if width in ends or width % 16)


TILES = list(_tiles())


@pytest.mark.parametrize("at", range(len(TILES)))
def test_each_tile(at):
    """wgmma never waits for the one before it, all accumulators stay in registers, and half a factor goes to both."""
    high, width, swap, turns = TILES[at]
    ways, full = ((1, False), (4, False), (1, False), (3, True))[at % 4]
    pair = 1 if width % 16 or (swap and high < 192) or at % 3 == 0 else 2
    chosen = config(high, width, pair, swap, ways=ways, turns=turns, full=full)
    sizes = (192, 1024) if ways == 4 else (4096, 4104)
    ends = ({}, {"bias": True, "activation": "gelu"}, {"bias": True}, {"activation": "silu"})[at % 5 % 4]
    p = problem(*sizes, dtype=("bfloat16", "float16")[at // 2 % 2], **ends)
    found, cfg = fitting(VARIANT, p, chosen)
    assert not found.spills
    assert len(VARIANT.builds(p, chosen)) == 1 + (ways > 1)
    asked, registers = instructions(found), {24, 160, 168} if cfg.CONSUMERS == 3 else {24, 240}
    assert asked["wgmma"] % (4 * cfg.CONSUMERS * cfg.UNITS) == 0 and asked["TMA load"] == 2
    assert registers < set(found.setmaxnreg)
    beside = (
        found.shared - (cfg.STAGES * cfg.STAGE + 1 + cfg.CONSUMERS * cfg.UNITS * cfg.STORES * cfg.PIECE // 8) * 1024
    )
    assert beside < 1024, "what the kernel sets aside, which begins at a multiple of 1024, comes first"


def of_8_bits(m=4096, n=4096, k=4096, **more):
    return product(m, n, k, **{"dtype": "float8_e4m3fn", "scaling": "rowwise", "out_dtype": "bfloat16", **more})


EXACT_TILES = sorted({one["WIDTH"] for one in candidates(of_8_bits())})


@pytest.mark.parametrize("at", range(len(EXACT_TILES)))
def test_each_tile_of_8_bits(at):
    """Blocks of K begin anew, and what they and the accumulators take stays in registers."""
    more = ({}, {"dtype": "float8_e5m2", "out_dtype": "float16"}, {"scaling": "scalar"}, {"scaling": ""})[at % 4]
    p = of_8_bits(**more, **({"bias": True, "activation": "gelu"} if at % 2 else {}))
    chosen = next(one for one in candidates(p) if one["WIDTH"] == EXACT_TILES[at])
    found, cfg = fitting(VARIANT, p, chosen)
    assert not found.spills and instructions(found)["wgmma"] == 2 * 4 * cfg.UNITS * (3 if cfg.AHEAD else 1)
    assert instructions(found)["TMA load"] == 2 and {24, 240} < set(found.setmaxnreg)


cuda = gpu_for(matmul_pairs_of_tiles, matmul_exact_pairs)
FORMATS = (*("128s", "i", "i", "q", "q") * 3, *"iiiiqqi")
"""Of its parameters; the kernel's own instructions look for maps at 0, 5 and 10."""


@needs_fake_cuda
@pytest.mark.parametrize(
    "m, n, chosen, found, grid",
    [
        (1000, 696, config(256, 64, 2), [(256, 64), (32, 64), (128, 64)], 2 * 2 * 11),
        (1000, 696, config(128, 96, 1), [(64, 64), (96, 64), (64, 32)], 2 * 8 * 4),
        (1000, 696, config(128, 96, 2), [(128, 64), (48, 64), (64, 32)], 2 * 4 * 8),
        (300, 696, config(128, 96, 1, swap=True), [(64, 64), (96, 64), (96, 64)], 2 * 3 * 4),
        (300, 696, config(192, 80, 2, swap=True), [(192, 64), (40, 64), (40, 64)], 2 * 2 * 4),
        (300, 696, config(64, 56, 1, swap=True, turns=True), [(32, 64), (56, 64), (56, 64)], 2 * 11 * 3),
        (300, 696, config(128, 152, 1, swap=True), [(64, 64), (152, 64), (8, 64)], 2 * 6),
        (1000, 1400, config(128, 96, 1, ways=6, full=True), None, 2 * 66),
        (500, 696, config(256, 64, 2, ways=5), None, 2 * 5 * 11),
        (1000, 4096, config(128, 112, 2, turns=True), [(128, 64), (56, 64), (128, 16)], 2 * 66),
    ],
)
def test_pairs_are_clusters_and_bring_half_of_what_they_share(cuda, m, n, chosen, found, grid):
    """Of narrow tiles, which compile in a tenth of the time that the widest take."""
    boxes, programs, cluster = launched(cuda, call_of(host, problem(m, n, 512), chosen), FORMATS)
    assert (programs, cluster) == (grid, 2) and found in (boxes, None)


EXACT_FORMATS = (*("128s", "i", "i", "q", "q") * 3, *"iiiqqiiiiq")


@needs_fake_cuda
def test_boxes_of_8_bits_are_as_long(cuda):
    """128 bytes of K."""
    call = call_of(host, of_8_bits(1000, 696, 512), config(128, 96, 2))
    assert launched(cuda, call, EXACT_FORMATS) == ([(128, 128), (48, 128), (64, 32)], 2 * 4 * 8, 2)


@needs_fake_cuda
def test_the_ordinary_launch_has_single_ctas(cuda):
    call = call_of(host, problem(1000, 696, 512), config(128, 64, 2))
    assert launched(cuda, call, FORMATS, lambda call: call.alone().plain()) == ([(8, 64)] * 3, 8 * 11, 1)
    with pytest.raises(TypeError, match="clusters"):
        call.plain()


@pytest.mark.parametrize("p", [problem(), of_8_bits(), of_8_bits(k=64)], ids=["16 bits", "8 bits", "one block of 8"])
def test_a_kernel_that_is_launched_alone_meets_nobody(p):
    """`barrier.cluster` of a launch without clusters takes the hardware barrier of the default partition, and there is
    no other CTA at whose barriers to arrive."""
    call = call_of(host, p, config(128, 128, 2))
    together = resources(call.build(p.target), p.target)
    assert meetings(together) >= 4 and mentions(together, "mapa")
    alone = call.alone()
    for constants in (alone.constants, alone.if_plain_maps):
        build = Build.of(call.kernel, alone.example(), constants=constants, options=call.options, arch=p.target)
        found = resources(build, p.target)
        assert meetings(found) == mentions(found, "mapa") == 0


def test_declared_configs_are_legal():
    of = lambda draw: (draw.randint(129, 20000), 8 * draw.randint(1, 4000), 8 * draw.randint(1, 3000))  # noqa: E731
    declared_configs_are_legal(VARIANT, host, candidates, MOST, lambda draw: problem(*of(draw)))
    even = lambda draw: (draw.randint(129, 20000), 8 * draw.randint(1, 4000), 16 * draw.randint(1, 1500))  # noqa: E731
    declared_configs_are_legal(VARIANT, host, candidates, MOST, lambda draw: of_8_bits(*even(draw)))


@pytest.mark.parametrize(
    "more",
    [{"m": 64}, {"m": 128, "k": 960}, {"n": 4090}, {"layout": "nn"}, {"dtype": "float32"}, {"b": 2}]
    + [{"scaling": "rowwise"}],
)
def test_what_is_refused(more):
    assert VARIANT.reasons(problem(**more))


@pytest.mark.parametrize("more", [{"swap": True}, {"turns": True}, {"ways": 2}])
def test_configs_refused_to_8_bits(more):
    assert list(VARIANT.requires.rule(of_8_bits(), config(128, 96, 1, **more)))
