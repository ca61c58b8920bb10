"""Autograd for eager calls on plain tensors, without the cost of the torch op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from registry.dispatch.plan import Plan, observe
from registry.dispatch.scope import EMPTY, Scope, current, entered
from registry.ops.attention.torch_op import no_second_derivative
from registry.ops.parts.derivatives import last_derivative

Held = tuple[Plan, float, bool, Scope, Callable[..., Any]]
"""What a call holds besides tensors. One argument instead of many: autograd looks at each."""


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, held: Held) -> Any:  # type: ignore[override]
        plan, scale, return_lse, scope, _ = held
        out, lse = plan.launch(q, k, v, scale=scale)
        if scope is not EMPTY:
            observe(scope, plan.decision)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.held = held
        if not return_lse:
            return out  # a second output costs as much as saving all five tensors
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None = None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        tensors = grad_out, q, k, v, out, lse, grad_lse
        # With create_graph=True somebody may differentiate the gradients, and must not be told zero.
        grads = _Gradients.apply(ctx.held, *tensors) if torch.is_grad_enabled() else _gradients(ctx.held, *tensors)
        return (*grads, None)


def _gradients(held: Held, *tensors: torch.Tensor | None) -> Any:
    plan, scale, _, scope, backward_of = held
    with entered(scope):
        return backward_of(plan.decision.problem, scale, *tensors)


_Gradients = last_derivative(_gradients, no_second_derivative)


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 3


def _recorder() -> Callable[..., Any]:
    """`_EagerAttention.apply` without its Python part.

    That part serves functorch and `setup_context`, of which neither is here (a plan's guard refuses tensors under
    functorch), and takes as long as the rest of autograd's work. The slot beneath is tried on a probe first.
    """
    usual: Callable[..., Any] = _EagerAttention.apply
    try:
        beneath = vars(torch._C._FunctionBase)["apply"]
        with torch.enable_grad():
            x = torch.ones((), device="cpu", requires_grad=True)
            y = beneath.__get__(None, _Probe)(x)
        # The node is called by hand: a backward pass would start autograd's threads, after which nobody may fork.
        works = y.item() == 2.0 and y.grad_fn.apply(torch.ones((), device="cpu")).item() == 3.0
    except Exception:  # a private part of torch, which may vanish in any way
        return usual
    return beneath.__get__(None, _EagerAttention) if works else usual


_apply = _recorder()


def eager_with_grad(
    plan: Plan, scale: float | None, return_lse: bool, backward_of: Callable[..., Any], *qkv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch a plan under autograd. The backward runs in the scope of the forward, on whatever thread it is."""
    found = _apply(*qkv, (plan, plan.default if scale is None else scale, return_lse, current.get(), backward_of))
    return found if return_lse else (found, None)
