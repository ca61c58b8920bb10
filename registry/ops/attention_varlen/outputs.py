"""Outputs of attention_varlen as every variant allocates them: dense [T, Hq, Dv] and [Hq, T]."""

from __future__ import annotations

import torch


def new_out(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An uninitialised output [T, Hq, Dv], dense."""
    return q.new_empty((q.shape[0], q.shape[1], v.shape[-1]))


def new_lse(q: torch.Tensor) -> torch.Tensor:
    """An uninitialised float32 LSE [Hq, T]."""
    return q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
