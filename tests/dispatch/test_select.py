"""legal -> rank -> plan, and what happens when a kernel does not compile."""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import replace

import pytest
import replay_problems
import torch
from made_up import math_run, qkv

import registry
from registry import Design, IllegalVariant, KernelDoesNotFit, NoLegalVariant, UnknownVariant, notices
from registry.contract.problem import PROBLEM_TYPES
from registry.dispatch.catalog import catalog
from registry.dispatch.quarantine import quarantine
from registry.dispatch.select import decide
from registry.ops.attention.problem import AttentionProblem

CPU = registry.Target.named("cpu")


@pytest.fixture
def tables(tmp_path, put_in_force):
    def use(text):
        (tmp_path / "mine.yaml").write_text(text)
        put_in_force(tmp_path)

    return use


RULES = """
op: attention
arch: cpu
rules:
- when: {{seqlen_q: "..64"}}
  use: [{first}]
- use: [{second}]
"""


def test_the_first_matching_rule_decides(tables, declare):
    declare("test.small")
    declare("test.large")
    tables(RULES.format(first="test.small", second="test.large"))
    small = registry.attention.explain(*qkv(1, 1, 8, 16))
    large = registry.attention.explain(*qkv(1, 1, 128, 16))
    assert (small.variant, large.variant) == ("test.small", "test.large")
    assert "mine.yaml" in small.because and "rules[0]" in small.because


def test_a_table_cannot_make_an_illegal_variant_run(tables, declare):
    declare("test.gpu_only", arch=("sm90",))
    tables(RULES.format(first="test.gpu_only", second="test.gpu_only"))
    decision = registry.attention.explain(*qkv())
    assert decision.variant == "torch_cpu"
    assert "any.yaml" in decision.because
    refused = next(c for c in decision.candidates if c.variant == "test.gpu_only")
    assert not refused.legal and refused.reasons[0].field == "arch"


def test_the_config_of_a_table_is_used_if_it_is_legal(tables, declare):
    def limit(problem, config):
        return [] if config["BLOCK"] <= 64 else [registry.Reason("rule", "BLOCK", config["BLOCK"], 64)]

    declare("test.small", configs=[{"BLOCK": 16}, {"BLOCK": 32}], rule=limit)
    table = "op: attention\narch: cpu\nrules:\n- use: [{{variant: test.small, config: {{BLOCK: {block}}}}}]\n"
    tables(table.format(block=32))
    assert registry.attention.explain(*qkv()).config == {"BLOCK": 32}
    tables(table.format(block=128))
    assert registry.attention.explain(*qkv()).config == {"BLOCK": 16}
    assert any("BLOCK" in message for message in notices.counts())


def test_without_a_rule_the_choice_is_a_heuristic_and_says_so(declare):
    declare("test.only", softcap=True, dtypes=("float32",), arch=("cpu",))
    decision = registry.attention.explain(*qkv(), softcap=3.0)
    legal = {c.variant: c.because for c in decision.candidates if c.legal}
    assert "heuristic" in legal["test.only"]


def test_nothing_legal_lists_every_variant_with_its_reasons():
    q = torch.randn(1, 1, 8, 16).to(torch.float8_e4m3fn)
    with pytest.raises(NoLegalVariant) as caught:
        registry.attention(q, q, q)
    assert set(caught.value.reasons) == set(registry.attention.variants)
    assert all(caught.value.reasons.values())
    assert "float8_e4m3fn" in str(caught.value)


def test_explain_is_what_runs(declare):
    ran = []

    def spy(*args, config, **kwargs):
        ran.append(config)
        return math_run(*args, config=config, **kwargs)

    declare("test.spy", run=spy, configs=[{"A": 1}, {"A": 2}], causal=True, arch=("cpu",))
    q, k, v = qkv()
    with registry.prefer("test.spy"), registry.record() as recorder:
        explained = registry.attention.explain(q, k, v, causal=True)
        registry.attention(q, k, v, causal=True)
    (launch,) = recorder.launches
    assert (launch.variant, dict(launch.config), launch.problem) == (
        explained.variant,
        explained.config,
        explained.problem,
    )
    assert ran == [explained.config]


