"""Checks of attention's arguments: each error names the argument, what it got and what is allowed."""

from __future__ import annotations

import torch

from registry.errors import InvalidArgument, shown
from registry.ops.tensors import check_dims, dtype_name

BHSD, _ = LAYOUTS = ("bhsd", "bshd")


FLOATS = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
)


def check_qkv(q: object, k: object, v: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in bhsd order if they can be attended over, else InvalidArgument."""
    q, k, v = check_4d("q", q), check_4d("k", k), check_4d("v", v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in FLOATS:
            raise InvalidArgument(name, dtype_name(tensor.dtype), ", ".join(sorted(map(dtype_name, FLOATS))))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InvalidArgument(name, f"dtype {dtype_name(tensor.dtype)}", f"q's dtype {dtype_name(q.dtype)}")
        if tensor.device != q.device:
            raise InvalidArgument(name, f"device {tensor.device}", f"q's device {q.device}")
        if tensor.shape[0] != q.shape[0]:
            raise InvalidArgument(name, f"batch {tensor.shape[0]}", f"q's batch {q.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise InvalidArgument("v", f"{v.shape[1]} heads", f"k's {k.shape[1]} heads")
    if k.shape[2] != v.shape[2]:
        raise InvalidArgument("v", f"length {v.shape[2]}", f"k's length {k.shape[2]}")
    if k.shape[3] != q.shape[3]:
        raise InvalidArgument("k", f"head_dim {k.shape[3]}", f"q's head_dim {q.shape[3]}")
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[3] == 0:
            raise InvalidArgument(name, "head_dim 0", "a head_dim of at least 1")
    if k.shape[1] == 0 and q.shape[1] != 0 or (k.shape[1] and q.shape[1] % k.shape[1]):
        raise InvalidArgument("k", f"{k.shape[1]} heads for {q.shape[1]} query heads", "a divisor of q's heads")
    return q, k, v


def check_4d(name: str, value: object, order: str = "batch, heads, length, head_dim") -> torch.Tensor:
    """The value if it is a tensor of four dimensions."""
    return check_dims(name, value, 4, order)


def from_bshd(q: object, k: object, v: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of that layout, in bhsd order."""
    order = "batch, length, heads, head_dim"
    q, k, v = (check_4d(name, value, order).transpose(1, 2) for name, value in (("q", q), ("k", k), ("v", v)))
    return q, k, v


def check_layout(layout: object) -> str:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InvalidArgument("layout", shown(layout), " or ".join(map(repr, LAYOUTS)))
    return str(layout)
