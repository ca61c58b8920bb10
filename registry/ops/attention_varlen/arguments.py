"""Checks of attention_varlen's arguments, as far as the host can see them: shapes, dtypes, devices, host maxima.

What lies in device memory (lengths, page numbers) is lengths.py's business.
"""

from __future__ import annotations

import functools
import numbers
from dataclasses import dataclass
from typing import Any

import torch

from registry.errors import InvalidArgument, shown
from registry.ops.parts.products import needs_copy, refuse_its_grad
from registry.ops.tensors import (
    autocast,
    autocast_dtype,
    check_tensor,
    described,
    dtype_name,
    is_its_own,
    jit_traced,
    surely,
)

FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
QUANTISED = frozenset((torch.float8_e4m3fn, torch.int8))
_HALVES = frozenset((torch.float16, torch.bfloat16))
_INTEGERS = (torch.int32, torch.int64)
KV_LAYOUTS = ("packed", "cache", "paged")
KV_SCALES = ("tensor", "head", "token")

OPTIONAL = ("cu_seqlens_k", "seqused_k", "block_table", "sinks", "alibi_slopes", "k_scale", "v_scale", "out")
"""The tensors that a call may leave out, in the order in which they are passed on."""

WITHOUT_GRADIENT = ("alibi_slopes", "k_scale", "v_scale")
_K_SHAPES = "[T, Hkv, D] (packed), [B, S, Hkv, D] (cache) or [pages, page, Hkv, D] (pages, with block_table)"


@dataclass(frozen=True)
class Geometry:
    """What the shapes of a call say."""

    kv_layout: str
    batch: int
    page_size: int
    capacity: int
    """Keys that one sequence may have at most: rows of packed k, slots of a cache, pages of a block table's row."""


