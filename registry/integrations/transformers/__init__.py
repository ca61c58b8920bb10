"""`attn_implementation="kernel_registry"` for Hugging Face transformers.

    from registry.integrations import transformers
    transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kernel_registry")

Masks are taken by what they mean. Causal, sliding and bidirectional ones become arguments of `registry.attention`;
padding, packed sequences and chunks become sequences of `registry.attention_varlen`, put together once for all layers
of a step; so do static caches, whose length the host does not wait for. Rows of padding give zeros. What has no such
meaning (a mask of your own, attention dropout, a bias, keys that a model chooses) is computed by torch from a dense
mask, which `registry.record()` counts under "elsewhere". `fuse(model)` lets the gated MLPs run by the registry, too.
"""

from __future__ import annotations

from typing import Any

import torch

import registry
from registry.dispatch.scope import went_elsewhere
from registry.integrations.transformers.chosen import chosen_keys, of_them
from registry.integrations.transformers.masks import MaskMeaning, PackedTokens, crosses_chunks, mask
from registry.integrations.transformers.mlp import fuse, unfuse

NAME = "kernel_registry"


def enable(name: str = NAME) -> str:
    """Register the attention and its masks with transformers under `name`, for the life of the process."""
    from transformers import AttentionInterface, AttentionMaskInterface  # type: ignore[import-not-found]

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: [B, H, S, D] in, [B, S, H, D] out. `s_aux` are sinks; `indices` of keys, or of blocks
    of them, are those that the model has chosen."""
    mask = attention_mask if isinstance(attention_mask, MaskMeaning) else None
    how: dict[str, Any]
    chosen = None
    if indices is not None or block_indices is not None:
        chosen = chosen_keys(module, key.shape[2], indices, block_indices)
    plain = not dropout and position_bias is None and s_aux is None and chosen is None
    if plain and mask is not None and mask.prefix is not None and mask.fits(query, key):
        # what most layers of most models are asked for, and what decoding waits for: nothing is looked at twice
        if mask.grows() and _builds_by_shape(query.device) and not _needs_grad(query, key, value):
            how = {"causal": False, "window": None, "scale": scaling, "softcap": softcap or 0.0}
            return _by_counts(query, key, value, mask, None, how), None
        if mask.prefix < mask.keys:
            key, value = key[:, :, : mask.prefix], value[:, :, : mask.prefix]
        pattern = mask.pattern
        assert pattern is not None
        causal = pattern.causal and mask.queries > 1
        window = pattern.window
        cap = softcap or 0.0
        found = registry.attention(query, key, value, causal=causal, scale=scaling, window=window, softcap=cap)
        return found.transpose(1, 2), None
    how = {"scale": scaling, "softcap": softcap or 0.0}
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if mask is None and attention_mask is None:
        # Without a mask the first query stands at the first key; a lone one sees all, as in transformers' sdpa.
        causal = bool(causal) and query.shape[2] > 1
        if causal and key.shape[2] > query.shape[2]:
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    why = _what_is_missing(mask, attention_mask, dropout, position_bias, chosen, query, key)
    if why:
        went_elsewhere("transformers", why)
        dense = mask.dense() if mask is not None else attention_mask
        if chosen is not None:
            dense = of_them(dense, chosen[..., : key.shape[2]], query.shape[1], causal)
        return _dense_attention(query, key, value, dense, causal, position_bias, dropout, s_aux, **how), None
    if mask is None:
        left = sliding_window - 1 if sliding_window and causal else None
        how |= {"causal": causal, "window": None if left is None else (left, 0)}
        return _one_length(query, key, value, s_aux, how), None
    pattern = mask.pattern
    assert pattern is not None
    how |= {"causal": pattern.causal, "window": pattern.window}
    if mask.padding is not None or pattern.packed is not None or crosses_chunks(mask):
        packed = mask.packed()
        assert packed is not None
        return _packed_attention(query, key, value, packed, s_aux, how), None
    if mask.prefix is None:
        return _by_counts(query, key, value, mask, s_aux, how), None
    return _one_length(query, key[:, :, : mask.prefix], value[:, :, : mask.prefix], s_aux, how), None


def _builds_by_shape(device: torch.device) -> bool:
    """Whether a library may build a kernel for each new shape, in milliseconds, as cuDNN does."""
    return device.type == "cuda"


def _needs_grad(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _what_is_missing(
    mask: MaskMeaning | None,
    given: Any,
    dropout: float,
    position_bias: Any,
    chosen: Any,
    query: torch.Tensor,
    key: torch.Tensor,
) -> str | None:
    """Why no variant can run this; None where one can."""
    if dropout:
        return "dropout of attention weights"
    if position_bias is not None:
        return "a position bias"
    if chosen is not None:
        return "keys that the model chooses"
    if mask is None:
        return None if given is None else "a dense mask"
    if mask.keys != key.shape[2]:
        raise ValueError(f"the mask is of {mask.keys} keys, and there are {key.shape[2]}")
    if not mask.fits(query, key):
        return "a mask of another batch or of other queries"  # which broadcasts, or is an error of torch's
    if mask.pattern is None:
        return "a mask function that is not one of transformers' own, or one in an exported program"
    if mask.misplaced():
        return "a window that does not end with the keys"
    if (mask.padding is not None or mask.pattern.packed is not None) and mask.packed() is None:
        return "a window over padding between tokens"
    return None


def _one_length(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any, how: dict[str, Any]) -> torch.Tensor:
    """All rows of the batch have all the keys."""
    if sinks is None:
        return registry.attention(q, k, v, **how).transpose(1, 2)  # type: ignore[no-any-return]
    (batch, _, queries, _), keys = q.shape, k.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    starts: dict[str, Any] = {
        f"cu_seqlens_{name}": torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        for name, length in (("q", queries), ("k", keys))
    }
    out = registry.attention_varlen(q, k, v, max_seqlen_q=queries, max_seqlen_k=keys, sinks=sinks, **starts, **how)
    return out.unflatten(0, (batch, queries))  # type: ignore[no-any-return]


def _by_counts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: MaskMeaning, sinks: Any, how: dict[str, Any]
) -> torch.Tensor:
    """All rows of the batch have as many keys, and how many is read on the device."""
    starts, used = mask.counts(q.device)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    one = mask.queries == 1  # each layer of each step waits for the host, and two calls are fewer than four
    out = registry.attention_varlen(
        q.squeeze(2) if one else q.transpose(1, 2).flatten(0, 1),
        k,
        v,
        cu_seqlens_q=starts,
        seqused_k=used,
        max_seqlen_q=mask.queries,
        max_seqlen_k=k.shape[1],
        sinks=sinks,
        **how,
    )
    return out.unsqueeze(1) if one else out.unflatten(0, (mask.batch, mask.queries))  # type: ignore[no-any-return]


def _packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: PackedTokens, sinks: Any, how: dict[str, Any]
) -> torch.Tensor:
    batch, _, queries, _ = q.shape
    packed = packed.on(q.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    if packed.rows is None:
        out = registry.attention_varlen(q, k, v, sinks=sinks, **packed.lengths, **how).unflatten(0, (batch, queries))
        assert packed.padding is not None
        padding = packed.padding[:, :, None, None]
        return out.masked_fill(padding, 0.0) if out.requires_grad else out.masked_fill_(padding, 0.0)  # type: ignore[no-any-return]
    q_rows, k_rows = packed.rows
    rows = (q_rows, k_rows, k_rows)
    q, k, v = (x if len(r) == len(x) else x.index_select(0, r) for x, r in zip((q, k, v), rows, strict=True))
    out = registry.attention_varlen(q, k, v, sinks=sinks, **packed.lengths, **how)
    if len(out) != batch * queries:
        out = out.new_zeros(batch * queries, *out.shape[1:]).index_copy_(0, q_rows, out)
    return out.unflatten(0, (batch, queries))  # type: ignore[no-any-return]


def _dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    bias: torch.Tensor | None,
    dropout: float,
    sinks: torch.Tensor | None,
    scale: float | None,
    softcap: float,
) -> torch.Tensor:
    """By torch, from a dense mask: scaled_dot_product_attention, or its definition where that has no word for it."""
    if mask is None and causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        least = torch.finfo(q.dtype).min
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, least)
    if bias is not None:
        mask = bias if mask is None else mask + bias
    if not softcap and sinks is None:
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = (scores if mask is None else scores + mask).float()
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype)
    return (torch.nn.functional.dropout(weights, dropout) @ v).transpose(1, 2)


__all__ = ["NAME", "MaskMeaning", "attention", "enable", "fuse", "mask", "unfuse"]
