"""Calls that are tried out."""

from __future__ import annotations

import torch

import registry


def qkv(s=8, dtype=torch.float32):
    return tuple(torch.randn(1, 2, s, 16, dtype=dtype) for _ in range(3))


def picked(*tensors):
    return registry.attention.explain(*(tensors or qkv())).variant
