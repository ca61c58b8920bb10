"""Checks of a grouped product's arguments: which form it has, and what its groups are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from registry.errors import InvalidArgument
from registry.ops.parts.masks import check_flag
from registry.ops.parts.products import FP8, refuse_its_grad
from registry.ops.tensors import check_tensor, dtype_name, readable

FORMS = {(2, 3): "rows", (3, 3): "batch", (2, 2): "inner"}
"""By the dimensions of a and b: what the groups are slices of. "batch" has them ready as a dimension."""
FLOATS = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
DTYPES = FLOATS | FP8
MOST_GROUPS = 1024
"""Kernels look for a tile's group among all of them at once."""


def form_of(a: object, b: object) -> tuple[torch.Tensor, torch.Tensor, str]:
    """a and b, and "rows", "batch" or "inner", or InvalidArgument."""
    a, b = check_tensor("a", a), check_tensor("b", b)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dtype not in DTYPES:
            raise InvalidArgument(name, dtype_name(tensor.dtype), ", ".join(sorted(map(dtype_name, DTYPES))))
    form = FORMS.get((a.dim(), b.dim()))
    if form is None:
        turned = "; for a [E, M, K] and b [K, T], grouped_mm(b.mT, a.mT, offs=offs).mT" if a.dim() == 3 else ""
        allowed = "a [T, K] with b [E, K, N], a [E, M, K] with b [E, K, N], or a [M, T] with b [T, N]" + turned
        raise InvalidArgument("b", f"{b.dim()} dimensions, for {a.dim()} of a", allowed)
    if a.device != b.device:
        raise InvalidArgument("b", f"device {b.device}", f"a's device {a.device}")
    if a.dtype != b.dtype:
        raise InvalidArgument("b", f"dtype {dtype_name(b.dtype)}", f"a's dtype {dtype_name(a.dtype)}")
    wanted = (a.shape[0], a.shape[-1]) if form == "batch" else (a.shape[-1],)
    if tuple(b.shape[: len(wanted)] if form != "rows" else b.shape[1:2]) != wanted:
        inner = f"an inner size of {a.shape[-1]}" + (f" and {a.shape[0]} groups" if form == "batch" else "")
        raise InvalidArgument("b", f"shape {tuple(b.shape)} for a of shape {tuple(a.shape)}", inner)
    return a, b, form


def check_groups(offs: Any, rows: Any, a: torch.Tensor, b: torch.Tensor, form: str) -> int:
    """How many groups there are, after checks of all but the values of the offsets and of the rows."""
    if form == "batch":
        if offs is not None:
            raise InvalidArgument("offs", "given", "None where a and b have a dimension of groups")
        groups = a.shape[0]
    else:
        groups = _vector("offs", offs, (torch.int32,), a.device).shape[0]
        if form == "rows" and groups != b.shape[0]:
            raise InvalidArgument("offs", f"{groups} offsets", f"{b.shape[0]}, the end of each of b's groups")
    if groups > MOST_GROUPS:
        raise InvalidArgument("offs" if offs is not None else "a", f"{groups} groups", f"at most {MOST_GROUPS}")
    if rows is not None:
        _only("rows", "given", form, "rows")
        _vector("rows", rows, (torch.int32, torch.int64), a.device)
    return groups


def _vector(name: str, given: Any, dtypes: tuple[torch.dtype, ...], device: torch.device) -> torch.Tensor:
    if given is None:
        raise InvalidArgument(name, "None", f"a vector of {_names(dtypes)}")
    found = check_tensor(name, given)
    if found.dim() != 1 or found.dtype not in dtypes or found.device != device:
        got = f"{dtype_name(found.dtype)} of shape {tuple(found.shape)} on {found.device}"
        raise InvalidArgument(name, got, f"a vector of {_names(dtypes)} on {device}")
    return found


def _names(dtypes: Iterable[torch.dtype]) -> str:
    """For errors alone: a compiler that follows a call warns of the cache that names come from."""
    return " or ".join(sorted(map(dtype_name, dtypes)))


def _only(name: str, got: Any, form: str, *forms: str) -> None:
    if form not in forms:
        shapes = " or ".join({"rows": "a [T, K] with b [E, K, N]", "batch": "a [E, M, K]"}[one] for one in forms)
        raise InvalidArgument(name, got, f"None or False, or {shapes}")


def check_values(offs: torch.Tensor | None, rows: torch.Tensor | None, a: torch.Tensor, form: str) -> None:
    """Offsets that fall or leave the tensor, rows that are not there: an error where they can be read for nothing, on
    the CPU. On a GPU they are clamped, for to read them would mean to wait for it."""
    if offs is not None and offs.numel() and readable(offs):
        size = rows.shape[0] if rows is not None else a.shape[0 if form == "rows" else 1]
        ends = offs.tolist()
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if not start <= end <= size:
                raise InvalidArgument(f"offs[{i}]", end, f"between the end before it, {start}, and {size}")
    if rows is not None and rows.numel() and readable(rows):
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= a.shape[0]:
            raise InvalidArgument("rows", low if low < 0 else high, f"rows of a: 0 to {a.shape[0] - 1}")


def columns_of(b: torch.Tensor, gated: object) -> int:
    """Columns of the result: half of b's where one half gates the other."""
    check_flag("gated", gated)
    if gated and b.shape[-1] % 2:
        raise InvalidArgument("b", f"{b.shape[-1]} columns", "an even number, the gates and then what they gate")
    return b.shape[-1] // 2 if gated else b.shape[-1]


def check_epilogue(
    bias: Any, activation: str, gated: bool, scale_a: Any, scale_b: Any, a: torch.Tensor, b: torch.Tensor, form: str
) -> str:
    """ "" or "rowwise": how the product is scaled."""
    given = {"bias": bias is not None, "activation": bool(activation), "gated": gated, "scale_a": scale_a is not None}
    for name, asked in given.items():
        if asked and form == "inner":
            raise InvalidArgument(name, "given", "none of it where a and b have two dimensions")
    if bias is not None:
        _per_group("bias", bias, (b.shape[0], b.shape[-1]), FLOATS, a.device)
    if scale_a is None and scale_b is None:
        return ""
    of_rows = (a.shape[0],) if form == "rows" else tuple(a.shape[:2])
    _per_group("scale_a", scale_a, of_rows, frozenset((torch.float32,)), a.device)
    _per_group("scale_b", scale_b, (b.shape[0], b.shape[-1]), frozenset((torch.float32,)), a.device)
    refuse_its_grad("scale_a", scale_a)
    refuse_its_grad("scale_b", scale_b)
    return "rowwise"


def _per_group(
    name: str, given: Any, shape: tuple[int, ...], dtypes: frozenset[torch.dtype], device: torch.device
) -> None:
    if given is None:
        allowed = f"{_names(dtypes)} of shape {shape} on {device}, as for the other operand"
        raise InvalidArgument(name, "None", allowed)
    found = check_tensor(name, given)
    if tuple(found.shape) != shape or found.dtype not in dtypes or found.device != device:
        got = f"{dtype_name(found.dtype)} of shape {tuple(found.shape)} on {found.device}"
        raise InvalidArgument(name, got, f"{_names(dtypes)} of shape {shape} on {device}")


def shape_of(
    a: torch.Tensor, offs: torch.Tensor | None, rows: torch.Tensor | None, columns: int, form: str
) -> tuple[int, ...]:
    """Of the result."""
    if form == "batch":
        return (a.shape[0], a.shape[1], columns)
    if form == "inner":
        assert offs is not None
        return (offs.shape[0], a.shape[0], columns)
    return (a.shape[0] if rows is None else rows.shape[0], columns)
