"""grouped_mm at the torch boundary, once for all variants: the torch op, its fake and its autograd.

Eager calls on plain tensors that need no gradient do not come here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from registry.dispatch.compiled_calls import define_kernel
from registry.dispatch.scope import Scope, current, entered, named_for
from registry.ops.grouped_mm import arguments, costs
from registry.ops.grouped_mm.oracle import finish
from registry.ops.parts.counting import counted
from registry.ops.parts.products import check_activation, check_out, refuse_grad
from registry.ops.tensors import autocast, differentiated, forward_mode, hidden, no_derivative, plain

_library = torch.library.Library("registry", "FRAGMENT")
_library.define(
    "grouped_mm(Tensor a, Tensor b, Tensor? offs, Tensor? rows, Tensor? bias, str activation, bool gated, "
    "ScalarType out_dtype, Tensor? scale_a, Tensor? scale_b, str? variant) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


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
    result_dtype = arguments.check_out_dtype(out_dtype, a.dtype)
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
    # The derivatives of a fused activation and of a gather need what fusing throws away: both stay outside.
    transformed = differentiated() and not (torch.compiler.is_compiling() and not forward_mode())
    apart = needs_grad or transformed
    if apart and rows is not None:
        # On a CPU torch's own indexing refuses rows that are not there, in a graph too.
        at = rows.clamp(0, a.shape[0] - 1) if a.is_cuda else rows
        a, rows = a.index_select(0, at), None
        scale_a = scale_a if scale_a is None else scale_a.index_select(0, at)
    if transformed:
        result = _TransformedGroupedMm.apply(a, b, offs, bias, result_dtype, scale_a, scale_b, variant)
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
    _EagerGroupedMm.launch = staticmethod(launch)
    _EagerGroupedMm.product = staticmethod(lambda a, b, offs: product(a, b, offs=offs))


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


def _gradients(ctx: Any, grad: torch.Tensor, product: Product, needed: tuple[bool, bool, bool]) -> tuple[Any, Any, Any]:
    a, b, offs = ctx.saved_tensors
    given = grad.to(a.dtype).contiguous()  # that of a sum is one number everywhere
    grad_a = grad_b = grad_bias = None
    if needed[0] and b.dim() == 2:
        grad_a = product(b, given.mT, offs).mT
    elif needed[0]:
        grad_a = product(given, b.mT, offs)
    if needed[1]:
        grad_b = product(a.mT, given, offs)
    if needed[2]:  # sums of the rows of each group: a product with ones
        ones = grad.new_ones((1, grad.shape[0]))
        grad_bias = (grad.sum(1) if offs is None else product(ones, grad, offs)[:, 0]).to(ctx.bias_dtype)
    return grad_a, grad_b, grad_bias


def _save(ctx: Any, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    ctx.save_for_backward(a, b, offs)
    ctx.bias_dtype = bias.dtype if bias is not None else None


def _plain_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    return _call(a, b, offs, None, None, "", False, a.dtype, None, None, None)


def _op_save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, offs, rows, bias, activation, gated, _, scale_a, _, _ = inputs
    ctx.scope = current.get()
    if activation or gated or rows is not None or scale_a is not None:
        what = "differentiation through a fused activation, gate, gather or scales of grouped_mm"
        raise no_derivative(what, "all of them outside")
    _save(ctx, a, b, offs, bias)


def _op_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad
    with entered(ctx.scope):
        grad_a, grad_b, grad_bias = _gradients(ctx, grad, _plain_product, (needs[0], needs[1], needs[4]))
    return (grad_a, grad_b, None, None, grad_bias, *[None] * 6)


torch.library.register_autograd("registry::grouped_mm", _op_backward, setup_context=_op_save, lib=_library)


class _EagerGroupedMm(torch.autograd.Function):
    launch: ClassVar[Callable[..., torch.Tensor]]
    product: ClassVar[Product]

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        offs: torch.Tensor | None,
        bias: torch.Tensor | None,
        settings: tuple[str, bool, torch.dtype, str | None],
        scope: Scope,
    ) -> torch.Tensor:
        _save(ctx, a, b, offs, bias)
        ctx.scope = scope
        return _EagerGroupedMm.launch(settings, a, b, offs, None, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad
        with entered(ctx.scope):
            found = _gradients(ctx, grad, _EagerGroupedMm.product, (needs[0], needs[1], needs[3]))
        return (*found[:2], None, found[2], None, None)


# --- functorch and forward mode -----------------------------------------------------------------------------------


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int]:
    """One call after the other: groups of groups would need offsets that nobody has."""
    each = (
        [arg if dim is None else arg.select(dim, i) for arg, dim in zip(args, in_dims, strict=True)]
        for i in range(info.batch_size)
    )
    return torch.stack([_call(*one) for one in each]), 0


torch.library.register_vmap("registry::grouped_mm", _vmap, lib=_library)


class _TransformedGroupedMm(torch.autograd.Function):
    """The torch op where functorch or forward mode is at work: its own derivatives are such products again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> torch.Tensor:  # type: ignore[override]
        a, b, offs, bias, *rest = args
        return _call(a, b, offs, None, bias, "", False, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        a, b, offs, bias, ctx.out_dtype, ctx.scale, _, _ = inputs
        _save(ctx, a, b, offs, bias)
        ctx.save_for_forward(a, b, offs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        _refuse_scales(ctx)
        needs = ctx.needs_input_grad
        found = _gradients(ctx, grad, _transformed_product, (needs[0], needs[1], needs[3]))
        return (*found[:2], None, found[2], *[None] * 4)

    @staticmethod
    def jvp(ctx: Any, a_dot: Any, b_dot: Any, offs_dot: Any, bias_dot: Any, *_: Any) -> torch.Tensor:  # type: ignore[override]
        _refuse_scales(ctx)
        a, b, offs = ctx.saved_tensors
        terms = [] if a_dot is None else [_transformed_product(a_dot, b, offs)]
        terms += [] if b_dot is None else [_transformed_product(a, b_dot, offs)]
        if bias_dot is not None:  # the bias as one more row of each group's matrix
            ones = a.new_ones((*a.shape[:-1], 1))
            terms.append(_transformed_product(ones, bias_dot.to(a.dtype).unsqueeze(1), offs))
        result: torch.Tensor = sum(terms[1:], terms[0]).to(ctx.out_dtype)
        return result


def _refuse_scales(ctx: Any) -> None:
    if ctx.scale is not None:
        raise no_derivative("differentiation of grouped_mm with scale_a and scale_b", "None for both")


def _transformed_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = _TransformedGroupedMm.apply(a, b, offs, None, a.dtype, None, None, None)
    return result
