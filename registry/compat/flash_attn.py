"""FlashAttention's functions, by its argument names and with its meaning, run by whatever is fastest here.

    from registry.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Positions are those of FlashAttention 2; what FlashAttention 3 and 4 name besides comes by keyword (`page_table`,
`seqused_k`, `s_aux` or `learnable_sink`, `k_descale`). Hints of speed (`num_splits`, `pack_gqa`, `sm_margin`,
`scheduler_metadata`) are taken and not needed: tables choose. What has another result and is not done is refused.
Rows that see no key have an LSE of -inf here.
"""

from __future__ import annotations

from typing import Any

import torch

import registry
from registry.compat import checks, kv_cache
from registry.errors import InvalidArgument
from registry.ops.parts.masks import check_flag
from registry.ops.tensors import check_dims, check_tensor

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Tensor = torch.Tensor
Window = tuple[int, int]


@checks.named
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    **others: Any,
) -> Any:
    """q [B, S, H, D], k and v [B, Sk, Hkv, D] -> [B, S, H, D]; with return_attn_probs, (out, lse [B, H, S], None)."""
    checks.only_hints(others, dropout_p=dropout_p)
    checks.deterministic(deterministic)
    how = checks.how(softmax_scale, causal, window_size, softcap)
    sinks = checks.one_of("s_aux", s_aux, "learnable_sink", learnable_sink)
    if alibi_slopes is None:
        found = registry.attention(q, k, v, layout="bshd", return_lse=return_attn_probs, sinks=sinks, **how)
        return (*found, None) if return_attn_probs else found
    q, k, v = (check_dims(name, tensor, 4, "[B, S, H, D]") for name, tensor in (("q", q), ("k", k), ("v", v)))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != q.shape[0]:
            raise InvalidArgument(name, f"batch {tensor.shape[0]}", f"q's batch {q.shape[0]}")
    if v.shape[1] != k.shape[1]:
        raise InvalidArgument("v", f"length {v.shape[1]}", f"k's length {k.shape[1]}")
    (b, s), keys = q.shape[:2], k.shape[1]
    starts = torch.arange(b + 1, dtype=torch.int32, device=q.device)
    found = registry.attention_varlen(
        *(tensor.flatten(0, 1) for tensor in (q, k, v)),
        cu_seqlens_q=starts * s,
        cu_seqlens_k=starts * keys,
        max_seqlen_q=s,
        max_seqlen_k=keys,
        sinks=sinks,
        alibi_slopes=checks.slopes(alibi_slopes),
        return_lse=return_attn_probs,
        **how,
    )
    out = (found[0] if return_attn_probs else found).unflatten(0, (b, s))
    return (out, found[1].unflatten(1, (b, s)).transpose(0, 1), None) if return_attn_probs else out


