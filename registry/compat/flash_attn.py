"""FlashAttention's functions, by its argument names and with its meaning, run by whatever is fastest here.

    from registry.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Positions are those of FlashAttention 2; what FlashAttention 3 and 4 name besides comes by keyword (`page_table`,
`seqused_k`, `s_aux` or `learnable_sink`, `k_descale`). Hints of speed (`num_splits`, `pack_gqa`, `sm_margin`,
`scheduler_metadata`) are taken and not needed: tables choose. What has another result and is not done is refused.
Rows that see no key have an LSE of -inf here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import registry
from registry.compat import kv_cache
from registry.errors import InvalidArgument

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Tensor = torch.Tensor
Window = tuple[int, int]
_NAMES = {"k_scale": "k_descale", "v_scale": "v_descale", "sinks": "s_aux", "scale": "softmax_scale"}
_NAMES |= {"seqused_k": "cache_seqlens", "window": "window_size"}


@contextlib.contextmanager
def _named(**own: str) -> Iterator[None]:
    """Errors name the argument as these functions do."""
    try:
        yield
    except InvalidArgument as error:
        name = (_NAMES | own).get(error.argument)
        if name is None:
            raise
        raise InvalidArgument(name, error.got, error.allowed) from None


@_named()
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
    _only_hints(others, dropout_p=dropout_p)
    _check_deterministic(deterministic)
    how = _how(softmax_scale, causal, window_size, softcap)
    sinks = _one_of("s_aux", s_aux, "learnable_sink", learnable_sink)
    if alibi_slopes is None:
        found = registry.attention(q, k, v, layout="bshd", return_lse=return_attn_probs, sinks=sinks, **how)
        return (*found, None) if return_attn_probs else found
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise InvalidArgument(name, f"{tensor.dim()} dimensions {tuple(tensor.shape)}", "4: [B, S, H, D]")
    (b, s), keys = q.shape[:2], k.shape[1]
    starts = torch.arange(b + 1, dtype=torch.int32, device=q.device)
    found = registry.attention_varlen(
        *(tensor.flatten(0, 1) for tensor in (q, k, v)),
        cu_seqlens_q=starts * s,
        cu_seqlens_k=starts * keys,
        max_seqlen_q=s,
        max_seqlen_k=keys,
        sinks=sinks,
        alibi_slopes=_slopes(alibi_slopes),
        return_lse=return_attn_probs,
        **how,
    )
    out = (found[0] if return_attn_probs else found).unflatten(0, (b, s))
    return (out, found[1].unflatten(1, (b, s)).transpose(0, 1), None) if return_attn_probs else out


@_named(seqused_k="seqused_k")
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
    _only_hints(others, dropout_p=dropout_p)
    _check_deterministic(deterministic)
    table = _one_of("block_table", block_table, "page_table", page_table)
    lengths: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q}
    if table is not None:
        if seqused_q is not None:
            raise InvalidArgument("seqused_q", "a tensor beside pages", "None")
        used = seqused_k if seqused_k is not None else None if cu_seqlens_k is None else cu_seqlens_k.diff()
        lengths |= {"seqused_k": used, "block_table": table}
    elif seqused_q is None and seqused_k is None:
        lengths["cu_seqlens_k"] = cu_seqlens_k
    else:
        parts = _parts(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        lengths = {"cu_seqlens_q": parts[0], "cu_seqlens_k": parts[1]}
    found = registry.attention_varlen(
        q,
        k,
        v,
        **lengths,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        sinks=_one_of("s_aux", s_aux, "learnable_sink", learnable_sink),
        alibi_slopes=_slopes(alibi_slopes),
        k_scale=_descale("k_descale", k_descale),
        v_scale=_descale("v_descale", v_descale),
        return_lse=return_attn_probs,
        out=out,
        **_how(softmax_scale, causal, window_size, softcap),
    )
    return (*found, None) if return_attn_probs else found


@torch.no_grad()
@_named()
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
    _only_hints(others, cache_leftpad=cache_leftpad)
    cache = kv_cache.Cache(
        k_cache, v_cache, _one_of("block_table", block_table, "page_table", page_table), cache_batch_idx, q
    )
    before = cache.lengths(cache_seqlens, k, v)
    if (rotary_cos is None) != (rotary_sin is None):
        raise InvalidArgument("rotary_sin", "rotary_cos alone or itself alone", "both of them, or neither")
    if rotary_cos is not None:
        if k is None or rotary_sin is None:
            raise InvalidArgument("rotary_cos", "a tensor, and no k", "None, or new keys in k and v")
        still = not causal and tuple(window_size) == (-1, -1)  # then all queries stand at the first new position
        q = kv_cache.rotated(q, rotary_cos, rotary_sin, before, rotary_interleaved, still)
        k = kv_cache.rotated(k, rotary_cos, rotary_sin, before, rotary_interleaved)
    after = cache.append(k, v, before)
    b, s = q.shape[:2]
    found = registry.attention_varlen(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        cu_seqlens_q=torch.arange(b + 1, dtype=torch.int32, device=q.device) * s,
        seqused_k=after,
        block_table=cache.table,
        max_seqlen_q=s,
        max_seqlen_k=cache.capacity,
        sinks=_one_of("s_aux", s_aux, "learnable_sink", learnable_sink),
        alibi_slopes=_slopes(alibi_slopes),
        k_scale=_descale("k_descale", k_descale),
        v_scale=_descale("v_descale", v_descale),
        return_lse=return_softmax_lse,
        **_how(softmax_scale, causal, window_size, softcap),
    )
    out = (found[0] if return_softmax_lse else found).unflatten(0, (b, s))
    return (out, found[1].unflatten(1, (b, s)).transpose(0, 1)) if return_softmax_lse else out


# --- what all three take alike ------------------------------------------------------------------------------------

_HINTS = frozenset(("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"))
_REFUSED = frozenset(
    (
        "qv",
        "q_descale",
        "attention_chunk",
        "rotary_seqlens",
        "cu_seqlens_q",
        "cu_seqlens_k_new",
        "max_seqlen_q",
        "score_mod",
        "mask_mod",
        "block_sparse_tensors",
    )
)


def _only_hints(others: dict[str, Any], **given: Any) -> None:
    """Raise for arguments that would change the result and are not done; those at their defaults ask for nothing."""
    for name, value in {**others, **given}.items():
        if name not in _HINTS | _REFUSED | given.keys():
            raise TypeError(f"FlashAttention has no argument {name!r} that is known here")
        if name not in _HINTS and (isinstance(value, torch.Tensor) or value):
            got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise InvalidArgument(name, got, "0" if isinstance(value, (int, float)) else "None: it is not done here")


def _check_deterministic(deterministic: bool) -> None:
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise InvalidArgument("deterministic", True, "False, or torch.use_deterministic_algorithms(True)")


def _how(scale: float | None, causal: bool, window_size: Any, softcap: float) -> dict[str, Any]:
    """The masks and the scale, as the registry's ops take them."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise InvalidArgument("window_size", repr(window_size), "(left, right), -1 for unlimited")
    left, right = (-1 if side is None or side < 0 else side for side in window_size)
    window = None if left == right == -1 else (left, right)
    return {"scale": scale, "causal": bool(causal), "window": window, "softcap": float(softcap or 0.0)}


