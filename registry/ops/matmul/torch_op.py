"""Matmul at the torch boundary, once for all variants: the torch op, its fake and its autograd.

Eager calls on plain tensors that need no gradient do not come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from registry.dispatch.compiled_calls import define_kernel
from registry.dispatch.scope import current, entered, named_for
from registry.dispatch.traced import asked_of, graph_forms, in_one_piece, is_tracing, variant_for
from registry.ops.matmul import arguments, costs
from registry.ops.parts.counting import counted
from registry.ops.parts.product_derivatives import Product, eager, keep, one_by_one, transformed
from registry.ops.parts.products import activate, check_activation, check_out, check_out_dtype, refuse_grad
from registry.ops.tensors import asked_for_later, autocast, differentiated, no_derivative, plain

_library = torch.library.Library("registry", "FRAGMENT")
_library.define(
    "matmul(Tensor a, Tensor b, Tensor? bias, str activation, ScalarType out_dtype, Tensor? scale_a, Tensor? scale_b, "
    "str? variant) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# Under names of this module, of which a graph guards one each rather than the way there.
_torch_op = torch.ops.registry.matmul
_functorch_active = torch._C._are_functorch_transforms_active
_autocast_enabled = torch.is_autocast_enabled


def through_torch(
    settings: tuple[str | None, torch.dtype | None, str | None],
    a: Any,
    b: Any,
    bias: torch.Tensor | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The product through what autograd, compilers, modes and subclasses can see."""
    activation, out_dtype, variant = settings
    alone = bias is None and scale_a is None and out is None and activation is None and out_dtype is None
    if is_tracing() and alone and _is_plain_product(a, b):
        asked = variant_for("matmul", variant)
        found: torch.Tensor = _torch_op(a, b, None, "", a.dtype, None, None, asked)
        return found
    a, b = arguments.check_operands(*autocast(a, b))
    result_dtype = check_out_dtype(out_dtype, a.dtype, arguments.OUT_DTYPES)
    if bias is not None:
        arguments.check_bias(bias, a, b, result_dtype)
        bias = autocast(bias)[0]
    activation = check_activation(activation)
    a2, b2, shape = arguments.as_matrices(a, b, scale_a)
    scaling = arguments.check_scales(scale_a, scale_b, a2, b2)
    arguments.check_integers(result_dtype, a.dtype, activation, scaling)
    inputs = [t for t in (a, b, bias) if t is not None]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    refuse_grad("scale_a", scale_a, *inputs)
    refuse_grad("out", out, *inputs)
    variant = named_for("matmul", variant, settles=True)
    # The derivative of a fused activation needs what fusing throws away, so it stays outside where grad is needed, or
    # may be later.
    followed = differentiated()
    apart = needs_grad or followed or asked_for_later()
    fused = "" if apart else activation
    if followed:
        result = _transformed(a2, b2, bias, result_dtype, scale_a, scale_b, variant)
    elif needs_grad and all(plain(t) for t in inputs):
        result = _EagerMatmul.apply(a2, b2, bias, ("", result_dtype, variant), current.get())
    else:
        result = torch.ops.registry.matmul(a2, b2, bias, fused, result_dtype, scale_a, scale_b, variant)
    result = result.reshape(shape)
    result = activate(result, activation) if apart else result
    if out is None:
        return result
    check_out(out, shape, result_dtype, a.device)
    return out.copy_(result)


