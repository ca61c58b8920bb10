"""Declarations that cannot be right are refused when they are registered, with what would have been allowed."""

from __future__ import annotations

import dataclasses

import pytest

import registry
from registry import DeclarationError, Design, Requires, Variant
from registry.contract.declared import HANDED, check_declaration, never_met
from registry.contract.problem import PROBLEM_TYPES
from registry.ops.known import all_ops


def whatever(*tensors, **given):
    raise NotImplementedError


def declared(op="attention", run=whatever, **given):
    own = {one.name for one in dataclasses.fields(Variant)} - {"requires"}
    settings = {name: given.pop(name) for name in own & given.keys()}
    check_declaration(Variant("test.declared", op=op, run=run, requires=Requires(**given), **settings))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(dtypes=("bfloat61",)), "Requires.dtypes: got 'bfloat61'"),
        (dict(dtypes=("int8",)), "Requires.dtypes: got 'int8'; allowed of attention: 'bfloat16'"),
        (dict(layouts=("bhds",)), "Requires.layouts: got 'bhds'; allowed of attention: 'bhsd', 'bshd', 'strided'"),
        (dict(op="matmul", layouts=("bhsd",)), "Requires.layouts: got 'bhsd'; allowed of matmul: 'nn'"),
        (dict(op="matmul", activations=("gleu",)), "Requires.activations: got 'gleu'; allowed of matmul: 'relu'"),
        (dict(op="matmul", scaling=("blockwise",)), "Requires.scaling: got 'blockwise'"),
        (dict(op="matmul", out_dtypes=("half",)), "Requires.out_dtypes: got 'half'; allowed of matmul: 'bfloat16'"),
        (dict(op="grouped_mm", out_dtypes=("int64",)), "Requires.out_dtypes: got 'int64'; allowed of grouped_mm"),
        (
            dict(op="matmul", dtypes_b=("int64",)),
            "Requires.dtypes_b: got 'int64'; allowed of matmul: 'bfloat16', 'float",
        ),
        (dict(op="attention_varlen", kv_dtypes=("int64",)), "kv_dtypes: got 'int64'; allowed of attention_varlen"),
        (dict(op="matmul", out_dtypes=("fp32",)), "Requires.out_dtypes: got 'fp32'"),
        (dict(op="matmul", activations="relu"), "Requires.activations: got 'relu'; allowed: a tuple of strings"),
        (dict(op="unheard_of", loudness=11), ""),  # which is said elsewhere
        (
            dict(casual=True),
            "Requires.casual: got a claim that attention does not have; allowed: any_softcap, arch, base_alignment, ",
        ),
        (
            dict(op="matmul", dtypes=("float16", "int8"), promoted=True),
            "Requires.promoted: got True beside dtypes float16, int8; allowed: beside float8_e4m3fn or float8_e5m2, wh",
        ),
        (
            dict(op="grouped_mm", promoted=True),
            "Requires.promoted: got True beside dtypes none; allowed: beside float8",
        ),
        (dict(op="matmul", dtypes=("float16", "float8_e5m2"), promoted=True), ""),
        (dict(op="grouped_mm", dtypes=("float16",), promoted=False), ""),
        (dict(grad_lse=True), "Requires.grad_lse: got a claim that attention does not have"),
        (dict(op="matmul", causal=True), "Requires.causal: got a claim that matmul does not have"),
        (dict(op="attention", activations=("relu",)), "Requires.activations: got a claim that attention does not have"),
        (dict(head_dim=128), "Requires.head_dim: got 128; allowed: (lowest, highest), two integers"),
        (dict(head_dim=(128, 64)), "Requires.head_dim: got (128, 64)"),
        (dict(head_dim=(-8, 64)), "Requires.head_dim: got (-8, 64); allowed: (lowest, highest), two integers of sizes"),
        (dict(head_dim=(0, 0)), "Requires.head_dim: got (0, 0)"),
        (dict(op="matmul", activations=("",)), "activations: got ('',); allowed: a tuple of strings, none empty"),
        (dict(configs=[{"w": 4, "s": 2}, {"w": 8}, {"s": 2, "w": 4}]), "configs: got {'s': 2, 'w': 4} twice; allowed"),
        (dict(op="matmul", activations={"gleu"}), "Requires.activations: got 'gleu'; allowed of matmul: 'relu'"),
        (dict(op="matmul", claims={"scaling": ["xx"]}), "Requires.scaling: got 'xx'"),
        (dict(design=Design(warp_groups=-1)), "Design.warp_groups: got -1; allowed: 0 or more"),
        (dict(design=Design(tile=(64, 0))), "Design.tile: got (64, 0); allowed: positive integers"),
        (dict(design=Design(dsl="")), "Design.dsl: got ''; allowed: a name"),
        (dict(causal="yes"), "Requires.causal: got 'yes'; allowed: True or False"),
        (dict(seqlen_q_multiple=0), "Requires.seqlen_q_multiple: got 0; allowed: a positive integer"),
        (dict(head_dim_multiple=0), "Requires.head_dim_multiple: got 0; allowed: a positive integer"),
        (dict(head_dim_v=(64,)), "Requires.head_dim_v: got (64,); allowed: (lowest, highest), two integers"),
        (dict(op="attention_varlen", page_size_multiple=True), "Requires.page_size_multiple: got True"),
        (dict(op="attention_varlen", checks_lengths=1), "Requires.checks_lengths: got 1; allowed: True or False"),
        (dict(base_alignment="16"), "Requires.base_alignment: got '16'; allowed: 1, 2, 4, 8 or 16"),
        (dict(stride_alignment=3), "Requires.stride_alignment: got 3; allowed: 1, 2, 4, 8 or 16"),
        (dict(unit_inner_stride=None), "Requires.unit_inner_stride: got None; allowed: True or False"),
        (dict(ieee=1), "Requires.ieee: got 1; allowed: True or False"),
        (dict(traceable="no"), "Variant test.declared: traceable: got 'no'; allowed: a value of type bool"),
        (dict(summary=None), "Variant test.declared: summary: got None; allowed: a value of type str"),
        (dict(design=Design(warp_groups="2")), "design: warp_groups: got '2'; allowed: a value of type int"),
        (dict(configs=[{1: 2}]), "config {1: 2}; allowed: a flat dict of integers"),
        (dict(configs=[{"keep": 0.5}]), "config {'keep': 0.5}; allowed: a flat dict of integers (of 18 digits at "),
        (dict(configs=[{"w": 10**17}, {"w": 1 - 10**18}]), ""),
        (dict(configs=[{"w": 10**18}]), "config {'w': 1000000000000000000}; allowed: a flat dict of integers (of 18 d"),
        (dict(configs=[{"w": -(10**5000)}]), "config a dict, which cannot be shown; allowed: a flat dict of integers"),
        (dict(arch=("sm00",)), "Requires.arch: got 'sm00'; allowed: \"sm90\""),
        (dict(head_dim=(65, 79), head_dim_multiple=16), "got (65, 79), in which no multiple of 16 lies; allowed: a"),
        (dict(design="fast"), "Variant test.declared: design: got 'fast'; allowed: a record Design(...)"),
        (dict(summary="x" * 100_000, traceable=[0] * 100_000), "traceable: got [0, 0, "),
        (dict(claims=5), "Requires.claims: got 5; allowed: a dict of claims by name"),
        (dict(toolchain={"tritn": ">=3.6"}), "Requires.toolchain: got 'tritn'; allowed: torch, triton, driver"),
    ],
)
def test_values_that_there_are_not(given, said):
    if not said:
        return declared(**given)
    with pytest.raises(DeclarationError) as caught:
        declared(**given)
    assert said in str(caught.value)


