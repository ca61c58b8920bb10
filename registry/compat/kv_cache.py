"""A cache of keys and values as FlashAttention takes it: what is in it, writing behind that, and rotary positions."""

from __future__ import annotations

import torch

from registry.errors import InvalidArgument

Tensor = torch.Tensor


class Cache:
    """k_cache and v_cache [B, S, Hkv, D], or pages of them with a table."""

    def __init__(
        self, k: Tensor, v: Tensor, table: Tensor | None, batch_idx: Tensor | None, q: Tensor, names: str = "_cache"
    ) -> None:
        for name, tensor in (("q", q), (f"k{names}", k), (f"v{names}", v)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 4:
                got = type(tensor).__name__ if not isinstance(tensor, torch.Tensor) else f"shape {tuple(tensor.shape)}"
                raise InvalidArgument(name, got, "4 dimensions: [B, S, H, D], or [pages, page, Hkv, D] with a table")
        if batch_idx is not None:
            if table is not None:
                raise InvalidArgument("cache_batch_idx", "a tensor beside a block_table", "one of them")
            table = batch_idx[:, None].contiguous()  # a cache is pages, each as long as a sequence may be
        self.k, self.v, self.table, self._batch, self._device = k, v, table, q.shape[0], q.device
        if table is None and k.shape[0] != q.shape[0]:
            raise InvalidArgument("k_cache", f"{k.shape[0]} sequences", f"q's {q.shape[0]}, or cache_batch_idx")
        self.capacity = k.shape[1] * (1 if table is None else table.shape[1])

    def lengths(self, cache_seqlens: int | Tensor | None, k: Tensor | None, v: Tensor | None) -> Tensor:
        """int32 [B]: how many keys of each sequence there are, before k and v are written."""
        if (k is None) != (v is None):
            raise InvalidArgument("v" if v is None else "k", "None", "a tensor: both of k and v, or neither")
        if cache_seqlens is None and k is not None:
            raise InvalidArgument("cache_seqlens", "None beside k", "where k and v are to be written")
        if cache_seqlens is None:
            cache_seqlens = self.capacity
        if isinstance(cache_seqlens, int):
            return torch.full((self._batch,), cache_seqlens, dtype=torch.int32, device=self._device)
        if tuple(cache_seqlens.shape) != (self._batch,) or cache_seqlens.dtype is not torch.int32:
            got = f"shape {tuple(cache_seqlens.shape)} of {str(cache_seqlens.dtype).removeprefix('torch.')}"
            raise InvalidArgument("cache_seqlens", got, f"an int, or int32 of shape ({self._batch},)")
        return cache_seqlens

    def append(self, k: Tensor | None, v: Tensor | None, before: Tensor) -> Tensor:
        """Write new keys and values behind those that are there; the lengths after that."""
        if k is None or v is None:
            return before
        for name, tensor, cache in (("k", k, self.k), ("v", v, self.v)):
            shape = (self._batch, k.shape[1], *cache.shape[2:])
            if tuple(tensor.shape) != shape or tensor.dtype != cache.dtype:
                got = f"shape {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
                allowed = f"shape {shape} of {str(cache.dtype).removeprefix('torch.')}, as the cache has"
                raise InvalidArgument(name, got, allowed)
        at = before[:, None].long() + torch.arange(k.shape[1], device=k.device)
        if at.is_cpu and at.numel() and not 0 <= int(at.min()) <= int(at.max()) < self.capacity:
            allowed = f"0 to {self.capacity - k.shape[1]}, so that {k.shape[1]} more fit into the cache"
            raise InvalidArgument("cache_seqlens", before.tolist(), allowed)
        rows = torch.arange(self._batch, device=k.device)[:, None]
        page = self.k.shape[1]
        where = (rows, at) if self.table is None else (self.table[rows, at // page].long(), at % page)
        self.k[where], self.v[where] = k, v
        return before + k.shape[1]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, before: Tensor, interleaved: bool, still: bool = False) -> Tensor:
    """Rotary embedding of x [B, S, H, D] at positions before, before + 1, ...; all of them at `before` if `still`."""
    half = cos.shape[1]
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * half > x.shape[3]:
        got = f"shapes {tuple(cos.shape)} and {tuple(sin.shape)}"
        raise InvalidArgument("rotary_cos", got, f"with rotary_sin [positions, up to {x.shape[3] // 2}]")
    steps = torch.arange(x.shape[1], device=x.device)
    at = before[:, None].long() + (0 * steps if still else steps)
    wide_cos, wide_sin = (t[at][:, :, None].float() for t in (cos, sin))
    turned = x[..., : 2 * half].float()
    one, two = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, dim=-1)
    pair = (one * wide_cos - two * wide_sin, one * wide_sin + two * wide_cos)
    mixed = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((mixed.to(x.dtype), x[..., 2 * half :]), dim=-1)
