"""Autograd for eager calls on plain tensors, without the cost of the torch op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from registry.plans import Plan, observe
from registry.scope import EMPTY, Scope, entered

if TYPE_CHECKING:
    from registry.ops.attention import AttentionBackward


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, scale: float | None, masks: Any,
        scope: Scope, backward: AttentionBackward,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        out, lse = (plan.launch if plan.proven else plan.first_launch)(
            q, k, v, scale=plan.scale if scale is None else scale
        )
        if scope is not EMPTY:
            observe(scope, plan.decision)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.settings = scale, masks, scope, backward
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        scale, (causal, window, softcap), scope, backward = ctx.settings
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if scale is None:
            scale = 1.0 / math.sqrt(q.shape[3])
        with entered(scope):
            grads = backward(
                grad_out,
                q,
                k,
                v,
                out,
                lse,
                causal=causal,
                scale=scale,
                window=window,
                softcap=softcap,
                grad_lse=grad_lse,
            )
        return (*grads, None, None, None, None, None)


def eager_with_grad(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, scale: float | None, masks: Any, scope: Scope,
    backward: AttentionBackward,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Launch a plan under autograd. The backward runs in the scope of the forward, on whatever thread it is."""
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _EagerAttention.apply
    return apply(q, k, v, plan, scale, masks, scope, backward)
