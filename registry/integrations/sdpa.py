"""torch's own scaled_dot_product_attention, run by the registry: two doors, each with the meaning that torch gives it.

    from registry.integrations import sdpa
    with sdpa.replaced():        # every torch.nn.functional.scaled_dot_product_attention in the block, on this thread
        model(x)

    sdpa.register_flash()        # or: as torch's flash attention, for the process
    torch.nn.attention.activate_flash_attention_impl("kernel_registry")

`is_causal` is aligned top-left here, as torch has it. A call with a dense mask, with dropout or with shapes that
broadcast stays torch's, which `registry.record()` counts under "elsewhere". So does one for which only torch's own
definition will do: with tangents of forward mode, and under `sdpa_kernel(SDPBackend.MATH)`, whose gradients have
gradients. A compiled function asks that while it is traced.

The first door does not see a function that was imported by its own name before the block, which keeps torch's meaning.
A tensor class of others that recognises torch's function by looking it up by its name finds the registry's there while
a block is open; torch's own that does, `CausalBias`, is told of both. The second door sees whatever torch itself would
hand to flash attention.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, CausalVariant

import registry
from registry.dispatch.scope import block, went_elsewhere
from registry.dispatch.traced import by_the_tracer
from registry.errors import InvalidArgument
from registry.forks import new_lock
from registry.ops.parts.masks import is_finite
from registry.ops.tensors import have_tangents

NAME = "kernel_registry"
_NAMES = {"q": "query", "k": "key", "v": "value", "causal": "is_causal"}
_sdpa = torch.nn.functional.scaled_dot_product_attention


_blocks = threading.local()
_lock = new_lock()
_open = 0
"""How many blocks there are on all threads: the last one to end puts torch's own function back."""

_bias_as_torch_has_it = CausalBias.__torch_function__.__func__  # type: ignore[attr-defined]


