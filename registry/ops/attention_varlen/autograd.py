"""Autograd for eager calls on plain tensors, without the cost of the torch op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from registry.dispatch.plan import Plan, observe
from registry.dispatch.scope import EMPTY, Scope, entered
from registry.ops.attention_varlen.backward import attention_varlen_backward
from registry.ops.attention_varlen.derivatives import differentiable, no_gradient_of_a_cache, no_second_derivative
from registry.ops.parts.derivatives import last_derivative


@dataclass(frozen=True)
class Held:
    """What a call holds besides the tensors that autograd follows. One argument instead of many: it looks at each."""

    plan: Plan
    scale: float
    scope: Scope
    given: dict[str, Any]
    """The other tensors by name, the sinks among them."""


class _EagerVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, held: Held) -> Any:  # type: ignore[override]
        out, lse = held.plan.launch(q, k, v, scale=held.scale, **held.given)
        if held.scope is not EMPTY:
            observe(held.scope, held.plan.decision)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *(held.given[n] for n in _SAVED))
        ctx.held = held
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        problem: Any = ctx.held.plan.decision.problem
        if not differentiable(problem):
            raise no_gradient_of_a_cache()
        q, k, v, out, lse, *given = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        tensors = (grad_out, q, k, v, out, lse, grad_lse, *given)
        # With create_graph=True somebody may differentiate the gradients, and must not be told zero.
        grads = _Gradients.apply(ctx.held, *tensors) if torch.is_grad_enabled() else _gradients(ctx.held, *tensors)
        return (*grads, *([None] * (5 - len(grads))))


_SAVED = ("cu_seqlens_q", "cu_seqlens_k", "alibi_slopes")


def _gradients(held: Held, *tensors: Any) -> Any:
    problem: Any = held.plan.decision.problem
    given = dict(zip(("grad_lse", "sinks", *_SAVED), tensors[6:], strict=True))
    with entered(held.scope):
        return attention_varlen_backward.of(problem, held.scale, *tensors[:6], **given)


_Gradients = last_derivative(_gradients, no_second_derivative)


def eager_with_grad(
    plan: Plan, scale: float, scope: Scope, given: dict[str, Any], *qkv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a plan under autograd. The backward runs in the scope of the forward, on whatever thread it is."""
    found: tuple[torch.Tensor, torch.Tensor] = _EagerVarlen.apply(*qkv, given["sinks"], Held(plan, scale, scope, given))
    return found
