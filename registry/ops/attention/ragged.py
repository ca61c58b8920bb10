"""Dense calls with `key_lengths` or `sinks`, as calls of attention_varlen: the same tensors, viewed as it takes them.

Copied is only what cannot be viewed so: bhsd queries that are more than one row, and bhsd keys under autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from registry.dispatch.traced import is_tracing
from registry.errors import InvalidArgument
from registry.ops.attention import arguments
from registry.ops.op import OPS
from registry.ops.tensors import (
    asked_for_later,
    autocast,
    check_tensor,
    described,
    differentiated,
    divided,
    is_distributed,
    readable,
)

OP = "attention_varlen"
_RENAMED = {"seqused_k": "key_lengths", "cu_seqlens_k": "key_lengths"}
_INTEGERS = (torch.int32, torch.int64)


def attend(
    q: Any, k: Any, v: Any, *, layout: str, return_lse: bool, by: Callable[..., Any] | None = None, **call: Any
) -> Any:
    """What `registry.attention` returns in this layout, for bhsd operands; `by` the op, or by its oracle."""
    if by is None:
        q, k, v = autocast(q, k, v)
    with _named():
        packed = _call(q, k, v, call)
        found = (OPS[OP] if by is None else by)(*packed, **call, return_lse=return_lse)  # type: ignore[operator]
    b, h, s = q.shape[:3]
    out = (found[0] if return_lse else found).view(b, s, h, v.shape[3]).transpose(1, 2)
    if is_distributed(out):  # torch would take a view of its gradient by strides that a shard of that lacks
        out = out.contiguous()
    out = out if layout == "bhsd" else out.transpose(1, 2)
    return (out, found[1].view(h, b, s).transpose(0, 1)) if return_lse else out


def oracle() -> Callable[..., Any]:
    """The definition of that op."""
    return OPS[OP].reference  # type: ignore[attr-defined,no-any-return]


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Errors name the arguments of this op."""
    try:
        yield
    except InvalidArgument as error:
        if error.argument in _RENAMED:
            raise InvalidArgument(_RENAMED[error.argument], error.got, error.allowed) from None
        raise


def explain(q: Any, k: Any, v: Any, *, layout: str = "bhsd", **call: Any) -> Any:
    """What such a call would run, and why."""
    if arguments.check_layout(layout) != "bhsd":
        q, k, v = arguments.from_bshd(q, k, v)
    q, k, v = autocast(q, k, v)
    with _named():
        return OPS[OP].explain(*_call(q, k, v, call), **call)


def _call(q: Any, k: Any, v: Any, call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v for that op; the lengths go into `call`, instead of those of the keys."""
    q, k, v = (divided(tensor, 0, 2) for tensor in arguments.check_qkv(q, k, v))
    key_lengths, sinks = call.pop("key_lengths", None), call.get("sinks")
    (b, _, s, _), keys = q.shape, k.shape[2]
    call |= {"max_seqlen_q": s, "max_seqlen_k": keys}
    starts = _counted(b + 1, q)
    rows_of_q, rows_of_k, rows_of_v = (t.transpose(1, 2) for t in (q, k, v))
    if key_lengths is None:
        call |= {"cu_seqlens_q": starts * s, "cu_seqlens_k": starts * keys}
        return tuple(t.flatten(0, 1) for t in (rows_of_q, rows_of_k, rows_of_v))  # type: ignore[return-value]
    lengths = _checked(key_lengths, q, keys)
    followed = any(isinstance(t, torch.Tensor) and t.requires_grad for t in (q, k, v, sinks))
    # What torch.func follows does not say so to a tracer, and of what torch.jit.trace makes gradients are asked later.
    unknown = asked_for_later() or (is_tracing() and differentiated())
    if not (unknown or (followed and torch.is_grad_enabled())):
        call |= {"cu_seqlens_q": starts * s, "seqused_k": lengths}
        return rows_of_q.flatten(0, 1), rows_of_k, rows_of_v
    if q.is_cpu and q.itemsize > 1:
        # There plain products multiply zeros by what lies behind the keys, which may be NaN.
        behind = (_counted(keys, lengths) >= lengths[:, None])[:, :, None, None]
        rows_of_k, rows_of_v = (t.masked_fill(behind, 0.0) for t in (rows_of_k, rows_of_v))
    # Gradients are for packed keys. What follows the keys of a sequence is one more sequence, which has no queries.
    ends = torch.stack((starts[:-1] * keys + lengths, starts[1:] * keys), dim=1).flatten()
    call |= {"cu_seqlens_q": (starts * s).repeat_interleave(2)[1:], "cu_seqlens_k": torch.cat((starts[:1], ends))}
    return tuple(t.flatten(0, 1) for t in (rows_of_q, rows_of_k, rows_of_v))  # type: ignore[return-value]


def _counted(count: int, beside: torch.Tensor) -> torch.Tensor:
    """0, 1, 2 ... on the device of a tensor; distributed where that is, with which no other may be mixed."""
    if is_distributed(beside):
        return beside.new_ones((count,), dtype=torch.int32).cumsum(0, dtype=torch.int32) - 1
    return torch.arange(count, dtype=torch.int32, device=beside.device)


def _checked(key_lengths: Any, q: torch.Tensor, keys: int) -> torch.Tensor:
    lengths = check_tensor("key_lengths", key_lengths)
    if tuple(lengths.shape) != (q.shape[0],) or lengths.dtype not in _INTEGERS:
        got = described(lengths)
        raise InvalidArgument("key_lengths", got, f"({q.shape[0]},) of int32 or int64: the keys of each batch entry")
    if lengths.device != q.device:
        raise InvalidArgument("key_lengths", f"device {lengths.device}", f"q's device {q.device}")
    if readable(lengths):
        for entry, length in enumerate(lengths.tolist()):
            if not 0 <= length <= keys:
                raise InvalidArgument("key_lengths", f"{length} in entry {entry}", f"0 to {keys}, the keys there are")
    elif lengths.is_cpu and is_tracing() and not (is_distributed(lengths) or differentiated()):
        # The graph looks at them: what it calls knows them by another name, and may have made others of them.
        right = ((lengths >= 0) & (lengths <= keys)).all()
        torch._assert_async(right, "key_lengths: got lengths out of bounds; allowed: 0 to the keys there are")
    if lengths.dtype is torch.int64:
        lengths = lengths.clamp(-1, 2**31 - 1)  # what int32 does not hold stays a lie
    return lengths.to(torch.int32).contiguous()
