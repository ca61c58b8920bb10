"""Keys that a model chooses for each query by itself, which it tells an attention that is none of transformers' own.

DeepSeek's sparse attention names keys (`indices`), MiniMax's blocks of them (`block_indices`). To transformers' sdpa
and eager attention such models give a mask instead; no variant here has a word for either, so this is that mask.
"""

from __future__ import annotations

from typing import Any

import torch


def chosen_keys(module: Any, keys: int, indices: Any, block_indices: Any) -> torch.Tensor:
    """[B, 1 or heads that choose, S, keys] of bool: which are seen."""
    if block_indices is None:
        return _seen(indices[:, None], keys)
    size = module.indexer.block_size
    return _seen(block_indices, -(-keys // size)).repeat_interleave(size, dim=-1)[..., :keys]


def _seen(indices: torch.Tensor, count: int) -> torch.Tensor:
    """Those of `count` that are named; -1 names none."""
    at = indices.long()
    seen = at.new_zeros((*at.shape[:-1], count + 1), dtype=torch.bool)
    return seen.scatter(-1, torch.where(at < 0, count, at), True)[..., :count]


def of_them(mask: torch.Tensor | None, chosen: torch.Tensor, heads: int, causal: bool) -> torch.Tensor:
    """The mask, of bool or added to scores, with what was not chosen hidden, too. Without one, causal from key 0 on."""
    if chosen.shape[1] not in (1, heads):
        chosen = chosen.repeat_interleave(heads // chosen.shape[1], dim=1)
    if mask is None:
        return chosen.tril() if causal else chosen
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)