@pytest.mark.parametrize("variant", registry.variants().values(), ids=lambda variant: variant.name)
def test_what_no_call_can_meet_is_found_whichever_claim_is_gone(variant):
    """Of every built-in variant, claim by claim; none of theirs is so."""
    assert never_met(variant) == []
    kind, requires = PROBLEM_TYPES[variant.op], variant.requires
    needed = {how.claim for how in kind.queries().values() if how.rule in ("member", "range")}
    for claim in ("arch", *sorted(needed)):
        own = claim not in requires.claims
        less = dataclasses.replace(requires, **{claim: ()}) if own else _without(requires, claim)
        (why,) = never_met(dataclasses.replace(variant, requires=less))
        assert why.startswith(f"{claim}: none is claimed")


def _without(requires, claim):
    return dataclasses.replace(requires, claims={k: v for k, v in requires.claims.items() if k != claim})


@pytest.mark.parametrize(
    ("versions", "some"),
    [
        (">=3,<2", False),
        ("==3.6,!=3.6", False),
        (">=3.6.0,!=3.6.*,<3.7", False),
        (">3.6,<3.7", True),
        ("<3", True),
        ("==3.6.*", True),
        ("~=3.6", True),
        ("!=3.6", True),
        (">=3.6,!=3.6.0", True),
        ("===nightly", True),
    ],
)
def test_ranges_of_versions_in_which_none_lies(versions, some):
    requires = Requires(arch=("any",), dtypes=("float32",), layouts=("nn",), toolchain={"triton": versions})
    found = never_met(Variant("test.declared", op="matmul", run=whatever, requires=requires))
    assert found == ([] if some else [f"toolchain: no version of triton is {versions}"])


