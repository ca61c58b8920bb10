"""What a product costs."""

from __future__ import annotations

import math
from typing import Any

import torch

from registry.ops.matmul.problem import MatmulProblem


def flops(problem: MatmulProblem) -> float:
    """Floating-point operations of the product; the epilogue is not counted."""
    return 2.0 * problem.batch * problem.m * problem.n * problem.k


def bytes_moved(problem: MatmulProblem) -> float:
    """Both operands read once, the product written once."""
    a, b, out = (getattr(torch, name).itemsize for name in (problem.dtype, problem.dtype_b, problem.out_dtype))
    m, n, k = problem.m, problem.n, problem.k
    return float(problem.batch * (m * k * a + k * n * b + m * n * out))


def torch_product(a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: torch.Tensor) -> int:
    """The same, for FlopCounterMode."""
    return 2 * math.prod(out_val.shape) * a.shape[-1]
