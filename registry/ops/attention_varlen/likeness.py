"""In what batches are alike: coordinates in which near ones are likely to be served best by the same kernel."""

from __future__ import annotations

from typing import Any

from registry.contract.likeness import counted, octaves, rounding_up
from registry.ops.parts.heads import tile_width
from registry.ops.parts.masks import UNLIMITED, seen_by_each

ROWS = 64
"""Of the smallest tile: the rows of grouped heads share it."""
FLAGS = ("causal", "softcap", "window", "sinks", "alibi")

_counted = counted(
    "longest",
    "mean",
    "keys",
    "mean_keys",
    "batch",
    "heads",
    "group",
    "head_dim",
    "rows",
    "tiles",
    "work",
    "cached",
    "uneven",
    "seen",
    "memory",
    "width",
)
"""What of these are sizes."""


def coordinates(problem: Any) -> dict[str, float]:
    """Lengths as they are at most and in the mean, heads, how many tiles an SM has, masks and what they leave to be
    seen, how keys lie, and what an SM has of the memory."""
    sequences, heads = max(problem.batch, 1), problem.heads_kv
    group = problem.heads_q // max(heads, 1)
    keys = problem.total_k or sequences * problem.max_seqlen_k
    rows = max(group * -(-problem.total_q // sequences), 1)  # of a sequence and a head of keys
    tiles = sequences * heads * -(-rows // ROWS)
    queries, longest, window = max(problem.max_seqlen_q, 1), problem.max_seqlen_k, problem.window
    # Without this a window of 128 keys over a long cache was taken for one of 4,096.
    seen = seen_by_each(queries, longest, problem.causal, window)
    reach = queries + window[0] if window is not None and window[0] != UNLIMITED else longest
    found = {
        "longest": problem.max_seqlen_q,
        "mean": problem.total_q / sequences,
        "keys": problem.max_seqlen_k,
        "mean_keys": keys / sequences,
        "batch": sequences,
        "heads": heads,
        "group": group,
        "head_dim": problem.head_dim,
        "rows": rows,
        "waste": rounding_up(rows, ROWS),
        "tiles": tiles / max(problem.target.sm_count, 1),
        "work": problem.total_q * problem.heads_q * seen,
        "cached": min(keys, sequences * reach) * heads,
        "page": octaves(problem.page_size) if problem.page_size else -2.0,
        "uneven": problem.max_seqlen_q * sequences / max(problem.total_q, 1),
        "seen": seen,
        "memory": problem.target.memory_gbs / max(problem.target.sm_count, 1),
        "width": tile_width(problem.head_dim),
        **{name: 2.0 * bool(getattr(problem, name)) for name in FLAGS},
        f"kv={problem.kv_layout}": 1.0,
        **({"narrow_keys": 2.0} if problem.kv_dtype != problem.dtype else {}),
        "bits_32": 4.0 * (problem.dtype == "float32"),
        "lse": 0.5 * problem.lse,
        **({"deterministic": 2.0 * problem.deterministic} if problem.op == "attention_varlen_backward" else {}),
    }
    return _counted(found)
