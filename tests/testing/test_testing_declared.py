"""What a variant says beside its launches is held against what it does: `run` beside `prepare`, `traceable`, `cost`,
`waits`, `design_of`, the memory order of results, and the ends of claims."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from registry import Design, Reason, Requires, Target, Variant
from registry.ops.attention.backward import attention_backward
from registry.ops.attention.op import attention
from registry.ops.attention.outputs import new_out
from registry.ops.known import op_named
from registry.ops.parts.sizes import size_for
from registry.testing import Report, check_variant, checks_for

pytestmark = pytest.mark.usefixtures("quick_python")


class Labelled(torch.Tensor):
    """What torch's functions give of one is one again."""

    def __new__(cls, plain: torch.Tensor) -> Any:
        return plain.as_subclass(cls)


def product(a: Any, b: Any, *, config: Any, **given: Any) -> Any:
    return torch.matmul(a, b)


def prepare(problem: Any, config: Any) -> Callable[..., Any]:
    return lambda a, b, **given: torch.matmul(a, b)


def product_variant(run: Any = product, **declared: Any) -> Variant:
    claims = {name: declared.pop(name) for name in ("bias", "activations") if name in declared}
    requires = Requires(arch=("cpu",), dtypes=("float32",), layouts=("nn",), ieee=True, **claims)
    return Variant("test.product", op="matmul", run=run, requires=requires, **declared)


def failing(variant: Variant, beginning: str) -> list[str]:
    report = check_variant(variant, only=lambda name: name.startswith(beginning))
    assert report.cases, f"no check begins with {beginning!r}"
    return [case.detail for case in report.failures]


def right(q: Any, k: Any, v: Any, *, scale: float, config: Any, **features: Any) -> Any:
    found = attention.reference(q, k, v, scale=scale, dtype=torch.float32, **features)
    return new_out(q, v).copy_(found), None


def attention_variant(run: Any = right, **claims: Any) -> Variant:
    claimed: dict[str, Any] = {"arch": ("cpu",), "dtypes": ("float32",), "head_dim": (16, 32), "ieee": True}
    claimed |= {"layouts": ("bhsd", "bshd"), "head_dim_multiple": 16, **claims}
    return Variant("test.declared", op="attention", run=run, requires=Requires(**claimed))


# --- run and prepare ----------------------------------------------------------------------------------------------


def test_a_wrong_run_beside_a_right_prepare_fails() -> None:
    assert not failing(product_variant(prepare=prepare), "run itself")
    wrong = product_variant(lambda a, b, *, config, **given: torch.matmul(a, b) * 1.01, prepare=prepare)
    assert not failing(wrong, "float32")
    assert all("relative error" in detail for detail in failing(wrong, "run itself")) and failing(wrong, "run itself")


def misfit(problem: Any, config: Any) -> Callable[..., Any]:
    def launch(a: Any) -> Any:
        raise NotImplementedError

    return launch


@pytest.mark.parametrize("check", ["float32", "called again", "threads", "by name"])
def test_a_launch_that_cannot_be_called_is_named_with_its_call(check: str) -> None:
    found = failing(product_variant(prepare=misfit, bias=True, activations=("relu",)), check)
    said = "test.product: the launch that prepare gave: got one that cannot be called so (misfit.<locals>.launch() "
    assert found and all(detail.startswith(f"InvalidArgument: {said}") for detail in found), found
    assert all("; allowed: one that matmul can call as launch(a, b, *, bias)" in detail for detail in found), found


def test_a_run_that_cannot_be_called_is_named_with_its_call() -> None:
    found = failing(product_variant(lambda a: a), "float32")
    assert found and all("one that matmul can call as run(a, b, *, config)" in detail for detail in found)


@pytest.mark.parametrize("where", ["launch", "prepare"])
def test_a_type_error_of_its_own_code_stays_as_it_is(where: str) -> None:
    def fails(problem: Any, config: Any) -> Callable[..., Any]:
        return (lambda a, b, **given: len(3)) if where == "launch" else len(3)  # type: ignore[arg-type]

    found = failing(product_variant(prepare=fails), "float32")
    assert found and all(detail.startswith("TypeError: object of type 'int' has no len()") for detail in found)


def test_a_run_without_a_prepare_is_launched_once() -> None:
    names = [check.name for check in checks_for(product_variant())]
    assert not [name for name in names if name.startswith(("run itself", "traced"))]


# --- traceable ----------------------------------------------------------------------------------------------------


def by_numpy(a: Any, b: Any, *, config: Any, **given: Any) -> Any:
    return torch.from_numpy(a.numpy() @ b.numpy())


