"""gluon_fa3_varlen and gluon_fa3_cached without a GPU: what the compiler makes of every shipped config."""

import dataclasses
import itertools

import pytest

from registry import Target
from registry.ops.attention_varlen.problem import VarlenProblem

pytest.importorskip("triton")

from compiled import hot_loops, loop_spills, resources
from covering import all_of, configs_are_there_and_differ, covering_builds, first_of, named

from registry.plugins.gluon_fa3 import varlen
from registry.plugins.gluon_fa3.places import OUTER_STRIDE
from registry.plugins.gluon_fa3.traits import ROWS_LIMIT
from registry.plugins.gluon_fa3.varlen.configs import outer_rows, traits_of
from registry.plugins.gluon_fa3.varlen.host import tensor_map
from registry.toolbox.launch import StandIn

WITH_NEWEST_TRITON = r"build\[d128-128-causal-wNone-c0\.0-128-2-2-pair"
H200 = Target.named("H200")
VARIANT = varlen.VARIANT
CACHED = varlen.CACHED
first, first_cached = first_of(VARIANT), first_of(CACHED)


def problem(**sizes):
    return VarlenProblem.of_shape(H200, **{"b": 4, "hq": 8, "sq": 2048, "sk": 2048, "d": 128, "lse": True, **sizes})


PLAIN = [problem(d=d, causal=causal) for d, causal in itertools.product((64, 128, 256), (False, True))]
FEATURES = [
    problem(d=64, hkv=2, causal=True, softcap=30.0, lse=False),
    problem(d=128, sk=777, window=(256, 64), softcap=15.0, dtype="float16"),
    problem(d=192, dv=128, causal=True, out=True),
    problem(d=40, dv=200, hkv=1, window=(128, 0)),
    problem(d=64, hkv=1, causal=True, sq=40, sk=40, b=200),
    problem(d=128, hq=7, hkv=1, causal=True, sq=40, sk=40, b=200),
    problem(d=64, hkv=1, causal=True, sinks=True),
    problem(d=64, hkv=1, causal=True, window=(127, 0), sinks=True),
    problem(d=256, hkv=2, sinks=True, lse=False),
]


OVER_A_CACHE = [
    problem(d=128, hkv=2, causal=True, kv="cache", sq=300),
    problem(d=64, causal=True, kv="paged", page=16),
    problem(d=128, hkv=2, causal=True, kv="paged", page=64),
    problem(d=128, causal=True, kv="paged", page=256, window=(512, 0), softcap=30.0),
    problem(d=256, hkv=1, causal=True, kv="paged", page=8, dtype="float16", sq=100),
    problem(d=128, hkv=2, causal=True, kv="paged", page=16, sq=24, b=64),
    problem(d=128, dv=96, hq=10, hkv=2, causal=True, kv="paged", page=64, sq=24, sk=9000, lse=False),
    problem(d=64, hq=64, causal=True, window=(127, 0), kv="paged", page=64, sq=24, b=64, sinks=True),
    problem(d=64, hq=64, causal=True, kv="paged", page=64, sq=24, sk=9000, sinks=True),
]


def variant_of(p):
    return VARIANT if p.kv_layout == "packed" else CACHED


def built(p, config):
    """The kernel with matrix products; before it one makes the list of row blocks, and after it one may add up."""
    build = variant_of(p).builds(p, config)[1]
    return resources(build)


BUILDS = covering_builds(
    all_of(PLAIN, VARIANT.legal_configs), all_of(PLAIN + FEATURES, first), ("BLOCK_N", "consumers", "stages")
) + covering_builds(
    all_of(OVER_A_CACHE[2:3], CACHED.legal_configs), all_of(OVER_A_CACHE, first_cached), ("BLOCK_N", "consumers")
)


@pytest.mark.parametrize("p, config", named(BUILDS))
def test_build(p, config):
    found, t = built(p, config), traits_of(p, config)
    loops = hot_loops(found)
    masked = [loop for loop in loops if loop.counts.get("FSEL", 0) > 2]  # two are of lazy maxima
    assert len(loops) - (t.mask == "shifted") * len(masked) == t.groups, "one steady loop for each consumer warp group"
    assert len(masked) == (0 if t.mask == "tail" else t.groups), "the end of a sequence is in the first block"
    assert not found.ptxas_warnings, "serialised wgmma, or an ignored setmaxnreg"
    assert loop_spills(found) == []
    assert {t.consumer_registers, t.producer_registers} <= set(found.setmaxnreg)
    assert found.registers * found.threads <= variant_of(p).requires.registers(p, config)
    assert found.shared <= variant_of(p).requires.shared_memory(p, config) < found.shared + 1024
    assert found.counts["HGMMA"] and found.counts["TMA load"]
    assert bool(found.counts["TMA store"]) != t.shared_out
    assert found.counts["HMMA"] == 0
    for loop in loops:
        assert loop.counts["HGMMA"] == t.head_columns // 16 + t.block_n // 16 * len(t.value_parts)


def test_every_claimed_problem_has_a_config_and_configs_differ():
    for p in PLAIN + FEATURES + OVER_A_CACHE:
        configs_are_there_and_differ(variant_of(p), p)


