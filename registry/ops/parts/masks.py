"""What every op of attention checks and means alike: flags, scales, softcaps, windows, and which keys a query sees."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from registry.errors import InvalidArgument, shown
from registry.ops.tensors import untraced

UNLIMITED = -1

Window = tuple[int, int]

FAR = 2**30
"""A side of a window that is as good as unlimited: row + side must not leave the integers of any kernel."""

MOST_SCALE = torch.finfo(torch.float32).max
"""Kernels take the scale in float32."""


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(name, shown(value), "True or False")


def is_window(window: object) -> bool:
    """Whether a window has its canonical form, two plain ints: as a key, (1, 2) equals (True, 2.0)."""
    return type(window) is tuple and len(window) == 2 and type(window[0]) is type(window[1]) is int


def is_finite(value: object) -> bool:
    """Whether this is a number that float32 can hold; spelt so that torch.compile can trace it for a symbolic one."""
    value = untraced(value)
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    return value - value == 0.0 and -MOST_SCALE <= value <= MOST_SCALE  # type: ignore[operator]


LEAST_SCALE = 1e-30
LEAST_SOFTCAP = 1e-30
"""Kernels divide by it in float32, where what is far below is zero."""


def positive_scale(q: Any, scale: Any) -> tuple[Any, float]:
    """(q, scale) for the same scores, with a positive scale: kernels take maxima of scores before they scale them.

    A sign moves into q, where autograd follows it; zero becomes a number so small that all scores vanish.
    """
    scale = untraced(scale)
    check_scale(scale)
    if scale < 0:
        q, scale = _negated(q), -scale
    return q, max(float(scale), LEAST_SCALE)


def _negated(q: Any) -> Any:
    """-q, also of 8 bits, where torch has no minus; what is no q stays as it is, and is refused as that later."""
    if not isinstance(q, torch.Tensor) or not q.is_floating_point() or q.layout is not torch.strided or q.is_nested:
        return q
    return -q if q.itemsize > 1 else (-q.float()).to(q.dtype)


def check_scale(scale: object) -> None:
    if not is_finite(scale):
        raise InvalidArgument("scale", shown(scale), "None (1/sqrt(head_dim)) or a finite number (of float32's range)")


def check_softcap(softcap: object) -> float:
    softcap = untraced(softcap)
    if not is_finite(softcap) or softcap < 0 or 0 < softcap < LEAST_SOFTCAP:  # type: ignore[operator]
        allowed = f"0.0 (off) or a positive finite number (of float32's range, from {LEAST_SOFTCAP})"
        raise InvalidArgument("softcap", shown(softcap), allowed)
    return float(softcap)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_window(window: object) -> Window | None:
    """A window as (left, right), -1 for unlimited; one number means so many keys to either side.

    A side of FAR keys or more is unlimited: no tensor has so many.
    """
    if window is None:
        return None
    allowed = "None, a number of keys to either side, or (left, right) with None or -1 for unlimited"
    window = untraced(window)
    if _is_number(window) and window >= 0:  # type: ignore[operator]
        window = (window, window)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidArgument("window", shown(window), allowed)
    sides = [UNLIMITED if side is None else untraced(side) for side in window]
    if not all(_is_number(side) and side >= UNLIMITED for side in sides):
        raise InvalidArgument("window", shown(window), allowed)
    left, right = (UNLIMITED if side >= FAR else int(side) for side in sides)
    return left, right


def window_of(left: int, right: int) -> Window | None:
    """The window of two sides, as torch ops are given it."""
    return None if left == UNLIMITED and right == UNLIMITED else (left, right)


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


def visible_pairs(queries: int, keys: int, causal: bool, window: Window | None) -> int:
    """How many (query, key) pairs one head sees."""
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    right = 0 if causal else right
    shift = keys - queries
    last = queries * keys if right == UNLIMITED else _keys_up_to(shift + right + 1, queries, keys)
    return last - (0 if left == UNLIMITED else _keys_up_to(shift - left, queries, keys))


def seen_by_each(queries: int, keys: int, causal: bool, window: Window | None) -> float:
    """How many keys a query sees, in the mean."""
    return visible_pairs(queries, keys, causal, window) / queries if causal or window is not None else keys


def _keys_up_to(first: int, rows: int, keys: int) -> int:
    """The sum of 0 <= first + row <= keys, held to those bounds, over the rows: the keys left of a diagonal."""

    def below(n: int) -> int:
        rising = min(max(n, 0), keys)
        return rising * (rising - 1) // 2 + keys * max(n - keys, 0)

    return below(first + rows) - below(first)


def visible(
    seqlen_q: int, seqlen_k: int, causal: bool, window: Window | None, device: torch.device, shift: int | None = None
) -> torch.Tensor | None:
    """[Sq, Sk] bool: which keys each query sees; None where all see all.

    Query i stands at key i + shift: aligned bottom-right where `shift` is not said."""
    if not causal and window is None:
        return None
    row = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q if shift is None else shift)
    column = torch.arange(seqlen_k, device=device)[None, :]
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    if causal:
        seen = seen & (column <= row)
    if left != UNLIMITED:
        seen = seen & (column >= row - left)
    if right != UNLIMITED:
        seen = seen & (column <= row + right)
    return seen
