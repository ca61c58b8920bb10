"""xFormers' memory-efficient attention as built into torch. Its LSE is padded to 32 rows."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from registry.plugins.torch_attention.common import ANY_ORDER, HALVES, no_blind_rows

aten = torch.ops.aten
NO_MASK, BOTTOM_RIGHT, LSE_ROWS = 0, 2, 32


def efficient(q, k, v, *, causal, return_lse, scale, config):
    out, lse, *_ = aten._efficient_attention_forward(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        None,
        None,
        None,
        None,
        0.0,
        BOTTOM_RIGHT if causal else NO_MASK,
        return_lse,
        scale=scale,
    )
    return out.transpose(1, 2), lse[:, :, : q.shape[2]].contiguous() if return_lse else None


def efficient_backward(grad_out, q, k, v, out, lse, *, causal, scale, config):
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    rows = -q.shape[2] % LSE_ROWS
    out = out.transpose(1, 2).contiguous()  # it reads `out` as dense [B, S, H, D], whatever the strides say
    grads = aten._efficient_attention_backward(
        grad_out.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        out,
        None,
        None,
        q.shape[2],
        k.shape[2],
        pad(lse, (0, rows), value=math.inf),
        0.0,
        seed,
        seed,
        BOTTOM_RIGHT if causal else NO_MASK,
        False,
        scale=scale,
    )
    return tuple(grad.transpose(1, 2) for grad in grads[:3])


CLAIMS = dict(
    arch=("sm70+",),
    dtypes=(*HALVES, "float32"),
    head_dim=(8, 512),
    head_dim_multiple=8,
    head_dim_v=(8, 512),
    head_dim_v_multiple=8,
    layouts=ANY_ORDER,
    causal=True,
    cross_length=True,
    ieee=True,
    rule=no_blind_rows,
    base_alignment=16,
    stride_alignment=16,
    deterministic=True,
)
BACKWARD = {"deterministic": False}
