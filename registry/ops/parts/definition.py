"""Attention by its definition, differentiable, in the dtype of the operands: what both oracles come down to."""

from __future__ import annotations

import torch

from registry.ops.parts.masks import Window, visible


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
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    shift: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [..., Hq, S, Dv], lse [..., Hq, S]) of q [..., Hq, S, D] over k [..., Hkv, Sk, D].

    `shift` says at which key the first query stands, where these are a piece of a sequence and not all of it.
    """
    group, rows, keys = q.shape[-3] // max(k.shape[-3], 1), q.shape[-2], k.shape[-2]
    if group != 1:
        k, v = k.repeat_interleave(group, dim=-3), v.repeat_interleave(group, dim=-3)
    scores = torch.matmul(q, k.mT) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if alibi_slopes is not None:
        far = distances(rows, keys, q.device, shift).to(scores.dtype)
        scores = scores - alibi_slopes.to(scores.dtype)[:, None, None] * far
    seen = visible(rows, keys, causal, window, q.device, shift)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # one more column in the softmax's sum, which makes a row without keys like any other
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
        weights, lse = torch.softmax(scores, dim=-1)[..., :-1], torch.logsumexp(scores, dim=-1)
    elif seen is None and keys:
        weights, lse = torch.softmax(scores, dim=-1), torch.logsumexp(scores, dim=-1)
    else:
        # A row without keys is given one score for all, and then nothing of it is kept: no NaN, in gradients too.
        blind = torch.ones(rows, dtype=torch.bool, device=q.device) if seen is None else ~seen.any(dim=-1)
        scores = scores.masked_fill(blind[:, None], 0.0)
        weights = torch.softmax(scores, dim=-1).masked_fill(blind[:, None], 0.0)
        lse = torch.logsumexp(scores, dim=-1).masked_fill(blind, -torch.inf)
    return torch.matmul(weights, v), lse