def check_operands(q: Any, k: Any, v: Any, cu_seqlens_q: Any, given: dict[str, Any]) -> Geometry:
    """The geometry of a call if its tensors go together, else InvalidArgument."""
    for name, tensor in (("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q), *given.items()):
        if tensor is None and name in OPTIONAL:
            continue
        if check_tensor(name, tensor).device != q.device:
            raise InvalidArgument(name, f"device {tensor.device}", f"q's device {q.device}")
    _check_qkv(q, k, v)
    table = given["block_table"]
    layout = "packed" if k.dim() == 3 else "cache" if table is None else "paged"
    _check_index("cu_seqlens_q", cu_seqlens_q, 1)
    if not cu_seqlens_q.shape[0]:
        raise InvalidArgument("cu_seqlens_q", "shape (0,)", "[B + 1]: where each sequence begins, and the end")
    batch = cu_seqlens_q.shape[0] - 1
    capacity, page = _check_lengths(layout, batch, k, given)
    for name in ("sinks", "alibi_slopes"):
        _check_per_head(name, given[name], q)
    refuse_followed(given)
    check_out(given["out"], q, v)
    return Geometry(layout, batch, page, capacity)


def refuse_followed(given: dict[str, Any]) -> None:
    """Raise where somebody wants the gradient of what has none: no fact that a plan is kept by says so."""
    for name in WITHOUT_GRADIENT:
        if given[name] is not None:
            refuse_its_grad(name, given[name])
    out = given["out"]
    if out is not None and out.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument("out", "a tensor that requires grad", "one that does not, or a call under no_grad()")


def _check_qkv(q: Any, k: Any, v: Any) -> None:
    if q.dim() != 3:
        raise InvalidArgument("q", f"{q.dim()} dimensions {tuple(q.shape)}", "3: [T, Hq, D]")
    if q.dtype not in FLOATS:
        raise InvalidArgument("q", dtype_name(q.dtype), ", ".join(sorted(map(dtype_name, FLOATS))))
    if k.dim() not in (3, 4):
        raise InvalidArgument("k", f"{k.dim()} dimensions {tuple(k.shape)}", _K_SHAPES)
    if v.dim() != k.dim() or v.shape[:-1] != k.shape[:-1]:
        raise InvalidArgument("v", f"shape {tuple(v.shape)}", f"k's shape but for the last dimension: {tuple(k.shape)}")
    if v.dtype != k.dtype:
        raise InvalidArgument("v", f"dtype {dtype_name(v.dtype)}", f"k's dtype {dtype_name(k.dtype)}")
    if k.dtype != q.dtype and k.dtype not in QUANTISED:
        allowed = ", ".join([f"q's dtype {dtype_name(q.dtype)}", *sorted(map(dtype_name, QUANTISED))])
        raise InvalidArgument("k", f"dtype {dtype_name(k.dtype)}", allowed)
    if k.shape[-1] != q.shape[2]:
        raise InvalidArgument("k", f"head_dim {k.shape[-1]}", f"q's head_dim {q.shape[2]}")
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[-1] == 0:
            raise InvalidArgument(name, "head_dim 0", "a head_dim of at least 1")
    heads, heads_kv = q.shape[1], k.shape[-2]
    if heads_kv == 0 and heads != 0 or (heads_kv and heads % heads_kv):
        raise InvalidArgument("k", f"{heads_kv} heads for {heads} query heads", "a divisor of q's heads")


def _check_index(name: str, tensor: Any, dim: int) -> None:
    if tensor.dtype is not torch.int32:
        raise InvalidArgument(name, f"dtype {dtype_name(tensor.dtype)}", "int32: .to(torch.int32)")
    if tensor.dim() != dim:
        raise InvalidArgument(name, f"{tensor.dim()} dimensions {tuple(tensor.shape)}", f"{dim}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidArgument(name, f"strides {tuple(tensor.stride())}", "a unit inner stride: .contiguous()")


def _check_lengths(layout: str, batch: int, k: Any, given: dict[str, Any]) -> tuple[int, int]:
    """(capacity, page size), once the lengths of k are said in the way that its layout wants."""
    cu_seqlens_k, seqused_k, table = (given[name] for name in ("cu_seqlens_k", "seqused_k", "block_table"))
    wants = "cu_seqlens_k" if layout == "packed" else "seqused_k"
    for name, tensor in (("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k)):
        if (tensor is not None) != (name == wants):
            got = f"{'None' if tensor is None else 'a tensor'} for k of shape {tuple(k.shape)} ({layout})"
            raise InvalidArgument(name, got, "lengths of k by cu_seqlens_k where it is packed, else by seqused_k")
    if layout == "packed":
        if table is not None:
            raise InvalidArgument(
                "block_table", f"a tensor for k of shape {tuple(k.shape)}", "None, or pages in k and v"
            )
        _check_index("cu_seqlens_k", cu_seqlens_k, 1)
        if cu_seqlens_k.shape[0] != batch + 1:
            raise InvalidArgument(
                "cu_seqlens_k", f"shape {tuple(cu_seqlens_k.shape)}", f"cu_seqlens_q's ({batch + 1},)"
            )
        return k.shape[0], 0
    _check_index("seqused_k", seqused_k, 1)
    if seqused_k.shape[0] != batch:
        raise InvalidArgument("seqused_k", f"shape {tuple(seqused_k.shape)}", f"({batch},): one length a sequence")
    if layout == "cache":
        if k.shape[0] != batch:
            raise InvalidArgument("k", f"a cache of {k.shape[0]} sequences", f"one of {batch}, as cu_seqlens_q says")
        return k.shape[1], 0
    _check_index("block_table", table, 2)
    if table.shape[0] != batch:
        raise InvalidArgument("block_table", f"shape {tuple(table.shape)}", f"({batch}, pages of the longest sequence)")
    return table.shape[1] * k.shape[1], k.shape[1]


def _check_per_head(name: str, tensor: Any, q: Any) -> None:
    if tensor is None:
        return
    dtypes = {torch.float32, q.dtype} if name == "sinks" else {torch.float32}
    if tuple(tensor.shape) != (q.shape[1],) or tensor.dtype not in dtypes:
        allowed = f"[{q.shape[1]}], one a query head, {' or '.join(sorted(map(dtype_name, dtypes)))}"
        raise InvalidArgument(name, described(tensor), allowed)
    if tensor.shape[0] > 1 and tensor.stride(0) != 1:
        raise InvalidArgument(name, f"strides {tuple(tensor.stride())}", "a unit stride: .contiguous()")


def check_scales(k: Any, k_scale: Any, v_scale: Any) -> str:
    """How k and v are scaled: "" (not at all), "tensor", "head" or "token"; a quantised cache must be."""
    if k.dtype not in QUANTISED:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                allowed = f"None for k and v of {dtype_name(k.dtype)}: only quantised ones are scaled"
                raise InvalidArgument(name, "a tensor", allowed)
        return ""
    heads = k.shape[-2]
    shapes = {(1,): "tensor", (heads,): "head", tuple(k.shape[:-1]): "token"} | {(1,): "tensor"}
    found = []
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None or scale.dtype is not torch.float32 or tuple(scale.shape) not in shapes:
            got = "None" if scale is None else described(scale)
            allowed = f"float32 of shape (1,), ({heads},) or {tuple(k.shape[:-1])}"
            raise InvalidArgument(name, got, f"{allowed}, for k and v of {dtype_name(k.dtype)}")
        found.append(shapes[tuple(scale.shape)])
    if found[0] != found[1]:
        raise InvalidArgument("v_scale", f"one a {found[1]}", f"as k_scale: one a {found[0]}")
    return found[0]


def is_read(out: Any, q: Any, k: Any, v: Any, cu_seqlens_q: Any, given: dict[str, Any]) -> bool:
    """Whether `out` lies where an input does, which a kernel reads after it has begun to write."""
    return needs_copy(out, q, k, v, cu_seqlens_q, *[given[name] for name in OPTIONAL if name != "out"])


def as_autocast_wants(q: Any, k: Any, v: Any, given: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """q, k and v as autocast wants them, and sinks of a dtype that goes with these: of the other half, float32."""
    dtype, sinks = autocast_dtype(q), given["sinks"]
    if dtype is not None and isinstance(sinks, torch.Tensor) and sinks.dtype in _HALVES - {dtype}:
        given = given | {"sinks": sinks.float()}
    q, k, v = autocast(q, k, v)
    return q, k, v, given


def check_out(out: Any, q: Any, v: Any) -> None:
    """`out`, if there is one, must be a tensor as a kernel can write the result to."""
    if out is None:
        return
    check_tensor("out", out)
    shape = (q.shape[0], q.shape[1], v.shape[-1])
    if tuple(out.shape) != shape or out.dtype != q.dtype:
        got = described(out)
        raise InvalidArgument("out", got, f"shape {shape} of {dtype_name(q.dtype)}")
    if (out.stride(-1) != 1 and out.shape[-1] > 1) or not is_its_own(out):
        raise InvalidArgument(
            "out", f"strides {tuple(out.stride())}", "a unit inner stride, and memory for each element"
        )


@functools.lru_cache(maxsize=1024)
def coarse(longest: int) -> int:
    """A bound of a growing length that changes rarely: a step in 64 keys, or in an eighth of them and less.

    A cache grows by a key a step. With its length for a fact, each step would be a problem of its own, decided anew.
    """
    step = max(64, 1 << max(longest.bit_length() - 4, 0))
    return -(-longest // step) * step


def check_maximum(name: str, value: Any, capacity: int) -> int:
    """A host maximum as tight as the tensors make it. A graph may work it out from values that it has not seen yet."""
    if jit_traced() and isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in _INTEGERS:
        return value  # type: ignore[return-value]  # a size, which is a tensor there: what runs makes it tight
    compiling = torch.compiler.is_compiling()
    number = not isinstance(value, bool) and isinstance(value, (numbers.Integral, torch.SymInt))
    if not number or (surely(value < 0) if compiling else value < 0):
        allowed = "an int of at least 0: the longest of the sequences, or a bound of it"
        raise InvalidArgument(name, shown(value), allowed)
    if compiling:
        torch._check(value >= 0)
        return torch.sym_min(value, capacity)  # type: ignore[no-any-return]
    value = value if isinstance(value, (int, torch.SymInt)) else int(value)  # type: ignore[call-overload]
    return value if jit_traced() else min(value, capacity)  # type: ignore[no-any-return]
