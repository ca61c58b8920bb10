"""What the conformance kit draws from claims and configs: who is launched often, and what may be left out."""

from __future__ import annotations

from typing import Any

import torch

from registry import Reason, Requires, Target, Variant
from registry.dispatch.catalog import catalog
from registry.ops.attention.op import attention
from registry.ops.known import op_named
from registry.ops.parts.sizes import size_for
from registry.ops.parts.trials import draw
from registry.testing import check_variant, checks_for

CLAIMS: dict[str, Any] = {
    "arch": ("cpu",),
    "dtypes": ("float32",),
    "head_dim": (16, 24),
    "head_dim_multiple": 8,
    "ieee": True,
    "layouts": ("bhsd",),
}


def right(q: Any, k: Any, v: Any, *, scale: float, config: Any) -> Any:
    return attention.reference(q, k, v, scale=scale), None


def test_each_value_of_a_config_is_launched_again_and_again() -> None:
    configs = [{"BLOCK": block, "SPLIT": split} for block in (16, 32, 64, 128) for split in (1, 2, 4)]
    claims = CLAIMS | {"deterministic": True}
    variant = Variant("test.drawn", op="attention", run=right, requires=Requires(**claims), configs=configs)
    names = [check.name for check in checks_for(variant)]
    for words in ("right 200 times", "same bits 200 times"):
        again = " ".join(name for name in names if name.startswith(words))
        assert "SPLIT=2" in again and "SPLIT=4" in again, again


def test_what_another_architecture_may_run_is_no_idle_claim() -> None:
    def rule(problem: Any, config: Any) -> Any:
        if problem.head_dim == 24 and problem.target.arch == "cpu":
            yield Reason("target.head_dim", "head_dim", 24, "16 on a CPU")

    claims = CLAIMS | {"arch": ("cpu", "sm90"), "rule": rule}
    variant = Variant("test.drawn", op="attention", run=right, requires=Requires(**claims))
    report = check_variant(variant, Target.named("cpu"), only=lambda name: name == "every claim can be used")
    assert report.passed, str(report)
    assert "head_dim=24 was not run: of cpu refused, of sm90 not" in str(report)


def test_every_claim_has_a_problem_whatever_the_draw() -> None:
    """Of one form of grouped products nearly every mixture of what is claimed for the others is no call."""
    variant = catalog.get().variants["torch_loop"]
    op, size = op_named(variant.op), size_for(torch.device("cpu"), "quick", False)
    for number in range(12):
        found = draw(variant, op, op.conformance, Target.named("cpu"), size, number)
        assert not [label for label in {**found.uncovered, **found.elsewhere} if op.conformance.asked(label)], number
