"""attention_varlen at the torch boundary, once for all variants: the torch ops, their fakes and autograd.

Eager calls on plain tensors do not come here without need. torch.compile, fake tensors, subclasses, functorch and
autocast take `torch.ops.registry.attention_varlen`, whose kernel makes the same dispatch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, Optional, Tuple  # noqa: UP035

import torch
from torch import Tensor

from registry.dispatch.compiled_calls import define_kernel
from registry.dispatch.scope import current, entered, named_for
from registry.dispatch.traced import in_one_piece, is_tracing, meet_compiler
from registry.errors import InvalidArgument
from registry.ops.attention_varlen import arguments, costs
from registry.ops.attention_varlen.derivatives import INSTEAD, no_gradient_of_a_cache, no_second_derivative
from registry.ops.attention_varlen.outputs import new_lse, new_out
from registry.ops.parts import masks
from registry.ops.parts.counting import counted
from registry.ops.parts.derivatives import last_derivative, transformed
from registry.ops.parts.masks import UNLIMITED
from registry.ops.parts.products import refuse_grad
from registry.ops.tensors import asked_for_later, differentiated, no_derivative

_library = torch.library.Library("registry", "FRAGMENT")
_HOW = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, bool causal, float scale, SymInt window_left, SymInt window_right, "
    "float softcap"
)
_library.define(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? block_table, Tensor? sinks, Tensor? alibi_slopes, Tensor? k_scale, Tensor? v_scale, "
    f"{_HOW}, bool with_lse, str? variant) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_varlen_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? sinks, Tensor? alibi_slopes, Tensor? grad_lse, "
    f"{_HOW}) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_TENSORS = 11

How = tuple[int, int, bool, Any, float, bool, str | None]
"""All of a call but tensors and scale."""
HOW = ("max_seqlen_q", "max_seqlen_k", "causal", "window", "softcap", "return_lse", "variant")


def through_torch(
    how: How, scale: float | None, q: Any, k: Any, v: Any, cu_seqlens_q: Any, given: dict[str, Any]
) -> Any:
    """Call the torch op, which compilers, modes and subclasses can see."""
    max_q, max_k, causal, window, softcap, return_lse, variant = how
    q, k, v, given = arguments.as_autocast_wants(q, k, v, given)
    geometry = arguments.check_operands(q, k, v, cu_seqlens_q, given)
    arguments.check_scales(k, given["k_scale"], given["v_scale"])
    max_q = arguments.check_maximum("max_seqlen_q", max_q, q.shape[0])
    max_k = arguments.check_maximum("max_seqlen_k", max_k, geometry.capacity)
    masks.check_flag("causal", causal)
    if scale is None:
        scale = q.shape[2] ** -0.5
    else:
        masks.check_scale(scale)
    softcap = masks.check_softcap(softcap)
    causal, window = masks.canonical_window(masks.check_window(window), causal)
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    *optional, out = (given[name] for name in arguments.OPTIONAL)
    followed = [t for t in (q, k, v, given["sinks"]) if t is not None]
    refuse_grad("out", out, *followed)
    with_grad = asked_for_later() or (torch.is_grad_enabled() and any(t.requires_grad for t in followed))
    # torch's own autograd for custom ops does not know functorch's transforms; an autograd.Function does.
    variant = named_for("attention_varlen", variant)
    call = _transformed if differentiated() else torch.ops.registry.attention_varlen
    if any(isinstance(size, torch.Tensor) for size in (max_q, max_k)):
        call = _of_traced_sizes()
        max_q, max_k = map(torch.as_tensor, (max_q, max_k))  # type: ignore[assignment]
    asked = (max_q, max_k, causal, float(scale), left, right, softcap, return_lse or with_grad, variant)
    found, lse = call(q, k, v, cu_seqlens_q, *optional, *asked)
    if out is not None:
        found = out.copy_(found)
    return found, lse if return_lse else None


@functools.cache
def _of_traced_sizes() -> Any:
    """The torch op with `max_seqlen_q` and `max_seqlen_k` as tensors, which sizes are to torch.jit.trace.

    The op takes integers, and the tracer would keep those it was given: longer sequences would not run. Before a
    scripted function it keeps how they are worked out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # who traces has been told by torch
        return torch.jit.script(_scripted)


def _scripted(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Optional[Tensor],  # noqa: UP045
    seqused_k: Optional[Tensor],  # noqa: UP045
    block_table: Optional[Tensor],  # noqa: UP045
    sinks: Optional[Tensor],  # noqa: UP045
    alibi_slopes: Optional[Tensor],  # noqa: UP045
    k_scale: Optional[Tensor],  # noqa: UP045
    v_scale: Optional[Tensor],  # noqa: UP045
    max_q: Tensor,
    max_k: Tensor,
    causal: bool,
    scale: float,
    left: int,
    right: int,
    softcap: float,
    with_lse: bool,
    variant: Optional[str],  # noqa: UP045
) -> Tuple[Tensor, Tensor]:  # noqa: UP006
    return torch.ops.registry.attention_varlen(  # type: ignore[no-any-return]
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, sinks, alibi_slopes, k_scale, v_scale,
        int(max_q), int(max_k), causal, scale, left, right, softcap, with_lse, variant,
    )  # fmt: skip


