"""In what attentions are alike: coordinates in which near ones are likely to be served best by the same kernel."""

from __future__ import annotations

import math
from typing import Any

from registry.contract.likeness import counted, rounding_up, rounds
from registry.contract.noted import gcd
from registry.ops.parts.heads import tile_width
from registry.ops.parts.masks import seen_by_each

SHORT = 64
"""Rows of the smallest tile: as many queries or fewer are decoding to a kernel."""

KEYS = 128
"""Of a tile of the gradients, which has all query heads of its keys, or where tiles are few a half or a quarter of
them. Where it can be divided decides much: of 2,825 gradients, each asked of the others, 1.73% were lost without."""

_counted = counted(
    "queries",
    "keys",
    "heads",
    "head_dim",
    "group",
    "rows",
    "seen",
    "cached",
    "waves_64",
    "waves_128",
    "waves_192",
    "key_tiles",
    "key_waves",
    "halves",
    "packed",
    "width",
    "memory",
)
"""What of these are sizes."""


def coordinates(problem: Any) -> dict[str, float]:
    """Lengths, heads and rows in octaves, how full rounds of tiles are, how the heads that share keys can be divided or
    lie in one tile, what an SM has of the memory, and the masks."""
    queries, keys, dim = problem.seqlen_q, problem.seqlen_k, problem.head_dim
    heads, sms = problem.batch * problem.heads_q, problem.target.sm_count
    group = problem.heads_q // max(problem.heads_kv, 1)
    seen = seen_by_each(queries, keys, problem.causal, problem.window)
    key_tiles = problem.batch * problem.heads_kv * math.ceil(keys / KEYS)
    width = tile_width(dim)
    found = {
        "queries": queries,
        "keys": keys,
        "heads": heads,
        "head_dim": dim,
        "group": group,
        "rows": heads * queries,
        "seen": seen,
        "cached": problem.batch * problem.heads_kv * keys,
        "waves_64": rounds(heads * -(-queries // 64), sms),
        "waves_128": rounds(heads * -(-queries // 128), sms),
        "waves_192": rounds(heads * -(-queries // 192), sms),
        "key_tiles": key_tiles,
        "key_waves": rounds(key_tiles, sms),
        "halves": gcd(group, 4),
        "packed": group * queries,
        "waste_64": rounding_up(queries, 64),
        "waste_128": rounding_up(queries, 128),
        "causal": 2.0 * problem.causal,
        "window": 2.0 * (problem.window is not None),
        "softcap": 2.0 * bool(problem.softcap),
        "width": width,
        "whole_width": float(dim == width),
        "other_lengths": float(queries != keys),
        "short": 2.0 * (queries <= SHORT),
        "grouped": float(group > 1),
        "memory": problem.target.memory_gbs / max(sms, 1),
        "bits_32": 4.0 * (problem.dtype == "float32"),
        "lse": 0.5 * problem.lse,
        **({"deterministic": 2.0 * problem.deterministic} if problem.op == "attention_backward" else {}),
    }
    return _counted(found)
