"""What attention costs: visible pairs, floating-point operations, bytes."""

from __future__ import annotations

from registry.ops.attention.arguments import UNLIMITED
from registry.ops.attention.problem import AttentionProblem


def visible_pairs(problem: AttentionProblem) -> int:
    """How many (query, key) pairs one head sees."""
    s, t = problem.seqlen_q, problem.seqlen_k
    left, right = problem.window if problem.window is not None else (UNLIMITED, UNLIMITED)
    right = 0 if problem.causal else right
    if left == UNLIMITED and right == UNLIMITED:
        return s * t
    total = 0
    for row in range(s):
        at = row + t - s
        low = 0 if left == UNLIMITED else max(0, at - left)
        high = t - 1 if right == UNLIMITED else min(t - 1, at + right)
        total += max(0, high - low + 1)
    return total


def flops(problem: AttentionProblem) -> float:
    """Floating-point operations of the matrix products, masked pairs left out (the backward has five for two)."""
    pairs = problem.batch * problem.heads_q * visible_pairs(problem)
    d, dv = problem.head_dim, problem.head_dim_v
    if problem.op == "attention_backward":
        return 2.0 * pairs * (3 * d + 2 * dv)
    return 2.0 * pairs * (d + dv)


def bytes_moved(problem: AttentionProblem, itemsize: int) -> int:
    """The least that must pass through device memory: each operand read once, each result written once."""
    q = problem.batch * problem.heads_q * problem.seqlen_q * problem.head_dim
    o = problem.batch * problem.heads_q * problem.seqlen_q * problem.head_dim_v
    k = problem.batch * problem.heads_kv * problem.seqlen_k * problem.head_dim
    v = problem.batch * problem.heads_kv * problem.seqlen_k * problem.head_dim_v
    once = (q + k + v + o) * itemsize
    return 2 * once + o * itemsize if problem.op == "attention_backward" else once
