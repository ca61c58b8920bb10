"""torch's blocked CPU kernel, and plain torch operations: slow, large, and able to do everything."""

from __future__ import annotations

import math

import torch

import registry
from registry.ops.attention.oracle import visible
from registry.ops.attention.outputs import new_out
from registry.plugins.torch_attention.common import ANY_ORDER, HALVES, no_blind_rows

aten = torch.ops.aten
UNLIMITED = -1


# --- the CPU kernel (aligned top-left: other alignments and windows go in as a mask) ------------------------------


def _cpu_mask(q, k, causal, window):
    """(is_causal, mask) for aten, additive in q's dtype."""
    if not causal and window is None:
        return False, None
    if window is None and q.shape[2] == k.shape[2]:
        return True, None
    row = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    column = torch.arange(k.shape[2])[None, :]
    left, right = window if window is not None else (UNLIMITED, 0)
    hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
    if left != UNLIMITED:
        hidden = hidden | (column < row - left)
    if right != UNLIMITED:
        hidden = hidden | (column > row + right)
    return False, torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -math.inf)


def _for_each_query_head(q, *tensors):
    """k and v with a head for each of q's: torch's backward of groups adds them up in q's dtype, which costs digits."""
    group = q.shape[1] // tensors[0].shape[1]
    return tensors if group == 1 else tuple(t.repeat_interleave(group, dim=1) for t in tensors)


def cpu(q, k, v, *, causal, window, return_lse, scale, config):
    is_causal, mask = _cpu_mask(q, k, causal, window)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, lse.to(torch.float32).contiguous() if return_lse else None


def cpu_backward(grad_out, q, k, v, out, lse, *, causal, window, deterministic, scale, config):
    heads, (k, v) = k.shape[1], _for_each_query_head(q, k, v)
    is_causal, mask = _cpu_mask(q, k, causal, window)
    if q.dtype is torch.float64:  # the LSE that was kept is a float32, and so would be the gradients' accuracy
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        lse = forward(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[1]
    lse = lse.to(_math_dtype(q.dtype))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    if heads == k.shape[1]:
        return dq, dk, dv
    return dq, *(t.unflatten(1, (heads, -1)).sum(2) for t in (dk, dv))


def _math_dtype(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


CPU_CLAIMS = dict(
    arch=("cpu",),
    dtypes=(*HALVES, "float32", "float64"),
    head_dim=(1, 2**16),
    layouts=ANY_ORDER,
    causal=True,
    window=True,
    gqa=True,
    cross_length=True,
    deterministic=True,
    ieee=True,
    rule=no_blind_rows,
)


# --- plain math -----------------------------------------------------------------------------------------------


def math_attention(q, k, v, *, causal, window, softcap, return_lse, scale, config):
    with torch.no_grad():
        out, lse = registry.attention.reference(
            q,
            k,
            v,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            return_lse=True,
            dtype=_math_dtype(q.dtype),
        )
    return out.to(q.dtype), lse.float() if return_lse else None


def math_backward(grad_out, q, k, v, out, lse, *, causal, window, softcap, deterministic, grad_lse, scale, config):
    """By the formula, since autograd is off where compilers call. Out and LSE are computed again, unrounded."""
    dtype, group = _math_dtype(q.dtype), q.shape[1] // k.shape[1]
    grad, q_, k_, v_ = (t.to(dtype) for t in (grad_out, q, k, v))
    k_, v_ = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (k_, v_))
    scores = torch.matmul(q_, k_.mT) * scale
    slope = scale
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = capped * softcap, (1.0 - capped.square()) * scale
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    if seen is not None:
        weights = weights.masked_fill(~seen, 0.0)  # NaN in rows without keys
    terms = torch.matmul(grad, v_.mT)
    terms = terms - (weights * terms).sum(-1, keepdim=True)
    if grad_lse is not None:
        terms = terms + grad_lse.to(dtype).unsqueeze(-1)
    terms = terms * weights * slope
    found = (torch.matmul(terms, k_), torch.matmul(terms.mT, q_), torch.matmul(weights.mT, grad))
    grouped = (t.unflatten(1, (-1, group)).sum(2) if i and group > 1 else t for i, t in enumerate(found))
    return tuple(new_out(like, like).copy_(t) for like, t in zip((q, k, v), grouped, strict=True))


MATH_CLAIMS = dict(
    arch=("any",),
    dtypes=(*HALVES, "float32", "float64"),
    head_dim=(1, 2**16),
    head_dim_v=(1, 2**16),
    layouts=ANY_ORDER,
    unit_inner_stride=False,
    causal=True,
    window=True,
    softcap=True,
    any_softcap=True,
    gqa=True,
    cross_length=True,
    deterministic=True,
    ieee=True,
)
MATH_BACKWARD = {"grad_lse": True}
