"""Gradients of attention by the formula, in torch: right, and small enough to be broken."""

import math
import random

import torch
from claims import HEADS, claimed

from registry import Requires, Variant
from registry.ops.attention.outputs import new_out

CALLS = []


def gradients(grad_out, q, k, v, out, lse, *, causal, window, softcap, scale, grad_lse, deterministic, config):
    group, offset = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    q_, k_, v_, g_ = (t.float() for t in (q, k, v, grad_out))
    k_, v_ = (t.repeat_interleave(group, 1) for t in (k_, v_))
    scores, slope = q_ @ k_.mT * scale, 1.0
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = softcap * capped, 1.0 - capped.square()
    row, column = torch.arange(q.shape[2])[:, None] + offset, torch.arange(k.shape[2])
    left, right = window if window is not None else (-1, -1)
    hidden = torch.zeros(scores.shape[2:], dtype=torch.bool)
    if causal:
        hidden |= column > row
    if left >= 0:
        hidden |= column < row - left
    if right >= 0:
        hidden |= column > row + right
    shift = lse.nan_to_num(neginf=0.0)[..., None]
    weights = torch.exp(scores.masked_fill(hidden, -math.inf) - shift)
    delta = (g_ * out.float()).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse[..., None]
    inner = weights * (g_ @ v_.mT - delta) * slope
    dq = inner @ k_ * scale
    dk = (inner.mT @ q_ * scale).unflatten(1, (-1, group)).sum(2)
    dv = (weights.mT @ g_).unflatten(1, (-1, group)).sum(2)
    return tuple(new_out(like, like).copy_(grad) for like, grad in ((q, dq), (k, dk), (v, dv)))


VARIANT = Variant(
    "test.kernel_backward",
    op="attention_backward",
    run=gradients,
    requires=Requires(
        dtypes=("float32", "bfloat16"),
        layouts=("bhsd", "bshd", "strided"),
        **HEADS,
        **claimed("causal window softcap lse gqa cross_length grad_lse"),
    ),
)
__all__ = ["CALLS", "VARIANT", "random"]
