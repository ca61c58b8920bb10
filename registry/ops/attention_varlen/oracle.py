"""The oracle: each sequence by the definition, differentiable, in any dtype. It waits for the lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from registry.ops.parts.masks import Window, visible


def keys_of(b: int, k: torch.Tensor, scale: torch.Tensor | None, given: dict[str, Any]) -> torch.Tensor:
    """[length, Hkv, D]: the keys (or values) of sequence b out of whatever layout, quantised ones times their scale."""
    table, seqused, cu_seqlens_k = given["block_table"], given["seqused_k"], given["cu_seqlens_k"]
    if cu_seqlens_k is not None:
        at: Any = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
    elif table is None:
        at = (b, slice(0, int(seqused[b])))
    else:
        slots = torch.arange(int(seqused[b]), device=k.device)
        at = (table[b].long()[slots // k.shape[1]], slots % k.shape[1])
    found = k[at]
    if scale is None:
        return found
    found = found.to(torch.float64)
    if scale.dim() == k.dim() - 1 and scale.shape == k.shape[:-1]:
        return found * scale[at].to(torch.float64)[..., None]
    return found * scale.to(torch.float64).reshape(1, -1, 1)


def sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, given: dict[str, Any]
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows of q, keys, values) of each sequence."""
    bounds = cu_seqlens_q.tolist()
    for b in range(len(bounds) - 1):
        yield (
            slice(bounds[b], bounds[b + 1]),
            keys_of(b, k, given["k_scale"], given),
            keys_of(b, v, given["v_scale"], given),
        )


def distances(rows: int, keys: int, device: torch.device, shift: int | None = None) -> torch.Tensor:
    """[rows, keys]: how far each key is from each query, aligned bottom-right; what ALiBi's slopes multiply."""
    at = torch.arange(rows, device=device)[:, None] + (keys - rows if shift is None else shift)
    return (at - torch.arange(keys, device=device)[None, :]).abs()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    window: Window | None,
    softcap: float,
    scale: float,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    shift: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [n, Hq, Dv], lse [Hq, n]) of one sequence, q [n, Hq, D], k [m, Hkv, D], in the dtype of the operands.

    `shift` says at which key the first query stands, where these are a piece of a sequence and not all of it.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    if group > 1:
        k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = torch.matmul(q, k.mT) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        far = distances(q.shape[1], k.shape[1], q.device, shift).to(scores.dtype)
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * far
    seen = visible(q.shape[1], k.shape[1], causal, window, q.device, shift)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more column in the softmax's sum, which makes a row without keys like any other
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=-1)
        weights, lse = torch.softmax(scores, dim=-1)[..., :-1], torch.logsumexp(scores, dim=-1)
    else:
        blind = torch.full(scores.shape[1:2], not k.shape[1], dtype=torch.bool, device=q.device)
        if seen is not None:
            blind = ~seen.any(dim=-1)
        scores = scores.masked_fill(blind[:, None], 0.0)
        weights = torch.softmax(scores, dim=-1).masked_fill(blind[:, None], 0.0)
        lse = torch.logsumexp(scores, dim=-1).masked_fill(blind, -torch.inf)
    return torch.matmul(weights, v).transpose(0, 1), lse


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    given: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float64,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, Dv], lse [Hq, T]) of all sequences."""
    outs, lses = [], []
    for rows, keys, values in sequences(q, k, v, cu_seqlens_q, given):
        out, lse = attend(
            q[rows].to(dtype),
            keys.to(dtype),
            values.to(dtype),
            sinks=given["sinks"],
            alibi_slopes=given["alibi_slopes"],
            **how,
        )
        outs.append(out)
        lses.append(lse)
    if not outs:
        return q.new_zeros((0, q.shape[1], v.shape[-1]), dtype=dtype), q.new_zeros((q.shape[1], 0), dtype=dtype)
    return torch.cat(outs), torch.cat(lses, dim=1)