def by_values(a: Any, b: Any, *, config: Any, **given: Any) -> Any:
    return torch.matmul(a, b) if float(a.sum()) > 0 else torch.matmul(a, b) + 0.0


def by_writing(a: Any, b: Any, *, config: Any, **given: Any) -> Any:
    return torch.matmul(a, b, out=a.new_empty(*a.shape[:-1], b.shape[-1]))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (product, ""),
        (by_numpy, "no graph can hold its run"),
        (by_values, "in by_values)"),
        (by_writing, "its run writes: aten.mm.out"),
    ],
)
def test_what_is_not_traceable_fails_where_it_says_that_it_is(run: Any, said: str) -> None:
    assert not failing(product_variant(run, prepare=prepare), "run itself")
    found = failing(product_variant(run, traceable=True), "traced")
    assert all(said in detail for detail in found) and bool(found) == bool(said), found


# --- cost, waits, design_of -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [0.0, -1.0, math.nan, math.inf, None, "1", True, ZeroDivisionError])
def test_a_cost_that_is_no_number_above_zero_fails(cost: Any) -> None:
    def given(problem: Any, config: Any) -> Any:
        if cost is ZeroDivisionError:
            raise cost("no cost")
        return cost

    (detail,) = failing(product_variant(cost=given), "cost")
    assert ("ZeroDivisionError: no cost" if cost is ZeroDivisionError else "allowed: a finite number > 0") in detail
    assert "config {}" in detail  # and the problem before it


def test_what_cannot_be_asked_fails() -> None:
    def raises(given: Any) -> Any:
        raise SystemExit(0)

    assert "SystemExit" in failing(product_variant(waits=raises), "waits")[0]
    assert "allowed: True or False" in failing(product_variant(waits=lambda problem: "no"), "waits")[0]
    assert "SystemExit" in failing(product_variant(design_of=raises), "design_of")[0]
    assert "allowed: a record Design(...)" in failing(product_variant(design_of=lambda config: {}), "design_of")[0]


def test_what_raises_is_blamed_for_itself_and_not_for_the_configs() -> None:
    def raises(*given: Any) -> Any:
        raise ZeroDivisionError

    variant = product_variant(cost=raises, design_of=raises)
    assert not failing(variant, "configs") and failing(variant, "cost") and failing(variant, "design_of")


def test_what_can_be_asked_passes() -> None:
    asked: dict[str, Any] = {"cost": lambda problem, config: 2, "waits": lambda problem: False}
    variant = product_variant(**asked, design_of=lambda config: Design())
    for name in ("cost", "waits", "design_of"):
        assert not failing(variant, name)


# --- results ------------------------------------------------------------------------------------------------------