def test_run_gets_exactly_what_it_claims(declare):
    seen = {}

    def spy(q, k, v, **kwargs):
        seen.update(kwargs)
        return torch.zeros_like(q), None

    declare("test.plain", run=spy, causal=True)
    registry.attention(*qkv(), variant="test.plain")
    assert set(seen) == {"scale", "config", "causal"}
    with pytest.raises(IllegalVariant, match="window"):
        registry.attention(*qkv(), window=4, variant="test.plain")


def test_prepare_runs_once_per_plan_and_late(declare):
    made = []

    def prepare(problem, config):
        made.append(problem)
        return lambda q, k, v, *, scale: (q * 0 + scale, None)

    declare("test.fast", prepare=prepare)
    q, k, v = qkv()
    registry.attention.explain(q, k, v, variant="test.fast")
    assert made == []
    for _ in range(3):
        out = registry.attention(q, k, v, variant="test.fast", scale=2.0)
    assert len(made) == 1 and torch.all(out == 2.0)


# --- forcing ------------------------------------------------------------------------------------------------------


def test_a_forced_variant_runs_or_raises():
    q, k, v = qkv()
    with registry.record() as recorder:
        registry.attention(q, k, v, variant="torch_math")
    assert recorder.counts == {"attention": {"torch_math": 1}}
    with pytest.raises(IllegalVariant, match="sm80"):
        registry.attention(q, k, v, variant="torch_flash")
    with pytest.raises(UnknownVariant, match="torch_math"):
        registry.attention(q, k, v, variant="torch_flsh")
    with pytest.raises(UnknownVariant):
        registry.attention(q, k, v, variant="torch_matmul")


# --- quarantine ---------------------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_fit_gives_way_before_anything_runs(declare):
    tries = []

    def bad(*args, **kwargs):
        tries.append(1)
        raise KernelDoesNotFit("shared memory: 300 kB of 227 kB")

    declare("test.bad", run=bad, arch=("cpu",))
    q, k, v = qkv()
    with registry.prefer("test.bad"), registry.record() as recorder:
        assert registry.attention.explain(q, k, v).variant == "test.bad"
        out = registry.attention(q, k, v)
        registry.attention(q, k, v)
        after = registry.attention.explain(q, k, v)
    torch.testing.assert_close(out, registry.attention.reference(q, k, v, dtype=torch.float32))
    assert len(tries) == 1
    assert recorder.counts == {"attention": {"torch_cpu": 2}}
    assert after.variant == "torch_cpu"
    refused = next(c for c in after.candidates if c.variant == "test.bad")
    assert [r.code for r in refused.reasons] == ["quarantine"]
    assert "300 kB" in str(refused.reasons[0])
    assert any("quarantined" in message for message in notices.counts())
    # another size of the same class is quarantined too, another dtype is not
    with registry.prefer("test.bad"):
        registry.attention(*qkv(1, 2, 24, 16))
        assert len(tries) == 1
        assert quarantine.reason("test.bad", AttentionProblem.of_shape(CPU, dtype="float16", d=16)) is None


@pytest.mark.parametrize("part", ["run", "prepare"])
def test_a_forced_kernel_that_does_not_fit_raises(declare, part):
    def bad(*args, **kwargs):
        raise KernelDoesNotFit("too big")

    declare("test.bad", **{part: bad})
    with pytest.raises(IllegalVariant, match="too big"):
        registry.attention(*qkv(), variant="test.bad")


