"""gluon_fa3_varlen_backward without a GPU: what the compiler makes of every shipped config."""

import dataclasses
import itertools

import pytest

from registry import Target
from registry.ops.attention_varlen.problem import VarlenBackwardProblem

pytest.importorskip("triton")

from compiled import hot_loops, lent_barriers, loop_spills, resources
from covering import all_of, covering_builds, first_of, named

from registry.plugins.gluon_fa3.backward.traits import GROUP_REGISTERS, GROUPS, HELPER_REGISTERS
from registry.plugins.gluon_fa3.varlen import backward

WITH_NEWEST_TRITON = (
    r"build\[d(64.*causal-wNone-c0\.0-.*2-any|256.*causal-)"  # of a left bound its ptxas spills 18 words
)
H200 = Target.named("H200")
VARIANT = backward.VARIANT
first = first_of(VARIANT)
MEASURED_ON = H200.triton.startswith("3.6.")
NEWEST_SPILLS = 4  # triton 3.9's ptxas keeps four words of the sweep for dK in memory for a while


def problem(**sizes):
    made = {"b": 4, "hq": 8, "sq": 2048, "sk": 2048, "d": 128, "lse": True, **sizes}
    return VarlenBackwardProblem.of_shape(H200, **made)


PLAIN = [problem(d=d, causal=causal) for d, causal in itertools.product((64, 128, 256), (False, True))]
FEATURES = [
    problem(d=64, hkv=2, causal=True, softcap=30.0),
    problem(d=128, sk=777, window=(256, 64), dtype="float16"),
    problem(d=40, dv=128, hkv=1),
    problem(d=128, b=2, hkv=2, causal=True),  # tiles in parts
    problem(d=128, sq=200, sk=1000, causal=True),  # blocks draw tiles
    problem(d=64, sq=100, sk=100, causal=True),  # short: 64 rows a step
    problem(d=200, dv=160, window=(256, -1), softcap=30.0),
    problem(d=64, hkv=1, causal=True, window=(127, 0), sinks=True),
    problem(d=192, hkv=2, sinks=True),
]


BUILDS = covering_builds(all_of(PLAIN, VARIANT.legal_configs), all_of(PLAIN + FEATURES, first), ("BLOCK_M", "stages"))


@pytest.mark.parametrize("p, config", named(BUILDS))
def test_build(p, config):
    sweeps = config["method"] == "sweeps"
    kernels = [resources(build) for build in VARIANT.builds(p, config)]
    assert all(lent_barriers(found) == [] for found in kernels), "see toolbox.hopper"
    hot = [one for one in kernels if one.counts["HGMMA"]]
    others = 3 + p.sinks
    assert (len(hot), len(kernels) - len(hot)) == (3 if sweeps else 1, others), "lists, before, after sums, of sinks"
    for found in hot:
        loops = hot_loops(found)
        assert len(loops) == GROUPS, "one steady loop for each matrix warp group"
        assert not found.ptxas_warnings, "serialised wgmma, or an ignored setmaxnreg"
        assert {GROUP_REGISTERS, HELPER_REGISTERS} <= set(found.setmaxnreg)
        assert found.registers * found.threads <= VARIANT.requires.registers(p, config)
        assert found.counts["TMA load"] and found.counts["TMA store"] and found.counts["HMMA"] == 0
        assert len(loop_spills(found)) <= (0 if MEASURED_ON else NEWEST_SPILLS)
    most = max(found.shared for found in hot)
    assert most <= VARIANT.requires.shared_memory(p, config) < most + 1024
    if not sweeps and backward.traits_of(p, config).parts == 1:
        assert hot[0].opcodes["UTMAREDG"] in (GROUPS, 2 * GROUPS), "dQ leaves whole; the last step may be a copy"


def test_deterministic_problems_run_in_a_fixed_order():
    found = VARIANT.legal_configs(problem(deterministic=True))
    assert {config["order"] for config in found} == {"fixed"}


def ragged(longest, total, **sizes):
    """A batch of which the host knows the longest sequence and the sum."""
    made = problem(sq=longest, sk=longest, causal=True, **sizes)
    operands = tuple(dataclasses.replace(one, shape=(total, *one.shape[1:])) for one in made.operands)
    return dataclasses.replace(made, operands=operands, total_q=total, total_k=total)


@pytest.mark.parametrize(
    "p, order, parts",
    [  # as measured: the best of 1, 2 and 4, or within 4% of it
        (ragged(2048, 3008, b=16, hq=32, hkv=8), "any", 2),  # 128 tiles, the longest twice as long as the mean
        (ragged(2048, 3008, b=16, hq=32, hkv=8), "fixed", 2),
        (ragged(2048, 3008, b=16, hq=32, hkv=8, d=64), "any", 2),
        (ragged(2048, 7921, b=16, hq=32, hkv=8), "any", 1),
        (ragged(4096, 4480, b=4, hq=32, hkv=8), "any", 1),  # as long as an SM's share
        (ragged(2048, 32768, b=16, hq=32, hkv=8), "any", 1),
        (ragged(512, 3030, b=32, hq=64, hkv=8), "any", 1),  # short ones would be divided too
        (ragged(128, 1868, b=128, hq=32, hkv=2), "any", 1),
        (ragged(2048, 2048, b=1, hq=64, hkv=8), "any", 2),
        (ragged(2048, 3008, b=16, hq=16, hkv=16), "any", 1),  # no heads to share out
        (ragged(1024, 1024, b=1, hq=32, hkv=2), "any", 16),  # 8 beat 4 by a third; 16 was not measured
        (ragged(2048, 4500, b=8, hq=71, hkv=1, d=64), "any", 71),
        (ragged(1500, 3000, b=5, hq=28, hkv=4), "any", 7),
        (ragged(8192, 14000, b=4, hq=40, hkv=8), "any", 1),
        (ragged(2048, 7921, b=16, hq=32, hkv=2), "any", 4),
        (ragged(1024, 1024, b=1, hq=32, hkv=2), "fixed", 2),
    ],
)
def test_few_tiles_are_divided_by_query_heads(p, order, parts):
    (config, *_) = (config for config in VARIANT.legal_configs(p) if config["order"] == order)
    assert backward.parts_of(p, config) == parts


def test_short_sequences_take_64_rows_a_step_at_64_columns():
    first_of = {total: VARIANT.legal_configs(ragged(128, total, b=128, d=64))[0] for total in (1868, 16384)}
    assert {config["BLOCK_M"] for config in first_of.values()} == {64}
    assert VARIANT.legal_configs(ragged(512, 16385, b=128, d=64))[0]["BLOCK_M"] == 128
    assert VARIANT.legal_configs(problem(d=64, sq=100, sk=100, softcap=30.0))[0]["BLOCK_M"] == 64
