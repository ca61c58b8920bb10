"""x / sqrt(mean(x^2) + eps), times a weight where one is given, over the last dimension of [rows, hidden]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from registry.contract.problem import OperandFact, Problem, fact, query
from registry.contract.target import Target
from registry.dispatch.scope import Scope, current
from registry.errors import InvalidArgument
from registry.ops.op import Op, with_variant
from registry.ops.tensors import check_tensor, dtype_name, operand


@dataclass(frozen=True, kw_only=True)
class RmsNormProblem(Problem):
    """One call of rms_norm."""

    op: ClassVar[str] = "rms_norm"

    rows: int = fact()
    hidden: int = query("range", claim="hidden")
    weight: bool = query("flag", claim="weight", default=False)

    @classmethod
    def of_shape(
        cls,
        target: Target,
        *,
        dtype: str = "bfloat16",
        rows: int = 1024,
        hidden: int = 1024,
        weight: bool = False,
        deterministic: bool = False,
    ) -> RmsNormProblem:
        itemsize = getattr(torch, dtype).itemsize
        operands = (OperandFact("x", dtype, (rows, hidden), (hidden, 1), itemsize),)
        if weight:
            operands += (OperandFact("weight", dtype, (hidden,), (1,), itemsize),)
        sizes = {"rows": rows, "hidden": hidden, "weight": weight}
        return cls(target=target, dtype=dtype, deterministic=deterministic, operands=operands, **sizes)


class RmsNorm(Op):
    """Root-mean-square normalisation by the fastest legal kernel."""

    name = "rms_norm"
    summary = "x / sqrt(mean(x^2) + eps) * weight"
    problem_type = RmsNormProblem
    tensors = ("x",)
    call_arguments: ClassVar[Mapping[str, str]] = {"eps": "", "weight": "weight"}

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6, variant: str | None = None
    ) -> torch.Tensor:
        plan = self.plans.by_facts((variant,), x, weight)
        found: torch.Tensor = plan.launch(x, eps=eps, weight=weight)
        return found

    def asked(self, settings: Any, with_grad: bool, *tensors: Any) -> tuple[Problem, Scope]:
        return self.problem_of(*tensors, variant=settings[0])

    def problem_of(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        *,
        eps: float = 1e-6,
        variant: str | None = None,
        target: Target | None = None,
    ) -> tuple[Problem, Scope]:
        if check_tensor("x", x).dim() != 2:
            raise InvalidArgument("x", f"{x.dim()} dimensions", "2: [rows, hidden]")
        problem = RmsNormProblem(
            target=target if target is not None else Target.of(x.device),
            dtype=dtype_name(x.dtype),
            rows=x.shape[0],
            hidden=x.shape[1],
            weight=weight is not None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            operands=(operand("x", x), *([operand("weight", weight)] if weight is not None else [])),
        )
        return problem, with_variant(self.name, current.get(), variant)

    def reference(self, x: torch.Tensor, weight: torch.Tensor | None = None, *, eps: float = 1e-6) -> torch.Tensor:
        """The oracle, in float64."""
        wide = x.double()
        found = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
        return found if weight is None else found * weight.double()

    def flops(self, problem: Any) -> float:
        return 4.0 * problem.rows * problem.hidden


rms_norm = RmsNorm()