def _one_of(name: str, value: Any, other: str, other_value: Any) -> Any:
    """The one of two names for the same argument that was used."""
    if value is not None and other_value is not None:
        raise InvalidArgument(other, f"a tensor beside {name}", f"{name} or {other}, which mean the same")
    return value if value is not None else other_value


def _slopes(slopes: Tensor | None) -> Tensor | None:
    if slopes is not None and slopes.dim() != 1:
        raise InvalidArgument("alibi_slopes", f"shape {tuple(slopes.shape)}", "[H]: the same for the whole batch")
    return slopes


def _descale(name: str, scale: Tensor | None) -> Tensor | None:
    if scale is not None and scale.dim() == 2:
        allowed = "[1], [Hkv] or one a token and head: the same for the whole batch"
        raise InvalidArgument(name, f"shape {tuple(scale.shape)}", allowed)
    return scale


def _parts(
    starts_q: Tensor, starts_k: Tensor | None, used_q: Tensor | None, used_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where three sequences begin for each: what is used of it, queries without keys, keys without queries."""
    if starts_k is None:
        raise InvalidArgument("cu_seqlens_k", "None", "where each sequence of packed k begins, and the end")
    end_q, end_k = (
        starts[1:] if used is None else starts[:-1] + used for starts, used in ((starts_q, used_q), (starts_k, used_k))
    )
    parts_q, parts_k = (starts_q[:-1], end_q, starts_q[1:]), (starts_k[:-1], end_k, end_k)
    joined = (torch.stack(parts, dim=1).flatten() for parts in (parts_q, parts_k))
    q, k = (torch.cat((part, starts[-1:])) for part, starts in zip(joined, (starts_q, starts_k), strict=True))
    return q, k