@checks.named
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    **others: Any,
) -> Any:
    """q [T, H, D]; k and v [Tk, Hkv, D], or pages [pages, page, Hkv, D] with block_table -> [T, H, D].

    With return_attn_probs, (out, lse [H, T], None). Queries that seqused_q leaves out give 0.
    """
    checks.only_hints(others, dropout_p=dropout_p)
    checks.deterministic(deterministic)
    table = checks.one_of("block_table", block_table, "page_table", page_table)
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q}
    if table is not None:
        if check_tensor("k", k).dim() == 3:
            name, got = "page_table" if block_table is None else "block_table", f"a tensor for k of {tuple(k.shape)}"
            raise InvalidArgument(name, got, "None, or pages in k and v: [pages, page, Hkv, D]")
        if seqused_q is not None:
            raise InvalidArgument("seqused_q", "a tensor beside pages", "None")
        used = seqused_k
        if cu_seqlens_k is not None:  # beside seqused_k too, which is what counts
            ends = checks.lengths("cu_seqlens_k", cu_seqlens_k, None, check_tensor("q", q).device)
            used = ends.diff() if used is None else used
        lengths |= {"seqused_k": used, "block_table": table}
    elif seqused_q is None and seqused_k is None:
        lengths["cu_seqlens_k"] = cu_seqlens_k
    else:
        parts = _parts(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        lengths = {"cu_seqlens_q": parts[0], "cu_seqlens_k": parts[1]}
    found = registry.attention_varlen(
        q,
        k,
        v,
        **lengths,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        sinks=checks.one_of("s_aux", s_aux, "learnable_sink", learnable_sink),
        alibi_slopes=checks.slopes(alibi_slopes),
        k_scale=checks.descale("k_descale", k_descale),
        v_scale=checks.descale("v_descale", v_descale),
        return_lse=return_attn_probs,
        out=out,
        **checks.how(softmax_scale, causal, window_size, softcap),
    )
    return (*found, None) if return_attn_probs else found


@torch.no_grad()
@checks.named
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **others: Any,
) -> Any:
    """q [B, S, H, D] over k_cache and v_cache [B, Sc, Hkv, D], or pages with block_table -> [B, S, H, D].

    k and v [B, Sn, Hkv, D] are written into the caches behind the cache_seqlens keys that are there, and attended to.
    With return_softmax_lse, (out, lse [B, H, S]). Without gradients, as in FlashAttention.
    """
    checks.only_hints(others, cache_leftpad=cache_leftpad)
    check_flag("return_softmax_lse", return_softmax_lse)
    how = checks.how(softmax_scale, causal, window_size, softcap)
    table = checks.one_of("block_table", block_table, "page_table", page_table)
    cache = kv_cache.Cache(k_cache, v_cache, table, cache_batch_idx, q)
    before = cache.lengths(cache_seqlens, k, v)
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("rotary_sin", "rotary_cos alone or itself alone", "both of them, or neither")
    if rotary_cos is not None:
        if k is None or rotary_sin is None:
            raise InvalidArgument("rotary_cos", "a tensor, and no k", "None, or new keys in k and v")
        check_flag("rotary_interleaved", rotary_interleaved)
        still = not causal and how["window"] is None  # then all queries stand at the first new position
        q = kv_cache.rotated("q", q, rotary_cos, rotary_sin, before, rotary_interleaved, still)
        k = kv_cache.rotated("k", k, rotary_cos, rotary_sin, before, rotary_interleaved)
    where = None if k is None else cache.behind(k, v, before)
    if k is None and torch.compiler.is_compiling():  # an error of what the graph calls has another name for them
        checks.refuse_beyond("cache_seqlens", before, cache.capacity, "the keys that a sequence's cache holds")
    if k is not None and v is not None:
        q, k, v = (cache.apart(given) for given in (q, k, v))
    b, s = q.shape[:2]
    operands = q.flatten(0, 1), k_cache, v_cache
    call = how | {
        "cu_seqlens_q": torch.arange(b + 1, dtype=torch.int32, device=q.device) * s,
        "seqused_k": before if k is None else before + k.shape[1],
        "block_table": cache.table,
        "max_seqlen_q": s,
        "max_seqlen_k": cache.capacity,
        "sinks": checks.one_of("s_aux", s_aux, "learnable_sink", learnable_sink),
        "alibi_slopes": checks.slopes(alibi_slopes),
        "k_scale": checks.descale("k_descale", k_descale),
        "v_scale": checks.descale("v_descale", v_descale),
        "return_lse": return_softmax_lse,
    }
    try:
        if where is not None and k is not None and v is not None:
            registry.attention_varlen.check(*operands, **call)  # a call that is refused has written nothing
            k_cache[where], v_cache[where] = k, v
        found = registry.attention_varlen(*operands, **call)
    except InvalidArgument as error:
        raise checks.renamed(error, kv_cache.NAMES) from None
    out = (found[0] if return_softmax_lse else found).unflatten(0, (b, s))
    return (out, found[1].unflatten(1, (b, s)).transpose(0, 1)) if return_softmax_lse else out


def _parts(
    q: Any, k: Any, starts_q: Any, starts_k: Any, used_q: Tensor | None, used_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where three sequences begin for each: what is used of it, queries without keys, keys without queries."""
    if starts_k is None:
        raise InvalidArgument("cu_seqlens_k", "None", "where each sequence of packed k begins, and the end")
    q, k = check_dims("q", q, 3, "[T, H, D]"), check_dims("k", k, 3, "[Tk, Hkv, D]")
    starts_q = checks.lengths("cu_seqlens_q", starts_q, None, q.device)
    starts_k = checks.lengths("cu_seqlens_k", starts_k, starts_q.shape[0], q.device)
    checks.refuse_tail("cu_seqlens_q", starts_q, q.shape[0])
    checks.refuse_tail("cu_seqlens_k", starts_k, k.shape[0])
    for name, used, starts in (("seqused_q", used_q, starts_q), ("seqused_k", used_k, starts_k)):
        if used is not None:
            used = checks.lengths(name, used, starts.shape[0] - 1, q.device)
            checks.refuse_beyond(name, used, starts.diff(), "the rows that this sequence has")
    end_q, end_k = (
        starts[1:] if used is None else starts[:-1] + used for starts, used in ((starts_q, used_q), (starts_k, used_k))
    )
    parts_q, parts_k = (starts_q[:-1], end_q, starts_q[1:]), (starts_k[:-1], end_k, end_k)
    joined = (torch.stack(parts, dim=1).flatten() for parts in (parts_q, parts_k))
    of_q, of_k = (torch.cat((part, starts[-1:])) for part, starts in zip(joined, (starts_q, starts_k), strict=True))
    return of_q, of_k
