"""gluon_fa3_wide without a GPU: what the compiler makes of every shipped config, and where a head's pieces lie."""

import itertools

import pytest

from registry import Target
from registry.ops.attention.problem import AttentionProblem

pytest.importorskip("triton")

from compiled import exponentials_beside, hot_loops, loop_spills, resources
from covering import all_of, configs_are_there_and_differ, first_of, named

from registry.plugins.gluon_fa3 import wide
from registry.plugins.gluon_fa3.wide.traits import PANEL, rule, traits_of

H200 = Target.named("H200")
VARIANT = wide.VARIANT
first = first_of(VARIANT)


def problem(**sizes):
    return AttentionProblem.of_shape(H200, **{"b": 2, "hq": 8, "s": 4096, "d": 512, **sizes})


PLAIN = [problem(d=320), problem(d=384, causal=True), problem(), problem(causal=True), problem(d=576, dv=512)]
FEATURES = [
    problem(d=264, s=77, causal=True, lse=True, dtype="float16"),
    problem(d=448, dv=64, s=1000, hkv=2, layout="bshd"),
    problem(d=512, dv=256, s=1000, sk=777, window=(128, 0)),
    problem(d=576, dv=512, s=1000, softcap=30.0, causal=True, lse=True),
]
ALL = all_of(PLAIN, VARIANT.legal_configs) + all_of(FEATURES, first)
A_FEW = 4  # of 540 instructions of a block, where 240 registers hold all but one or two of what a thread needs


def built(p, config):
    (build,) = VARIANT.builds(p, config)
    return resources(build)


@pytest.mark.parametrize("p, config", named(ALL))
def test_build(p, config):
    found, t = built(p, config), traits_of(p, config)
    assert len(hot_loops(found)) == t.groups * (2 if t.mask == "shifted" else 1), "a steady loop for each warp group"
    assert not found.ptxas_warnings, "serialised wgmma, or an ignored setmaxnreg"
    assert {t.consumer_registers, t.producer_registers} <= set(found.setmaxnreg)
    assert found.registers * found.threads <= VARIANT.requires.registers(p, config)
    assert found.shared <= VARIANT.requires.shared_memory(p, config) < found.shared + 1024
    assert found.counts["HGMMA"] and found.counts["TMA load"] and found.counts["TMA store"]
    assert found.counts["HMMA"] == 0
    if p in PLAIN:
        assert len(loop_spills(found)) <= A_FEW


@pytest.mark.parametrize("p, config", named(all_of(PLAIN, VARIANT.legal_configs)))
def test_a_block_takes_no_product_twice(p, config):
    t = traits_of(p, config)
    for loop in hot_loops(built(p, config)):
        assert loop.counts["HGMMA"] == t.head // 16 + t.block_n // 16 * len(t.value_parts)


@pytest.mark.parametrize("p, config", named(all_of(PLAIN, first)))
def test_exponentials_run_beside_the_product(p, config):
    """They come before the wait for it. Else groups would overlap each other only, not each itself."""
    found = built(p, config)
    assert exponentials_beside(found) == [loop.counts["MUFU"] for loop in hot_loops(found)], "none after the wait"


def every_build():
    for d, dv in itertools.product(range(264, 577, 8), (8, 64, 200, 256, 264, 320, 328, 384, 448, 512)):
        p = problem(d=d, dv=dv)
        for config in VARIANT.legal_configs(p):
            yield p, traits_of(p, config)


def test_products_of_the_scores_take_each_column_once():
    """Each within one part of K, in one matrix of it, and with the columns of Q that it multiplies."""
    for p, t in every_build():
        starts = [sum(t.k_widths[:part]) for part in range(t.k_parts)]
        taken = sorted((starts[part] + at, columns) for part, at, columns, _, _ in t.products)
        ends = [at + columns for at, columns in taken]
        assert [at for at, _ in taken] == [0, *ends[:-1]] and ends[-1] == t.head >= p.head_dim
        leading = 1 << (t.k_slot.bit_length() - 1)
        for part, at, columns, q, q_at in t.products:
            assert columns & (columns - 1) == 0 and at % columns == 0 and at + columns <= t.k_widths[part]
            assert at + columns <= leading or at >= leading, "no matrix of two places"
            column = PANEL * (-1 - q) if q < 0 else t.q_parts[q][0] + q_at
            assert column == starts[part] + at
        assert [part for part, *_ in t.products] == sorted(part for part, *_ in t.products), "as the parts come"


def test_values_of_a_tile_are_all_there():
    for p, t in every_build():
        assert t.halves * t.head_v >= p.head_dim_v > (t.halves - 1) * t.head_v, "no tile without values"
        assert sum(wide for _, wide in t.value_parts) == t.head_v and len(t.value_parts) <= 2
        assert t.q_parts[t.o_place][1] >= t.value_parts[0][1], "O leaves through Q's place, part by part"


def test_what_does_not_fit_is_refused():
    def refused(config, **sizes):
        p = problem(**sizes)
        return [reason.field for reason in rule(p, {**VARIANT.configs_for(p)[0], **config})]

    assert refused({}) == []
    assert refused({"q_panels": 5}, d=512) == ["q_panels", "BLOCK_N"], "a slot of K has room for four, and it spills"
    assert refused({"q_panels": 1}, d=384) == ["q_panels"], "O needs 256 columns that are one matrix"
    assert refused({"k_slots": 1}) == ["k_slots"]
    assert refused({"k_parts": 3}) == ["k_parts"]
    assert refused({"BLOCK_N": 128}) == ["BLOCK_N", "BLOCK_N"]
    assert refused({"BLOCK_N": 32, "k_parts": 1, "q_panels": 4}) == ["BLOCK_N"], "it spills"
    assert refused({"pingpong": "never"}) == ["pingpong"]


def test_every_config_is_legal_somewhere_and_differs():
    for p in PLAIN + FEATURES:
        configs_are_there_and_differ(VARIANT, p)
        assert VARIANT.legal_configs(p), "a default that fits"


def test_blocks_of_32_keys_mask_more_than_one_on_the_diagonal():
    p = problem(d=576, dv=512, causal=True)
    assert traits_of(p, VARIANT.configs_for(p)[0]).mask == "shifted"
    assert traits_of(problem(causal=True), VARIANT.configs_for(problem())[0]).mask == "diagonal"
