"""The conformance kit must fail kernels that are wrong. Each test breaks a right kernel in one way."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from registry import Reason, Requires, Target, Variant
from registry.ops.attention.backward import attention_backward
from registry.ops.attention.op import attention
from registry.ops.attention.outputs import new_lse, new_out
from registry.ops.known import op_named
from registry.ops.parts.sizes import size_for
from registry.ops.parts.trials import draw
from registry.testing import Report, check_op, check_variant, checks_for, in_common, places

pytestmark = pytest.mark.usefixtures("quick_python")

CLAIMS: dict[str, Any] = {
    "arch": ("cpu",),
    "dtypes": ("float32", "bfloat16"),
    "head_dim": (16, 32),
    "head_dim_multiple": 8,
    "ieee": True,
    "layouts": ("bhsd", "bshd", "strided"),
    "causal": True,
    "window": True,
    "lse": True,
    "gqa": True,
    "cross_length": True,
}


def right(q: Any, k: Any, v: Any, *, scale: float, config: Any, **features: Any) -> Any:
    features["softcap"] = features.get("softcap", 0.0)
    features["return_lse"] = True
    found, lse = attention.reference(q, k, v, scale=scale, dtype=torch.float32, **features)
    out = new_out(q, v)
    out.copy_(found)
    return out, new_lse(q).copy_(lse)


def report_on(run: Any, **claims: Any) -> Report:
    configs = claims.pop("configs", ({},))
    only = claims.pop("only", lambda name: True)
    return check_variant(
        Variant("test.kit", op="attention", run=run, requires=Requires(**CLAIMS | claims), configs=configs), only=only
    )


def complaints(report: Report) -> str:
    return "\n".join(case.detail for case in report.failures)


# --- right kernels pass -------------------------------------------------------------------------------------------


def test_a_kernel_with_few_claims_passes_and_its_refusals_are_checked() -> None:
    def plain(q: Any, k: Any, v: Any, *, scale: float, config: Any) -> Any:
        return right(q, k, v, scale=scale, config=config)[0], None

    narrow = dict.fromkeys(("causal", "window", "lse", "cross_length", "gqa", "ieee"), False)
    report = report_on(plain, dtypes=("bfloat16",), layouts=("bhsd",), base_alignment=16, stride_alignment=16, **narrow)
    assert report.passed, str(report)
    names = {case.name for case in report.cases}
    for field in (
        "causal",
        "window",
        "lse",
        "gqa",
        "cross_length",
        "float32",
        "head_dim above",
        "base address",
        "row stride",
    ):
        assert f"refuses {field}" in names


# --- wrong kernels fail: tests/testing/test_mutants.py has most of them ---------------------------------------------


def test_a_nondeterministic_kernel_fails_where_it_claims_to_be_deterministic() -> None:
    def noisy(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        out, lse = right(q, k, v, **rest)
        return out * (1 + 1e-7 * random.randrange(8)), lse

    report = report_on(noisy, dtypes=("float32",), deterministic=True, only=lambda name: "times" in name)
    assert "differs from the first" in complaints(report)


def test_what_is_wrong_for_long_sequences_alone_fails() -> None:
    def long_is_wrong(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        out, lse = right(q, k, v, **rest)
        return (out * 1.1 if k.shape[2] > 1024 else out), lse

    report = report_on(long_is_wrong, only=lambda name: "1501x1501" in name)
    assert report.failures, str(report)


def test_every_config_is_tried() -> None:
    def second_is_wrong(q: Any, k: Any, v: Any, *, config: Any, **rest: Any) -> Any:
        out, lse = right(q, k, v, config=config, **rest)
        return out * config["factor"], lse

    once: Any = lambda name: name.startswith(("float32", "bfloat16"))  # noqa: E731
    assert report_on(second_is_wrong, configs=[{"factor": 1}], only=once).passed
    report = report_on(second_is_wrong, configs=[{"factor": 1}, {"factor": 2}], only=once)
    assert [case.name for case in report.failures] and all("factor=2" in case.name for case in report.failures)


def test_a_claim_that_its_own_rule_never_allows_fails() -> None:
    def rule(problem: Any, config: Any) -> Any:
        if problem.window is not None:
            yield Reason("semantics", "window", problem.window, "none")

    report = report_on(right, rule=rule)
    assert "no legal problem found for mask=(False, (-1, 7))" in complaints(report)


def test_a_rule_that_refuses_without_words_fails() -> None:
    def rule(problem: Any, config: Any) -> Any:
        if problem.causal:
            yield Reason("", "", None, "")

    report = report_on(right, rule=rule, causal=False, window=False)
    assert report.passed, str(report)
    report = report_on(right, rule=lambda problem, config: [Reason("", "", None, "")])
    assert "no legal problem found at all" in complaints(report)


# --- the kit's own surface ----------------------------------------------------------------------------------------


def test_the_problems_are_the_same_every_time() -> None:
    names = [[check.name for check in checks_for("torch_math", Target.named("cpu"))] for _ in range(2)]
    assert names[0] == names[1]
    assert len(names[0]) == len(set(names[0]))


def test_another_draw_is_of_other_problems_and_values() -> None:
    drawn = [{check.name for check in checks_for("torch_math", Target.named("cpu"), draw=draw)} for draw in (0, 7, 7)]
    assert drawn[1] == drawn[2]
    assert drawn[0] - drawn[1] and drawn[1] - drawn[0]
    assert check_variant("torch_math", Target.named("cpu"), only=lambda name: name.startswith("called"), draw=7).passed


def test_places_are_those_that_the_variant_claims() -> None:
    assert [target.arch for target in places("torch_cpu")] == ["cpu"]
    gpu_only = Variant("test.kit", op="attention", run=right, requires=Requires(**CLAIMS | {"arch": ("sm70",)}))
    assert places(gpu_only) == []


def test_ops_keep_their_promises_on_empty_tensors() -> None:
    report = check_op("matmul")
    assert {case.name for case in report.cases} == {"opcheck", "torch.compile", "empty tensors"}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda out, lse: None, ""),
        (lambda out, lse: (), ""),
        (lambda out, lse: (out, None), "lse"),
        (lambda out, lse: (None, lse), "out"),
        (lambda out, lse: (out.double(), lse), "out is torch.float64"),
        (lambda out, lse: (out, lse.double()), "lse is torch.float64"),
        (lambda out, lse: (out[..., :-1].contiguous(), lse), "shape"),
        (lambda out, lse: (out, lse[..., None]), "shape"),
    ],
    ids=["None", "()", "no lse", "no out", "dtype of out", "dtype of lse", "shape of out", "shape of lse"],
)
def test_results_that_are_none_fail(returned: Any, said: str) -> None:
    """Of each kind that a `run` may return by mistake."""
    variant = Variant("test.kit", op="attention", run=lambda *a, **k: returned(*right(*a, **k)), requires=_requires())
    report = check_variant(variant, only=lambda name: name.startswith("float32") and " lse" in name)
    assert report.failures and any(said in case.detail for case in report.failures), report


def test_a_product_that_is_none_fails_by_name() -> None:
    requires = Requires(arch=("cpu",), dtypes=("float32",), layouts=("nn",), ieee=True)
    variant = Variant("test.product", op="matmul", run=lambda *a, **k: None, requires=requires)
    report = check_variant(variant, only=lambda name: name.startswith("float32"))
    assert any("what run returns" in case.detail + str(case.error) for case in report.failures), report


@pytest.mark.parametrize("returned", [lambda *g: None, lambda *g: (), lambda *g: g[:1], lambda *g: (*g[:2], None)])
def test_gradients_that_are_missing_fail(returned: Any) -> None:
    def run(
        grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, scale: float, config: Any, **rest: Any
    ) -> Any:
        return returned(*attention_backward.reference(grad_out, q, k, v, scale=scale, dtype=torch.float32))

    requires = Requires(arch=("cpu",), dtypes=("float32",), head_dim=(16, 16), ieee=True, layouts=("bhsd",), lse=True)
    variant = Variant("test.kit_backward", op="attention_backward", run=run, requires=requires)
    report = check_variant(variant, only=lambda name: name.startswith("float32"))
    assert report.cases and len(report.failures) == len(report.cases), report


def _requires() -> Requires:
    return Requires(**CLAIMS | {"dtypes": ("float32",), "window": False, "gqa": False})


def test_failures_say_what_they_share_and_the_smallest_of_them() -> None:
    def wrong_with_a_window(q: Any, k: Any, v: Any, *, window: Any, **rest: Any) -> Any:
        out, lse = right(q, k, v, window=window, **rest)
        return (out * 1.5 if window is not None and q.dtype is torch.bfloat16 else out), lse

    report = report_on(wrong_with_a_window)
    words = in_common(report.cases)
    assert "bfloat16" in words and "failures have" in words
    assert "the smallest that fails: bfloat16 batch:1 heads:1x1 lengths:" in report.smallest
    assert "window:" in report.smallest and "head_dim:" in report.smallest
    assert words in str(report) and report.smallest in str(report)
    plain = json.loads(json.dumps(report.to_dict()))
    assert [case["name"] for case in plain["cases"]] == [case.name for case in report.cases]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_every_config_is_dealt_to_several_problems(level: str) -> None:
    configs = [{"BLOCK": 2**i} for i in range(12)]
    variant = Variant("test.kit", op="attention", run=right, requires=Requires(**CLAIMS), configs=configs)
    size = size_for(torch.device("cpu"), level, False)
    op = op_named("attention")
    trials = draw(variant, op, op.conformance, Target.named("cpu"), size).trials
    for config in configs:
        problems = {trial.problem for trial in trials if trial.config == config}
        assert len(problems) >= 2 and any(problem.causal or problem.window for problem in problems)


def test_what_has_no_order_is_tried_whole_and_sizes_are_thinned() -> None:
    size = size_for(torch.device("cpu"), "quick", False)
    op = op_named("attention")
    requires = Requires(**CLAIMS)
    trials = draw(
        Variant("test.kit", op="attention", run=right, requires=requires), op, op.conformance, Target.named("cpu"), size
    ).trials
    axes = op.conformance.axes(requires, size)
    for axis in ("memory", "mask", "dtype", "spread"):
        assert {trial.spec[axis] for trial in trials} == set(axes[axis])
    assert size.long > 2 * 128 and any(trial.problem.seqlen_k == size.long for trial in trials)
