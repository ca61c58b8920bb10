"""What attention_varlen costs, as far as the host knows: lengths are device memory, so all are taken for their share.

Queries are taken to be spread evenly over the sequences, and each sequence for as long as the host knows it may be: the
mean of packed keys, or the maximum of a cache. A workload, which knows its lengths, says better (tuning.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry.ops.parts.masks import UNLIMITED, Window


def visible_pairs(queries: int, keys: int, causal: bool, window: Window | None) -> int:
    """How many (query, key) pairs of a sequence one head sees."""
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    right = 0 if causal else right
    if left == UNLIMITED and right == UNLIMITED:
        return queries * keys
    total = 0
    for row in range(queries):
        at = row + keys - queries
        low = 0 if left == UNLIMITED else max(0, at - left)
        high = keys - 1 if right == UNLIMITED else min(keys - 1, at + right)
        total += max(0, high - low + 1)
    return total


def flops_of(problem: Any, lengths: Iterable[tuple[int, int]]) -> float:
    """Floating-point operations of the matrix products for these (queries, keys); the backward has five for two."""
    pairs = sum(visible_pairs(*each, problem.causal, problem.window) for each in lengths) * problem.heads_q
    d, dv = problem.head_dim, problem.head_dim_v
    return float(2 * pairs * (3 * d + 2 * dv if problem.op.endswith("_backward") else d + dv))


def flops(problem: Any) -> float:
    """The same where nobody knows the lengths."""
    keys = problem.total_k // max(problem.batch, 1) if problem.kv_layout == "packed" else problem.max_seqlen_k
    each = (-(-problem.total_q // max(problem.batch, 1)), keys)
    return float(problem.batch * flops_of(problem, [each]))
