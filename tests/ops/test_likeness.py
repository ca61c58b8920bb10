"""In what problems are alike to a table: what decides in kernels is told, and no size is too small to be told of."""

from __future__ import annotations

import math

import pytest

from registry import Target
from registry.dispatch.catalog import catalog
from registry.ops.parts.cases import Case

H200 = Target.named("H200")


def likeness(op, text):
    return Case.parse(op, text).problem(H200).likeness()


@pytest.mark.parametrize(
    ("heads", "halves"), [("hq=8,hkv=8", 0), ("hq=12,hkv=4", 0), ("hq=12,hkv=2", 1), ("hq=32,hkv=4", 2)]
)
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_how_often_the_heads_that_share_keys_can_be_halved(op, heads, halves):
    assert likeness(op, f"b=2,{heads},s=40,d=128,causal")["halves"] == halves


def test_tiles_of_keys_fill_rounds_of_the_chip():
    few, full, more = (likeness("attention_backward", f"b={b},hq=32,hkv=4,s=128,d=128") for b in (2, 33, 34))
    assert few["key_waves"] == 1 and full["key_waves"] == 0 < more["key_waves"]
    assert full["key_tiles"] == 7 and few["packed"] == 10


@pytest.mark.parametrize("form", ["form=rows,layout=nt", "form=inner,layout=tn", "form=batch,layout=nn"])
@pytest.mark.parametrize("sizes", ["e=1,m=1,n=1,k=1", "e=256,m=3,n=8,k=8", "e=4,m=512,n=256,k=4096"])
def test_groups_of_any_size_have_tiles(form, sizes):
    found = likeness("grouped_mm", f"{sizes},{form}")
    assert all(math.isfinite(value) for value in found.values())
    assert {"tiles", "waves_128x256", "waste_64", "work", "matrices"} <= found.keys()


def test_a_gate_doubles_the_columns_of_tiles_and_the_matrices():
    plain, gated = (likeness("grouped_mm", f"e=8,m=4096,n=2048,k=1024{more}") for more in ("", ",gated"))
    assert gated["tiles"] == plain["tiles"] + 1 and gated["matrices"] == plain["matrices"] + 1


@pytest.mark.parametrize(
    ("op", "text"), [("grouped_mm", "e=8,m=4096,n=2048,k=1024"), ("attention_varlen", "b=4,hq=8,sq=100,d=64")]
)
def test_what_decides_only_who_may_run_keeps_problems_near(op, text):
    """And is right to: a fixed order changes neither who may run nor the configs."""
    plain, fixed = (likeness(op, f"{text}{more}") for more in ("", ",deterministic"))
    assert plain == fixed and not {"out", "deterministic"} & plain.keys()
    one, other = (Case.parse(op, f"{text}{more}").problem(H200) for more in ("", ",deterministic"))
    assert not one.deterministic and other.deterministic
    for variant in catalog.get().of(op).values():
        assert bool(variant.reasons(one)) == bool(variant.reasons(other)), variant.name
        if not variant.reasons(one):
            assert list(variant.configs_for(one)) == list(variant.configs_for(other)), variant.name


def test_sizes_in_lines_of_a_cache():
    assert [likeness("matmul", f"m=100,n=100,k={k}")["k_divisor"] for k in (33, 40, 96, 640)] == [0, 3, 5, 6]


def test_a_window_is_told_by_what_it_leaves_to_be_seen():
    """127 keys of 37,583 are other work than 4,095 of them, and these other work than all."""
    cache = "b=9,hq=40,hkv=8,sq=1,sk=37583,d=128,kv=paged,page=32,causal"
    masks = (",window=127:0", ",window=4095:0", "")
    narrow, wide, whole = (likeness("attention_varlen", cache + mask) for mask in masks)
    assert narrow["seen"] == 7 and wide["seen"] == 12 < whole["seen"] == whole["keys"]
    assert narrow["work"] + 5 == wide["work"] < whole["work"]
    assert narrow["cached"] < wide["cached"] < whole["cached"]


def test_packed_rows_see_half_of_what_is_causal():
    full, causal = (likeness("attention_varlen", f"b=4,hq=8,sq=1024,d=64{mask}") for mask in ("", ",causal"))
    assert full["seen"] == 10 and causal["seen"] == 9
    assert causal["cached"] == full["cached"]


@pytest.mark.parametrize("op", ["attention", "attention_varlen", "attention_varlen_backward"])
def test_cards_of_one_architecture_differ_by_their_memory(op):
    sizes = "b=2,hq=8,sq=64,d=64" if "varlen" in op else "b=2,hq=8,s=64,d=64"
    one, other = (Case.parse(op, sizes).problem(Target.named(name)).likeness() for name in ("H100", "H200"))
    assert one["memory"] < other["memory"]
    assert {**one, "memory": 0} == {**other, "memory": 0}
