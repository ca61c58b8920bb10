"""The oracle: attention by its definition, differentiable, in any dtype."""

from __future__ import annotations

from typing import Any

import torch

from registry.ops.parts.definition import attend
from registry.ops.parts.masks import visible

__all__ = ["reference", "visible"]


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dtype: torch.dtype | None = torch.float64, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of [B, H, S, D] with these masks and this scale, in `dtype` (None: as given)."""
    return attend(*(t if dtype is None else t.to(dtype) for t in (q, k, v)), **how)
