"""`attn_implementation="kernel_registry"` for Hugging Face transformers.

    from registry.integrations import transformers
    transformers.enable()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="kernel_registry")

Masks are taken by what they mean. Causal, sliding and bidirectional ones become arguments of `registry.attention`;
padding, packed sequences and chunks become sequences of `registry.attention_varlen`, put together once for all layers
of a step; so do static caches, whose length the host does not wait for. Rows of padding give zeros. What has no such
meaning (a mask of your own, attention dropout, a bias) is computed by torch from a dense mask, which
`registry.record()` counts under "elsewhere".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

import registry
from registry.dispatch.scope import went_elsewhere
from registry.ops.parts.masks import FAR

NAME = "kernel_registry"


def enable(name: str = NAME) -> str:
    """Register the attention and its masks with transformers under `name`, for the life of the process."""
    from transformers import AttentionInterface, AttentionMaskInterface  # type: ignore[import-not-found]

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


# --- what a mask means ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees, padding apart."""

    causal: bool
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    left_padding: torch.Tensor | None = None
    """Where the chunks of each row begin."""
    packed: torch.Tensor | None = None
    """[B, S]: which sequence a token belongs to."""
    positions: torch.Tensor | None = None
    """[B, S]: where a token stands in its sequence, if chunks count from there rather than from the row's beginning."""

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        return None if self.left is None and self.right is None else (self.left, self.right)


def _pattern(function: Callable[..., Any]) -> Pattern | None:
    """The pattern that transformers' own mask functions stand for; None for any other function."""
    found: dict[str, Any] = {"causal": False}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if getattr(one, "__module__", None) != "transformers.masking_utils" or not hasattr(one, "__code__"):
            return None
        kind = one.__qualname__.partition(".")[0]
        held = dict(zip(one.__code__.co_freevars, (c.cell_contents for c in one.__closure__ or ()), strict=True))
        if kind == "and_masks":
            waiting += held["mask_functions"]
        elif kind == "remap_positions_for_packed_sequence":
            waiting.append(held["mask_function"])
            found["positions"] = held["position_ids"]
        elif kind == "causal_mask_function":
            found["causal"] = True
        elif kind == "sliding_window_overlay":
            found["left"] = min(held["sliding_window"] - 1, found.get("left", FAR))
        elif kind == "sliding_window_bidirectional_overlay":
            found["left"] = min(held["sliding_window"], found.get("left", FAR))
            found["right"] = min(held["sliding_window"], found.get("right", FAR))
        elif kind == "chunked_overlay" and "chunk" not in found:
            found |= {"chunk": held["chunk_size"], "left_padding": held["left_padding"]}
        elif kind == "packed_sequence_mask_function" and "packed" not in found:
            packed = held["packed_sequence_mask"]
            found["packed"] = packed if packed.any() else None
        elif kind != "bidirectional_mask_function":
            return None
    return Pattern(**found)


def mask(*args: Any, **kwargs: Any) -> MaskMeaning:
    """What transformers calls for a mask. A graph breaks here: its meaning is read from functions and data."""
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return _outside_of_graphs(*args, **kwargs) if compiling else MaskMeaning(*args, **kwargs)


@torch.compiler.disable(reason="masks are read outside of graphs: compile without fullgraph")  # type: ignore[untyped-decorator]
def _outside_of_graphs(*args: Any, **kwargs: Any) -> MaskMeaning:
    return MaskMeaning(*args, **kwargs)


