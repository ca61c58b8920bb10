"""A cache of keys and values as FlashAttention takes it: what is in it, writing behind that, and rotary positions."""

from __future__ import annotations

from typing import Any

import torch

from registry.compat import checks
from registry.errors import InvalidArgument, shown
from registry.ops.tensors import check_dims, check_tensor, described, dtype_name, is_its_own, overlap

Tensor = torch.Tensor

NAMES = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}
"""What the op's arguments are called here."""
_SHAPES = "[B, S, H, D], or [pages, page, Hkv, D] with a table"


class Cache:
    """k_cache and v_cache [B, S, Hkv, D], or pages of them with a table."""

    def __init__(self, k: Any, v: Any, table: Any, batch_idx: Any, q: Any) -> None:
        q, k, v = (check_dims(name, t, 4, _SHAPES) for name, t in (("q", q), ("k_cache", k), ("v_cache", v)))
        for name, tensor in (("k_cache", k), ("v_cache", v)):
            if tensor.device != q.device:
                raise InvalidArgument(name, f"device {tensor.device}", f"q's device {q.device}")
        if v.shape[:3] != k.shape[:3] or v.dtype != k.dtype:
            got = described(v)
            raise InvalidArgument("v_cache", got, f"k_cache's: {tuple(k.shape[:3])} and D, of {dtype_name(k.dtype)}")
        if batch_idx is not None:
            if table is not None:
                raise InvalidArgument("cache_batch_idx", "a tensor beside a block_table", "one of them")
            batch_idx = checks.lengths("cache_batch_idx", batch_idx, q.shape[0], q.device)
            checks.refuse_beyond("cache_batch_idx", batch_idx, k.shape[0] - 1, "the sequences of the cache")
            table = batch_idx[:, None].contiguous()  # a cache is pages, each as long as a sequence may be
        elif table is not None:
            table = check_dims("block_table", table, 2, "[B, pages of the longest sequence]")
            if table.dtype is not torch.int32 or table.shape[0] != q.shape[0] or table.device != q.device:
                got = f"{described(table)} on {table.device}"
                raise InvalidArgument("block_table", got, f"int32 of shape ({q.shape[0]}, pages) on {q.device}")
        elif k.shape[0] != q.shape[0]:
            raise InvalidArgument("k_cache", f"{k.shape[0]} sequences", f"q's {q.shape[0]}, or cache_batch_idx")
        self.k, self.v, self.table, self._batch, self._device = k, v, table, q.shape[0], q.device
        self.capacity = k.shape[1] * (1 if table is None else table.shape[1])

    def lengths(self, cache_seqlens: Any, k: Tensor | None, v: Tensor | None) -> Tensor:
        """int32 [B]: how many keys of each sequence there are, before k and v are written."""
        if (k is None) != (v is None):
            raise InvalidArgument("v" if v is None else "k", "None", "a tensor: both of k and v, or neither")
        if cache_seqlens is None and k is not None:
            raise InvalidArgument("cache_seqlens", "None beside k", "where k and v are to be written")
        if cache_seqlens is None:
            cache_seqlens = self.capacity
        if type(cache_seqlens) is int:
            if not 0 <= cache_seqlens <= self.capacity:
                raise InvalidArgument("cache_seqlens", shown(cache_seqlens), f"0 to {self.capacity}, which it can hold")
            return torch.full((self._batch,), cache_seqlens, dtype=torch.int32, device=self._device)
        if not isinstance(cache_seqlens, torch.Tensor):
            raise InvalidArgument("cache_seqlens", shown(cache_seqlens), f"an int, or int32 of shape ({self._batch},)")
        return checks.lengths("cache_seqlens", cache_seqlens, self._batch, self._device)

    def behind(self, k: Any, v: Any, before: Tensor) -> tuple[Tensor, Tensor]:
        """Where new keys and values go, behind those that are there: two numbers of each, as the caches are indexed."""
        k = check_dims("k", k, 4, "[B, Sn, Hkv, D]")
        for name, tensor, cache in (("k", k, self.k), ("v", check_tensor("v", v), self.v)):
            shape = (self._batch, k.shape[1], *cache.shape[2:])
            if tuple(tensor.shape) != shape or tensor.dtype != cache.dtype or tensor.device != cache.device:
                got = f"{described(tensor)} on {tensor.device}"
                allowed = f"shape {shape} of {dtype_name(cache.dtype)} on {cache.device}, as the cache has"
                raise InvalidArgument(name, got, allowed)
            if not is_its_own(cache):
                got = f"shape {tuple(cache.shape)} with strides {cache.stride()}"
                raise InvalidArgument(
                    f"{name}_cache", got, f"entries that share no memory, for {name} is written there"
                )
        if not torch.compiler.is_compiling() and _are_mixed((self.k, self.v), (k, v)):
            got = f"shape {tuple(self.v.shape)} in k_cache's memory"
            raise InvalidArgument("v_cache", got, "memory of its own, for k and v are written there, or v as part of k")
        more = k.shape[1]
        checks.refuse_beyond("cache_seqlens", before, self.capacity - more, f"so that {more} more fit into the cache")
        at = before[:, None].long() + torch.arange(more, device=k.device)
        rows = torch.arange(self._batch, device=k.device)[:, None]
        page = self.k.shape[1]
        if self.table is None:
            return rows, at
        pages = self.table[rows, at // page].long()
        checks.refuse_beyond("block_table", pages, self.k.shape[0] - 1, "the pages there are")
        return pages, at % page

    def apart(self, given: Tensor) -> Tensor:
        """The tensor, or a copy of one that shares memory with the caches, which are written to before it is read. What
        a graph writes is seen by nobody in it."""
        shared = not torch.compiler.is_compiling() and any(overlap(given, cache) for cache in (self.k, self.v))
        return given.clone() if shared else given


def _are_mixed(caches: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> bool:
    """Whether what is written to one cache spoils the other: they have elements in common, and the new tensors not the
    same ones (values that are a part of the keys)."""
    k, v = caches
    if not overlap(k, v):
        return False
    alike = k.stride() == v.stride()
    apart = (v.data_ptr() - k.data_ptr()) // k.element_size()
    if alike and overlap(*new) and new[0].stride() == new[1].stride():
        return (new[1].data_ptr() - new[0].data_ptr()) // k.element_size() != apart
    sizes = (*k.shape[:-1], min(k.shape[-1], v.shape[-1]))
    return not alike or not is_its_own(torch.empty_strided((2, *sizes), (abs(apart), *k.stride()), device="meta"))


def rotated(name: str, x: Any, cos: Any, sin: Any, before: Tensor, interleaved: bool, still: bool = False) -> Tensor:
    """Rotary embedding of x [B, S, H, D] at positions before, before + 1, ...; all of them at `before` if `still`."""
    x = check_dims(name, x, 4, "[B, S, H, D]")
    if x.shape[0] != before.shape[0] or not x.is_floating_point():
        got = described(x)
        raise InvalidArgument(name, got, f"{before.shape[0]} sequences of floating numbers")
    cos, sin = (check_dims(name, t, 2, "[positions, D / 2]") for name, t in (("rotary_cos", cos), ("rotary_sin", sin)))
    half = cos.shape[1]
    for name, tensor in (("rotary_cos", cos), ("rotary_sin", sin)):
        if tensor.shape != cos.shape or 2 * half > x.shape[3] or not tensor.is_floating_point():
            got = described(tensor)
            allowed = f"as the other one, [positions, up to {x.shape[3] // 2}] of floating numbers"
            raise InvalidArgument(name, got, allowed)
        if tensor.device != x.device:
            raise InvalidArgument(name, f"device {tensor.device}", f"q's device {x.device}")
    steps = torch.arange(x.shape[1], device=x.device)
    at = before[:, None].long() + (0 * steps if still else steps)
    checks.refuse_beyond("cache_seqlens", at, cos.shape[0] - 1, "the positions that rotary_cos has")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    wide_cos, wide_sin = (t[at][:, :, None].to(wide) for t in (cos, sin))
    turned = x[..., : 2 * half].to(wide)
    one, two = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(half, dim=-1)
    pair = (one * wide_cos - two * wide_sin, one * wide_sin + two * wide_cos)
    mixed = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((mixed.to(x.dtype), x[..., 2 * half :]), dim=-1)
