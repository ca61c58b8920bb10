"""What attention_varlen costs, as far as the host knows: lengths are device memory, so all are taken for their share.

Queries are taken to be spread evenly over the sequences, and each sequence for as long as the host knows it may be: the
mean of packed keys, or the maximum of a cache. A workload, which knows its lengths, says better (tuning.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from registry.ops.parts.heads import flops_of_pairs
from registry.ops.parts.masks import visible_pairs, window_of
from registry.ops.tensors import is_virtual


def flops_of(problem: Any, lengths: Iterable[tuple[int, int]]) -> float:
    """Floating-point operations of the matrix products for these (queries, keys); the backward has five for two."""
    pairs = sum(visible_pairs(*each, problem.causal, problem.window) for each in lengths) * problem.heads_q
    return float(flops_of_pairs(pairs, problem.head_dim, problem.head_dim_v, problem.op.endswith("_backward")))


def flops(problem: Any) -> float:
    """The same where nobody knows the lengths."""
    keys = problem.total_k // max(problem.batch, 1) if problem.kv_layout == "packed" else problem.max_seqlen_k
    each = (-(-problem.total_q // max(problem.batch, 1)), keys)
    return float(problem.batch * flops_of(problem, [each]))


def bytes_moved(problem: Any) -> float:
    """The least that must pass through device memory: each operand read once, each result written once."""
    itemsize, kv_itemsize = (getattr(torch, name).itemsize for name in (problem.dtype, problem.kv_dtype))
    d, dv = problem.head_dim, problem.head_dim_v
    out = problem.total_q * problem.heads_q * dv * itemsize
    keys = problem.total_k or problem.batch * problem.max_seqlen_k
    once = problem.total_q * problem.heads_q * d * itemsize + keys * problem.heads_kv * (d + dv) * kv_itemsize + out
    return float(2 * once + out if problem.op.endswith("_backward") else once)


# --- for FlopCounterMode, which sees the torch ops ------------------------------------------------------------------
#
# It counts what ran, so it waits for the lengths, as torch's own formulas for packed attention do. Where nobody can see
# them (fake tensors), all are taken for their share, as above.


def _lengths(
    q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: Any, used: Any, max_k: int
) -> Iterable[tuple[int, int]]:
    batch = cu_q.shape[0] - 1
    if not is_virtual(cu_q):
        keys = cu_k.diff() if cu_k is not None else used
        return zip(cu_q.diff().tolist(), keys.tolist(), strict=True)
    return [(-(-q.shape[0] // max(batch, 1)), k.shape[0] // max(batch, 1) if cu_k is not None else max_k)] * batch


def _of_tensors(
    q: torch.Tensor,
    v: torch.Tensor,
    lengths: Iterable[tuple[int, int]],
    causal: bool,
    left: int,
    right: int,
    backward: bool,
) -> int:
    window = window_of(left, right)
    pairs = q.shape[1] * sum(visible_pairs(*each, causal, window) for each in lengths)
    return flops_of_pairs(pairs, q.shape[2], v.shape[-1], backward)


def torch_forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used: Any, *rest: Any, out_val: Any) -> int:
    *_, max_k, causal, _scale, left, right, _softcap, _lse, _variant = rest
    return _of_tensors(q, v, _lengths(q, k, cu_q, cu_k, used, max_k), causal, left, right, backward=False)


def torch_backward(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *rest: Any, out_val: Any) -> int:
    cu_q, cu_k, *_, max_k, causal, _scale, left, right, _softcap = rest
    return _of_tensors(q, v, _lengths(q, k, cu_q, cu_k, None, max_k), causal, left, right, backward=True)
