"""gluon_fa3_varlen_backward without a GPU: what the compiler makes of every shipped config."""

import itertools

import pytest

from registry import Target
from registry.ops.attention_varlen.problem import VarlenBackwardProblem

pytest.importorskip("triton")

from compiled import loop_spills, resources
from covering import all_of, covering_builds, named

from registry.plugins.gluon_fa3.backward.traits import GROUPS
from registry.plugins.gluon_fa3.varlen import backward

WITH_NEWEST_TRITON = r"build\[d64.*causal-.*-c0\.0-.*2-any"
H200 = Target.named("H200")
VARIANT = backward.VARIANT
MEASURED_ON = H200.triton.startswith("3.6.")


def problem(**sizes):
    made = {"b": 4, "hq": 8, "sq": 2048, "sk": 2048, "d": 128, "lse": True, **sizes}
    return VarlenBackwardProblem.of_shape(H200, **made)


PLAIN = [problem(d=d, causal=causal) for d, causal in itertools.product((64, 128), (False, True))]
FEATURES = [
    problem(d=64, hkv=2, causal=True, softcap=30.0),
    problem(d=128, sk=777, window=(256, 64), dtype="float16"),
    problem(d=40, dv=128, hkv=1),
    problem(d=128, sq=200, sk=1000, causal=True),  # blocks draw tiles
]


def first(p):
    return VARIANT.legal_configs(p)[:1]


BUILDS = covering_builds(all_of(PLAIN, VARIANT.legal_configs), all_of(PLAIN + FEATURES, first), ("BLOCK_M", "stages"))


@pytest.mark.parametrize("p, config", named(BUILDS))
def test_build(p, config):
    kernels = [resources(build) for build in VARIANT.builds(p, config)]
    (found,) = (one for one in kernels if one.counts["HGMMA"])
    assert len(kernels) == 4, "the list, before, the products, after"
    loops = [loop for loop in found.loops if loop.tensor_core and loop.innermost]
    assert len(loops) == GROUPS, "one steady loop for each matrix warp group"
    assert not found.ptxas_warnings, "serialised wgmma, or an ignored setmaxnreg"
    assert {240, 24} <= set(found.setmaxnreg)
    assert found.registers * found.threads <= VARIANT.requires.registers(p, config)
    assert found.shared <= VARIANT.requires.shared_memory(p, config) < found.shared + 1024
    assert found.counts["TMA load"] and found.counts["TMA store"] and found.counts["HMMA"] == 0
    assert found.opcodes["UTMAREDG"] in (GROUPS, 2 * GROUPS), "dQ leaves whole; the last step may be a copy"
    if MEASURED_ON:
        assert loop_spills(found) == []


def test_deterministic_problems_run_in_a_fixed_order():
    found = VARIANT.legal_configs(problem(deterministic=True))
    assert {config["order"] for config in found} == {"fixed"}


def test_wide_heads_are_refused():
    assert "head_dim" in {reason.field for reason in VARIANT.reasons(problem(d=256))}
