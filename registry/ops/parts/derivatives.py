"""torch.autograd.Functions that functorch may transform, of ops that have first derivatives in reverse mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
    """Gradients that have no derivatives, which is said: autograd would say zero."""

    def refuse(ctx: Any, *grads: Any) -> Any:
        raise refusal()

    return transformed(compute, lambda ctx, inputs, output: None, refuse, refusal, vmap)
