"""What a mask of transformers means: shared by the layers of a step, and put together once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from registry.dispatch.traced import is_exporting
from registry.integrations.transformers.as_tensor import AsTensor
from registry.ops.parts.masks import FAR


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


def pattern_of(function: Callable[..., Any]) -> Pattern | None:
    """The pattern that transformers' own mask functions stand for; None for any other function."""
    found: dict[str, Any] = {"causal": False}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        kind = _kinds().get(getattr(one, "__code__", None))
        if kind is None:
            return None
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


@functools.cache
def _kinds() -> dict[Any, str]:
    """By its code, which function of transformers this is, or makes this. By name they cannot be told: where a graph
    breaks, a function that is made anew has lost the name of that which made it (Python 3.10)."""
    from transformers import masking_utils

    functions = {n: inspect.unwrap(one) for n, one in vars(masking_utils).items() if inspect.isfunction(one)}
    own = {n: one.__code__ for n, one in functions.items() if one.__module__ == masking_utils.__name__}
    made = {inner: n for n, code in own.items() for inner in code.co_consts if inspect.iscode(inner)}
    return made | {code: n for n, code in own.items()}


_WANT_A_TENSOR = frozenset(("deepseek_v4", "doge"))
"""Models that join the mask with one of their own where it is a tensor, and pass over it where it is none."""


def mask(*args: Any, **kwargs: Any) -> MaskMeaning | torch.Tensor:
    """What transformers calls for a mask. A graph breaks here: its meaning is read from functions and data."""
    if getattr(kwargs.get("config"), "model_type", None) in _WANT_A_TENSOR:
        return _dense(*args, **kwargs)
    compiling = torch.compiler.is_compiling() and not is_exporting()
    return _outside_of_graphs(*args, **kwargs) if compiling else MaskMeaning(*args, **kwargs)


@torch.compiler.disable(reason="masks are read outside of graphs: compile without fullgraph")  # type: ignore[untyped-decorator]
def _outside_of_graphs(*args: Any, **kwargs: Any) -> MaskMeaning:
    return MaskMeaning(*args, **kwargs)