def test_heads_lie_side_by_side_where_they_share_keys():
    """As many as a tile has room for, whatever their number, with the queries of a sequence."""
    asked = {(4, 40): 4, (4, 24): 4, (7, 40): 8, (5, 16): 8, (1, 24): None, (3, 40): 4, (16, 8): 8, (4, 2000): None}
    for (group, queries), heads in asked.items():
        p = problem(hq=2 * group, hkv=2, sq=queries, sk=queries, b=200, causal=True)
        t = traits_of(p, VARIANT.configs(p)[0])
        assert VARIANT.configs(p)[0].get("heads") == heads
        assert t.rows * t.heads == 64 and t.sets * t.heads >= t.group and t.heads % t.box_heads == 0


def test_keys_are_shared_out_where_tiles_are_few():
    """Or their last wave is not full, or one sequence may be far longer than others: of packed ones that is known."""
    packed = {"hkv": 2, "sq": 32, "sk": 9000, "causal": True}
    lengths = {**packed, "kv": "paged", "page": 64}
    for b, given, expected in (
        (1, lengths, True), (70, lengths, True), (4000, lengths, False), (1, lengths | {"sk": 200}, False),
        (1, packed, True), (70, packed, True), (300, packed, False), (300, packed | {"tk": 40_000}, True),
        (1, packed | {"sq": 9000, "hkv": 8}, False),
    ):  # fmt: skip
        p = problem(b=b, **given)
        assert any(config.get("shared_out") for config in variant_of(p).configs(p)) == expected, p


def test_rows_that_are_one_row_again_are_refused():
    expanded = [
        dataclasses.replace(o, strides=(0, 0, 128, 1)) if o.name == "k" else o for o in OVER_A_CACHE[1].operands
    ]
    reasons = CACHED.reasons(dataclasses.replace(OVER_A_CACHE[1], operands=tuple(expanded)))
    assert [r.field for r in reasons] == ["strides"]


def address(described, coordinates):
    """Where the TMA unit looks, in elements; None where the map ends before."""
    if any(not 0 <= at < size for at, size in zip(coordinates, described.shape, strict=True)):
        return None
    return sum(at * stride for at, stride in zip(coordinates, described.strides, strict=True)) % (2**64 // 2)


@pytest.mark.parametrize("strides", [(512, 128, 1), (3072, 256, 1)])
def test_rows_of_a_sequence_are_found_and_end_with_it(strides):
    """By the arithmetic of 64-bit addresses that places.py describes, in elements of two bytes."""
    described = tensor_map(StandIn((1000, 4, 128), "bfloat16", strides), 64, 128)
    for begin, end, head, column in ((0, 1000, 0, 0), (10, 74, 3, 64), (999, 1000, 2, 127), (500, 500, 1, 0)):
        for row in (0, 1, end - begin - 1, end - begin, end - begin + 63):
            found = address(described, (ROWS_LIMIT, end, head, ROWS_LIMIT - (end - begin) + row, column))
            inside = 0 <= row < end - begin
            assert found == ((begin + row) * strides[0] + head * strides[1] + column if inside else None) or row < 0
    assert all(2 * stride < 2**40 and stride % 8 == 0 for stride in described.strides[:-1]), "what a map may have"
    assert OUTER_STRIDE * ROWS_LIMIT == 2**64


@pytest.mark.parametrize("strides", [(8192, 512, 128, 1), (16384, 512, 128, 1), (8192, 128, 2048, 1)])
def test_a_box_of_a_page_ends_with_the_keys(strides):
    """Pages beside each other, with those of values between them, and with heads before rows: see pages.py."""
    pages, page, box = 7, 16, 8
    k = StandIn((pages, page, 4, 128), "bfloat16", strides)
    described, apart = tensor_map(k, box, 64), outer_rows(k)
    for number, begin, count in ((0, 0, 8), (6, 8, 8), (3, 8, 1), (2, 0, 0)):
        end = number * apart + begin + count
        for row in range(box):
            found = address(described, (ROWS_LIMIT, end, 2, ROWS_LIMIT - count + row, 64))
            own = number * strides[0] + (begin + row) * strides[1] + 2 * strides[2] + 64
            assert found == (own if row < count else None)


@pytest.mark.parametrize(
    "k, v",
    [
        ((8200, 512, 128, 1), (8200, 512, 128, 1)),  # from page to page no whole number of rows
        ((8192, 512, 128, 1), (16384, 512, 128, 1)),  # and not the same in both
    ],
)
def test_pages_that_one_map_cannot_describe_are_refused(k, v):
    p = OVER_A_CACHE[1]
    strides = {"k": k, "v": v}
    other = [dataclasses.replace(o, strides=strides.get(o.name, o.strides)) for o in p.operands]
    reasons = CACHED.reasons(dataclasses.replace(p, operands=tuple(other)))
    assert [r.field for r in reasons] == ["strides"] and "whole rows apart in k as in v" in str(reasons[0])


def test_one_key_and_one_sequence_may_have_any_stride():
    cache = problem(b=1, sq=64, sk=1, kv="cache")
    assert not CACHED.reasons(cache)
    assert outer_rows(StandIn((1, 5, 4, 128), "bfloat16", (3, 512, 128, 1))) == 5
    assert outer_rows(StandIn((9, 1, 4, 128), "bfloat16", (1024, 7, 128, 1))) == 1


def test_refusals_name_a_fix():
    unaligned = tuple(dataclasses.replace(o, base_alignment=2) for o in problem().operands)
    reasons = VARIANT.reasons(dataclasses.replace(problem(), operands=unaligned))
    assert reasons and all(r.fix for r in reasons)


def test_more_rows_than_a_map_counts_are_refused():
    assert {"total_q", "total_k"} <= {r.field for r in VARIANT.reasons(problem(b=1 << 10, sq=1 << 20, sk=1 << 20))}
