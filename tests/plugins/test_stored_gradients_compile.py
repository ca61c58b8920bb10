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
    *itertools.product([GLUON], ["sm90"], [PLAIN, EVERYTHING, CAPPED, dict(d=256), dict(d=256, softcap=50.0), SUMMED]),
]
KERNELS = {
    TRITON: {"row_deltas", "attention_weights", "weighted_sums"},
    GLUON: {"row_deltas", "specialised_weights", "specialised_products"},
}


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
        assert {one.name for one in found} == KERNELS[name]
        most, declared = max(one.shared for one in found), variant.requires.shared_memory(p, config)
        assert most <= declared and (unit == "mma" or declared <= most + 1024), "mma's rings have a stage less"
        for one in found:
            assert not any("C75" in line for line in one.ptxas_warnings), f"{one.name}: wgmma serialised"
            assert one.spills == 0 or not loop_spills(one, innermost=False), one.name
            assert matrix_units(one) == (set() if one.name == "row_deltas" else {unit})


@pytest.mark.parametrize(
    "features", [PLAIN, EVERYTHING, CAPPED, dict(d=256), dict(d=192, dv=128, softcap=9.0)], ids=str
)
def test_the_specialised_kernels_are_what_they_declare(features):
    p, variant = problem(**features), variants()[GLUON]
    slices = -(-p.head_dim // configs.SLICE) + -(-p.head_dim_v // configs.SLICE)
    for config in variant.legal_configs(p):
        found = {one.name: one for one in map(resources, variant.builds(p, config))}
        weights, products = found["specialised_weights"], found["specialised_products"]
        for one in (weights, products):
            assert not one.ptxas_warnings and one.spills == 0
            assert {configs.CONSUMER_REGISTERS, configs.PRODUCER_REGISTERS} <= set(one.setmaxnreg)
            assert one.registers * one.threads <= variant.requires.registers(p, config)
            assert one.counts["TMA load"]
        steps = configs.SLICE // 16
        assert weights.counts["HGMMA"] == configs.GROUPS * slices * steps, "each slice once, 16 columns a step"
        assert weights.counts["TMA store"] == configs.GROUPS * 2 * config["WEIGHTS_N"] // configs.SLICE
        accumulators = 1 if config["COLUMNS"].bit_count() == 1 else 2
        assert products.counts["HGMMA"] == configs.GROUPS * 2 * accumulators * steps, "by keys, and by rows"


def test_rows_stay_where_they_leave_room_for_a_ring():
    for d, dv in ((192, 64), (192, 128), (256, 256), (264, 64), (576, 512)):
        p, variant = problem(d=d, dv=dv), variants()[GLUON]
        for config in variant.configs_for(p):
            assert configs.rows_stay(p) == (d <= configs.STAYING) and config["weights_stages"] >= 3
        columns = [config["COLUMNS"] for config in variant.configs_for(p)]
        computed = [sum(-(-x // c) * c for x in (d, d, dv)) for c in columns]
        assert computed == sorted(computed), "what computes the fewest columns comes first"


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
        kinds = {TRITON: 4, GLUON: 3}[name]
        assert len(builds) > kinds and len(set(builds)) == kinds, "delta, weights, and sums (by rows, and by keys)"


def test_sums_over_keys_go_on_from_chunk_to_chunk():
    p, variant = problem(**SUMMED), variants()[GLUON]
    calls = host.GLUON._calls(p, variant.configs_for(p)[0], host.GLUON.interface.operands(p), 1.0)
    sums = [one.constants["T"] for one in calls if hasattr(one.constants.get("T"), "ADDS")]
    assert len(sums) > 2
    assert [one.ADDS for one in sums] == [False] + [True] * (len(sums) - 1)
    assert [one.KEEPS for one in sums] == [True] * (len(sums) - 1) + [False]
    kept = calls[1].operands()["p_map"]
    assert 4 * kept.shape[0] * kept.shape[1] <= configs.CHUNK


@pytest.mark.parametrize("name", [TRITON, GLUON])
def test_what_writes_p_and_what_reads_it_count_its_rows_alike(name):
    """Keys of a head come in chunks of different size where they do not divide evenly."""
    p, variant = problem(d=512, b=1, hkv=1, s=16384 + 2000), variants()[name]
    config = variant.configs_for(p)[0]
    backward = {TRITON: host.TRITON, GLUON: host.GLUON}[name]
    _, *calls = backward._calls(p, config, backward.interface.operands(p), 1.0)
    chunks: dict[int, set[int]] = {}
    for call in calls:
        chunks.setdefault(call.arguments["first_tile_k"], set()).add(call.arguments["tiles_k"])
        map_or_memory = call.operands().get("p_map")
        if map_or_memory is not None:
            rows, keys = map_or_memory.shape
            assert rows * keys >= call.arguments["tiles_q"] * call.arguments["tiles_k"] * 128 * 256
    assert all(len(sizes) == 1 for sizes in chunks.values()) and len(set.union(*chunks.values())) == 2
