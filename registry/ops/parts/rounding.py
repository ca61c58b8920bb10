"""How each dtype rounds: what the yardsticks of the conformance kit multiply, round to, and forgive."""

from __future__ import annotations

import math

import torch

from registry.ops.tensors import ieee_float32

_TF32_DROPPED = 0x1FFF
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP8_SUM_EPS = 2.0**-13
"""Tensor cores add fp8 products with fewer bits than float32 has."""
_FP8_CUT = 2.0**-10
"""And they cut off what is too much. Sums of products of one sign were off by 5e-4 on an H200, however many, where they
went to float32 every 128 products; by 0.005 (512 products), 0.07 (4,096) and 0.5 (65,536) where they stayed."""


def as_multiplied(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that a matrix unit of this dtype sees, in a dtype wide enough to accumulate in."""
    if dtype is torch.float64 or dtype is torch.int8:
        return x.to(torch.float64)
    if dtype is torch.float32:
        x = x.to(torch.float32)
        return x if ieee_float32() else _as_tf32(x)
    return x.to(dtype).to(torch.float32)


def _as_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest, as cuBLAS does it, which is half the error of cutting off."""
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + (_TF32_DROPPED + 1) // 2) & ~_TF32_DROPPED
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def factor_eps(dtype: torch.dtype) -> float:
    """What stands for 1 in the last place of a factor of this dtype, as it is multiplied."""
    if dtype is torch.float32 and not ieee_float32():
        return torch.finfo(torch.float32).eps * (_TF32_DROPPED + 1)
    return torch.finfo(dtype).eps


def rounded_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values as a result of this dtype holds them: integers beyond it modulo its size, as torch adds integers."""
    return x.round().long().to(dtype) if dtype in (torch.int8, torch.int32) else x.to(dtype)


def sum_eps(dtype: torch.dtype) -> float:
    """Relative error of one addition, as kernels for operands of this dtype accumulate."""
    if dtype is torch.float64:
        return torch.finfo(torch.float64).eps
    return _FP8_SUM_EPS if dtype in _FP8 else torch.finfo(torch.float32).eps


def of_one_sign(x: torch.Tensor, inner: int) -> torch.Tensor:
    """Values of a factor whose sums along its dimension `inner` never cancel, with a factor like it: what an adder of
    few bits loses is seen in the result. Such sums are as large as others are, the root of how many there are."""
    signs = x.select(inner, 0).sign().unsqueeze(inner)
    return x.abs() * signs / math.sqrt(math.sqrt(x.shape[inner]))


def floor_of(dtype: torch.dtype, factors: torch.dtype | None = None) -> float:
    """Relative error that rounding alone makes in a result of this dtype, and cutting in the sums of such factors."""
    if factors in _FP8:
        return max(_FP8_CUT, floor_of(dtype))
    if dtype in (torch.int8, torch.int32):
        return 0.0
    if dtype in (torch.float32, torch.float64):
        return 4 * torch.finfo(dtype).eps
    return 0.4 * torch.finfo(dtype).eps
