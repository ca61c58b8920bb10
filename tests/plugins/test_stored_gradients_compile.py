"""Gradients by way of memory without a GPU: what the compiler makes of shipped configs, and how heads are chunked."""

from __future__ import annotations

import itertools

import pytest

from registry import Target, variants
from registry.ops.attention.problem import AttentionBackwardProblem

triton = pytest.importorskip("triton")

from compiled import loop_spills, matrix_units, resources  # noqa: E402
from covering import configs_are_there_and_differ  # noqa: E402

from registry.plugins.triton_fa2.stored import configs, host  # noqa: E402

TRITON, GLUON = "triton_stored_backward", "gluon_stored_backward"
PINNED = triton.__version__.startswith("3.6.")


def problem(arch="sm90", **sizes):
    what = {"b": 2, "hq": 8, "s": 4096, "d": 512, "lse": True, **sizes}
    return AttentionBackwardProblem.of_shape(Target.named(arch), **what)


PLAIN = dict(causal=True)
EVERYTHING = dict(d=576, dv=264, hkv=2, s=1000, window=(100, 50), dtype="float16")
SUMMED = dict(d=256, b=1, hkv=1, s=16384)  # keys of one head in several chunks
CAPPED = EVERYTHING | dict(softcap=30.0)
CASES = [
    *itertools.product([TRITON], ["sm90"], [PLAIN, CAPPED, dict(d=320)]),
    *itertools.product([TRITON], ["sm80", "sm89", "sm100"], [CAPPED]),
    *itertools.product([GLUON], ["sm90"], [PLAIN, EVERYTHING, dict(d=256), SUMMED]),
]
FIRST = {TRITON: "attention_weights", GLUON: "specialised_weights"}


@pytest.mark.skipif(not PINNED, reason="spills were looked at with one Triton")
@pytest.mark.parametrize(
    "name, arch, features", CASES, ids=lambda value: value if type(value) is str else "-".join(value)
)
def test_shipped_configs_fit_and_do_not_spill(name, arch, features):
    p, variant = problem(arch, **features), variants()[name]
    configs_are_there_and_differ(variant, p)
    assert variant.legal_configs(p) == variant.configs_for(p)
    unit = {90: "wgmma", 100: "tcgen05"}.get(p.target.sm, "mma")
    for config in variant.legal_configs(p):
        found = list({resources(build, p.target): None for build in variant.builds(p, config)})
        assert {one.name for one in found} == {"row_deltas", FIRST[name], "weighted_sums"}
        most, declared = max(one.shared for one in found), variant.requires.shared_memory(p, config)
        assert most <= declared and (unit == "mma" or declared <= most + 1024), "mma's rings have a stage less"
        for one in found:
            assert not any("C75" in line for line in one.ptxas_warnings), f"{one.name}: wgmma serialised"
            assert one.spills == 0 or not loop_spills(one, innermost=False), one.name
            assert matrix_units(one) == (set() if one.name == "row_deltas" else {unit})


@pytest.mark.parametrize("features", [PLAIN, EVERYTHING], ids=["causal", "everything"])
def test_the_specialised_kernel_is_what_it_declares(features):
    p, variant = problem(**features), variants()[GLUON]
    config = variant.legal_configs(p)[0]
    found = next(one for one in map(resources, variant.builds(p, config)) if one.name == FIRST[GLUON])
    assert not found.ptxas_warnings and found.spills == 0
    assert {configs.CONSUMER_REGISTERS, configs.PRODUCER_REGISTERS} <= set(found.setmaxnreg)
    assert found.registers * found.threads <= variant.requires.registers(p, config)
    slices = -(-p.head_dim // configs.SLICE) + -(-p.head_dim_v // configs.SLICE)
    assert found.counts["HGMMA"] == configs.GROUPS * slices * configs.SLICE // 16, "each slice once, 16 columns a step"
    assert found.counts["TMA load"] and found.counts["TMA store"] == configs.GROUPS * 2 * config["WEIGHTS_N"] // 64


def test_chunks_are_all_heads_and_keys_once_and_fit():
    for groups, tiles, each in itertools.product((1, 5, 64), (1, 7, 128), (1, configs.CHUNK // 9, 3 * configs.CHUNK)):
        found = [*host.chunks_of(groups, tiles, each)]
        places = [
            (head, tile)
            for one in found
            for head in range(one.head, one.head + one.heads)
            for tile in range(one.tile, one.tile + one.tiles)
        ]
        assert places == [*itertools.product(range(groups), range(tiles))]
        for one in found:
            assert one.heads * one.tiles * each <= configs.CHUNK or one.heads * one.tiles == 1
            assert one.tiles == tiles or one.heads == 1, "keys are divided where a head does not fit"


def test_all_chunks_run_the_same_kernels():
    p = problem(b=4, hq=32, hkv=8, s=8192)
    for name in (TRITON, GLUON):
        variant = variants()[name]
        builds = variant.builds(p, variant.configs_for(p)[0])
        assert len(builds) > 5 and len(set(builds)) == 4, "delta, weights, and sums by rows and by keys"


def test_sums_over_keys_go_on_from_chunk_to_chunk():
    p, variant = problem(**SUMMED), variants()[GLUON]
    calls = host.GLUON._calls(p, variant.configs_for(p)[0], host.GLUON.interface.operands(p), 1.0)
    by_rows = [one for one in calls if one.constants.get("BY_KEYS") is False]
    assert len(by_rows) > 2
    assert [one.constants["ADDS"] for one in by_rows] == [False] + [True] * (len(by_rows) - 1)
    assert [one.constants["KEEPS"] for one in by_rows] == [True] * (len(by_rows) - 1) + [False]
    kept = calls[1].operands()["p_map"]
    assert 4 * kept.shape[0] * kept.shape[1] <= configs.CHUNK


def test_what_writes_p_and_what_reads_it_count_its_rows_alike():
    """Keys of a head come in chunks of different size where they do not divide evenly."""
    p, variant = problem(d=256, b=1, hkv=1, s=16384 + 2000), variants()[GLUON]
    config = variant.configs_for(p)[0]
    _, *calls = host.GLUON._calls(p, config, host.GLUON.interface.operands(p), 1.0)
    keys = set()
    for weights, *products in zip(*[iter(calls)] * 4, strict=True):
        pitch = weights.arguments["tiles_k"] * config["WEIGHTS_N"]
        for name in ("p_map", "ds_map"):
            written = weights.arguments[name]
            assert (written.shape[1], written.strides[0]) == (pitch, pitch)
            assert written.shape[0] * pitch <= written.base.shape[0] * written.base.shape[1]
        assert {one.arguments["tiles_k"] * config["WEIGHTS_N"] for one in products} == {pitch}
        keys.add(pitch)
    assert len(keys) == 2
