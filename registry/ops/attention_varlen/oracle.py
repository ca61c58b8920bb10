"""The oracle: each sequence by the definition, differentiable, in any dtype. It waits for the lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from registry.ops.parts import definition
from registry.ops.parts.definition import distances

__all__ = ["attend", "distances", "keys_of", "reference", "sequences"]


def keys_of(b: int, k: torch.Tensor, scale: torch.Tensor | None, given: dict[str, Any]) -> torch.Tensor:
    """[length, Hkv, D]: the keys (or values) of sequence b out of whatever layout, quantised ones times their scale."""
    table, seqused, cu_seqlens_k = given["block_table"], given["seqused_k"], given["cu_seqlens_k"]
    if cu_seqlens_k is not None:
        at: Any = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
    elif table is None:
        at = (b, slice(0, int(seqused[b])))
    else:
        slots = torch.arange(int(seqused[b]), device=k.device)
        at = (table[b].long()[slots // k.shape[1]], slots % k.shape[1])
    found = k[at]
    if scale is None:
        return found
    found = found.to(torch.float64)
    if scale.dim() == k.dim() - 1 and scale.shape == k.shape[:-1]:
        return found * scale[at].to(torch.float64)[..., None]
    return found * scale.to(torch.float64).reshape(1, -1, 1)


def sequences(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, given: dict[str, Any]
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """(rows of q, keys, values) of each sequence."""
    bounds = cu_seqlens_q.tolist()
    for b in range(len(bounds) - 1):
        yield (
            slice(bounds[b], bounds[b + 1]),
            keys_of(b, k, given["k_scale"], given),
            keys_of(b, v, given["v_scale"], given),
        )


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dtype: torch.dtype | None = None, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [n, Hq, Dv], lse [Hq, n]) of one sequence, q [n, Hq, D], k [m, Hkv, D], in `dtype` (None: as given)."""
    out, lse = definition.attend(*(t.to(dtype or t.dtype).transpose(0, 1) for t in (q, k, v)), **how)
    return out.transpose(0, 1), lse


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    given: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float64,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [T, Hq, Dv], lse [Hq, T]) of all sequences."""
    outs, lses = [], []
    for rows, keys, values in sequences(k, v, cu_seqlens_q, given):
        more = {"sinks": given["sinks"], "alibi_slopes": given["alibi_slopes"], "dtype": dtype}
        out, lse = attend(q[rows], keys, values, **more, **how)
        outs.append(out)
        lses.append(lse)
    if not outs:
        return q.new_zeros((0, q.shape[1], v.shape[-1]), dtype=dtype), q.new_zeros((q.shape[1], 0), dtype=dtype)
    return torch.cat(outs), torch.cat(lses, dim=1)