def gradients_through_torch(how: tuple[Any, ...], scale: float, *tensors: Any) -> tuple[torch.Tensor, ...]:
    """Call the torch op of the gradients with all of its tensors, None for those that are not there. The variant is the
    scope's."""
    causal, window, softcap, max_q, max_k, _ = how
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    if is_tracing():
        meet_compiler()
    call = _transformed_backward if differentiated() else torch.ops.registry.attention_varlen_backward
    found: tuple[torch.Tensor, ...] = call(*tensors, max_q, max_k, causal, float(scale), left, right, softcap)
    return found


def define(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Give the torch ops their kernels: the two ops' own ways to find and launch a plan."""

    def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, cu_seqlens_q, *optional = args[:_TENSORS]
        max_q, max_k, causal, scale, left, right, softcap, with_lse, variant = args[_TENSORS:]
        how = (max_q, max_k, causal, masks.window_of(left, right), softcap, with_lse, variant)
        given = dict(zip(arguments.OPTIONAL, (*optional, None), strict=True))
        out, lse = forward(how, scale, q, k, v, cu_seqlens_q, given)
        return out, lse if lse is not None else q.new_empty(0, dtype=torch.float32)

    def _backward(*args: Any) -> tuple[torch.Tensor, ...]:
        *tensors, max_q, max_k, causal, scale, left, right, softcap = args
        how = (causal, masks.window_of(left, right), softcap, max_q, max_k, None)
        found = backward(how, scale, *tensors)
        found = tuple(grad.contiguous() for grad in found)
        return found if len(found) == 4 else (*found, found[0].new_empty(0))

    define_kernel(_library, "attention_varlen", _forward)
    define_kernel(_library, "attention_varlen_backward", _backward)


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *_, with_lse, _ = rest
    return new_out(q, v), new_lse(q) if with_lse else q.new_empty(0, dtype=torch.float32)


def _backward_fake(grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
    grads = tuple(t.new_empty(t.shape) for t in (q, k, v))
    sinks = rest[4]
    return *grads, sinks.new_empty(sinks.shape) if sinks is not None else q.new_empty(0)


torch.library.register_fake("registry::attention_varlen", _forward_fake, lib=_library)
torch.library.register_fake("registry::attention_varlen_backward", _backward_fake, lib=_library)
counted("attention_varlen", costs.torch_forward)
counted("attention_varlen_backward", costs.torch_backward)


# --- autograd of the torch op -------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, _, _, sinks, alibi_slopes, *_ = inputs
    *ctx.how, with_lse, _ = inputs[_TENSORS:]
    if not with_lse:
        raise RuntimeError("registry::attention_varlen needs with_lse=True to be differentiated")
    # Of what functorch differentiates in a graph that is being compiled, the call's own checks see nothing.
    for name, followed in zip(arguments.OPTIONAL, ctx.needs_input_grad[4:_TENSORS], strict=False):
        if followed and name in arguments.WITHOUT_GRADIENT:
            raise InvalidArgument(name, "a tensor that requires grad", "one that does not, for it is given none")
    ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_k, sinks, alibi_slopes)
    ctx.scope = current.get()
    ctx.packed = cu_seqlens_k is not None and k.dtype == q.dtype
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    if not ctx.packed:
        raise no_gradient_of_a_cache()
    q, k, v, out, lse, *saved = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    call = _TransformedBackward.apply if differentiated() else torch.ops.registry.attention_varlen_backward
    with entered(ctx.scope):
        dq, dk, dv, dsinks = call(grad_out, q, k, v, out, lse, *saved, grad_lse, *ctx.how)
    lengths, others = [None] * 4, [None] * (3 + len(ctx.how) + 2)
    return dq, dk, dv, *lengths, dsinks if saved[2] is not None else None, *others


def _no_vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise no_derivative("vmap over attention_varlen", "more sequences in a batch")


def _compute(*args: Any) -> Any:
    *inputs, _, variant = args
    return torch.ops.registry.attention_varlen(*inputs, True, variant)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _save(ctx, (*inputs[:-2], True, inputs[-1]), output)


def _no_forward_mode() -> NotImplementedError:
    return no_derivative("forward-mode differentiation of attention_varlen", INSTEAD)


_Transformed = transformed(_compute, _keep, _op_backward, _no_forward_mode, _no_vmap)
_TransformedBackward = last_derivative(torch.ops.registry.attention_varlen_backward, no_second_derivative, _no_vmap)
torch.library.register_autograd("registry::attention_varlen", _op_backward, setup_context=_save, lib=_library)
torch.library.register_autograd("registry::attention_varlen_backward", _TransformedBackward.backward, lib=_library)


@in_one_piece
def _transformed(*args: Any) -> Any:
    return _Transformed.apply(*args)


@in_one_piece
def _transformed_backward(*args: Any) -> Any:
    return _TransformedBackward.apply(*args)
