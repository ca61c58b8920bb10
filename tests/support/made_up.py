"""Kernels for tests of what surrounds kernels, and what they are called with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

import registry
from registry.dispatch.catalog import catalog


def qkv(*shape: int, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Operands of attention, small ones unless told."""
    return tuple(torch.randn(*(shape or (1, 2, 8, 16)), **kwargs) for _ in range(3))


def math_run(q: Any, k: Any, v: Any, *, scale: float, config: Any, causal: bool = False, **features: Any) -> Any:
    """A kernel that is right: the oracle in float32."""
    features.pop("return_lse", None)
    out, lse = registry.attention.reference(
        q, k, v, scale=scale, causal=causal, return_lse=True, dtype=torch.float32, **features
    )
    return out.to(q.dtype), lse


@contextlib.contextmanager
def taken_back() -> Iterator[None]:
    """What is registered meanwhile is gone afterwards, and so are tables of `--plugin`."""
    before = catalog.get()
    yield
    for name in set(registry.variants()) - set(before.variants):
        registry.unregister(name)
    if catalog.get().tables != before.tables:
        catalog._catalog = dataclasses.replace(catalog.get(), tables=before.tables)
        registry.reload_tables()