def test_an_output_in_another_memory_order_than_that_of_q_fails() -> None:
    def contiguous(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        return right(q, k, v, **rest)[0].contiguous(), None

    assert not failing(attention_variant(), "float32")
    found = failing(attention_variant(contiguous), "float32")
    assert found and all("in the memory order of q they are" in detail for detail in found)
    assert not failing(attention_variant(contiguous, layouts=("bhsd",)), "float32")


def test_gradients_in_another_memory_order_fail() -> None:
    def gradients(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, scale: float, config: Any) -> Any:
        found = attention_backward.reference(grad_out, q, k, v, scale=scale, dtype=torch.float32)
        dq, dk, dv = (new_out(like, like).copy_(grad) for like, grad in zip((q, k, v), found, strict=True))
        return dq, dk.contiguous() if turned else dk, dv

    requires = Requires(
        arch=("cpu",), dtypes=("float32",), head_dim=(16, 16), ieee=True, layouts=("bhsd", "bshd"), lse=True
    )
    variant = Variant("test.declared_backward", op="attention_backward", run=gradients, requires=requires)
    turned = False
    assert not failing(variant, "float32")
    turned = True
    found = failing(variant, "float32")
    assert found and all(detail.startswith("dk has strides") and "order of k" in detail for detail in found)


def test_a_result_that_requires_a_gradient_fails() -> None:
    found = failing(product_variant(lambda a, b, **given: torch.matmul(a, b).requires_grad_()), "float32")
    assert found and all("out requires a gradient" in detail for detail in found)


@pytest.mark.parametrize("kind", ["Parameter", "Labelled"])
def test_a_result_that_is_no_plain_tensor_fails(kind: str) -> None:
    make = {"Parameter": functools.partial(torch.nn.Parameter, requires_grad=False), "Labelled": Labelled}[kind]
    found = failing(product_variant(lambda a, b, **given: make(torch.matmul(a, b))), "float32")
    name = {"Parameter": "torch.nn.parameter.Parameter", "Labelled": f"{__name__}.Labelled"}[kind]
    assert found and all(f"out is a {name}; allowed: a plain torch.Tensor" in detail for detail in found)


def test_a_launch_that_has_denormal_numbers_flushed_fails() -> None:
    def flushing(a: Any, b: Any, **given: Any) -> Any:
        assert torch.set_flush_denormal(True)
        return torch.matmul(a, b)

    if not torch.set_flush_denormal(False):
        pytest.skip("this CPU flushes none")
    try:
        found = failing(product_variant(flushing), "float32")
    finally:
        torch.set_flush_denormal(False)
    assert any("the launch changed whether the CPU flushes denormal numbers" in detail for detail in found)
    assert not failing(product_variant(), "float32")


def test_a_run_that_ends_the_process_fails_its_checks_alone() -> None:
    """While the smallest failure is looked for, too."""

    def ends(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        raise SystemExit(0)

    report = check_variant(attention_variant(ends), only=lambda name: name.startswith(("float32", "refuses")))
    assert report.failures and all("SystemExit" in case.detail for case in report.failures)
    assert "the smallest that fails" in report.smallest and any(case.passed for case in report.cases)


# --- the ends of claims ---------------------------------------------------------------------------------------------


def test_what_is_wrong_at_the_end_of_a_claim_fails() -> None:
    def wide_is_wrong(q: Any, k: Any, v: Any, **rest: Any) -> Any:
        out, lse = right(q, k, v, **rest)
        return (out * 1.1 if q.shape[3] == 2048 else out), lse

    report = ends_of(attention_variant(wide_is_wrong, head_dim=(16, 2048)))
    assert len(report.failures) == 1 and "head_dim=2048" in report.failures[0].about
    assert ends_of(attention_variant(head_dim=(16, 2048))).passed


def ends_of(variant: Variant) -> Report:
    return check_variant(variant, only=lambda name: "head_dim:2048" in name or name.startswith("every claim"))


def test_a_report_says_what_was_not_run() -> None:
    report = ends_of(attention_variant(head_dim=(16, 2048)))
    assert "  head_dim 176..2032 was not run: too wide on cpu" in str(report).splitlines()
    report = check_variant(attention_variant(), only=lambda name: name.startswith("every claim"))
    assert report.passed and "was not run" not in str(report)


def test_what_is_too_wide_depends_on_where_it_runs() -> None:
    kit, requires = op_named("attention").conformance, attention_variant(head_dim=(16, 128)).requires
    assert kit.left_out(requires, size_for(torch.device("cpu"), "quick", True)) == ["head_dim 80..128"]
    assert kit.left_out(requires, size_for(torch.device("cpu"), "quick", False)) == []
    packed = op_named("attention_varlen").conformance
    requires = Requires(
        arch=("cpu",), dtypes=("float32",), head_dim=(16, 161), kv_layouts=("paged",), page_size=(1, 300)
    )
    assert packed.left_out(requires, size_for(torch.device("cpu"), "full", False)) == ["page_size 257..300"]


def test_head_dims_with_holes_are_variants_of_their_own() -> None:
    def rule(problem: Any, config: Any) -> Any:
        if problem.head_dim not in (16, 32, 64):
            yield Reason("range", "head_dim", problem.head_dim, "16, 32 or 64")

    holes = checks_for(attention_variant(head_dim=(16, 64), rule=rule), Target.named("cpu"))
    (said,) = [check.run().detail for check in holes if check.name == "every claim can be used"]
    assert "no legal problem found for head_dim=48" in said
    for one in (16, 32, 64):
        alone = attention_variant(head_dim=(one, one), head_dim_multiple=1)
        assert not failing(alone, "every claim") and not failing(alone, "refuses head_dim")


def test_who_changes_a_config_that_it_is_asked_about_fails() -> None:
    """A decision hands out the declared one itself."""

    def clamped(problem: Any, config: Any) -> Any:
        config["TILE"] = min(config["TILE"], problem.m)
        return ()

    def popped(problem: Any, config: Any) -> float:
        return float(config.pop("TILE", 1))

    assert not failing(product_variant(configs=[{"TILE": 512}]), "configs")
    for given in ({"cost": popped}, {"requires": dataclasses.replace(product_variant().requires, rule=clamped)}):
        found = failing(dataclasses.replace(product_variant(configs=[{"TILE": 512}]), **given), "configs")
        assert found and all("allowed: " in detail for detail in found)
