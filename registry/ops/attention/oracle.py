"""The oracle: attention by its definition, differentiable, in any dtype."""

from __future__ import annotations

import torch

from registry.ops.parts.masks import Window, visible

__all__ = ["reference", "visible"]


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    window: Window | None,
    softcap: float,
    dtype: torch.dtype | None = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) by the definition, in `dtype` (None: as given). Differentiable; takes [B, H, S, D]."""
    q, k, v = (t if dtype is None else t.to(dtype) for t in (q, k, v))
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device)
    if seen is None:
        return torch.matmul(torch.softmax(scores, dim=-1), v), torch.logsumexp(scores, dim=-1)
    # A row without keys is given one score for all, and then nothing of it is kept: no NaN, in gradients too.
    blind = ~seen.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~seen & ~blind, -torch.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(blind, 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(blind.squeeze(-1), -torch.inf)
    return torch.matmul(weights, v), lse
