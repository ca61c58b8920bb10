"""What attention costs: floating-point operations, and bytes through memory."""

from __future__ import annotations

from typing import Any

import torch

from registry.ops.attention.problem import AttentionProblem
from registry.ops.parts.heads import flops_of_pairs
from registry.ops.parts.masks import visible_pairs, window_of


def flops(problem: AttentionProblem) -> float:
    """Floating-point operations of the matrix products, masked pairs left out (the backward has five for two)."""
    pairs = visible_pairs(problem.seqlen_q, problem.seqlen_k, problem.causal, problem.window)
    pairs *= problem.batch * problem.heads_q
    return float(flops_of_pairs(pairs, problem.head_dim, problem.head_dim_v, problem.op == "attention_backward"))


def bytes_moved(problem: AttentionProblem) -> float:
    """The least that must pass through device memory: each operand read once, each result written once."""
    itemsize = getattr(torch, problem.dtype).itemsize
    q = problem.batch * problem.heads_q * problem.seqlen_q * problem.head_dim
    o = problem.batch * problem.heads_q * problem.seqlen_q * problem.head_dim_v
    k = problem.batch * problem.heads_kv * problem.seqlen_k * problem.head_dim
    v = problem.batch * problem.heads_kv * problem.seqlen_k * problem.head_dim_v
    once = (q + k + v + o) * itemsize
    return float(2 * once + o * itemsize if problem.op == "attention_backward" else once)


# --- for FlopCounterMode, which sees the torch ops ------------------------------------------------------------------


def _of_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, left: int, right: int, backward: bool
) -> int:
    pairs = q.shape[0] * q.shape[1] * visible_pairs(q.shape[2], k.shape[2], causal, window_of(left, right))
    return flops_of_pairs(pairs, q.shape[3], v.shape[3], backward)


def torch_forward(
    q: Any, k: Any, v: Any, causal: bool, scale: float, left: int, right: int, *_: Any, out_val: Any
) -> int:
    return _of_tensors(q, k, v, causal, left, right, backward=False)


def torch_backward(
    grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, grad_lse: Any, *masks: Any, **_: Any
) -> int:
    causal, _scale, left, right, _softcap = masks
    return _of_tensors(q, k, v, causal, left, right, backward=True)
