"""In what batches are alike: coordinates in which near ones are likely to be served best by the same kernel."""

from __future__ import annotations

from typing import Any

from registry.contract.likeness import octaves, rounding_up

ROWS = 64
"""Of the smallest tile: the rows of grouped heads share it."""
FLAGS = ("causal", "softcap", "window", "sinks", "alibi")


def coordinates(problem: Any) -> dict[str, float]:
    """Lengths as they are at most and in the mean, heads, how many tiles an SM has, masks, and how keys lie."""
    sequences, heads = max(problem.batch, 1), problem.heads_kv
    group = problem.heads_q // max(heads, 1)
    keys = problem.total_k or sequences * problem.max_seqlen_k
    rows = max(group * -(-problem.total_q // sequences), 1)  # of a sequence and a head of keys
    tiles = sequences * heads * -(-rows // ROWS)
    return {
        "longest": octaves(problem.max_seqlen_q),
        "mean": octaves(problem.total_q / sequences),
        "keys": octaves(problem.max_seqlen_k),
        "mean_keys": octaves(keys / sequences),
        "batch": octaves(sequences),
        "heads": octaves(heads),
        "group": octaves(group),
        "head_dim": octaves(problem.head_dim),
        "rows": octaves(rows),
        "waste": rounding_up(rows, ROWS),
        "tiles": octaves(tiles / max(problem.target.sm_count, 1)),
        "work": octaves(problem.total_q * problem.heads_q * problem.max_seqlen_k),
        "cached": octaves(keys * heads),
        "page": octaves(problem.page_size) if problem.page_size else -2.0,
        "uneven": octaves(problem.max_seqlen_q * sequences / max(problem.total_q, 1)),
        **{name: 2.0 * bool(getattr(problem, name)) for name in FLAGS},
        f"kv={problem.kv_layout}": 1.0,
        **({"narrow_keys": 2.0} if problem.kv_dtype != problem.dtype else {}),
        "bits_32": 4.0 * (problem.dtype == "float32"),
        "lse": 0.5 * problem.lse,
        **({"deterministic": 2.0 * problem.deterministic} if problem.op == "attention_varlen_backward" else {}),
    }
