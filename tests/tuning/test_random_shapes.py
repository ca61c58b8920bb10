"""Shapes by seed: the same in every process, legal calls all, and none rounded to what grids hold."""

from __future__ import annotations

import pytest

from registry import Target
from registry.errors import InvalidArgument
from registry.ops.known import all_ops, op_named
from registry.ops.parts.cases import Case
from registry.tuning.grids import grid, select

DRAWN = sorted((name, kind) for name, op in all_ops().items() for kind in op.tuning.draws)


@pytest.mark.parametrize(("op", "kind"), DRAWN)
def test_a_seed_always_gives_the_same_shapes_and_a_longer_draw_begins_with_a_shorter(op, kind):
    found = grid(op, f"{kind}:7:40")
    assert len(found) == 40 and found[:10] == grid(op, f"{kind}:7:10") and found != grid(op, f"{kind}:8:40")


@pytest.mark.parametrize(("op", "kind"), DRAWN)
def test_every_drawn_shape_is_a_call(op, kind):
    target = Target.named("H200")
    for case in grid(op, f"{kind}:11:60"):
        assert case.problem(target).op == op and Case.parse(op, case.text) == case


@pytest.mark.parametrize("op", sorted({op for op, _ in DRAWN}))
def test_what_is_mostly_asked_is_drawn_first(op):
    assert next(iter(op_named(op).tuning.draws)) == "random"


@pytest.mark.parametrize("op", sorted({op for op, _ in DRAWN}))
def test_shapes_of_published_models_are_told_from_others(op):
    """About half are where sizes of any kind are drawn, too; elsewhere all are."""
    of_a_model = op_named(op).tuning.of_a_model
    known = sum(map(of_a_model, grid(op, "random:5:200")))
    assert known == 200 if op.startswith(("grouped", "attention_varlen")) else 80 < known < 140


def test_a_layer_is_known_by_its_widths_and_layout_and_heads_by_all_three_numbers():
    layer, heads = op_named("matmul").tuning.of_a_model, op_named("attention").tuning.of_a_model
    of_any_rows = "m=3,n=6144,k=4096"
    assert layer(Case.parse("matmul", of_any_rows + ",layout=nt"))
    assert not layer(Case.parse("matmul", of_any_rows)) and not layer(
        Case.parse("matmul", "m=3,n=6144,k=4097,layout=nt")
    )
    assert heads(Case.parse("attention", "hq=32,hkv=8,s=5,d=128")) and heads(Case.parse("attention", "hq=32,s=5,d=128"))
    assert not heads(Case.parse("attention", "hq=32,hkv=8,s=5,d=96"))


def test_matmul_sizes_are_not_rounded():
    sizes = [case.sizes for case in grid("matmul", "random:3:80")]
    assert sum(size["m"] % 2 for size in sizes) > 20 and sum(size["k"] % 8 != 0 for size in sizes) > 15
    assert min(size["m"] for size in sizes) < 8 and max(size["m"] for size in sizes) > 4096


NO_DRAWS = [
    "random",
    "random:",
    "random:1",
    "random:1:x",
    "random:-1:4",
    "random:1:2:3",
    "random:1:0",
    "random:1:99999",
]


@pytest.mark.parametrize("name", NO_DRAWS)
def test_a_draw_needs_a_seed_and_a_count(name):
    with pytest.raises(InvalidArgument, match="random:SEED:COUNT"):
        grid("matmul", name)


def test_grids_are_joined():
    both = grid("matmul", "all+random:5:3")
    assert both[:-3] == grid("matmul", "all") and both[-3:] == grid("matmul", "random:5:3")
    assert grid("matmul", "quick+tiny+quick") == [*grid("matmul", "quick"), *grid("matmul", "tiny")]


@pytest.mark.parametrize("name", ["", "all+", "quick,tiny", "nothing"])
def test_a_grid_that_is_none_is_an_error(name):
    with pytest.raises(InvalidArgument, match="grid: got"):
        select("matmul", grid_name=name)
