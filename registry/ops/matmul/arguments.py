"""Checks of a product's arguments, and how torch.matmul's shapes become two or three dimensions."""

from __future__ import annotations

import math
from typing import Any

import torch

from registry.errors import InvalidArgument, shown
from registry.ops.parts.products import FP8, refuse_its_grad
from registry.ops.tensors import check_tensor, divided, dtype_name, surely

FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
INTEGERS = frozenset((torch.int8, torch.int32))


DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8)) | FP8


OUT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32))
"""int8 is not among them: sums of products would wrap."""

MOST_INT8_TERMS = (2**31 - 1) // 128**2
"""As many products of int8 fit into an int32, whatever their values."""


def check_operands(a: object, b: object) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b if torch.matmul would multiply them, else InvalidArgument."""
    a, b = check_tensor("a", a), check_tensor("b", b)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() == 0:
            raise InvalidArgument(name, "0 dimensions", "1 or more dimensions")
        if tensor.dtype not in DTYPES:
            raise InvalidArgument(name, dtype_name(tensor.dtype), ", ".join(sorted(map(dtype_name, DTYPES))))
    if a.device != b.device:
        raise InvalidArgument("b", f"device {b.device}", f"a's device {a.device}")
    if a.dtype != b.dtype and not (a.dtype in FP8 and b.dtype in FP8):
        raise InvalidArgument("b", f"dtype {dtype_name(b.dtype)}", f"a's dtype {dtype_name(a.dtype)}")
    inner = b.shape[-2] if b.dim() > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise InvalidArgument(
            "b", f"shape {tuple(b.shape)} for a of shape {tuple(a.shape)}", f"an inner size of {a.shape[-1]}"
        )
    if a.dtype is torch.int8 and inner > MOST_INT8_TERMS:
        raise InvalidArgument("a", f"an inner size of {inner}", f"up to {MOST_INT8_TERMS} for int8, summed in int32")
    try:
        batch_of(a, b)
    except RuntimeError:
        allowed = f"batch dimensions that broadcast with a's {tuple(a.shape[:-2])}"
        raise InvalidArgument("b", f"batch dimensions {tuple(b.shape[:-2])}", allowed) from None
    return a, b


def batch_of(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The batch dimensions of the product. RuntimeError for such as do not broadcast."""
    if b.dim() <= 2:
        return tuple(a.shape[:-2])
    return tuple(b.shape[:-2]) if a.dim() <= 2 else tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))


def _kind(value: object) -> str:
    return f"{dtype_name(value.dtype)} on {value.device}" if isinstance(value, torch.Tensor) else shown(value)


def check_scales(scale_a: Any, scale_b: Any, a: torch.Tensor, b: torch.Tensor) -> str:
    """ "", "scalar" or "rowwise": how the product of these matrices is scaled."""
    if scale_a is None and scale_b is None:
        return ""
    kinds = set()
    for name, scale, size in (("scale_a", scale_a, a.shape[-2]), ("scale_b", scale_b, b.shape[-1])):
        if not isinstance(scale, torch.Tensor) or scale.dtype is not torch.float32 or scale.device != a.device:
            raise InvalidArgument(name, _kind(scale), f"a float32 tensor on {a.device}, as for the other operand")
        check_tensor(name, scale)
        refuse_its_grad(name, scale)
        if scale.numel() == 1 and scale.dim() <= 1 and (scale.dim() == 0 or size == 1):
            kinds.add("scalar" if scale.dim() == 0 else "rowwise")
        elif scale.dim() == 1 and scale.shape[0] == size:
            kinds.add("rowwise")
        else:
            raise InvalidArgument(name, f"shape {tuple(scale.shape)}", f"() or ({size},)")
    if len(kinds) > 1:
        raise InvalidArgument(
            "scale_b", "one scale a scalar and the other a vector", "both () or both one value a row or column"
        )
    return kinds.pop()


def check_integers(out_dtype: torch.dtype, dtype: torch.dtype, activation: str, scaling: str) -> None:
    """An int32 result is a sum of integers: what would be rounded to one is refused."""
    if out_dtype is not torch.int32:
        return
    if dtype is not torch.int8:
        raise InvalidArgument("out_dtype", f"torch.int32 for {dtype_name(dtype)}", "a floating dtype, or int8 operands")
    floating = "or a floating out_dtype, for int32 results"
    if scaling:
        raise InvalidArgument("scale_a", "given", f"None, {floating}")
    if activation not in ("", "relu"):
        raise InvalidArgument("activation", repr(activation), f"None, relu, {floating}")


def check_bias(bias: Any, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype | None = None) -> None:
    """A bias is a vector of what the result is made of: floating for a floating result, integers for integers."""
    columns = b.shape[-1] if b.dim() > 1 else 1
    if isinstance(bias, torch.Tensor):
        check_tensor("bias", bias)  # before its shape, which a nested one does not have
    if not isinstance(bias, torch.Tensor) or bias.shape != (columns,) or bias.device != a.device:
        got = f"{tuple(bias.shape)} on {bias.device}" if isinstance(bias, torch.Tensor) else shown(bias)
        raise InvalidArgument("bias", got, f"None or a tensor of shape ({columns},) on {a.device}")
    if out_dtype is not None and bias.dtype not in (allowed := FLOATS if out_dtype in FLOATS else INTEGERS):
        names = ", ".join(sorted(map(dtype_name, allowed)))
        raise InvalidArgument("bias", f"dtype {dtype_name(bias.dtype)}", f"{names} for {dtype_name(out_dtype)} results")


def as_matrices(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any = None
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Views of two or three dimensions that multiply to the same numbers, and the shape of the result.

    No copy is made, except to broadcast over several batch dimensions that no single stride can walk, and of rows of a
    that none can walk where each has a scale: for one matrix b they are one matrix, whatever their strides.
    """
    if a.dim() == b.dim() == 2:
        return a, b, (a.shape[0], b.shape[1])
    shape = (*batch_of(a, b), *a.shape[-2:-1], *(b.shape[-1:] if b.dim() > 1 else ()))
    a2 = divided(a, *range(a.dim() - 1)) if a.dim() > 1 else a[None, :]
    b2 = divided(b, *range(b.dim() - 2)) if b.dim() > 1 else b[:, None]
    if a2.dim() == 2 and b2.dim() == 2:  # a vector or two
        return a2, b2, shape
    if b2.dim() == 2 and (_folds(a2) or (isinstance(scale_a, torch.Tensor) and scale_a.dim() == 1)):
        return a2.flatten(0, -2), b2, shape
    batch = batch_of(a2, b2)
    a3, b3 = a2.expand(*batch, -1, -1), b2.expand(*batch, -1, -1)
    if len(batch) != 1:  # the number of matrices in words: with empty ones, -1 could be anything
        count = math.prod(batch)
        a3, b3 = a3.reshape(count, *a2.shape[-2:]), b3.reshape(count, *b2.shape[-2:])
    one = a3.shape[0] == 1
    if surely(one) if torch.compiler.is_compiling() else one:  # a batch that is data stays one
        return a3[0], b3[0], shape
    return a3, b3, shape


def _folds(a: torch.Tensor) -> bool:
    """Whether [..., M, K] is one tall matrix by its strides. Told by numbers: a view that fails cannot be traced."""
    if a.is_contiguous():
        return True
    step = -1
    for size, stride in zip(reversed(a.shape[:-1]), reversed(a.stride()[:-1]), strict=True):
        if size != 1:
            if step not in (-1, stride):
                return False
            step = stride * size
    return True