def _is_plain_product(a: Any, b: Any) -> bool:
    """Whether the torch op takes these as they are: a graph guards all that was looked at, so this looks at little."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype != b.dtype or a.device != b.device:
        return False
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype.itemsize < 2:
        return False
    if not a.dtype.is_floating_point or forward_ad._current_level >= 0:
        return False
    return not _functorch_active() and not _autocast_enabled(a.device.type)


def define(
    launch: Callable[..., torch.Tensor],
    product: Callable[..., torch.Tensor],
    graph_launch: Callable[..., Any],
    holding: Callable[..., Any],
) -> None:
    """Give the torch op its kernel: the op's own way to find and launch a plan, and the op for its gradients; its form
    in graphs that are settled when they are compiled; and what a compiled graph keeps of a plan."""

    def _matmul(
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str,
        out_dtype: torch.dtype,
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        variant: str | None,
    ) -> torch.Tensor:
        settings = (activation, out_dtype, asked_of(variant))
        if _is_batch_of_one(a):
            return launch(settings, a[0], b[0], bias, scale_a, scale_b).contiguous()[None]
        return launch(settings, a, b, bias, scale_a, scale_b).contiguous()

    def _shortcut(a: Any, b: Any, bias: Any, activation: str, out_dtype: Any, *rest: Any) -> Any:
        scale_a, scale_b, variant = rest
        if bias is not None or scale_a is not None or scale_b is not None or _is_batch_of_one(a):
            return None
        known = holding((activation, out_dtype, asked_of(variant)), a, b, None, None, None, None)
        if known is None:
            return None
        plan, holds = known
        nothing = {"bias": None, "scale_a": None, "scale_b": None, "out": None}

        def answer(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor | None:
            return plan.launch(a, b, out_dtype=out_dtype, **nothing).contiguous() if holds(a, b) else None

        return answer

    def _in_graph(
        a: torch.Tensor,
        b: torch.Tensor,
        bias: Any,
        activation: str,
        out_dtype: Any,
        scale_a: Any,
        scale_b: Any,
        *asked: Any,
    ) -> Any:
        tensors = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
        chosen = graph_launch(*asked, (activation, out_dtype, None), a, b, *tensors.values())
        if chosen is None:
            return NotImplemented
        return chosen(a, b, out_dtype=out_dtype, out=None, **tensors).contiguous()

    graph_forms[torch.ops.registry.matmul.default] = _in_graph
    define_kernel(_library, "matmul", _matmul, _shortcut)
    _EagerMatmul.launch, _EagerMatmul.product = launch, product


def _is_batch_of_one(a: torch.Tensor) -> bool:
    """What a call makes a matrix, and who calls the torch op for a shard, or for a batch of any size, does not."""
    return a.dim() == 3 and a.shape[0] == 1


def _matmul_fake(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, activation: str, out_dtype: torch.dtype, *rest: Any
) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)


torch.library.register_fake("registry::matmul", _matmul_fake, lib=_library)
counted("matmul", costs.torch_product)


# --- gradients: matmuls that dispatch too -------------------------------------------------------------------------


def _gradients(ctx: Any, grad: torch.Tensor, product: Product, needed: Sequence[bool]) -> tuple[Any, Any, Any]:
    a, b = ctx.saved_tensors
    grad_in = grad.to(a.dtype)
    grad_a = product(grad_in, b.mT) if needed[0] else None
    grad_b = product(a.mT, grad_in) if needed[1] else None
    rows = tuple(range(grad.dim() - 1))  # not flattened: gradients that torch batches cannot be
    grad_bias = grad.sum(rows).to(ctx.bias_dtype) if needed[2] else None
    return grad_a, grad_b, grad_bias


def _op_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, bias, activation, _, scale_a, _, variant = inputs
    ctx.scope = current.get()
    ctx.settled = variant if asked_of(variant) is None else None
    if activation or scale_a is not None:
        raise no_derivative("differentiation through a fused activation or scales of matmul", "activations outside")
    keep(ctx, (a, b), bias)


def _op_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.registry.matmul(a, b, None, "", a.dtype, None, None, ctx.settled)
        return result

    with entered(ctx.scope):
        return (*_gradients(ctx, grad, product, ctx.needs_input_grad), *[None] * 5)


torch.library.register_autograd("registry::matmul", _op_backward, setup_context=_op_save, lib=_library)


_EagerMatmul = eager("_EagerMatmul", _gradients)


# --- functorch and forward mode -----------------------------------------------------------------------------------


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int]:
    """A mapped dimension of a and b is more batch; with a mapped bias, or scales, one product after the other."""
    a, b, *rest = args
    call: Callable[..., torch.Tensor] = torch.ops.registry.matmul
    if rest[3] is None and in_dims[2] is None:
        a, b = (t if dim is None else t.movedim(dim, 0) for t, dim in zip((a, b), in_dims, strict=False))
        a2, b2, shape = arguments.as_matrices(a, b)
        return call(a2, b2, *rest).reshape(shape), 0
    return one_by_one(call, info, in_dims, *args)


torch.library.register_vmap("registry::matmul", _vmap, lib=_library)


def _call(a: Any, b: Any, bias: Any, *rest: Any) -> torch.Tensor:
    result: torch.Tensor = torch.ops.registry.matmul(a, b, bias, "", *rest)
    return result


def _tangent_of_bias(product: Product, bias_dot: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return bias_dot.expand(*a.shape[:-1], b.shape[-1])


_TransformedMatmul = transformed("matmul", _call, _gradients, _tangent_of_bias)


@in_one_piece
def _transformed(*args: Any) -> torch.Tensor:
    result: torch.Tensor = _TransformedMatmul.apply(*args)
    return result
