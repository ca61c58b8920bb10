"""Derivatives of products, which are such products again: of plain tensors, and where functorch or forward mode works.

The operands of a product are a, b and, where it has groups, their ends; a bias comes behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from registry.dispatch.scope import entered
from registry.ops.tensors import no_derivative

Product = Callable[..., torch.Tensor]
Gradients = Callable[[Any, torch.Tensor, Product, Sequence[Any]], tuple[Any, ...]]
"""(ctx, grad, product, which are needed) -> of each operand and of the bias, None where it is not needed."""


def keep(ctx: Any, operands: Sequence[torch.Tensor | None], bias: torch.Tensor | None) -> None:
    """What gradients take."""
    ctx.save_for_backward(*operands)
    ctx.bias_dtype = bias.dtype if bias is not None else None


def eager(name: str, gradients: Gradients) -> Any:
    """The product of plain tensors, of (*operands, bias, settings, scope). The op gives it `launch` and `product`."""

    def forward(ctx: Any, *given: Any) -> Any:
        *operands, bias, settings, ctx.scope = given
        keep(ctx, operands, bias)
        return made.launch(settings, *operands, bias)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        with entered(ctx.scope):
            return (*gradients(ctx, grad, made.product, ctx.needs_input_grad), None, None)

    functions: Any = type(torch.autograd.Function)
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    made: Any = functions(name, (torch.autograd.Function,), methods)
    return made


def transformed(name: str, call: Product, gradients: Gradients, tangent_of_bias: Callable[..., torch.Tensor]) -> Any:
    """The torch op where functorch or forward mode is at work: `call` of (*operands, bias, out_dtype, scale_a, scale_b,
    variant). Its own derivatives are such products again, and `tangent_of_bias(product, bias_dot, *operands)`."""

    def refuse_scales(ctx: Any) -> None:
        if ctx.scale is not None:
            raise no_derivative(f"differentiation of {name} with scale_a and scale_b", "None for both")

    def product(*operands: Any) -> torch.Tensor:
        result: torch.Tensor = TransformedProduct.apply(*operands, None, operands[0].dtype, None, None, None)
        return result

    class TransformedProduct(torch.autograd.Function):
        generate_vmap_rule = True
        forward = staticmethod(call)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            *operands, bias, ctx.out_dtype, ctx.scale, _, _ = inputs
            keep(ctx, operands, bias)
            ctx.save_for_forward(*operands)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
            refuse_scales(ctx)
            return (*gradients(ctx, grad, product, ctx.needs_input_grad), *[None] * 4)

        @staticmethod
        def jvp(ctx: Any, a_dot: Any, b_dot: Any, *more: Any) -> torch.Tensor:  # type: ignore[override]
            refuse_scales(ctx)
            a, b, *ends = ctx.saved_tensors
            bias_dot = more[len(ends)]
            terms = [] if a_dot is None else [product(a_dot, b, *ends)]
            terms += [] if b_dot is None else [product(a, b_dot, *ends)]
            terms += [] if bias_dot is None else [tangent_of_bias(product, bias_dot, a, b, *ends)]
            result: torch.Tensor = sum(terms[1:], terms[0]).to(ctx.out_dtype)
            return result

    return TransformedProduct


def one_by_one(call: Product, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int]:
    """A rule for vmap: one call after the other; with no entries, one of zeros, which says what none looks like."""
    count = info.batch_size
    if not count:
        args = tuple(arg if dim is None else _with_one(arg, dim) for arg, dim in zip(args, in_dims, strict=True))
    each = (
        [arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)]
        for i in range(max(1, count))
    )
    return torch.stack([call(*one) for one in each])[:count], 0


def _with_one(nothing: torch.Tensor, dim: int) -> torch.Tensor:
    """Entries of which there are none, and one of zeros behind them, so that autograd still follows."""
    sizes = list(nothing.shape)
    sizes[dim] = 1
    return torch.cat((nothing, nothing.new_zeros(sizes)), dim)
