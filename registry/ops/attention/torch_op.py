"""Attention at the torch boundary, once for all variants: the torch ops, their fakes, autograd and vmap.

Eager calls on plain tensors do not come here without need. torch.compile, fake tensors, subclasses, functorch and
autocast take `torch.ops.registry.attention`, whose kernel makes the same dispatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from registry.dispatch.compiled_calls import define_kernel
from registry.dispatch.scope import current, entered, named_for
from registry.dispatch.traced import asked_of, graph_forms, in_one_piece, is_tracing, meet_compiler, variant_for
from registry.ops.attention import arguments, costs
from registry.ops.attention.outputs import in_the_order_of, new_lse, new_out, out_geometry
from registry.ops.parts import masks
from registry.ops.parts.counting import counted
from registry.ops.parts.derivatives import last_derivative, transformed
from registry.ops.parts.masks import UNLIMITED, window_of
from registry.ops.tensors import asked_for_later, autocast, differentiated, no_derivative

_library = torch.library.Library("registry", "DEF")
_MASKS = "bool causal, float scale, SymInt window_left, SymInt window_right, float softcap"
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {_MASKS}, bool with_lse, str? variant) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? grad_lse, "
    f"{_MASKS}) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# Under names of this module, of which a graph guards one each rather than the way there.
_torch_op = torch.ops.registry.attention
_grad_enabled = torch.is_grad_enabled
_autocast_enabled = torch.is_autocast_enabled
_functorch_active = torch._C._are_functorch_transforms_active

Settings = tuple[bool, Any, float, bool, str | None]
"""causal, window, softcap, whether the LSE is asked for, variant: all of a call but tensors and scale."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def through_torch(
    settings: Settings, scale: float | None, q: Any, k: Any, v: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the torch op, which compilers, modes and subclasses can see."""
    causal, window, softcap, return_lse, variant = settings
    if is_tracing() and window is None and softcap == 0.0 and scale is None and _is_plain_call(q, k, v):
        with_grad = _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        asked = variant_for("attention", variant)
        how = (causal, q.shape[3] ** -0.5, -1, -1, 0.0)
        out, lse = _torch_op(q, k, v, *how, return_lse or with_grad, asked)
        return out, lse if return_lse else None
    q, k, v = arguments.check_qkv(*autocast(q, k, v))
    masks.check_flag("causal", causal)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[3])
    else:
        masks.check_scale(scale)
    softcap = masks.check_softcap(softcap)
    causal, window = masks.canonical_window(masks.check_window(window), causal)
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    with_grad = asked_for_later() or (_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
    # torch's own autograd for custom ops does not know functorch's transforms; an autograd.Function does.
    variant = named_for("attention", variant, settles=True)
    call = _transformed if differentiated() else torch.ops.registry.attention
    out, lse = call(q, k, v, causal, float(scale), left, right, softcap, return_lse or with_grad, variant)
    return out, lse if return_lse else None


def gradients_through_torch(settings: Settings, scale: float, *tensors: Any) -> Gradients:
    """Call the torch op of the gradients; `tensors` end with that of the LSE, or None. The variant is the scope's."""
    causal, window, softcap, *_ = settings
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    if is_tracing():
        meet_compiler()
    call = _transformed_backward if differentiated() else torch.ops.registry.attention_backward
    found: Gradients = call(*tensors, causal, float(scale), left, right, softcap)
    return found


def _is_plain_call(q: Any, k: Any, v: Any) -> bool:
    """Whether the torch op takes these as they are: a graph guards all that was looked at, so this looks at little."""
    if not isinstance(q, Tensor) or not isinstance(k, Tensor) or not isinstance(v, Tensor):
        return False
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device or not q.dim() == k.dim() == v.dim():
        return False
    if q.dim() != 4 or not q.dtype.is_floating_point or q.dtype.itemsize < 2 or q.layout != k.layout:
        return False
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        return False
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] or q.shape[3] == 0 or forward_ad._current_level >= 0:
        return False
    return not _functorch_active() and not _autocast_enabled(q.device.type)


