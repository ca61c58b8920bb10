"""Attention over packed sequences, caches and pages, in torch: right, and small enough to be broken in every way."""

import math

import torch
from claims import HEADS, claimed

from registry import Requires, Variant
from registry.ops.attention_varlen.outputs import new_lse, new_out

CALLS, KEPT = [], {}


def keys_of(x, scale, b, cu_seqlens_k, seqused_k, block_table):
    """float32 [keys, Hkv, D] of sequence b, wherever it keeps them."""
    if cu_seqlens_k is not None:
        at = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
    elif block_table is None:
        at = (b, slice(0, int(seqused_k[b])))
    else:
        place, page = torch.arange(int(seqused_k[b])), x.shape[1]
        at = (block_table[b, place // page].long(), place % page)
    found = x[at].float()
    if scale is None:
        return found
    if scale.dim() > 1:  # one a token and head, beside the keys
        return found * scale[at][..., None]
    return found * (scale[:, None] if len(scale) > 1 else scale)


def packed(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    block_table,
    max_seqlen_q,
    max_seqlen_k,
    k_scale,
    v_scale,
    sinks,
    alibi_slopes,
    causal,
    window,
    softcap,
    return_lse,
    out,
    scale,
    config,
):
    result, lse = new_out(q, v) if out is None else out, new_lse(q)
    left, right = window if window is not None else (-1, -1)
    group = q.shape[1] // k.shape[-2]
    for b in range(len(cu_seqlens_q) - 1):
        start, end = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1])
        where = b, cu_seqlens_k, seqused_k, block_table
        k_ = keys_of(k, k_scale, *where).repeat_interleave(group, 1)
        v_ = keys_of(v, v_scale, *where).repeat_interleave(group, 1)
        keys, count = len(k_), end - start
        for first in range(0, count, config["BLOCK_M"]):
            rows = slice(first + start, min(first + config["BLOCK_M"], count) + start)
            row = torch.arange(rows.start - start, rows.stop - start)[:, None] + keys - count
            column = torch.arange(keys)
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), k_) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            if alibi_slopes is not None:
                scores = scores - alibi_slopes[:, None, None] * (row - column).abs()
            hidden = torch.zeros(scores.shape[1:], dtype=torch.bool)
            if causal:
                hidden |= column > row
            if left >= 0:
                hidden |= column < row - left
            if right >= 0:
                hidden |= column > row + right
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, row.shape[0], 1)], -1)
            total = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - total.nan_to_num(neginf=0.0)[..., None])[..., :keys]
            result[rows] = torch.einsum("hqk,khd->qhd", weights, v_).to(q.dtype)
            lse[:, rows] = total
    return result, lse if return_lse else None


VARIANT = Variant(
    "test.packed",
    op="attention_varlen",
    run=packed,
    requires=Requires(
        dtypes=("float32", "bfloat16"),
        kv_layouts=("packed", "cache", "paged"),
        page_size=(1, 256),
        kv_dtypes=("int8",),
        kv_scales=("tensor", "head", "token"),
        unit_inner_stride=False,
        **HEADS,
        **claimed("causal window softcap sinks alibi lse gqa out"),
    ),
    configs=[{"BLOCK_M": 128}, {"BLOCK_M": 16}],
)
__all__ = ["CALLS", "KEPT", "VARIANT"]
