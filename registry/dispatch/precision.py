"""How torch is asked for float32 matrix products."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

float32_precision: Callable[[], str] = functools.partial(
    torch._C._get_fp32_precision_getter,  # type: ignore[attr-defined]
    "cuda",
    "matmul",
)
"""It gives "tf32", or "ieee" or "none" for full precision. Both of torch's ways to ask set that; where they disagree,
its `get_float32_matmul_precision()` raises."""
