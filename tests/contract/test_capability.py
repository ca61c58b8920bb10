"""Legality: closed-world, all reasons at once, each with got, allowed and a fix."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import dataclass, replace

import pytest
import torch

import registry
from registry import DeclarationError, Reason, Requires, Target, Variant
from registry.contract.capability import arch_matches, config_reasons, reasons_against
from registry.contract.likeness import _EDGES, _MARKS, counted, in_octaves, octaves
from registry.contract.meeting import CLASSES, meets
from registry.contract.noted import Notes
from registry.contract.problem import OperandFact
from registry.ops.attention.problem import AttentionProblem
from registry.ops.known import op_named
from registry.tuning.grids import grid

H100 = Target.named("H100")
EVERYTHING = Requires(
    arch=("any",),
    dtypes=("bfloat16",),
    head_dim=(1, 512),
    head_dim_v=(1, 512),
    layouts=("bhsd", "bshd", "strided"),
    unit_inner_stride=False,
    causal=True,
    window=True,
    softcap=True,
    gqa=True,
    lse=True,
    cross_length=True,
    deterministic=True,
)


def problem(**shape):
    return AttentionProblem.of_shape(shape.pop("target", H100), **shape)


def fields_of(reasons):
    return {reason.field for reason in reasons}


def test_an_empty_declaration_claims_nothing():
    reasons = reasons_against(Requires(), problem())
    assert {"arch", "dtype", "head_dim", "layout"} <= fields_of(reasons)


@pytest.mark.parametrize(
    ("field", "shape"),
    [
        ("causal", {"causal": True}),
        ("window", {"window": (8, 8)}),
        ("softcap", {"softcap": 30.0}),
        ("gqa", {"hq": 8, "hkv": 2}),
        ("lse", {"lse": True}),
        ("cross_length", {"s": 16, "sk": 32}),
        ("deterministic", {"deterministic": True}),
        ("head_dim_v", {"d": 64, "dv": 32}),
    ],
)
def test_each_feature_must_be_claimed(field, shape):
    import dataclasses

    asked = problem(**shape)
    assert field in {f.name for f in dataclasses.fields(asked)}
    assert reasons_against(EVERYTHING, asked) == []
    without = dataclasses.replace(EVERYTHING, **{field: None if field == "head_dim_v" else False})
    assert fields_of(reasons_against(without, asked)) == {field}


def test_the_fix_of_grouped_heads_names_the_dimension_of_the_heads():
    without = replace(EVERYTHING, gqa=False)
    for layout, dims in (("bhsd", "over dim 1)"), ("bshd", 'over dim 1, or over dim 2 where layout="bshd")')):
        (reason,) = reasons_against(without, problem(hq=8, hkv=2, layout=layout))
        assert reason.fix.endswith(dims)


def test_a_new_field_makes_old_variants_illegal_until_they_claim_it():
    @dataclass(frozen=True, kw_only=True)
    class WithSinks(AttentionProblem):
        sinks: bool = False
        paging: str = ""

    def asked(**new):
        base = problem()
        values = {name: getattr(base, name) for name in base.queries() if name not in ("gqa", "cross_length")}
        return WithSinks(**values, **new)

    import dataclasses

    assert reasons_against(EVERYTHING, asked()) == []
    assert fields_of(reasons_against(EVERYTHING, asked(sinks=True, paging="16"))) == {"sinks", "paging"}
    claiming = dataclasses.replace(EVERYTHING, sinks=True, paging=("16", "64"))
    assert reasons_against(claiming, asked(sinks=True, paging="16")) == []
    assert fields_of(reasons_against(claiming, asked(sinks=True, paging="8"))) == {"paging"}


def test_claims_are_keywords_and_attributes():
    requires = Requires(head_dim=[64, 128], causal=True)
    assert (requires.head_dim, requires.causal, requires.window, requires.activations) == ((64, 128), True, False, ())
    assert requires == Requires(causal=True, head_dim=(64, 128)) != Requires(causal=True)
    assert pickle.loads(pickle.dumps(requires)) == copy.deepcopy(requires) == requires
    with pytest.raises(AttributeError, match="casual"):
        requires.casual  # noqa: B018


def test_all_reasons_are_collected_not_just_the_first():
    requires = Requires(arch=("sm80",), dtypes=("float16",), head_dim=(16, 64), layouts=("bhsd",))
    found = reasons_against(requires, problem(d=128, causal=True, layout="bshd", b=2, hq=2))
    assert fields_of(found) == {"arch", "dtype", "head_dim", "causal", "layout"}


def test_head_dim_off_the_grid_says_what_to_pad_to():
    requires = Requires(arch=("any",), dtypes=("bfloat16",), head_dim=(16, 256), head_dim_multiple=8, layouts=("bhsd",))
    (reason,) = reasons_against(requires, problem(d=76))
    assert (reason.got, reason.allowed, reason.fix) == (76, "16..256 in steps of 8", "pad head_dim 76 to 80")
    (beyond,) = reasons_against(requires, problem(d=264))
    assert beyond.fix is None
    wider = Requires(arch=("any",), dtypes=("bfloat16",), head_dim=(264, 576), layouts=("bhsd",))
    (halved,) = reasons_against(wider, problem(d=256))
    (more,) = reasons_against(wider, problem(d=128))
    assert (halved.fix, more.fix) == ("pad head_dim 256 to 264", None), "not where most of it would be padding"


def test_sequence_lengths_can_be_required_to_divide():
    import dataclasses

    requires = dataclasses.replace(EVERYTHING, seqlen_k_multiple=128)
    (reason,) = reasons_against(requires, problem(s=100, sk=130))
    assert reason.field == "seqlen_k"
    assert reason.fix == "pad seqlen_k 130 to 256"


def test_memory_facts_name_the_operand_the_stride_and_the_fix():
    requires = Requires(
        arch=("any",),
        dtypes=("bfloat16",),
        head_dim=(1, 512),
        layouts=("bhsd", "bshd", "strided"),
        base_alignment=16,
        stride_alignment=16,
    )
    wide = torch.zeros(1, 2, 16, 65, dtype=torch.bfloat16)
    q, k, v = wide[..., 1:65], wide[..., :64], torch.zeros(1, 2, 64, 16, dtype=torch.bfloat16).transpose(-1, -2)
    asked, _ = registry.attention.problem_of(q, k, v)
    found = {(reason.operand, reason.field): reason for reason in reasons_against(requires, asked)}
    assert ("q", "base_alignment") in found
    assert found["k", "stride_alignment"].got == "2080 bytes" or "130" in str(found["k", "stride_alignment"].got)
    assert found["k", "stride_alignment"].fix == (
        "call .contiguous() on k: its stride of 130 bytes in dimension 2 is no multiple of 16"
    )
    assert found["v", "unit_inner_stride"].fix == "call .contiguous() on v: its inner stride is 16"


@pytest.mark.parametrize(
    ("shape", "strides", "unit"),
    [
        ((2, 4, 8), (32, 8, 1), True),
        ((2, 4, 8), (32, 1, 1), False),
        ((4, 2, 8), (1, 32, 1), False),
        ((2, 1, 8), (32, 1, 1), True),
        ((2, 4, 1), (4, 1, 1), True),
        ((2, 4, 1), (4, 1, 3), True),
        ((2, 4, 8), (0, 4, 1), True),
        ((2, 4, 8), (32, 1, 4), False),
    ],
)
def test_the_unit_inner_stride_is_the_only_one(shape, strides, unit):
    assert OperandFact("q", "float32", shape, strides, 4).unit_inner_stride is unit


def laid(layout, rows, columns):
    """A matrix of that letter: "n", "t", or neither."""
    base = torch.zeros(2 * rows, 2 * columns)
    return {"n": base[:rows, :columns], "t": base.mT.contiguous().mT[:rows, :columns], "s": base[::2, ::2]}[layout]


@pytest.mark.parametrize("claimed", [("nn",), ("nn", "nt"), ("nt",), ("tn", "nt"), ("tt",)], ids=" ".join)
@pytest.mark.parametrize("given", ["nn", "nt", "tn", "tt", "sn", "ts", "ss"])
def test_the_fix_of_a_products_layout_is_one(claimed, given):
    requires = Requires(arch=("cpu",), dtypes=("float32",), layouts=claimed, ieee=True)
    operands = {"a": laid(given[0], 4, 6), "b": laid(given[1], 6, 5)}
    reasons = reasons_against(requires, registry.matmul.problem_of(**operands)[0])
    assert bool(reasons) == (given not in claimed)
    for reason in reasons:
        if reason.fix is None:  # rows are contiguous where they may not be, which no copy by itself changes
            assert "nn" not in claimed
            continue
        for name in reason.fix.removeprefix("call .contiguous() on ").split(" and "):
            operands[name] = operands[name].contiguous()
        assert reasons_against(requires, registry.matmul.problem_of(**operands)[0]) == []


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_fix_of_a_layout_of_attention_is_one(layout):
    requires = Requires(arch=("cpu",), dtypes=("float32",), head_dim=(1, 64), layouts=("bhsd",), ieee=True)
    q = torch.zeros(2, 3, 4, 8).transpose(1, 2) if layout == "bhsd" else torch.zeros(2, 3, 4, 8)
    (reason,) = reasons_against(requires, registry.attention.problem_of(q, q, q, layout=layout)[0])
    assert (reason.got, reason.fix) == ("bshd", "make every operand dense as [B, H, S, D]")
    dense = q.contiguous() if layout == "bhsd" else q.transpose(1, 2).contiguous().transpose(1, 2)
    assert reasons_against(requires, registry.attention.problem_of(dense, dense, dense, layout=layout)[0]) == []
    other = Requires(arch=("cpu",), dtypes=("float32",), head_dim=(1, 64), layouts=("bshd",), ieee=True)
    assert [r.fix for r in reasons_against(other, registry.attention.problem_of(dense, q, q, layout=layout)[0])] == [
        None
    ]


@pytest.mark.parametrize(("columns", "fix"), [(24, "call .contiguous() on q"), (20, "pad the rows of q")])
def test_the_fix_of_a_stride_is_one(columns, fix):
    requires = replace(EVERYTHING, stride_alignment=16)
    q = torch.zeros(1, 2, 6, 33, dtype=torch.bfloat16)[..., :columns]
    k = torch.zeros(1, 2, 6, 32, dtype=torch.bfloat16)[..., :columns]
    (reason,) = reasons_against(requires, registry.attention.problem_of(q, k, k)[0])
    assert reason.fix.startswith(f"{fix}: its stride of ")
    mended = q.contiguous() if fix.startswith("call") else torch.nn.functional.pad(q, (0, 4))[..., :columns]
    assert reasons_against(requires, registry.attention.problem_of(mended, k, k)[0]) == []


def test_toolchain_ranges():
    requires = Requires(arch=("any",), toolchain={"triton": ">=99"})
    reason = next(r for r in reasons_against(requires, problem()) if r.field == "triton")
    assert reason.allowed == ">=99"
    assert reason.fix == 'pip install "triton>=99"'


def test_shared_memory_is_a_function_of_the_config():
    requires = Requires(shared_memory=lambda problem, config: config["stages"] * 100_000)
    assert config_reasons(requires, problem(), {"stages": 2}) == []
    (reason,) = config_reasons(requires, problem(), {"stages": 3})
    assert (reason.field, reason.got) == ("shared_memory", 300_000)
    assert config_reasons(requires, problem(target=Target.named("RTX 3090")), {"stages": 2})


@pytest.mark.parametrize(
    ("claims", "arch", "expected"),
    [
        (("sm90",), "sm90", True),
        (("sm90",), "sm100", False),
        (("sm80+",), "sm120", True),
        (("sm80+",), "sm75", False),
        (("sm80+",), "cpu", False),
        (("cpu",), "cpu", True),
        (("any",), "cpu", True),
        ((), "sm90", False),
    ],
)
def test_architecture_claims(claims, arch, expected):
    assert arch_matches(claims, arch) is expected


@pytest.mark.parametrize(
    "claims",
    [{"arch": arch} for arch in ("sm90", ("hopper",), None)]
    + [{"toolchain": toolchain} for toolchain in (None, {"triton": "new"}, {"torch": 1})]
    + [{"dtypes": "float16"}, {"layouts": 1}],
)
def test_wrong_declarations_are_refused_at_once(claims):
    with pytest.raises(DeclarationError, match="got"):
        Requires(**claims)


@pytest.mark.parametrize(
    "settings",
    [{"configs": configs} for configs in ([], [{"a": object()}], 1, "B", torch.ones(2))]
    + [{"name": "Bad Name"}, {"run": None}, {"requires": {}}],
)
def test_wrong_variants_are_refused_at_once(settings):
    declared = {"name": "test.v", "op": "attention", "run": lambda: None, "requires": Requires()} | settings
    with pytest.raises(DeclarationError, match="allowed: |must be"):
        Variant(**declared)


def test_a_reason_reads_well():
    text = str(Reason("range", "head_dim", 72, "64, 128", "pad head_dim 72 to 128", "q"))
    assert text == "q.head_dim: got 72, allowed 64, 128; fix: pad head_dim 72 to 128"


@pytest.mark.parametrize("op", ["attention", "attention_backward", "attention_varlen", "grouped_mm", "matmul"])
def test_what_is_kept_of_kinds_of_problems_is_what_the_reasons_say(op):
    """Of all variants, on problems of many kinds that come in turns with two targets, each asked twice."""
    targets, variants = [H100, Target.named("A100")], op_named(op).variants.values()
    for case in grid(op, "random:771:60"):
        for asked in [case.problem(target) for target in targets] + [case.problem(H100)] * 2:
            flags = {name: True for name in ("deterministic", "causal", "bias") if hasattr(asked, name)}
            for one in (asked, replace(asked, **flags)):
                found = {v.name: meets(v.requires, one) for v in variants}
                assert found == {v.name: not reasons_against(v.requires, one) for v in variants}


def test_few_kinds_of_problems_are_kept():
    for softcap in range(1, 2 * CLASSES):
        assert meets(EVERYTHING, problem(softcap=float(softcap)))
    assert len(EVERYTHING._let_through[1]) <= CLASSES


@pytest.mark.parametrize("op", ["attention", "attention_varlen", "grouped_mm", "matmul"])
def test_facts_by_name_are_those_of_all(op):
    for case in grid(op, "random:772:20"):
        asked = case.problem(H100)
        every = asked.facts()
        for names in ({"dtype"}, {"dtype", "arch"}, set(every), {*list(every)[::3], "no such fact"}, set()):
            assert asked.facts(frozenset(names)) == {name: every[name] for name in every if name in names}


def test_a_size_counts_by_the_edge_that_it_is_not_below():
    """Integers are looked up as floats where they are the same."""
    sizes = [size for power in range(63) for size in range(2**power - 2, 2**power + 3)]
    sizes += [math.ceil(edge) + off for edge in _EDGES if edge > 4 for off in (-1, 0, 1)]
    for size in sizes:
        assert octaves(size) == _MARKS[sum(edge <= size for edge in _EDGES)], size
        assert octaves(size + 0.5) == _MARKS[sum(edge <= size + 0.5 for edge in _EDGES)], size


@pytest.mark.parametrize("op", ["attention", "attention_backward", "attention_varlen", "grouped_mm", "matmul"])
def test_what_a_variant_never_runs_has_no_legal_config(op):
    """`never` says no more than the rule: else `explain` would have nothing to say against the variant."""
    for variant in op_named(op).variants.values():
        for case in grid(op, "random:773:200") if variant.requires.never is not None else ():
            asked = case.problem(H100)
            if not reasons_against(variant.requires, asked) and variant.requires.never(asked):
                assert variant.legal_configs(asked) == [] != variant.config_refusals(asked) == variant.reasons(asked)


def test_what_never_runs_is_refused_before_configs_are_made():
    made = []
    rule = lambda problem, config: [Reason("few", "m", problem.m, "8 rows")] if problem.m < 8 else []  # noqa: E731
    requires = Requires(
        arch=("any",), dtypes=("bfloat16",), layouts=("nn",), rule=rule, never=lambda problem: problem.m < 8
    )
    variant = Variant("test.rows", "matmul", print, requires, configs=lambda problem: made.append(problem.m) or [{}])
    few, many = (op_named("matmul").problem_type.of_shape(H100, m=m) for m in (4, 16))
    assert (variant.first_legal(few), made) == (None, [])
    assert (variant.first_legal(many), made) == ({}, [16])
    assert [str(reason) for reason in variant.reasons(few)] == ["m: got 4, allowed 8 rows"]


def test_what_never_runs_is_refused_by_that_where_no_rule_says_more():
    requires = Requires(arch=("any",), dtypes=("bfloat16",), layouts=("nn",), never=lambda problem: problem.m < 8)
    variant = Variant("test.rows", "matmul", print, requires)
    said = [str(reason) for reason in variant.reasons(op_named("matmul").problem_type.of_shape(H100, m=4))]
    assert said == ["requires.never: got rules out every config here, allowed a problem that it lets through"]


@pytest.mark.parametrize("largest", [4096, 3.7, 2**53 - 1, 2**54 - 1, 2**60 + 1, 0])
def test_several_sizes_count_as_each_alone(largest):
    sizes = [1, 7, largest, 0.3, 128]
    assert list(in_octaves(sizes)) == [octaves(size) for size in sizes]
    found = counted("a", "c")({"a": 8, "b": "word", "c": largest, "d": 1.0})
    assert list(found.items()) == [("a", octaves(8)), ("b", "word"), ("c", octaves(largest)), ("d", 1.0)]


def test_noted_sizes_count_as_plain_ones():
    notes = Notes()
    with notes:
        found = list(in_octaves([5, *notes.sizes([300])]))
    assert found == [octaves(5), octaves(300)]
    following = notes.following((300,))
    assert [following.of((size,)) is not None for size in (271, 300, 304, 305)] == [False, True, True, False]
