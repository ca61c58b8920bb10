"""gluon_fa3_backward without a GPU: what the compiler makes of every shipped config."""

import dataclasses
import itertools

import pytest

from registry import Target
from registry.ops.attention.problem import AttentionBackwardProblem

pytest.importorskip("triton")

from compiled import hot_loops, loop_spills, matrix_units, resources
from covering import all_of, configs_are_there_and_differ, covering_builds, first_of, named

from registry.plugins.gluon_fa3 import backward
from registry.plugins.gluon_fa3.backward.traits import GROUPS, KEYS, mask_kind, parts_of, sweeps_of, traits_of

WITH_NEWEST_TRITON = r"build\[d(128.*s4096-causal-.*3-any0?\]|256.*causal-)"
H200 = Target.named("H200")
VARIANT = backward.VARIANT
first = first_of(VARIANT)
MEASURED_ON = H200.triton.startswith("3.6.")
NEWEST_SPILLS = 48  # triton 3.9's ptxas keeps 24 words of one group's P in memory for a while: causal, 128 columns


def problem(grad_lse=False, **sizes):
    made = AttentionBackwardProblem.of_shape(H200, **{"b": 2, "hq": 8, "s": 4096, "d": 128, "lse": True, **sizes})
    return dataclasses.replace(made, grad_lse=grad_lse)


PLAIN = [problem(d=d, causal=causal) for d, causal in itertools.product((64, 128, 256), (False, True))]
FEATURES = [
    problem(d=64, s=1000, hkv=2, layout="bshd", grad_lse=True),
    problem(d=128, s=1000, sk=777, causal=True, dtype="float16"),
    problem(d=128, s=1000, window=(256, 64)),
    problem(d=128, s=1000, softcap=15.0),
    problem(d=64, s=1000, softcap=15.0),
    problem(d=192, dv=128, causal=True),
    problem(d=40, dv=200, s=333, hkv=1),
    problem(d=128, s=1024, causal=True),  # blocks draw tiles
    problem(d=128, b=1, hkv=2, s=1000, causal=True),  # tiles in parts
    problem(d=64, b=1, hkv=2, s=1024, window=(256, 0)),  # both
]


def built(p, config):
    """The kernels with matrix products."""
    found = [resources(build) for build in VARIANT.builds(p, config)]
    return [one for one in found if "wgmma" in matrix_units(one)]


BUILDS = covering_builds(all_of(PLAIN, VARIANT.legal_configs), all_of(PLAIN + FEATURES, first), ("BLOCK_M", "stages"))


@pytest.mark.parametrize("p, config", named(BUILDS))
def test_build(p, config):
    kernels = built(p, config)
    assert len(kernels) == (3 if config["method"] == "sweeps" else 1)
    for found in kernels:
        assert len(hot_loops(found)) == GROUPS, "one steady loop for each matrix warp group"
        assert not found.ptxas_warnings, "serialised wgmma, or an ignored setmaxnreg"
        assert {240, 24} <= set(found.setmaxnreg)
        assert found.registers * found.threads <= VARIANT.requires.registers(p, config)
        assert found.counts["TMA load"] and found.counts["TMA store"] and found.counts["HMMA"] == 0
        assert len(loop_spills(found)) <= (0 if MEASURED_ON else NEWEST_SPILLS)
    most = max(found.shared for found in kernels)
    assert most <= VARIANT.requires.shared_memory(p, config) < most + 1024


def by_method(method):
    return [(p, config) for p, config in BUILDS if p in PLAIN and config["method"] == method]


@pytest.mark.parametrize("p, config", named(by_method("sums")))
def test_the_steady_loop_of_the_main_kernel(p, config):
    (found,) = built(p, config)
    t = traits_of(p, config)
    assert found.opcodes["UTMAREDG"] in (GROUPS, 2 * GROUPS), "dQ leaves whole; the last step may be a copy"
    a_thread = KEYS * t.block_m // 128
    for loop in hot_loops(found):
        assert loop.counts["MUFU"] == a_thread, "one exponential a score"
        assert loop.counts["F2FP"] == a_thread, "P and dS, two values at a time"
        assert loop.counts["FMUL"] == 2 * a_thread, "scores to base 2, and dS"
        assert {"FADD", "FFMA", "LDS"}.isdisjoint(loop.counts), "LSE and delta are terms of the products"
        assert loop.counts.get("PRMT", 0) <= 1, "pairs stay pairs; a constant may be made"
        assert loop.counts["HGMMA"] == 32 + 2, "a product more for the terms of LSE, and one for those of delta"
        assert loop.counts["STS"] == KEYS * t.dq_columns // 128 // 4, "dQ, 16 bytes at a time"
        assert ("FSEL" in loop.counts) == (t.mask != "none")


