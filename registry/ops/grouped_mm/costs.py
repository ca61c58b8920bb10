"""What grouped products cost."""

from __future__ import annotations

import math
from typing import Any

import torch

from registry.ops.grouped_mm.problem import GroupedMmProblem

PER_GROUP = {"rows": ("b",), "inner": ("out",), "batch": ("a", "b", "out")}
"""Of what each form has one a group, where m, n and k are the sizes of one."""


def flops(problem: GroupedMmProblem) -> float:
    """Floating-point operations, where the groups leave no rows over; the epilogue is not counted."""
    times = problem.groups if problem.form == "batch" else 1
    return 2.0 * (2 if problem.gated else 1) * times * problem.m * problem.n * problem.k


def bytes_moved(problem: GroupedMmProblem) -> float:
    """Operands read once, the result written once; of the second one all groups, though some may have no row."""
    itemsize, out_itemsize = (getattr(torch, name).itemsize for name in (problem.dtype, problem.out_dtype))
    a, b, out = problem.m * problem.k, problem.k * problem.n, problem.m * problem.n
    times = dict.fromkeys(PER_GROUP[problem.form], problem.groups)
    wide = 2 if problem.gated else 1
    return float(
        (times.get("a", 1) * a + times.get("b", 1) * wide * b) * itemsize + times.get("out", 1) * out * out_itemsize
    )


def torch_product(a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: torch.Tensor) -> int:
    """The same, for FlopCounterMode: of all rows, since the groups' lengths are on the device."""
    if a.dim() == b.dim() == 2:  # groups along the inner dimension
        return 2 * a.numel() * b.shape[1]
    return 2 * math.prod(out_val.shape[:-1]) * a.shape[-1] * b.shape[-1]
