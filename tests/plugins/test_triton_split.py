"""triton_split without a GPU: how its work is shared out, and what the compiler makes of its configs."""

from __future__ import annotations

import pytest

from registry import Target, variants
from registry.ops.attention.problem import AttentionProblem

triton = pytest.importorskip("triton")

from compiled import instructions, loop_spills, matrix_units, mentions, resources  # noqa: E402

from registry.plugins.triton_varlen.dense_host import MOST_QUERIES, lines_of, shares  # noqa: E402

WITH_NEWEST_TRITON = r"first_configs.*sm80"
NAME = "triton_split"


def problem(arch="sm90", **sizes):
    return AttentionProblem.of_shape(Target.named(arch), **{**dict(b=4, hq=32, hkv=8, s=1, sk=4096, d=128), **sizes})


def built(p):
    """(first legal config, what the compiler makes of it)."""
    variant = variants()[NAME]
    config = variant.legal_configs(p)[0]
    (one,) = (resources(build, p.target) for build in variant.builds(p, config))
    assert one.shared <= variant.requires.shared_memory(p, config)
    assert not one.spills or not loop_spills(one), "it spills in its loop"
    return config, one


@pytest.mark.parametrize(
    "arch, sizes",
    [
        ("sm90", dict()),
        ("sm90", dict(d=64)),
        ("sm90", dict(d=256)),
        ("sm90", dict(s=16, causal=True, lse=True)),
        ("sm90", dict(s=16, d=64, causal=True)),
        ("sm90", dict(s=8, d=256)),
        ("sm90", dict(d=80, hkv=32, window=(1023, 0), softcap=30.0, s=3)),
        ("sm80", dict()),
    ],
    ids=str,
)
def test_first_configs(arch, sizes):
    p = problem(arch, **sizes)
    config, one = built(p)
    assert ("wgmma" if config["BLOCK_M"] >= 64 else "mma") in matrix_units(one)
    assert instructions(one)["cp.async"] and not mentions(one, r"cp\.async\.ca"), "all bytes come by copies of 16"
    fit = 65536 // (-(-one.registers // 8) * 8 * 32 * config["num_warps"])
    assert fit == config["PER_SM"], "where more fit an SM than are launched for it, some SMs get more than others"


def test_where_tiles_are_many_two_programs_of_an_sm_come_first():
    first = [variants()[NAME].configs_for(problem(s=16, b=b))[0]["PER_SM"] for b in (1, 24)]
    assert first == [1, 2]


def test_a_length_that_grows_builds_nothing_new():
    variant = variants()[NAME]
    found = set()
    for sk in (4096, 4097, 5000, 60001):
        p = problem(sk=sk)
        (build,) = variant.builds(p, variant.legal_configs(p)[0])
        found.add(repr(build))
    assert len(found) == 1


@pytest.mark.parametrize("heads", [1, 2, 5, 8, 28, 32, 40, 48, 71, 140, 300])
def test_lines_leave_few_programs_without_work(heads):
    lines = lines_of(heads, 264)
    assert heads % lines == 0
    assert lines == 1 or 264 // lines * lines >= 0.95 * 264


@pytest.mark.parametrize("blocks", [1, 2, 7, 64, 333])
@pytest.mark.parametrize("tiles", [1, 2, 5, 20, 33, 40, 700])
@pytest.mark.parametrize("least", [1, 2])
def test_shares_cover_the_line(blocks, tiles, least):
    chunks = 33
    filling, share = shares(blocks, tiles, chunks, least)
    total = (filling + blocks) * tiles
    assert share >= least and -(-total // share) <= chunks
    assert share <= max(least, -(-blocks * tiles // chunks)) * 9 / 8, "hardly more than an equal share"
    if filling:
        assert (filling + blocks) % share == 0 and filling < share, "each program has one tile"


def test_many_queries_are_for_other_kernels():
    (reason,) = variants()[NAME].reasons(problem(s=MOST_QUERIES + 1))
    assert reason.field == "seqlen_q" and str(MOST_QUERIES) in reason.allowed
    assert variants()[NAME].legal_configs(problem(s=MOST_QUERIES))