@pytest.mark.parametrize("op", all_ops())
def test_every_claim_of_words_says_which_words_there_are(op):
    """Or what no call can ask for would be claimed without a complaint."""
    kind = PROBLEM_TYPES[op]
    words = {field for field, how in kind.queries().items() if kind.claims().get(how.claim) == ()}
    assert words and words <= kind.known_values.keys()


async def later(q, k, v, *, scale, config):
    return q, None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(run=lambda q, k, *, scale, config: None), "run(q, k, v, *, config, scale)"),
        (dict(run=lambda q, k, v, *, config: None), "got an unexpected keyword argument 'scale'"),
        (dict(run=lambda q, k, v, *, scale: None), "got an unexpected keyword argument 'config'"),
        (dict(run=lambda q, k, v, *, scale, config: None, causal=True), "run(q, k, v, *, config, causal, scale)"),
        (dict(run=lambda q, k, v, *, scale, causal, config: None), "missing a required argument: 'causal'"),
        # Python 3.13 says "keyword-only argument"
        (dict(op="matmul", run=lambda a, b, *, bias, config: None), "argument: 'bias'"),
        (dict(prepare=lambda problem: None), "prepare(problem, config)"),
        (dict(builds=lambda problem: []), "builds(problem, config)"),
        (dict(configs=lambda: [{}]), "configs(problem)"),
        (dict(design_of=lambda: None), "design_of(config)"),
        (dict(cost=3), "Variant test.declared: cost: got 3; allowed: a function"),
        (dict(cost=lambda config: 1.0), "cost(problem, config)"),
        (dict(waits=True), "Variant test.declared: waits: got True; allowed: a function"),
        (dict(rule=lambda problem: []), "requires.rule(problem, config)"),
        (dict(never=lambda problem, config: False), "requires.never(problem)"),
        (dict(schedule=lambda problem, config: None), "schedule: got a function; allowed: None: calls of attention do"),
        (dict(run=later), "run: got an async function; allowed: one that is not"),
        (dict(shared_memory=4096), "requires.shared_memory: got 4096; allowed: a function"),
    ],
)
def test_functions_that_cannot_be_called_as_they_will_be(given, said):
    with pytest.raises(DeclarationError) as caught:
        declared(**given)
    assert said in str(caught.value)


def test_functions_that_can():
    declared(run=lambda q, k, v, *, scale, config: None)
    declared(run=lambda q, k, v, scale, config, causal=False: None)
    declared(run=lambda q, k, v, *, scale, causal, config: None, causal=True)
    declared(op="matmul", run=lambda a, b, *, config, **epilogue: None, bias=True, out=True)


def test_every_op_says_what_it_hands_over():
    assert set(HANDED) == set(all_ops())


def test_registering_refuses_too():
    variant = Variant("test.declared", op="attention", run=lambda q: None, requires=Requires(arch=("any",)))
    with pytest.raises(DeclarationError, match="run"):
        registry.register(variant)
    assert "test.declared" not in registry.variants()
