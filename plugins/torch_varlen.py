"""Attention over ragged batches in torch: its FlashAttention-2 for packed sequences, its CPU kernel, and plain math."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.attention_varlen.oracle import distances, keys_of
from registry.ops.attention_varlen.outputs import new_lse, new_out
from registry.ops.parts.masks import visible

aten = torch.ops.aten
HALVES = ("float16", "bfloat16")
UNLIMITED = -1


# --- FlashAttention-2 as built into torch, which torch's varlen_attn calls (marks a row without keys by +inf) -------


def flash(q, k, v, *, cu_seqlens_k, seqused_k, causal, window, return_lse, scale, config, **queries):
    if cu_seqlens_k is None:  # a cache is packed sequences of equal length, of which the first keys are used
        cu_seqlens_k = torch.arange(k.shape[0] + 1, dtype=torch.int32, device=k.device) * k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    sides = {} if window is None else {"window_size_left": left, "window_size_right": right}
    out, lse, *_ = aten._flash_attention_forward(
        q,
        k,
        v,
        queries["cu_seqlens_q"],
        cu_seqlens_k,
        queries["max_seqlen_q"],
        queries["max_seqlen_k"],
        0.0,
        causal and window is None,
        False,
        scale=scale,
        seqused_k=seqused_k,
        **sides,
    )
    return out, lse.masked_fill(lse == math.inf, -math.inf) if return_lse else None


def flash_backward(grad_out, q, k, v, out, lse, *, causal, window, deterministic, scale, config, **lengths):
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    sides = {} if window is None else {"window_size_left": left, "window_size_right": right}
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    return aten._flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.masked_fill(lse == -math.inf, math.inf),
        lengths["cu_seqlens_q"],
        lengths["cu_seqlens_k"],
        lengths["max_seqlen_q"],
        lengths["max_seqlen_k"],
        0.0,
        causal and window is None,
        seed,
        seed.new_empty(()),
        scale=scale,
        **sides,
    )


def _flash_rule(problem: Any, config: Any) -> Iterator[Reason]:
    """It takes a right side for unlimited that is as long as the longest keys, and an unlimited one for just as long:
    early rows of a longer query see fewer."""
    right = problem.window[1] if problem.window is not None else 0
    if right == UNLIMITED or right >= problem.max_seqlen_k:
        longest = problem.max_seqlen_k + 1
        if problem.max_seqlen_q > longest:
            allowed = f"max_seqlen_q <= {longest}, or a right side < max_seqlen_k ({problem.max_seqlen_k})"
            yield Reason("semantics", "window", problem.window, allowed)
    for fact in problem.operands:
        if problem.kv_layout == "cache" and fact.name in "kv" and fact.strides[0] != fact.shape[1] * fact.strides[1]:
            yield Reason("stride", "strides", fact.strides, "sequences one after the other", operand=fact.name)


def _flash_backward_rule(problem: Any, config: Any) -> Iterator[Reason]:
    yield from _flash_rule(problem, config)
    if problem.target.arch in ("sm86", "sm89", "sm120") and problem.head_dim > 192:
        yield Reason("range", "head_dim", problem.head_dim, f"..192 on {problem.target.arch}")


# --- torch's CPU kernel, one sequence after the other (it knows no other mask than one that is added) ----------------


def each(
    q, k, v, *, causal, window, sinks, alibi_slopes, k_scale, v_scale, return_lse, out, scale, config,
    **lengths
):  # fmt: skip
    out = new_out(q, v) if out is None else out
    wide = _math_dtype(q.dtype)
    # Slopes times distances, and values times their scales, have more digits than a half has.
    kind = q.dtype if alibi_slopes is None and k_scale is None and v_scale is None else wide
    lse = new_lse(q).to(wide)
    bounds, group = lengths["cu_seqlens_q"].tolist(), q.shape[1] // k.shape[-2]
    for b, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        if start == stop:
            continue
        keys, values = (keys_of(b, t, s, lengths).to(kind) for t, s in ((k, k_scale), (v, v_scale)))
        if not keys.shape[0]:
            out[start:stop], lse[:, start:stop] = 0.0, -math.inf
            continue
        one, one_lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q[start:stop].transpose(0, 1)[None].to(kind),
            keys.transpose(0, 1).repeat_interleave(group, dim=0)[None],
            values.transpose(0, 1).repeat_interleave(group, dim=0)[None],
            0.0,
            False,
            attn_mask=_added(keys, stop - start, causal, window, alibi_slopes),
            scale=scale,
        )
        out[start:stop], lse[:, start:stop] = one[0].transpose(0, 1), one_lse[0]
        blind = _blind(stop - start, keys.shape[0], causal, window)
        out[start:stop][blind], lse[:, start:stop][:, blind] = 0.0, -math.inf
    if sinks is not None:
        # A sink takes its share of the softmax's sum, and gives nothing.
        with_sink = torch.logaddexp(lse, sinks.to(wide)[:, None])
        share = torch.exp(lse - with_sink).masked_fill(lse == -math.inf, 0.0)  # nobody's, where a sink is -inf, too
        out.mul_(share.T[..., None].to(out.dtype))
        lse = with_sink
    return out, lse.float() if return_lse else None


def _added(keys, queries, causal, window, alibi_slopes):
    """What is added to the scores of a sequence, or None."""
    seen = visible(queries, keys.shape[0], causal, window, keys.device)
    if seen is None and alibi_slopes is None:
        return None
    added = torch.zeros(1, 1, queries, keys.shape[0], dtype=keys.dtype)
    if alibi_slopes is not None:
        far = distances(queries, keys.shape[0], keys.device)
        added = added - alibi_slopes.to(keys.dtype)[:, None, None] * far
    return added if seen is None else added.masked_fill(~seen, -math.inf)


def _blind(queries, keys, causal, window):
    seen = visible(queries, keys, causal, window, torch.device("cpu"))
    return torch.zeros(queries, dtype=torch.bool) if seen is None else ~seen.any(-1)


# --- plain math on padded sequences: slow, large, able to do everything, and it waits for no length ------------------


class _Padded:
    """A ragged batch as [B, ...] tensors: which rows of the packed ones each sequence has, and which pairs are seen."""

    def __init__(
        self, q, k, masks, *, cu_seqlens_q, max_seqlen_q, max_seqlen_k, cu_seqlens_k, seqused_k=None, block_table=None
    ):
        self.rows, self.used = _rows_of(cu_seqlens_q, max_seqlen_q, q.shape[0])
        queries = cu_seqlens_q[1:] - cu_seqlens_q[:-1]
        at = torch.arange(max_seqlen_k, device=q.device)
        if cu_seqlens_k is not None:
            self.keys, self.used_keys = _rows_of(cu_seqlens_k, max_seqlen_k, k.shape[0])
            lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
            self.where = (self.keys.clamp(max=max(k.shape[0] - 1, 0)),)
        else:
            lengths, self.used_keys = seqused_k, at < seqused_k[:, None]
            if block_table is None:
                self.where = (torch.arange(k.shape[0], device=q.device)[:, None], at[None, :])
            else:
                pages = block_table[:, at // k.shape[1]].long().clamp(0, k.shape[0] - 1)
                self.where = (pages, (at % k.shape[1])[None, :])
        causal, window = masks
        left, right = window if window is not None else (UNLIMITED, UNLIMITED)
        right = 0 if causal else right
        row = torch.arange(max_seqlen_q, device=q.device)[None, :] + (lengths - queries)[:, None]
        self.distance = (row[:, :, None] - at).abs()
        seen = self.used_keys[:, None, :] & self.used[:, :, None]
        if left != UNLIMITED:
            seen = seen & (at >= row[:, :, None] - left)
        if right != UNLIMITED:
            seen = seen & (at <= row[:, :, None] + right)
        self.seen = seen[:, None, None]  # [B, 1, 1, n, m]

    def queries(self, x, group, dtype):
        """[T, Hq, D] as [B, Hkv, group, n, D], zero where a sequence has ended."""
        x = x[self.rows.clamp(max=x.shape[0] - 1)].to(dtype)
        x = x.masked_fill(~self.used[..., None, None], 0.0)
        return x.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4)

    def cached(self, x, scale, dtype):
        """k or v as [B, Hkv, m, D], zero where a sequence has ended: whatever lies there may be NaN."""
        found = x[self.where].to(dtype)
        if scale is not None:
            per_token = scale.dim() == x.dim() - 1 and scale.shape == x.shape[:-1]
            found = found * (scale[self.where][..., None] if per_token else scale[:, None]).to(dtype)
        return found.masked_fill(~self.used_keys[..., None, None], 0.0).transpose(1, 2)

    def packed(self, x, rows, like):
        """[B, n, H, D] back to the rows of a packed tensor like this one."""
        found = like.new_zeros((like.shape[0] + 1, *x.shape[2:]), dtype=x.dtype)
        return found.index_put_((rows,), x)[:-1]


def _rows_of(cu_seqlens, longest, rows):
    """([B, longest] rows of a packed tensor, `rows` where a sequence has ended; which of them are some)."""
    at = torch.arange(longest, device=cu_seqlens.device)
    used = at < (cu_seqlens[1:] - cu_seqlens[:-1])[:, None]
    return torch.where(used, cu_seqlens[:-1, None] + at, rows).long(), used


def _math_dtype(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def _scores(batch, q, k, scale, softcap, alibi_slopes):
    """(masked scores [B, Hkv, group, n, m], derivative by the plain products, for the backward)."""
    scores, slope = torch.matmul(q, k[:, :, None].mT) * scale, scale
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = capped * softcap, (1.0 - capped.square()) * scale
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(scores.dtype).view(1, *q.shape[1:3], 1, 1)
        scores = scores - slopes * batch.distance[:, None, None]
    return scores.masked_fill(~batch.seen, -math.inf), slope


def _lse(scores, sinks):
    lse = torch.logsumexp(scores, dim=-1)
    return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype).view(*scores.shape[1:3], 1))


def _weights(scores, lse):
    return torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])


def padded(
    q, k, v, *, causal, window, softcap, sinks, alibi_slopes, k_scale, v_scale, return_lse, out, scale, config,
    **lengths
):  # fmt: skip
    batch, dtype = _Padded(q, k, (causal, window), **lengths), _math_dtype(q.dtype)
    wide_q = batch.queries(q, q.shape[1] // k.shape[-2], dtype)
    wide_k, wide_v = batch.cached(k, k_scale, dtype), batch.cached(v, v_scale, dtype)
    scores, _ = _scores(batch, wide_q, wide_k, scale, softcap, alibi_slopes)
    lse = _lse(scores, sinks)
    found = torch.matmul(_weights(scores, lse), wide_v[:, :, None])
    found = batch.packed(found.permute(0, 3, 1, 2, 4).flatten(2, 3), batch.rows, q)
    out = found.to(q.dtype) if out is None else out.copy_(found)
    if not return_lse:
        return out, None
    return out, batch.packed(lse.float().permute(0, 3, 1, 2).flatten(2, 3), batch.rows, q).T.contiguous()


def padded_backward(
    grad_out, q, k, v, out, lse, *, causal, window, softcap, sinks, alibi_slopes, grad_lse, deterministic, scale,
    config, **lengths
):  # fmt: skip
    """By the formula, since autograd is off where compilers call. Out and LSE are computed again, unrounded."""
    batch, dtype, group = _Padded(q, k, (causal, window), **lengths), _math_dtype(q.dtype), q.shape[1] // k.shape[1]
    wide_q, grad = batch.queries(q, group, dtype), batch.queries(grad_out, group, dtype)
    wide_k, wide_v = batch.cached(k, None, dtype), batch.cached(v, None, dtype)
    scores, slope = _scores(batch, wide_q, wide_k, scale, softcap, alibi_slopes)
    total = _lse(scores, sinks)
    weights = _weights(scores, total)
    terms = torch.matmul(grad, wide_v[:, :, None].mT)
    delta = (weights * terms).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - batch.queries(grad_lse.T[..., None], group, dtype)
    terms = weights * (terms - delta) * slope
    dq = torch.matmul(terms, wide_k[:, :, None]).permute(0, 3, 1, 2, 4).flatten(2, 3)
    dk = torch.matmul(terms.mT, wide_q).sum(2).transpose(1, 2)
    dv = torch.matmul(weights.mT, grad).sum(2).transpose(1, 2)
    found = [batch.packed(dq, batch.rows, q), batch.packed(dk, batch.keys, k), batch.packed(dv, batch.keys, v)]
    if sinks is not None:
        share = torch.exp(sinks.to(dtype).view(*total.shape[1:3], 1) - total)
        # Where nothing else counts, or a sink is +inf, there is nothing to share: no inf - inf.
        share = share.masked_fill(~batch.used[:, None, None] | total.isinf(), 0.0)
        found.append(-(share * delta.squeeze(-1)).sum((0, 3)).flatten())
    return tuple(t.to(like.dtype).contiguous() for t, like in zip(found, (q, k, v, sinks), strict=False))


@hookimpl
def registry_variants():
    everything = dict(
        dtypes=(*HALVES, "float32", "float64"),
        head_dim=(1, 2**16),
        head_dim_v=(1, 2**16),
        causal=True,
        window=True,
        softcap=True,
        any_softcap=True,
        gqa=True,
        sinks=True,
        alibi=True,
        lse=True,
        ieee=True,
        deterministic=True,
    )
    cached = dict(
        kv_layouts=("packed", "cache", "paged"),
        page_size=(1, 2**30),
        kv_dtypes=("float8_e4m3fn", "int8"),
        kv_scales=("tensor", "head", "token"),
        out=True,
    )
    flash_requires = dict(
        arch=("sm80+",),
        dtypes=HALVES,
        head_dim=(8, 256),
        head_dim_multiple=8,
        causal=True,
        window=True,
        gqa=True,
        lse=True,
        deterministic=True,
        base_alignment=16,
        stride_alignment=16,
    )
    math_too = {"unit_inner_stride": False, "arch": ("any",)}
    return [
        Variant(
            "torch_varlen_flash",
            op="attention_varlen",
            run=flash,
            requires=Requires(**flash_requires, kv_layouts=("packed", "cache"), rule=_flash_rule),
            design=Design(dsl="cuda"),
            summary="FlashAttention-2 as built into torch, for packed sequences",
        ),
        Variant(
            "torch_varlen_flash_backward",
            op="attention_varlen_backward",
            run=flash_backward,
            requires=Requires(**flash_requires, kv_layouts=("packed",), rule=_flash_backward_rule),
            design=Design(dsl="cuda"),
            summary="FlashAttention-2 as built into torch, for packed sequences: gradients",
        ),
        Variant(
            "torch_varlen_each",
            op="attention_varlen",
            run=each,
            requires=Requires(
                **{**everything, "softcap": False, "any_softcap": False, "head_dim_v": None}, **cached, arch=("cpu",)
            ),
            design=Design(dsl="aten"),
            summary="torch's blocked CPU kernel, one sequence after the other",
        ),
        Variant(
            "torch_varlen_math",
            op="attention_varlen",
            run=padded,
            requires=Requires(**everything, **cached, **math_too),
            design=Design(dsl="aten"),
            summary="plain torch operations on padded sequences: does everything, stores all scores",
        ),
        Variant(
            "torch_varlen_math_backward",
            op="attention_varlen_backward",
            run=padded_backward,
            requires=Requires(**everything, **math_too, kv_layouts=("packed",), grad_lse=True),
            design=Design(dsl="aten"),
            summary="plain torch operations on padded sequences: gradients",
        ),
    ]