def _as_faked(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The result with the strides that the fake promised; compilers rely on them. Copies only where they differ."""
    shape, strides = out_geometry(like.shape, like.stride(), result.shape[3])
    if result.stride() == strides or result.numel() == 0:
        return result
    return like.new_empty_strided(shape, strides).copy_(result)


def _lse_or_none(q: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """The torch op returns tensors alone."""
    return lse.contiguous() if lse is not None else q.new_empty(0, dtype=torch.float32)


def define(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    graph_launch: Callable[..., Any],
    holding: Callable[..., Any],
) -> None:
    """Give the torch ops their kernels: the two ops' own ways to find and launch a plan; and the first its form in
    graphs that are settled when they are compiled, and what a compiled graph keeps of a plan."""

    def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *asked: Any) -> tuple[torch.Tensor, torch.Tensor]:
        causal, scale, left, right, softcap, with_lse, variant = asked
        settings = (causal, window_of(left, right), softcap, with_lse, asked_of(variant))
        out, lse = forward(settings, scale, q, k, v)
        return _as_faked(out, q), _lse_or_none(q, lse)

    def _shortcut(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *asked: Any) -> Any:
        causal, _, left, right, softcap, with_lse, variant = asked
        known = holding((causal, window_of(left, right), softcap, with_lse, asked_of(variant)), q, k, v)
        if known is None:
            return None
        plan, holds = known
        _, strides = out_geometry(q.shape, q.stride(), v.shape[3])
        nothing = _lse_or_none(q, None)

        def answer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: bool, scale: float, *__: Any) -> Any:
            if not holds(q, k, v):
                return None
            out, lse = plan.launch(q, k, v, scale=scale)
            out = out if out.stride() == strides else _as_faked(out, q)
            return out, nothing if lse is None else lse.contiguous()

        return answer

    def _in_graph(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *asked: Any) -> Any:
        causal, scale, left, right, softcap, with_lse, variant = asked
        if isinstance(left, torch.SymInt) or isinstance(right, torch.SymInt):
            return NotImplemented
        launch = graph_launch(variant, (causal, window_of(left, right), softcap, with_lse, None), q, k, v)
        if launch is None:
            return NotImplemented
        out, lse = launch(q, k, v, scale=scale)
        return in_the_order_of(out, q), _lse_or_none(q, lse)

    def _backward(*args: Any) -> Gradients:
        *tensors, grad_lse, causal, scale, left, right, softcap = args
        settings = (causal, window_of(left, right), softcap, grad_lse is not None, None)
        grads = backward(settings, scale, *tensors, grad_lse)
        dq, dk, dv = (_as_faked(grad, like) for grad, like in zip(grads, tensors[1:4], strict=True))
        return dq, dk, dv

    graph_forms[torch.ops.registry.attention.default] = _in_graph
    define_kernel(_library, "attention", _attention, _shortcut)
    define_kernel(_library, "attention_backward", _backward)


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *asked: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    *_, with_lse, _ = asked
    return new_out(q, v), new_lse(q) if with_lse else q.new_empty(0, dtype=torch.float32)


def _backward_fake(grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Gradients:
    return new_out(q, q), new_out(k, k), new_out(v, v)


torch.library.register_fake("registry::attention", _attention_fake, lib=_library)
torch.library.register_fake("registry::attention_backward", _backward_fake, lib=_library)
counted("attention", costs.torch_forward)
counted("attention_backward", costs.torch_backward)


# --- autograd of the torch op -------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, *ctx.masks, with_lse, _ = inputs
    if not with_lse:
        raise RuntimeError("registry::attention needs with_lse=True to be differentiated")
    ctx.save_for_backward(q, k, v, *output)
    ctx.scope = current.get()
    ctx.set_materialize_grads(False)


def _op_backward(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    call = _TransformedBackward.apply if differentiated() else torch.ops.registry.attention_backward
    with entered(ctx.scope):
        grads = call(grad_out, q, k, v, out, lse, grad_lse, *ctx.masks)
    return (*grads, *([None] * (len(ctx.masks) + 2)))


_INSTEAD = "first derivatives in reverse mode, or registry.attention.reference(...), which torch differentiates"


def no_second_derivative() -> NotImplementedError:
    """What differentiating the gradients of attention raises."""
    return no_derivative("a second derivative of attention", _INSTEAD)


_TransformedBackward = last_derivative(torch.ops.registry.attention_backward, no_second_derivative)
torch.library.register_autograd("registry::attention", _op_backward, setup_context=_save, lib=_library)
torch.library.register_autograd("registry::attention_backward", _TransformedBackward.backward, lib=_library)


def _fold(size: int, in_dims: tuple[int | None, ...], tensors: tuple[torch.Tensor | None, ...]) -> list[Any]:
    """A mapped dimension is more batch: move it to the front and fold it in."""
    folded = []
    for tensor, dim in zip(tensors, in_dims, strict=True):
        if tensor is not None:
            tensor = tensor.movedim(dim, 0) if dim is not None else tensor.expand(size, *tensor.shape)
            tensor = tensor.flatten(0, 1)
        folded.append(tensor)
    return folded


def _mapped_and_batch(size: int, in_dims: tuple[int | None, ...], tensors: tuple[torch.Tensor, ...]) -> tuple[int, int]:
    """The mapped dimension and the batch, which results have as one; either may be 0."""
    mapped = in_dims[0] is not None and in_dims[0] % tensors[0].dim() == 0
    return size, tensors[0].shape[1 if mapped else 0]


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    out, lse = torch.ops.registry.attention(*_fold(info.batch_size, in_dims[:3], args[:3]), *args[3:])
    unfold, with_lse = _mapped_and_batch(info.batch_size, in_dims, args), args[-2]
    return (out.unflatten(0, unfold), lse.unflatten(0, unfold) if with_lse else lse), (0, 0 if with_lse else None)


def _backward_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
    grads = torch.ops.registry.attention_backward(*_fold(info.batch_size, in_dims[:7], args[:7]), *args[7:])
    return tuple(grad.unflatten(0, _mapped_and_batch(info.batch_size, in_dims, args)) for grad in grads), (0, 0, 0)


torch.library.register_vmap("registry::attention", _vmap, lib=_library)
torch.library.register_vmap("registry::attention_backward", _backward_vmap, lib=_library)


def _compute(*args: Any) -> Any:
    *inputs, _, variant = args
    return torch.ops.registry.attention(*inputs, True, variant)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _save(ctx, (*inputs[:-2], True, inputs[-1]), output)


_TransformedAttention = transformed(
    _compute, _keep, _op_backward, lambda: no_derivative("forward-mode differentiation of attention", _INSTEAD)
)


@in_one_piece
def _transformed(*args: Any) -> Any:
    return _TransformedAttention.apply(*args)


@in_one_piece
def _transformed_backward(*args: Any) -> Any:
    return _TransformedBackward.apply(*args)
