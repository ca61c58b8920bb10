"""Ragged batches for tests of attention_varlen: packed, cached and paged, with NaN where no length reaches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

QUERIES, KEYS = (3, 0, 7, 1, 2), (5, 4, 0, 9, 2)


def starts(lengths: Any) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def batch(
    layout: str = "packed",
    queries: Any = QUERIES,
    keys: Any = KEYS,
    heads: tuple[int, int] = (4, 2),
    dv: int | None = None,
    dtype: torch.dtype = torch.float64,
    page: int = 4,
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """(q, k, v) and the arguments that go with them."""
    (hq, hkv), dv = heads, 8 if dv is None else dv
    q = torch.randn(sum(queries), hq, 8).to(dtype)
    how: dict[str, Any] = {"cu_seqlens_q": starts(queries), "max_seqlen_q": max(queries), "max_seqlen_k": max(keys)}
    if layout == "packed":
        how["cu_seqlens_k"] = starts(keys)
        return (q, *(torch.randn(sum(keys), hkv, width).to(dtype) for width in (8, dv))), how
    how["seqused_k"] = torch.tensor(keys, dtype=torch.int32)
    if layout == "cache":
        slots = [(b, i) for b, n in enumerate(keys) for i in range(n)]
        shape: tuple[int, int] = (len(keys), max(keys) + 2)
    else:
        width = -(-max(keys) // page)
        shuffled = torch.randperm(len(keys) * width + 2)[: len(keys) * width].view(len(keys), width)
        how["block_table"] = shuffled.to(torch.int32)
        slots = [(int(shuffled[b, i // page]), i % page) for b, n in enumerate(keys) for i in range(n)]
        shape = (len(keys) * width + 2, page)
    where = tuple(torch.tensor(index) for index in zip(*slots, strict=True))
    found = []
    for width in (8, dv):
        cache = torch.full((*shape, hkv, width), math.nan, dtype=dtype)
        cache[where] = torch.randn(len(slots), hkv, width).to(dtype)
        found.append(cache)
    return (q, *found), how


def keys_of(cache: torch.Tensor, b: int, how: dict[str, Any]) -> torch.Tensor:
    """The keys of one sequence, [n, Hkv, D], found one by one."""
    if "cu_seqlens_k" in how:
        return cache[how["cu_seqlens_k"][b] : how["cu_seqlens_k"][b + 1]]
    rows = []
    for i in range(int(how["seqused_k"][b])):
        page = cache.shape[1]
        rows.append(cache[how["block_table"][b, i // page], i % page] if "block_table" in how else cache[b, i])
    return torch.stack(rows) if rows else cache.new_zeros((0, *cache.shape[2:]))


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Any = None,
    softcap: float = 0.0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by loops over sequences, heads and queries: an oracle of the oracle, in float64."""
    bounds = how["cu_seqlens_q"].tolist()
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[-1], dtype=torch.float64)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64)
    left, right = window if window is not None else (-1, -1)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    for b, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        keys, values = keys_of(k, b, how).double(), keys_of(v, b, how).double()
        shift = keys.shape[0] - (end - begin)
        for i in range(end - begin):
            seen = [
                j
                for j in range(keys.shape[0])
                if (not causal or j <= i + shift)
                and (left == -1 or j >= i + shift - left)
                and (right == -1 or j <= i + shift + right)
            ]
            for h in range(q.shape[1]):
                kv = h * k.shape[-2] // q.shape[1]
                scores = [float(keys[j, kv] @ q[begin + i, h].double()) * scale for j in seen]
                scores = [softcap * math.tanh(s / softcap) for s in scores] if softcap else scores
                if alibi_slopes is not None:
                    slope = float(alibi_slopes[h])
                    scores = [s - slope * abs(i + shift - j) for s, j in zip(scores, seen, strict=True)]
                sink = [] if sinks is None else [float(sinks[h])]
                if scores or sink:
                    total = torch.logsumexp(torch.tensor([*scores, *sink], dtype=torch.float64), 0)
                    lse[h, begin + i] = total
                    for s, j in zip(scores, seen, strict=True):
                        out[begin + i, h] += math.exp(s - float(total)) * values[j, kv]
    return out, lse
