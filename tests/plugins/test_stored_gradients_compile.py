"""The gradients of wide heads without a GPU: what the compiler makes of shipped configs, and how heads are chunked."""

from __future__ import annotations

import itertools

import pytest

from registry import Target, variants
from registry.ops.attention.problem import AttentionBackwardProblem

triton = pytest.importorskip("triton")

from compiled import loop_spills, matrix_units, resources  # noqa: E402
from covering import configs_are_there_and_differ  # noqa: E402

from registry.plugins.triton_fa2.stored import configs, host  # noqa: E402

NAME = "triton_fa2_wide_backward"
PINNED = triton.__version__.startswith("3.6.")


def problem(arch="sm90", **sizes):
    what = {"b": 2, "hq": 8, "s": 4096, "d": 512, "lse": True, **sizes}
    return AttentionBackwardProblem.of_shape(Target.named(arch), **what)


PLAIN = dict(causal=True)
EVERYTHING = dict(d=576, dv=264, hkv=2, s=1000, window=(100, 50), softcap=30.0, dtype="float16")
CASES = [
    *itertools.product(["sm90"], [PLAIN, EVERYTHING, dict(d=320)]),
    *itertools.product(["sm80", "sm89", "sm100"], [EVERYTHING]),
]


@pytest.mark.skipif(not PINNED, reason="spills were looked at with one Triton")
@pytest.mark.parametrize(
    "arch, features", CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_shipped_configs_fit_and_do_not_spill(arch, features):
    p, variant = problem(arch, **features), variants()[NAME]
    configs_are_there_and_differ(variant, p)
    assert variant.legal_configs(p) == variant.configs_for(p)
    unit = {90: "wgmma", 100: "tcgen05"}.get(p.target.sm, "mma")
    for config in variant.legal_configs(p):
        found = list({resources(build, p.target): None for build in variant.builds(p, config)})
        assert {one.name for one in found} == {"row_deltas", "attention_weights", "weighted_sums"}
        assert max(one.shared for one in found) <= variant.requires.shared_memory(p, config)
        for one in found:
            assert not any("C75" in line for line in one.ptxas_warnings), f"{one.name}: wgmma serialised"
            assert one.spills == 0 or not loop_spills(one, innermost=False), one.name
            assert matrix_units(one) == (set() if one.name == "row_deltas" else {unit})


def test_heads_come_in_chunks_that_are_all_of_them():
    for groups, each in [(1, 9), (7, 1), (64, configs.CHUNK // 16), (5, configs.CHUNK), (3, 4 * configs.CHUNK)]:
        found = [*host.chunks_of(groups, each)]
        assert [first for first, _ in found] == [0, *itertools.accumulate(count for _, count in found)][:-1]
        assert sum(count for _, count in found) == groups and min(count for _, count in found) > 0
        most = max(count for _, count in found)
        assert most * each <= configs.CHUNK or most == 1, "no more than fit, or one head"


def test_all_chunks_run_the_same_kernels():
    p, variant = problem(b=4, hq=32, hkv=8, s=8192), variants()[NAME]
    builds = variant.builds(p, variant.configs_for(p)[0])
    assert len(builds) == 1 + 4 * len([*host.chunks_of(4 * 8, configs.group_bytes(p, variant.configs_for(p)[0]))]) > 5
    assert len(set(builds)) == 4, "delta, weights, and sums by rows and by keys"


def test_what_does_not_fit_is_refused():
    def refused(**sizes):
        p = problem(**sizes)
        return [(reason.field, reason.got) for reason in configs.rule(p, variants()[NAME].configs_for(p)[0])]

    assert refused() == []
    assert refused(s=65536, hq=1) == [("seqlen_k", 65536)], "16 GiB of weights"
    assert refused(s=32768, hq=2) == [], "one key head at a time"
