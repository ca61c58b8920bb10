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
    if seen is None and keys and sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1), v), torch.logsumexp(scores, dim=-1)
    # A row without keys, or with all of its weight on a sink of +inf, is given one score for all, and nothing of it is
    # kept: no NaN, in gradients too.
    empty = torch.full((rows,), not keys, device=q.device) if seen is None else ~seen.any(dim=-1)
    rest = scores.new_full((), -torch.inf)  # not from a number of the host: a graph that is being captured takes none
    if sinks is not None:  # one more column in the softmax's sum
        rest = sinks.to(scores.dtype)[:, None]
        empty = empty | (rest == torch.inf)
        scores = torch.cat([scores, rest[..., None].expand(*scores.shape[:-1], 1)], dim=-1)
    scores = scores.masked_fill(empty[..., None], 0.0)
    weights = torch.softmax(scores, dim=-1)[..., :keys].masked_fill(empty[..., None], 0.0)
    lse = torch.where(empty, rest, torch.logsumexp(scores, dim=-1))
    return torch.matmul(weights, v), lse
