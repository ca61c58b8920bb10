"""Checks of attention's arguments: each error names the argument, what it got and what is allowed."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from registry.errors import InvalidArgument
from registry.ops.tensors import check_tensor, dtype_name, ieee_float32

LAYOUTS = ("bhsd", "bshd")


UNLIMITED = -1


Window = tuple[int, int]

FAR = 2**30
"""A side of a window that is as good as unlimited: row + side must not leave the integers of any kernel."""

MOST_SCALE = torch.finfo(torch.float32).max
"""Kernels take the scale in float32."""


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
    if q.shape[3] == 0:
        raise InvalidArgument("q", "head_dim 0", "a head_dim of at least 1")
    if k.shape[1] == 0 and q.shape[1] != 0 or (k.shape[1] and q.shape[1] % k.shape[1]):
        raise InvalidArgument("k", f"{k.shape[1]} heads for {q.shape[1]} query heads", "a divisor of q's heads")
    return q, k, v


def check_4d(name: str, value: object) -> torch.Tensor:
    """The value if it is a tensor of four dimensions."""
    tensor = check_tensor(name, value)
    if tensor.dim() != 4:
        raise InvalidArgument(
            name, f"{tensor.dim()} dimensions {tuple(tensor.shape)}", "4: batch, heads, length, head_dim"
        )
    return tensor


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(name, repr(value), "True or False")


def is_window(window: object) -> bool:
    """Whether a window has the one form that is the same key however it is asked for: (1, 2) equals (True, 2.0)."""
    return type(window) is tuple and len(window) == 2 and type(window[0]) is type(window[1]) is int


def check_layout(layout: object) -> str:
    if layout not in LAYOUTS:
        raise InvalidArgument("layout", repr(layout), " or ".join(map(repr, LAYOUTS)))
    return str(layout)


def _is_finite(value: object) -> bool:
    """Whether this is a number that float32 can hold; spelt so that torch.compile can trace it for a symbolic one."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return value - value == 0.0 and -MOST_SCALE <= value <= MOST_SCALE  # type: ignore[operator]


LEAST_SCALE = 1e-30


def positive_scale(q: Any, scale: Any) -> tuple[Any, float]:
    """The same scores by a positive scale, which kernels rely on: they take maxima of scores before they scale them.

    A sign moves into q, where autograd follows it; zero becomes so little that all scores vanish.
    """
    check_scale(scale)
    if scale < 0 and isinstance(q, torch.Tensor):
        q, scale = -q, -scale
    return q, max(float(scale), LEAST_SCALE)


def check_scale(scale: object) -> None:
    if not _is_finite(scale):
        raise InvalidArgument("scale", repr(scale), "None (1/sqrt(head_dim)) or a finite number (of float32's range)")


def check_softcap(softcap: object) -> float:
    if not _is_finite(softcap) or softcap < 0:  # type: ignore[operator]
        raise InvalidArgument("softcap", repr(softcap), "0.0 (off) or a positive finite number (of float32's range)")
    return float(softcap)  # type: ignore[arg-type]


def check_window(window: object) -> Window | None:
    """A window as (left, right), -1 for unlimited; one number means so many keys to either side.

    A side of FAR keys or more is unlimited: no tensor has so many.
    """
    if window is None:
        return None
    allowed = "None, a number of keys to either side, or (left, right) with None or -1 for unlimited"
    if isinstance(window, int) and not isinstance(window, bool) and window >= 0:
        window = (window, window)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidArgument("window", repr(window), allowed)
    sides = [UNLIMITED if side is None else side for side in window]
    if not all(isinstance(side, int) and not isinstance(side, bool) and side >= UNLIMITED for side in sides):
        raise InvalidArgument("window", repr(window), allowed)
    left, right = (UNLIMITED if side >= FAR else int(side) for side in sides)
    return left, right


def canonical_window(window: Window | None, causal: bool) -> tuple[bool, Window | None]:
    """(causal, window) with one spelling for each mask: nothing to the right is causal, no limit at all is None."""
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    causal = causal or right == 0
    if left == UNLIMITED and (causal or right == UNLIMITED):
        return causal, None
    return causal, (left, 0 if causal else right)


def canonical_mask(causal: bool, window: Window | None, seqlen_q: int, seqlen_k: int) -> tuple[bool, Window | None]:
    """(causal, window) with one spelling for each mask of these lengths: a side that hides no key is not there.

    Aligned bottom-right, the left side hides most from the last row, which stands at the last key, and the right side
    hides most from the first one, seqlen_q - 1 keys before it. So one query is never causal, and a longer one always.
    """
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    right = 0 if causal else right
    left = UNLIMITED if left >= seqlen_k - 1 else left
    right = UNLIMITED if right >= seqlen_q - 1 else right
    return canonical_window((left, right), False)


def asks_ieee(dtype: torch.dtype) -> bool:
    """Whether a problem of this dtype must be computed in full float32 precision."""
    return dtype is torch.float32 and ieee_float32()
