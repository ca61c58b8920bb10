"""What a product costs."""

from __future__ import annotations

import math
from typing import Any

import torch

from registry.ops.matmul.problem import MatmulProblem


def flops(problem: MatmulProblem) -> float:
    """Floating-point operations of the product; the epilogue is not counted."""
    return 2.0 * problem.batch * problem.m * problem.n * problem.k


def torch_product(a: torch.Tensor, b: torch.Tensor, *_: Any, out_val: torch.Tensor) -> int:
    """The same, for FlopCounterMode."""
    return 2 * math.prod(out_val.shape) * a.shape[-1]
