"""torch.autograd.Functions that functorch may transform, of ops that have first derivatives in reverse mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from registry.errors import InvalidArgument, shown
from registry.ops.tensors import followed

_is_compiling = torch.compiler.is_dynamo_compiling
Refusal = Callable[[], NotImplementedError]


def transformed(
    compute: Callable[..., Any],
    keep: Callable[..., None],
    gradients: Callable[..., Any],
    refusal: Refusal,
    vmap: Callable[..., Any] | None = None,
) -> type[torch.autograd.Function]:
    """`compute` with these gradients, from what `keep(ctx, inputs, output)` kept; forward mode is refused. Without a
    rule for vmap torch makes one."""

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = vmap is None
        forward = staticmethod(compute)
        setup_context = staticmethod(keep)
        backward = staticmethod(gradients)

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Any:  # type: ignore[override]
            raise refusal()

    if vmap is not None:
        Transformed.vmap = staticmethod(vmap)  # type: ignore[assignment]
    return Transformed


def last_derivative(
    compute: Callable[..., Any], refusal: Refusal, vmap: Callable[..., Any] | None = None
) -> type[torch.autograd.Function]:
    """Gradients that have no derivatives, and raise where one is asked for: autograd would say zero."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise refusal()

    return transformed(compute, lambda ctx, inputs, output: None, refuse, refusal, vmap)


def of_seen_rows(grad_lse: torch.Tensor | None, lse: torch.Tensor) -> torch.Tensor | None:
    """A gradient of the LSE, made zero for rows that see no key: their LSE is -inf whatever q and k are, and their
    gradient may be NaN (as behind `logaddexp` of two such), which would spread by sums over rows. What cannot be such a
    gradient is returned as it is, to be refused later."""
    if not isinstance(grad_lse, torch.Tensor) or grad_lse.shape != lse.shape:
        return grad_lse
    return grad_lse.masked_fill(lse == -math.inf, 0.0)


def gradients_of_oracle(
    results: tuple[torch.Tensor, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """By autograd through an oracle's (out, lse), in their dtype. An LSE of -inf, of a row without keys, has none."""
    out, lse = results
    if grad_lse is None:
        return torch.autograd.grad(out, inputs, grad_out.to(out.dtype))
    seen = torch.where(torch.isfinite(lse), lse, 0.0)
    return torch.autograd.grad((out, seen), inputs, (grad_out.to(out.dtype), grad_lse.to(lse.dtype)))


def gradients_by_name(
    compute: Callable[..., Any],
    through_torch: Callable[..., Any],
    last: type[torch.autograd.Function],
    variant: str | None,
    settings: Any,
    scale: float,
    *tensors: torch.Tensor | None,
) -> Any:
    """`compute(settings, scale, *tensors)` for a call of an op of gradients by name: through `last` where autograd
    follows, which must be told neither zero nor a variant's own derivative; through the torch op in a graph being
    compiled."""
    if followed(*tensors):
        return last.apply(settings, scale, *tensors)
    if not _is_compiling():
        return compute(settings, scale, *tensors)
    if variant is not None:
        allowed = "None in a compiled function; registry.use(...) around its calls"
        raise InvalidArgument("variant", shown(variant), allowed)
    return through_torch(settings, scale, *tensors)
