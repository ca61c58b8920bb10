"""attention_varlen for the tuner: shapes are spelled, made and judged, and a recorded call is asked again."""

from __future__ import annotations

import random

import pytest
import torch

import registry
from registry.ops.attention_varlen import mixes
from registry.ops.known import op_named
from registry.ops.parts.cases import Case, of_problem
from registry.ops.parts.workload import workload

OPS = ("attention_varlen", "attention_varlen_backward")
H100 = registry.Target.named("H100")
ODD = {
    "attention_varlen": (
        "b=3,hq=4,hkv=2,sq=3,sk=40,d=16,dtype=float32,mix=one,kv=paged,page=4,kv_dtype=int8,scales=token,lse,causal",
        "b=2,hq=2,sq=5,sk=40,d=16,dv=8,dtype=float32,kv=cache,mix=lognormal,window=7:0,sinks",
        "b=4,hq=4,hkv=2,sq=33,d=16,dtype=float32,mix=lognormal,causal,window=7:0,softcap=2.0,sinks,alibi",
    ),
    "attention_varlen_backward": (
        "b=4,hq=4,hkv=2,sq=33,d=16,dtype=float32,mix=lognormal,causal,window=7:0,softcap=2.0,alibi",
        "b=4,hq=4,hkv=2,sq=33,d=16,dtype=float32,grad_lse,mix=one",
        "b=4,hq=4,hkv=2,sq=33,d=16,dtype=float32,grad_lse,mix=one,causal,sinks",
    ),
}


@pytest.mark.parametrize("op", OPS)
def test_a_recorded_call_is_the_same_problem_again(op):
    tuning, rng = op_named(op).tuning, random.Random(1)
    cases = [case for grid in tuning.grids.values() for case in grid(op)] + [
        tuning.draws["random"](rng) for _ in range(20)
    ]
    for case in cases:
        assert Case.parse(op, case.text) == case
        problem = case.problem(H100)
        assert of_problem(problem).problem(H100).facts() == problem.facts()


@pytest.mark.parametrize("op, text", [(op, text) for op in OPS for text in ODD[op]])
def test_right_results_pass_and_wrong_ones_do_not(op, text):
    made = workload(Case.parse(op, text), "cpu")
    with made.settings():
        problem = made.problem()
        found = op_named(op)
        variants = [v for v in found.variants.values() if not v.reasons(problem)]
        assert variants
        for variant in variants:
            got = made.call(found.bind(variant, problem, variant.legal_configs(problem)[0]), made.tensors)
            assert made.judge(got, made.expected()).ok
            wrong = tuple(None if t is None else t.clone() for t in got)
            wrong[0][-1, -1] += 0.1
            assert not made.judge(wrong, made.expected()).ok
            if len(got) == 4:  # sinks have a gradient, too
                assert not made.judge((*got[:3], got[3] * 1.01), made.expected()).ok
        assert made.op(**made.front_door()) is not None


@pytest.mark.parametrize("mix", mixes.MIXES)
@pytest.mark.parametrize("count", [1, 2, 7, 64])
def test_mixes_hold_the_longest_they_were_given(mix, count):
    lengths = mixes.MIXES[mix](count, 1000)
    assert len(lengths) == count and max(lengths) == lengths[0] == 1000 and min(lengths) >= 1


@pytest.mark.parametrize("total, count, longest", [(10, 4, 7), (10, 1, 10), (3, 3, 1), (100, 7, 40)])
def test_lengths_that_add_up(total, count, longest):
    lengths = mixes.adding_up(total, count, longest)
    assert len(lengths) == count and sum(lengths) == total and max(lengths) == longest


def test_an_unknown_mix_is_refused():
    with pytest.raises(registry.InvalidArgument, match="mix"):
        workload(Case.parse("attention_varlen", "b=2,hq=1,sq=4,d=16,mix=banana"), "meta")


def test_explain_takes_the_words_of_a_shape():
    problem = op_named("attention_varlen").problem_type.of_shape(
        H100, b=4, hq=32, hkv=8, sq=1, sk=4096, d=128, kv="paged", page=64, kv_dtype="int8"
    )
    case = Case.of("attention_varlen", b=4, hq=32, hkv=8, sq=1, sk=4096, d=128, kv="paged", page=64, kv_dtype="int8")
    facts, same = problem.facts(), case.problem(H100).facts()
    assert facts == same
    assert torch.int8.itemsize == next(fact.itemsize for fact in problem.operands if fact.name == "k")
