"""grouped_mm at the torch boundary, once for all variants: the torch op, its fake and its autograd.

Eager calls on plain tensors that need no gradient do not come here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from registry.dispatch.compiled_calls import define_kernel
from registry.dispatch.scope import current, entered, named_for
from registry.dispatch.traced import in_one_piece
from registry.ops.grouped_mm import arguments, costs
from registry.ops.grouped_mm.oracle import finish
from registry.ops.parts.counting import counted
from registry.ops.parts.product_derivatives import Product, eager, keep, one_by_one, transformed
from registry.ops.parts.products import check_activation, check_out, check_out_dtype, refuse_grad
from registry.ops.tensors import asked_for_later, autocast, differentiated, hidden, no_derivative, plain

_library = torch.library.Library("registry", "FRAGMENT")
_library.define(
    "grouped_mm(Tensor a, Tensor b, Tensor? offs, Tensor? rows, Tensor? bias, str activation, bool gated, "
    "ScalarType out_dtype, Tensor? scale_a, Tensor? scale_b, str? variant) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def through_torch(
    settings: tuple[str | None, bool, torch.dtype | None, str | None],
    a: Any,
    b: Any,
    offs: torch.Tensor | None,
    rows: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """The products through what autograd, compilers, modes and subclasses can see."""
    activation, gated, out_dtype, variant = settings
    a, b, form = arguments.form_of(*autocast(a, b))
    arguments.check_groups(offs, rows, a, b, form)
    columns, activation = arguments.columns_of(b, gated), check_activation(activation)
    arguments.check_epilogue(bias, activation, gated, scale_a, scale_b, a, b, form)
    result_dtype = check_out_dtype(out_dtype, a.dtype, arguments.FLOATS)
    bias = bias if bias is None else autocast(bias)[0]
    shape = arguments.shape_of(a, offs, rows, columns, form)
    inputs = [t for t in (a, b, bias) if t is not None]
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    refuse_grad("scale_a", scale_a, *inputs)
    refuse_grad("out", out, *inputs)
    variant = named_for("grouped_mm", variant)
    if (
        not a.is_cuda
        and not torch.compiler.is_compiling()
        and not any(t is not None and hidden(t) for t in (offs, rows))
    ):
        arguments.check_values(offs, rows, a, form)
    # The derivatives of a fused activation and of a gather need what fusing throws away: both stay outside, in a trace,
    # whose gradients may be asked for later, too.
    followed = differentiated()
    apart = needs_grad or followed or asked_for_later()
    if apart and rows is not None:
        # On a CPU torch's own indexing refuses rows that are not there, in a graph too.
        at = rows.clamp(0, a.shape[0] - 1) if a.is_cuda else rows
        a, rows = a.index_select(0, at), None
        scale_a = scale_a if scale_a is None else scale_a.index_select(0, at)
    if followed:
        result = _transformed(a, b, offs, bias, result_dtype, scale_a, scale_b, variant)
    elif needs_grad and all(plain(t) for t in inputs):
        result = _EagerGroupedMm.apply(a, b, offs, bias, ("", False, result_dtype, variant), current.get())
    else:
        fused = ("", False) if apart else (activation, gated)
        result = _call(a, b, offs, rows, bias, *fused, result_dtype, scale_a, scale_b, variant)
    if apart:
        result = finish(result, None, activation, gated)
    if out is None:
        return result  # type: ignore[no-any-return]
    check_out(out, shape, result_dtype, a.device)
    return out.copy_(result)


def _call(*given: Any) -> torch.Tensor:
    result: torch.Tensor = torch.ops.registry.grouped_mm(*given)
    return result


def define(launch: Callable[..., torch.Tensor], product: Callable[..., torch.Tensor]) -> None:
    """Give the torch op its kernel: the op's own way to find and launch a plan, and the op for its gradients."""

    def _grouped_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor | None,
        rows: torch.Tensor | None,
        bias: torch.Tensor | None,
        activation: str,
        gated: bool,
        out_dtype: torch.dtype,
        scale_a: torch.Tensor | None,
        scale_b: torch.Tensor | None,
        variant: str | None,
    ) -> torch.Tensor:
        settings = (activation, gated, out_dtype, variant)
        return launch(settings, a, b, offs, rows, bias, scale_a, scale_b).contiguous()

    define_kernel(_library, "grouped_mm", _grouped_mm)
    _EagerGroupedMm.launch = lambda settings, a, b, offs, bias: launch(settings, a, b, offs, None, bias)
    _EagerGroupedMm.product = lambda a, b, offs: product(a, b, offs=offs)


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    rows: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    gated: bool,
    out_dtype: torch.dtype,
    *rest: Any,
) -> torch.Tensor:
    form = arguments.FORMS[a.dim(), b.dim()]
    shape = arguments.shape_of(a, offs, rows, b.shape[-1] // (2 if gated else 1), form)
    return a.new_empty(shape, dtype=out_dtype)


torch.library.register_fake("registry::grouped_mm", _fake, lib=_library)
counted("grouped_mm", costs.torch_product)


# --- gradients: grouped products that dispatch too ----------------------------------------------------------------


def _gradients(ctx: Any, grad: torch.Tensor, product: Product, needed: Sequence[Any]) -> tuple[Any, Any, None, Any]:
    a, b, offs = ctx.saved_tensors
    given = grad.to(a.dtype).contiguous()  # that of a sum is one number everywhere
    grad_a = grad_b = grad_bias = None
    if needed[0] and b.dim() == 2:
        grad_a = product(b, given.mT, offs).mT
    elif needed[0]:
        grad_a = product(given, b.mT, offs)
    if needed[1]:
        grad_b = product(a.mT, given, offs)
    if needed[3]:  # sums of the rows of each group: a product with ones
        ones = grad.new_ones((1, grad.shape[0]))
        grad_bias = (grad.sum(1) if offs is None else product(ones, grad, offs)[:, 0]).to(ctx.bias_dtype)
    return grad_a, grad_b, None, grad_bias


def _plain_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    return _call(a, b, offs, None, None, "", False, a.dtype, None, None, None)


def _op_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, offs, rows, bias, activation, gated, _, scale_a, _, _ = inputs
    ctx.scope = current.get()
    if activation or gated or rows is not None or scale_a is not None:
        what = "differentiation through a fused activation, gate, gather or scales of grouped_mm"
        raise no_derivative(what, "all of them outside")
    keep(ctx, (a, b, offs), bias)


def _op_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    need_a, need_b, _, _, need_bias, *_ = ctx.needs_input_grad
    with entered(ctx.scope):
        *found, grad_bias = _gradients(ctx, grad, _plain_product, (need_a, need_b, None, need_bias))
    return (*found, None, grad_bias, *[None] * 6)


torch.library.register_autograd("registry::grouped_mm", _op_backward, setup_context=_op_save, lib=_library)


_EagerGroupedMm = eager("_EagerGroupedMm", _gradients)


# --- functorch and forward mode -----------------------------------------------------------------------------------

# Groups of groups would need offsets that nobody has.
torch.library.register_vmap("registry::grouped_mm", functools.partial(one_by_one, _call), lib=_library)


def _unfused(a: Any, b: Any, offs: Any, bias: Any, *rest: Any) -> torch.Tensor:
    return _call(a, b, offs, None, bias, "", False, *rest)


def _tangent_of_bias(product: Product, bias_dot: torch.Tensor, a: torch.Tensor, b: Any, offs: Any) -> torch.Tensor:
    """The bias as one more row of each group's matrix."""
    return product(a.new_ones((*a.shape[:-1], 1)), bias_dot.to(a.dtype).unsqueeze(1), offs)


_TransformedGroupedMm = transformed("grouped_mm", _unfused, _gradients, _tangent_of_bias)


@in_one_piece
def _transformed(*args: Any) -> torch.Tensor:
    result: torch.Tensor = _TransformedGroupedMm.apply(*args)
    return result