def _bias(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What a causal bias means: torch finds its function for it by its name, where ours is in a block."""
    if func is _sdpa:
        return cls._dispatch(*args, **(kwargs or {}))
    return _bias_as_torch_has_it(cls, func, types, args, kwargs)


@block
def replaced() -> Iterator[None]:
    """Have the registry run torch.nn.functional.scaled_dot_product_attention inside the block."""
    global _open
    with _lock:
        _open += 1
        torch.overrides.get_overridable_functions()  # torch keeps it for good; dynamo asks it, and not for ours
        # It stays: taken back, it would be missed by a thread that is at a bias just then.
        CausalBias.__torch_function__ = classmethod(_bias)  # type: ignore[assignment,method-assign]
        torch.nn.functional.scaled_dot_product_attention = _by_thread  # type: ignore[assignment]
    _blocks.depth = getattr(_blocks, "depth", 0) + 1
    try:
        yield
    finally:
        _blocks.depth -= 1
        with _lock:
            _open -= 1
            if not _open:
                torch.nn.functional.scaled_dot_product_attention = _sdpa


def _by_thread(*args: Any, **kwargs: Any) -> torch.Tensor:
    # What is traced is called in the block, and a graph is guarded by which function this is.
    inside = torch.compiler.is_dynamo_compiling() or getattr(_blocks, "depth", 0) > 0
    found: torch.Tensor = (attention if inside else _sdpa)(*args, **kwargs)
    return found


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch.nn.functional.scaled_dot_product_attention is, by `registry.attention` where that has it."""
    lower_right = isinstance(attn_mask, CausalBias) and attn_mask.variant == CausalVariant.LOWER_RIGHT
    upper_left = isinstance(attn_mask, CausalBias) and not lower_right
    why = _what_is_missing(query, key, value, None if lower_right or upper_left else attn_mask, dropout_p, enable_gqa)
    if not isinstance(is_causal, bool):
        why = "an is_causal that is neither True nor False"
    if scale is not None and not is_finite(scale):
        why = "a scale that is no number of float32's"
    if why is None and _math_alone():
        why = "sdpa_kernel(SDPBackend.MATH)"
    if why is None and have_tangents(query, key, value):
        why = "tangents of forward mode"
    top_left = why is None and (is_causal or upper_left)
    if why is None and (lower_right or upper_left):
        why = _what_is_odd(attn_mask, query, key, is_causal)
    if top_left and why is None and query.shape[-2] > key.shape[-2]:
        why = "is_causal with more queries than keys"
    if why is None:
        if top_left:  # no query sees a key past the last query
            key, value = key[..., : query.shape[-2], :], value[..., : query.shape[-2], :]
        three = query.dim() == 3
        q, k, v = (x[None] if three else x for x in (query, key, value))
        try:
            found = registry.attention(q, k, v, causal=top_left or lower_right, scale=scale)
        except InvalidArgument as error:
            raise InvalidArgument(_NAMES.get(error.argument, error.argument), error.got, error.allowed) from None
        return found[0].contiguous() if three else found  # type: ignore[no-any-return]
    went_elsewhere("sdpa", why)
    return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


@by_the_tracer
def _math_alone() -> bool:
    """Whether torch is asked for its own definition, which can be differentiated twice and in forward mode."""
    backends = torch.backends.cuda
    return not (backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled() or backends.cudnn_sdp_enabled())


def _what_is_missing(q: Any, k: Any, v: Any, mask: Any, dropout: float, gqa: bool) -> str | None:
    """Why the registry cannot run this; None where it can."""
    if not all(isinstance(x, torch.Tensor) for x in (q, k, v)):
        return "operands that are no tensors"
    if mask is not None:
        return "a dense mask"
    if not (isinstance(dropout, (int, float)) and dropout == 0):
        return "dropout of attention weights"
    if not isinstance(gqa, bool):
        return "an enable_gqa that is neither True nor False"
    if q.dim() not in (3, 4) or not q.dim() == k.dim() == v.dim():
        return "tensors that have neither three nor four dimensions"
    if any(x.is_nested or x.layout is not torch.strided for x in (q, k, v)):
        return "tensors that are not dense"
    (*outer, heads, _, columns), of_k, of_v = q.shape, k.shape, v.shape
    if outer != list(of_k[:-3]) or of_k[:-1] != of_v[:-1] or (not gqa and heads != of_k[-3]):
        return "shapes that broadcast"
    if not columns or not of_v[-1]:
        return "heads of no columns"
    if heads and not of_k[-3]:
        return "no heads of keys"
    return None


def _what_is_odd(bias: Any, q: torch.Tensor, k: torch.Tensor, is_causal: object) -> str | None:
    """Why a causal bias does not mean what it says, which torch may say or take in its own way."""
    if is_causal:
        return "a causal bias and is_causal"
    if (bias.seq_len_q, bias.seq_len_kv) != (q.shape[-2], k.shape[-2]):
        return "a causal bias of other lengths"
    return None


# --- as torch's flash attention ---------------------------------------------------------------------------------------


def register_flash(name: str = NAME) -> str:
    """Offer the registry to `torch.nn.attention.activate_flash_attention_impl(name)`."""
    torch.nn.attention.register_flash_attention_impl(name, register_fn=_Installed)
    return name


class _Installed:
    """Our kernels in the place of torch's, until `remove()`.

    They look at what they are asked, and hand back to torch's what is not for them. So they do with what comes from
    within: a variant may itself be torch's flash attention.
    """

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("aten", "IMPL")
        self._inside = threading.local()
        forward, backward = "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"
        self._put(f"{forward}_for_cpu", "CPU", cpu_forward)
        self._put(f"{forward}_for_cpu_backward", "CPU", cpu_backward)
        if torch.cuda.is_available():
            self._put(forward, "CUDA", cuda_forward)
            self._put(backward, "CUDA", cuda_backward)

    def _put(self, op: str, key: str, ours: Callable[..., Any]) -> None:
        theirs = torch.library.get_kernel(f"aten::{op}", key)  # type: ignore[arg-type]
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if not getattr(self._inside, "now", False):
                self._inside.now = True
                try:
                    found = ours(*args, **kwargs)
                finally:
                    self._inside.now = False
                if found is not None:
                    return found
            return theirs.call_boxed(keys, *args, **kwargs)

        self._library.impl(op, kernel, key, allow_override=True)

    def remove(self) -> None:
        """Give torch its own kernels back."""
        self._library._destroy()


def _refused(q: torch.Tensor, k: torch.Tensor, dropout: float, causal: bool, scale: Any, mask: Any = None) -> bool:
    """Whether this stays torch's; asked alike by the forward and the backward, which must go the same way."""
    why = None
    if mask is not None:
        why = "a dense mask"
    elif dropout:
        why = "dropout of attention weights"
    elif causal and q.shape[2] != k.shape[2]:
        why = "is_causal with other keys than queries"
    elif scale is not None and not is_finite(scale):
        why = "a scale that is no number of float32's"
    if why is not None:
        went_elsewhere("flash attention", why)
    return why is not None


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> Any:
    return registry.attention(q, k, v, causal=causal, scale=scale, return_lse=True)


def _backward(tensors: Sequence[torch.Tensor], causal: bool, scale: float | None) -> Any:
    grad_out, q, k, v, out, lse = tensors
    # In double precision where torch's own forward had doubles, before the door was there.
    return registry.attention.backward(grad_out, q, k, v, out, lse.float(), causal=causal, scale=scale)


def cpu_forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention_for_cpu, or None where torch must do it."""
    if _refused(query, key, dropout_p, is_causal, scale, attn_mask):
        return None
    return _forward(query, key, value, is_causal, scale)


def cpu_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Any = None,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward, or None."""
    if _refused(query, key, dropout_p, is_causal, scale, attn_mask):
        return None
    return _backward((grad_out, query, key, value, out, logsumexp), is_causal, scale)


def cuda_forward(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention, or None where torch must do it."""
    if return_debug_mask or _refused(query, key, dropout_p, is_causal, scale):
        return None
    out, lse = _forward(query, key, value, is_causal, scale)
    seed, offset = (torch.zeros(n, dtype=torch.uint64, device=query.device) for n in ((2,), ()))
    return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, query.new_empty(0)


def cuda_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Any,
    philox_offset: Any,
    *,
    scale: float | None = None,
) -> Any:
    """aten::_scaled_dot_product_flash_attention_backward, or None."""
    if _refused(query, key, dropout_p, is_causal, scale):
        return None
    return _backward((grad_out, query, key, value, out, logsumexp), is_causal, scale)


__all__ = ["NAME", "attention", "register_flash", "replaced"]
