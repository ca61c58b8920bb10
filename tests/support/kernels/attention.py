"""Attention over blocks of keys, in torch: right, and small enough to be broken in every way that a kernel is."""

import math
import random
from functools import partial

import torch
from claims import HEADS, claimed

from registry import Requires, Variant
from registry.ops.attention.outputs import new_lse, new_out

CALLS = []
SCRATCH = {}


def attention(q, k, v, *, causal, window, softcap, return_lse, scale, config):
    out, lse = new_out(q, v), new_lse(q)
    length, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    left, right = window if window is not None else (-1, -1)
    for start in range(0, length, config["BLOCK_M"]):
        rows = slice(start, min(start + config["BLOCK_M"], length))
        row = torch.arange(rows.start, rows.stop)[:, None] + keys - length
        top = torch.full((*q.shape[:2], rows.stop - start, 1), -math.inf)
        total, acc = torch.zeros_like(top), torch.zeros(*top.shape[:3], v.shape[3])
        for first in range(0, keys, config["BLOCK_N"]):
            last = min(first + config["BLOCK_N"], keys)
            k_ = k[:, :, first:last].float().repeat_interleave(group, 1)
            v_ = v[:, :, first:last].float().repeat_interleave(group, 1)
            scores = q[:, :, rows].float() @ k_.mT * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            column = torch.arange(first, last)
            hidden = torch.zeros(scores.shape[2:], dtype=torch.bool)
            if causal:
                hidden |= column > row
            if left >= 0:
                hidden |= column < row - left
            if right >= 0:
                hidden |= column > row + right
            scores = scores.masked_fill(hidden, -math.inf)
            higher = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = higher.nan_to_num(neginf=0.0)
            weights, fading = torch.exp(scores - shift), torch.exp(top - shift)
            total = total * fading + weights.sum(-1, keepdim=True)
            acc = acc * fading + weights @ v_
            top = higher
        out[:, :, rows] = (acc / torch.where(total > 0, total, 1.0)).to(q.dtype)
        lse[:, :, rows] = (torch.log(total) + top)[..., 0]
    return out, lse if return_lse else None


def prepare(problem, config):
    fixed = {"causal": problem.causal, "window": problem.window, "softcap": problem.softcap, "return_lse": problem.lse}

    def launch(q, k, v, *, scale):
        return attention(q, k, v, scale=scale, config=config, **fixed)

    return launch


VARIANT = Variant(
    "test.kernel",
    op="attention",
    run=attention,
    prepare=prepare,
    requires=Requires(
        dtypes=("float32", "bfloat16"),
        layouts=("bhsd", "bshd", "strided"),
        **HEADS,
        **claimed("causal window softcap lse gqa cross_length"),
    ),
    configs=[{"BLOCK_M": 128, "BLOCK_N": 128}, {"BLOCK_M": 64, "BLOCK_N": 96}],
)
__all__ = ["CALLS", "SCRATCH", "VARIANT", "partial", "random"]
