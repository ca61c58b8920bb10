"""Gradients of packed attention by the formula, in torch: right, and small enough to be broken."""

import math

import torch
from claims import HEADS, claimed

from registry import Requires, Variant


def gradients(
    grad_out,
    q,
    k,
    v,
    out,
    lse,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    sinks,
    alibi_slopes,
    causal,
    window,
    softcap,
    scale,
    grad_lse,
    deterministic,
    config,
):
    group = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))
    dsinks = None if sinks is None else torch.zeros(sinks.shape)
    left, right = window if window is not None else (-1, -1)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        keys = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        q_, k_, v_, g_, o_ = (t.float().transpose(0, 1) for t in (q[rows], k[keys], v[keys], grad_out[rows], out[rows]))
        k_, v_ = (t.repeat_interleave(group, 0) for t in (k_, v_))
        row = torch.arange(q_.shape[1])[:, None] + k_.shape[1] - q_.shape[1]
        column = torch.arange(k_.shape[1])
        scores, slope = q_ @ k_.mT * scale, 1.0
        if softcap:
            capped = torch.tanh(scores / softcap)
            scores, slope = softcap * capped, 1.0 - capped.square()
        if alibi_slopes is not None:
            scores = scores - alibi_slopes[:, None, None] * (row - column).abs()
        hidden = torch.zeros(scores.shape[1:], dtype=torch.bool)
        if causal:
            hidden |= column > row
        if left >= 0:
            hidden |= column < row - left
        if right >= 0:
            hidden |= column > row + right
        lse_ = lse[:, rows]
        weights = torch.exp(scores.masked_fill(hidden, -math.inf) - lse_.nan_to_num(neginf=0.0)[..., None])
        delta = (g_ * o_).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse[:, rows]
        inner = weights * (g_ @ v_.mT - delta[..., None]) * slope
        dq[rows] = (inner @ k_ * scale).transpose(0, 1)
        dk[keys] = (inner.mT @ q_ * scale).unflatten(0, (-1, group)).sum(1).transpose(0, 1)
        dv[keys] = (weights.mT @ g_).unflatten(0, (-1, group)).sum(1).transpose(0, 1)
        if sinks is not None:
            share = torch.exp(sinks.float()[:, None] - lse_).masked_fill(lse_.isinf(), 0.0)
            dsinks -= (share * delta).sum(1)
    grads = tuple(x.to(t.dtype) for x, t in ((dq, q), (dk, k), (dv, v)))
    return grads if sinks is None else (*grads, dsinks.to(sinks.dtype))


VARIANT = Variant(
    "test.packed_backward",
    op="attention_varlen_backward",
    run=gradients,
    requires=Requires(
        dtypes=("float32", "bfloat16"),
        kv_layouts=("packed",),
        unit_inner_stride=False,
        **HEADS,
        **claimed("causal window softcap sinks alibi lse gqa grad_lse"),
    ),
)
__all__ = ["VARIANT"]