def _dense(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The mask as transformers' sdpa is given it, and never none at all."""
    from transformers.masking_utils import sdpa_mask

    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(*args, **kwargs)  # type: ignore[no-any-return]


class MaskMeaning(AsTensor, BlockMask):
    """What stands in for a mask between the model and its layers: its meaning, shared by them.

    transformers hands a finished mask on if it is a tensor of four dimensions or a BlockMask. A tensor could not say
    what it means; to who computes with this it is one.
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
        if is_exporting():  # no data can be looked at
            plain = function is masking_utils.causal_mask_function and attention_mask is None
            self.pattern = Pattern(causal=True) if plain else None
        else:
            self.pattern = pattern_of(function)
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
            **rest,
        )
        self._dense: torch.Tensor | None = None
        self._packed: PackedTokens | None = None
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = None
        self.prefix = self._prefix()

    shape = property(lambda self: (self.batch, 1, self.queries, self.keys))  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"MaskMeaning{self.shape}({self.pattern}, padding={self.padding is not None})"

    __str__ = __repr__

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.get("dtype", next((one for one in args if isinstance(one, torch.dtype)), None))
        return self if dtype in (None, torch.bool) else self.dense().to(*args, **kwargs)

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
        if pattern is None or self.padding is not None or pattern.packed is not None or crosses_chunks(self):
            return None
        if self.misplaced():
            return None
        if not pattern.causal:
            return self.keys
        if isinstance(self.q_offset, torch.Tensor):
            return None
        end: int = self.q_offset + self.queries - self.kv_offset
        return min(self.keys, end)

    def fits(self, query: torch.Tensor, key: torch.Tensor) -> bool:
        """Whether it was made for these [B, H, S, D], and need not be broadcast."""
        return self.keys == key.shape[2] and self.queries == query.shape[2] and self.batch == query.shape[0]

    def misplaced(self) -> bool:
        """Whether a window counts from elsewhere than from the last key, or may do so, as nobody here can."""
        pattern = self.pattern
        if pattern is None or pattern.causal or pattern.window is None:
            return False  # causal keys end where the queries do
        if isinstance(self.q_offset, torch.Tensor):
            return True
        return bool(self.q_offset + self.queries != self.keys + self.kv_offset)

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
        if self._dense is None:
            self._dense = _dense(**self._dense_arguments)
        return self._dense

    def packed(self) -> PackedTokens | None:
        """The tokens that are not padding, as sequences; None where they do not keep the distances of a window."""
        if self._packed is None:
            self._packed = _pack(self)
        return self._packed if self._packed.keeps_distances or self.pattern.window is None else None  # type: ignore[union-attr]


@dataclass(frozen=True)
class PackedTokens:
    """Which rows of [B * S, H, D] are tokens, and where their sequences begin."""

    lengths: dict[str, Any]
    keeps_distances: bool
    rows: tuple[torch.Tensor, torch.Tensor] | None = None
    """Those of q and of k that are tokens; None where all rows stay where they are."""
    padding: torch.Tensor | None = None
    """[B, S]: those that stay and are none."""

    def on(self, device: torch.device) -> PackedTokens:
        """The same beside a layer that lies on another device than the first one."""
        if self.lengths["cu_seqlens_q"].device == device:
            return self
        starts = self.lengths["cu_seqlens_q"].to(device)
        same = self.lengths["cu_seqlens_k"] is self.lengths["cu_seqlens_q"]
        lengths = self.lengths | {"cu_seqlens_q": starts, "cu_seqlens_k": self.lengths["cu_seqlens_k"].to(device)}
        rows = None if self.rows is None else (self.rows[0].to(device), self.rows[1].to(device))
        padding = None if self.padding is None else self.padding.to(device)
        lengths = lengths | ({"cu_seqlens_k": starts} if same else {})
        return PackedTokens(lengths, self.keeps_distances, rows, padding)


PIECES = 4
"""Of a row of nothing but padding: longer sequences of it would cost time, and more of them cost time, too."""


def _where_they_lie(mask: MaskMeaning) -> PackedTokens | None:
    """Padded rows of a prefill as they lie in memory: tokens are a sequence, and padding makes others, whose results
    nobody wants. Nothing is moved, and a batch of this shape has as many sequences however it is padded. None where the
    tokens of a row do not lie side by side, or are not all there is."""
    pattern, padding = mask.pattern, mask.padding
    assert pattern is not None
    if padding is None or not pattern.causal or pattern.packed is not None or pattern.chunk is not None:
        return None
    if isinstance(mask.q_offset, torch.Tensor) or mask.q_offset or mask.kv_offset or mask.queries != mask.keys:
        return None
    rows, length = padding.shape
    if length != mask.keys or not length:
        return None
    valid = padding.to("cpu", torch.bool)
    begins = torch.ones_like(valid)
    torch.ne(valid[:, 1:], valid[:, :-1], out=begins[:, 1:])
    if int((begins & valid).sum(1).max()) > 1:
        return None
    piece = -(-length // PIECES)
    begins[:, ::piece] |= ~valid[:, ::piece]
    found = begins.flatten().nonzero().squeeze(1)
    starts = torch.full((rows * (PIECES + 2) + 1,), rows * length, dtype=torch.int32)
    starts[: len(found)] = found
    starts = starts.to(padding.device, non_blocking=True)
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    return PackedTokens(lengths, True, padding=~padding.to(torch.bool))


@torch.compiler.disable(reason="how long sequences are is data")  # type: ignore[untyped-decorator]
def _pack(mask: MaskMeaning) -> PackedTokens:
    """Give every token the number of its sequence, -1 for padding, and list those that have a query. Waits once."""
    unmoved = _where_they_lie(mask)
    if unmoved is not None:
        return unmoved
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
        # Padded queries are those of padded keys; in cross attention they are others. A window counts from the last
        # key, where the last query has to stand.
        if pattern.causal or pattern.window is not None:
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
    return PackedTokens(lengths, bool((reach == found).all()), (q_rows.to(device), k_rows.to(device)))


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


def crosses_chunks(mask: MaskMeaning) -> bool:
    pattern = mask.pattern
    if pattern is None or pattern.chunk is None:
        return False
    return pattern.positions is not None or mask.keys + mask.kv_offset > pattern.chunk