@pytest.mark.parametrize("p, config", named(by_method("sweeps")))
def test_the_steady_loops_of_the_sweeps(p, config):
    for found, t in zip(built(p, config), sweeps_of(p, config), strict=True):
        for loop in hot_loops(found):
            assert loop.counts["MUFU"] == 32 and loop.counts["F2FP"] == 16
            assert loop.counts["HGMMA"] == (t.x_columns // 16) + (t.gradient != "dv") * (t.w_columns // 16) + 4
            assert found.opcodes["UTMAREDG"] == 0


def test_every_claimed_problem_has_a_config_and_configs_differ():
    for p in PLAIN + FEATURES:
        configs_are_there_and_differ(VARIANT, p)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_deterministic_problems_run_in_a_fixed_order(d):
    found = VARIANT.legal_configs(problem(d=d, deterministic=True))
    assert {config["order"] for config in found} == {"fixed"}
    refused = {reason.field for reason in VARIANT.config_refusals(problem(d=d, deterministic=True))}
    assert refused == ({"order"} if d < 256 else set())


@pytest.mark.parametrize(
    "sizes, any_order, fixed_order",
    [
        (dict(b=1, hq=32, hkv=8, s=1024, causal=True), 4, 2),
        (dict(b=1, hq=32, hkv=8, s=2048, causal=True), 2, 2),
        (dict(b=1, hq=32, hkv=8, s=8192, causal=True), 1, 1),
        (dict(b=1, hq=32, hkv=8, s=2048), 1, 1),  # all tiles alike, about as many as SMs
        (dict(b=1, hq=16, s=1024, causal=True), 1, 1),  # no head to spare
        (dict(b=1, hq=6, hkv=1, s=256), 6, 2),
        (dict(b=15, hq=48, hkv=4, s=2870, causal=True), 3, 1),  # tiles of 12 heads would walk over 12 heads' queries
        (dict(b=19, hq=40, hkv=10, s=2811, causal=True), 1, 1),  # four heads' queries fit the cache
        (dict(b=24, hq=64, hkv=8, s=753, causal=True), 1, 1),  # short: parts cost more than they save
        (dict(b=1, hq=6, hkv=2, s=256), 3, 1),
        (dict(b=1, hq=8, hkv=2, s=256, d=64, dv=128), 1, 1),
    ],
)
def test_few_tiles_are_divided_by_query_heads(sizes, any_order, fixed_order):
    p = problem(**sizes)
    found = {config["order"]: parts_of(p, config) for config in VARIANT.legal_configs(p)}
    assert found == {"any": any_order, "fixed": fixed_order}


def test_a_fixed_order_has_the_same_bits():
    """Sums of more than two parts of dK would depend on which comes first."""
    for heads_kv, s, causal in itertools.product((1, 2, 4), (128, 1024, 4096), (False, True)):
        p = problem(b=1, hq=16, hkv=heads_kv, s=s, causal=causal, deterministic=True)
        assert max(traits_of(p, config).parts for config in VARIANT.legal_configs(p)) <= 2


@pytest.mark.parametrize(
    "sizes, kind",
    [
        (dict(s=1000), "from"),
        (dict(s=1000, sk=1024), "none"),
        (dict(s=1024, causal=True), "from"),
        (dict(s=1024, window=(100, 0)), "band"),
        (dict(s=1024, window=(-1, 3)), "from"),
    ],
)
def test_cheapest_mask(sizes, kind):
    assert mask_kind(problem(**sizes), 128) == kind


def test_refusals_name_a_fix():
    unaligned = tuple(dataclasses.replace(o, base_alignment=2) for o in problem().operands)
    reasons = VARIANT.reasons(dataclasses.replace(problem(), operands=unaligned))
    assert reasons and all(r.fix for r in reasons)