def test_any_other_failure_is_raised_and_never_retried(declare):
    def bad(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    declare("test.bad", run=bad)
    with registry.prefer("test.bad"), pytest.raises(RuntimeError, match="illegal memory access"):
        registry.attention(*qkv())
    assert quarantine.items() == []


def test_a_variant_in_the_place_of_a_quarantined_one_is_not_held_for_it(declare):
    def bad(*args, **kwargs):
        raise KernelDoesNotFit("too big")

    mine = declare("test.mine", run=bad)
    with registry.prefer("test.mine"):
        registry.attention(*qkv())
        assert registry.attention.explain(*qkv()).variant != "test.mine"
        registry.register(replace(mine, run=math_run), replace=True)
        assert registry.attention.explain(*qkv()).variant == "test.mine"
        quarantine.add("test.mine", registry.attention.problem_of(*qkv())[0], KernelDoesNotFit("too big"))
    registry.unregister("test.mine")
    assert quarantine.items() == []


def test_triton_compile_errors_count_as_not_fitting():
    from triton.runtime.errors import OutOfResources

    from registry.dispatch.quarantine import did_not_compile

    assert did_not_compile(OutOfResources(300, 200, "shared memory"))
    assert did_not_compile(RuntimeError("PassManager::run failed"))
    assert not did_not_compile(RuntimeError("CUDA error: misaligned address"))


# --- errata -------------------------------------------------------------------------------------------------------


def test_errata_make_a_variant_illegal_with_the_link(tables, declare):
    declare("test.known_bad")
    tables(
        "errata:\n- {variant: test.known_bad, op: attention, when: {head_dim: 16}, reason: wrong results, "
        "severity: wrong-result, link: 'https://example.org/1'}\n"
    )
    assert registry.attention.explain(*qkv(1, 1, 8, 32), variant="test.known_bad").variant == "test.known_bad"
    with pytest.raises(IllegalVariant, match="wrong results"):
        registry.attention(*qkv(1, 1, 8, 16), variant="test.known_bad")
    with registry.use("test.known_bad", config={}), pytest.raises(IllegalVariant, match="wrong results"):
        registry.attention(*qkv(1, 1, 8, 16))


# --- decide -----------------------------------------------------------------------------------------------------------


def test_decide_takes_a_problem_of_a_gpu_that_is_not_here():
    problem = AttentionProblem.of_shape(registry.Target.named("H100"), b=4, hq=32, hkv=8, s=8192, d=128, causal=True)
    decision = decide(problem)
    assert decision.variant in registry.attention.variants
    assert registry.attention.explain(problem, target=registry.Target.named("cpu")).variant == "torch_cpu"


@pytest.mark.parametrize("how", [{}, {"variant": "torch_cpu"}])
def test_explain_tells_what_is_ruled_out_of_every_variant_that_may_run(declare, how):
    def limit(problem, config):
        return [] if config["A"] < 2 else [registry.Reason("rule", "A", config["A"], "< 2")]

    declare("test.some", configs=[{"A": number} for number in range(6)], rule=limit)
    decision = registry.attention.explain(*qkv(), **how)
    assert decision.variant == "torch_cpu"
    (found,) = [c for c in decision.to_dict()["candidates"] if c["variant"] == "test.some"]
    assert found["legal"] and [reason["got"] for reason in found["refused_configs"]] == [2, 3, 4, 5]
    lines = [line.strip() for line in str(decision).splitlines() if "configs ruled out" in line]
    assert lines == [f"- configs ruled out: {w}" for w in ("A: got 2, allowed < 2", "A: got 3, allowed < 2")] + [
        "- configs ruled out: and 2 more reasons"
    ]


def test_design_never_takes_part_in_legality(declare):
    declare("test.designed", design=Design(warp_groups=3, pipeline_stages=9, warp_specialized=True, tile=(1024, 1024)))
    assert registry.attention.explain(*qkv(), variant="test.designed").variant == "test.designed"


# --- a launch asks only for what it needs -----------------------------------------------------------------------------


ASKED = ("attention", "attention_backward", "matmul")


def drawn(op, count=60):
    """Problems at random, the same in each run; without those that are none."""
    for words in replay_problems.drawn(op, count):
        words = {name: value for name, value in words.items() if name != "grad_lse"}
        for target in map(registry.Target.named, (*replay_problems.TARGETS, "V100")):
            with contextlib.suppress(registry.InvalidArgument):
                yield PROBLEM_TYPES[op].of_shape(target, **words)


@pytest.mark.parametrize("op", ASKED)
def test_a_launch_picks_what_stands_first_in_explain(op):
    answers = set()
    for problem in drawn(op):
        try:
            decision = decide(problem)
        except NoLegalVariant as refusal:
            assert set(refusal.reasons) == set(catalog.get().of(op)) and all(refusal.reasons.values())
            continue
        first = decision.candidates[0]
        assert (decision.variant, decision.because) == (first.variant, first.because) and first.rank == 0
        assert dict(decision.config) in list(map(dict, catalog.get().variants[first.variant].legal_configs(problem)))
        assert {c.variant for c in decision.candidates} == set(catalog.get().of(op))
        answers.add(decision.variant)
    assert len(answers) > 1


@pytest.mark.parametrize("op", ASKED)
def test_a_first_config_is_there_exactly_where_there_are_no_reasons(op):
    for problem in drawn(op, 30):
        for variant in catalog.get().of(op).values():
            first = variant.first_legal(problem)
            assert (first is None) == bool(variant.reasons(problem))
            assert first is None or first == variant.legal_configs(problem)[0]


def test_calls_and_recorders_ask_no_variant_behind_the_one_that_runs(declare, tables):
    asked = []
    declare("test.behind", rule=lambda problem, config: asked.append(problem) or [], arch=("cpu",))
    tables(RULES.format(first="torch_cpu", second="torch_cpu"))
    q, k, v = qkv()
    with registry.record() as recorder:
        registry.attention(q, k, v)
    assert recorder.counts == {"attention": {"torch_cpu": 1}} and not asked
    decision = registry.attention.explain(q, k, v)
    assert decision == registry.attention.explain(q, k, v) and repr(decision) and not asked
    assert "test.behind" in str(decision) and asked


def test_candidates_that_are_asked_for_late_stand_as_they_did(declare):
    declare("test.mine", arch=("cpu",))
    q, k, v = qkv()
    decision = registry.attention.explain(q, k, v)
    copied = pickle.loads(pickle.dumps(decision))
    late = registry.attention.explain(q, k, v)
    quarantine.add("test.mine", decision.problem, RuntimeError("too late"))
    declare("test.later", arch=("cpu",))
    assert late.candidates == decision.candidates == copied.candidates and late == decision == copied
    after = registry.attention.explain(q, k, v).candidates
    assert [c.variant for c in after if c.variant not in {c.variant for c in late.candidates}] == ["test.later"]
    assert not next(c for c in after if c.variant == "test.mine").legal


def one_query(queries=1):
    q = torch.empty(1, 32, queries, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, 8, 5000, 128, dtype=torch.bfloat16, device="meta")
    return registry.attention.explain(q, k, k, target=registry.Target.named("H200"))


@pytest.mark.parametrize("queries", [1, 16, 17])
def test_what_builds_each_size_goes_behind_where_lengths_grow(queries):
    """A library that builds a kernel for each length would build one for each token; no measurement shows it."""
    decision, growing = one_query(queries), queries <= 16
    (cudnn,) = (one for one in decision.candidates if one.variant == "torch_cudnn")
    assert cudnn.legal and ("builds a kernel for each new length" in cudnn.because) is growing
    by_table = [one for one in decision.candidates if one.because.startswith("attention.sm90.yaml") and one.legal]
    assert not growing or by_table[-1] == cudnn
    with registry.prefer(["torch_cudnn"]):
        assert one_query(queries).variant == "torch_cudnn"


def test_a_guess_that_fails_refuses_no_config():
    def order(configs):
        raise ValueError("a guess")

    variant = registry.variants()["triton_fa2"]
    problem = AttentionProblem.of_shape(registry.Target.named("H200"), hq=2, s=512, d=64)
    assert variant.first_legal(problem, order) == variant.first_legal(problem)
    assert variant.first_legal(problem, lambda configs: configs[::-1]) == variant.legal_configs(problem)[-1]