class MaskMeaning(BlockMask):
    """What stands in for a mask between the model and its layers: its meaning, shared by them.

    transformers hands a finished mask on if it is a tensor of four dimensions or a BlockMask; a tensor could be
    computed with, which this must not be.
    """

    def __init__(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        **rest: Any,
    ) -> None:
        from transformers import masking_utils

        function = masking_utils.causal_mask_function if mask_function is None else mask_function
        self.batch, self.queries, self.keys = batch_size, q_length, kv_length
        self.kv_offset = kv_offset
        self.padding = attention_mask
        if torch.compiler.is_exporting():  # no data can be looked at
            plain = function is masking_utils.causal_mask_function and attention_mask is None
            self.pattern = Pattern(causal=True) if plain else None
        else:
            self.pattern = _pattern(function)
            if (
                attention_mask is not None
                and bool(attention_mask.all())
                and attention_mask.shape[1] >= self._end(q_offset)
            ):
                self.padding = None
        # A static cache counts up its length in place, layer by layer: what it is now must be kept.
        self.q_offset = q_offset.clone() if isinstance(q_offset, torch.Tensor) else q_offset
        self._dense_arguments = dict(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=self.q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            **rest | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
        self._dense: torch.Tensor | None = None
        self._packed: PackedTokens | None = None
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = None
        self.prefix = self._prefix()

    shape = property(lambda self: (self.batch, 1, self.queries, self.keys))  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"MaskMeaning{self.shape}({self.pattern}, padding={self.padding is not None})"

    __str__ = __repr__

    def to(self, *args: Any, **kwargs: Any) -> MaskMeaning:
        return self

    def contiguous(self) -> MaskMeaning:
        return self

    def _end(self, q_offset: Any) -> int:
        """One past the last position that a query may see, 0 where only the device knows: the mask goes as far."""
        if self.pattern is None or not self.pattern.causal:
            return self.keys + self.kv_offset
        return 0 if isinstance(q_offset, torch.Tensor) else q_offset + self.queries

    def _prefix(self) -> int | None:
        """How many keys all rows have, if that, causal and a window say all; read by each layer, so found once."""
        pattern = self.pattern
        if pattern is None or self.padding is not None or pattern.packed is not None or _crosses_chunks(self):
            return None
        if not pattern.causal:
            return self.keys
        if isinstance(self.q_offset, torch.Tensor):
            return None
        end: int = self.q_offset + self.queries - self.kv_offset
        return min(self.keys, end)

    def grows(self) -> bool:
        """Whether a token is added to a cache that the next step finds longer by one: no step has a shape twice."""
        pattern = self.pattern
        assert pattern is not None
        return pattern.causal and self.queries == 1 and (pattern.left is None or self.keys <= pattern.left)

    def counts(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(where the queries of each row begin, how many keys it has): on the device, and made once a step."""
        if self._counts is None or self._counts[0].device != device:
            seen = self.q_offset + self.queries - self.kv_offset if self.prefix is None else self.prefix
            starts = torch.arange(0, (self.batch + 1) * self.queries, self.queries, dtype=torch.int32, device=device)
            if isinstance(seen, torch.Tensor):
                used = seen.to(device, torch.int32).expand(self.batch).contiguous()
            else:
                used = torch.full((self.batch,), seen, dtype=torch.int32, device=device)
            self._counts = starts, used
        return self._counts

    def dense(self) -> torch.Tensor:
        """[B, 1, Q, K] bool, made once a step and only where it is asked for."""
        from transformers.masking_utils import sdpa_mask

        if self._dense is None:
            self._dense = sdpa_mask(**self._dense_arguments)
        return self._dense

    def packed(self) -> PackedTokens | None:
        """The tokens that are not padding, as sequences; None where they do not keep the distances of a window."""
        if self._packed is None:
            self._packed = _pack(self)
        return self._packed if self._packed.keeps_distances or self.pattern.window is None else None  # type: ignore[union-attr]


@dataclass(frozen=True)
class PackedTokens:
    """Rows of [B * S, H, D] that are tokens, and where their sequences begin."""

    q_rows: torch.Tensor
    k_rows: torch.Tensor
    lengths: dict[str, Any]
    keeps_distances: bool

    def on(self, device: torch.device) -> PackedTokens:
        """The same beside a layer that lies on another device than the first one."""
        if self.q_rows.device == device:
            return self
        lengths = {name: n.to(device) if isinstance(n, torch.Tensor) else n for name, n in self.lengths.items()}
        return PackedTokens(self.q_rows.to(device), self.k_rows.to(device), lengths, self.keeps_distances)


@torch.compiler.disable(reason="how long sequences are is data")  # type: ignore[untyped-decorator]
def _pack(mask: MaskMeaning) -> PackedTokens:
    """Give every token the number of its sequence, -1 for padding, and list those that have a query. Waits once."""
    pattern = mask.pattern
    assert pattern is not None
    offset = int(mask.q_offset)
    end = min(mask.keys, offset + mask.queries - mask.kv_offset) if pattern.causal else mask.keys
    place = torch.arange(end)[None].expand(mask.batch, end)
    key_ids, device = torch.zeros_like(place), mask._dense_arguments["device"]
    if pattern.packed is not None:
        key_ids = pattern.packed.to("cpu", torch.int64)[:, :end]
    if pattern.chunk is not None:
        assert pattern.left_padding is not None
        stands = place + mask.kv_offset if pattern.positions is None else pattern.positions.to("cpu")[:, :end]
        chunks = (stands - pattern.left_padding.to("cpu")[:, None]) // pattern.chunk
        key_ids = key_ids * (mask.keys + 1) + chunks - chunks.min()
    own_tokens = pattern.causal or pattern.packed is not None or pattern.chunk is not None
    begin = offset - mask.kv_offset
    query_ids = key_ids[:, begin : begin + mask.queries] if own_tokens else key_ids.new_zeros(mask.batch, mask.queries)
    if mask.padding is not None:
        given = mask.padding.to("cpu", torch.bool)[:, mask.kv_offset : mask.kv_offset + end]
        valid = torch.zeros(mask.batch, end, dtype=torch.bool)
        valid[:, : given.shape[1]] = given
        key_ids = torch.where(valid, key_ids, -1)
        if pattern.causal:  # padded queries are those of padded keys; in cross attention they are others
            query_ids = key_ids[:, begin : begin + mask.queries]
    key_ids, query_ids = (_by_batch(ids) for ids in (key_ids, query_ids))
    key_ids = torch.where(torch.isin(key_ids, query_ids), key_ids, -1)
    q_rows, sequences, q_counts = _sequences(query_ids)
    k_rows, with_keys, found = _sequences(key_ids)
    k_counts = torch.zeros_like(q_counts)
    k_counts[torch.isin(sequences, with_keys)] = found
    last = found.cumsum(0) - 1
    reach = k_rows[last] - k_rows[last - found + 1] + 1 if len(found) else found
    padded = mask.keys - end  # rows of [B * keys], of which the first `end` of each were looked at
    k_rows = k_rows + (k_rows // max(end, 1)) * padded
    lengths = {
        "cu_seqlens_q": _starts(q_counts).to(device),
        "cu_seqlens_k": _starts(k_counts).to(device),
        "max_seqlen_q": int(q_counts.max()) if len(q_counts) else 0,
        "max_seqlen_k": int(k_counts.max()) if len(k_counts) else 0,
    }
    return PackedTokens(q_rows.to(device), k_rows.to(device), lengths, bool((reach == found).all()))


def _by_batch(ids: torch.Tensor) -> torch.Tensor:
    """Numbers that differ between the rows of a batch."""
    least = torch.arange(ids.shape[0])[:, None] << 32
    return torch.where(ids < 0, -1, ids + least)


def _sequences(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows that belong to a sequence, the sequences in order, and how many rows each has."""
    flat = ids.flatten()
    rows = (flat >= 0).nonzero().squeeze(1)
    found, counts = flat[rows].unique_consecutive(return_counts=True)
    return rows, found, counts


def _starts(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)


# --- attention ------------------------------------------------------------------------------------------------------


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
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: [B, H, S, D] in, [B, S, H, D] out. `s_aux` are sinks."""
    mask = attention_mask if isinstance(attention_mask, MaskMeaning) else None
    how: dict[str, Any]
    plain = not dropout and position_bias is None and s_aux is None
    if plain and mask is not None and mask.prefix is not None and mask.keys == key.shape[2]:
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
    why = _what_is_missing(mask, attention_mask, dropout, position_bias, key)
    if why:
        went_elsewhere("transformers", why)
        dense = mask.dense() if mask is not None else attention_mask
        return _dense_attention(query, key, value, dense, causal, position_bias, dropout, s_aux, **how), None
    if mask is None:
        left = sliding_window - 1 if sliding_window and causal else None
        how |= {"causal": causal, "window": None if left is None else (left, 0)}
        return _one_length(query, key, value, s_aux, how), None
    pattern = mask.pattern
    assert pattern is not None
    how |= {"causal": pattern.causal, "window": pattern.window}
    if mask.padding is not None or pattern.packed is not None or _crosses_chunks(mask):
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
    mask: MaskMeaning | None, given: Any, dropout: float, position_bias: Any, key: torch.Tensor
) -> str | None:
    """Why no variant can run this; None where one can."""
    if dropout:
        return "dropout of attention weights"
    if position_bias is not None:
        return "a position bias"
    if mask is None:
        return None if given is None else "a dense mask"
    if mask.keys != key.shape[2]:
        raise ValueError(f"the mask is of {mask.keys} keys, and there are {key.shape[2]}")
    if mask.pattern is None:
        return "a mask function that is not one of transformers' own, or one in an exported program"
    if (mask.padding is not None or mask.pattern.packed is not None) and mask.packed() is None:
        return "a window over padding between tokens"
    return None


def _crosses_chunks(mask: MaskMeaning) -> bool:
    pattern = mask.pattern
    if pattern is None or pattern.chunk is None:
        return False
    return pattern.positions is not None or mask.keys + mask.kv_offset > pattern.chunk


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
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = registry.attention_varlen(
        q.flatten(0, 1),
        k,
        v,
        cu_seqlens_q=starts,
        seqused_k=used,
        max_seqlen_q=mask.queries,
        max_seqlen_k=k.shape[1],
        sinks=sinks,
        **how,
    )
    return out.unflatten(0, (mask.batch, mask.queries))  # type: ignore[no-any-return]


def _packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: PackedTokens, sinks: Any, how: dict[str, Any]
) -> torch.Tensor:
    batch, _, queries, _ = q.shape
    packed = packed.on(q.device)
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    rows = (packed.q_rows, packed.k_rows, packed.k_rows)
    q, k, v = (x if len(r) == len(x) else x.index_select(0, r) for x, r in zip(flat, rows, strict=True))
    out = registry.attention_varlen(q, k, v, sinks=sinks, **packed.lengths, **how)
    if len(out) != batch * queries:
        out = out.new_zeros(batch * queries, *out.shape[1:]).index_copy(0, packed.q_rows, out)
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


__all__ = ["NAME", "MaskMeaning", "attention", "enable", "mask"]
