"""A shape is one text for `kreg explain` and for `kreg tune`, as results and pages spell it."""

from __future__ import annotations

import pytest

import registry
from registry.cli._problems import problem_from
from registry.errors import InvalidArgument
from registry.ops.known import all_ops, op_named
from registry.ops.parts.cases import Case
from registry.tuning.grids import grid

H200 = registry.Target.named("H200")


def explained(op, text):
    return problem_from(op, {"shape": text, "device": "H200"})


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_explain_and_tune_mean_the_same_problem(name):
    op = op_named(name)
    names = [*op.tuning.grids, *(f"{kind}:7:30" for kind in op.tuning.draws)]
    for text in [case.text for one in names for case in grid(name, one)[:60]]:
        assert explained(op, text).facts() == Case.parse(name, text).problem(H200).facts(), text


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("matmul", "m=1,n=64,k=32,layout=tn"),
        ("matmul", "m=64,n=1,k=1,layout=tt"),
        ("grouped_mm", "form=inner,e=3,m=64,n=32,k=1,layout=tt"),
        ("grouped_mm", "e=3,m=64,n=1,k=64,layout=nt"),
        ("attention_varlen", "b=4,hq=32,hkv=8,sq=4096,causal"),
        ("attention_varlen", "b=4,sq=1"),
        ("attention_varlen", "b=4,sq=9,sk=90,t=20,tk=200"),
        ("attention_varlen", "b=5,sq=300,sk=1250,mix=lognormal,kv=paged,page=16"),
        ("attention_varlen", "b=5,sq=300,sk=1250,mix=one,t=400"),
    ],
)
def test_sizes_of_one_and_those_left_out_do_too(op, text):
    assert explained(op_named(op), text).facts() == Case.parse(op, text).problem(H200).facts()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mix=odd,t=5", "mix: got 'odd'; allowed: uniform, lognormal, one"),
        ("mix=odd", "mix: got 'odd'; allowed: uniform, lognormal, one"),
        ("mix=one,b=2000000", "b: got 2000000; allowed: 1..1048576 with mix=one"),
        ("kv=paged,page=0", "page: got 0; allowed: a positive integer"),
    ],
)
def test_what_is_no_batch_names_the_argument(text, said):
    with pytest.raises(InvalidArgument) as raised:
        explained(op_named("attention_varlen"), text)
    assert str(raised.value) == said
