"""Fixtures shared by all tests: made-up variants that come and go, and a registry that forgets between tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from made_up import math_run

import registry
from registry import notices
from registry.dispatch.quarantine import quarantine


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Quarantines, notices and plans of one test never reach the next."""
    yield
    quarantine.clear()
    notices.clear()
    registry.forget_plans()


@pytest.fixture
def declare() -> Iterator[Callable[..., registry.Variant]]:
    """Register a made-up attention variant; it is taken back after the test."""
    names: list[str] = []

    def make(name: str = "test.kernel", *, op: str = "attention", run: Any = None, **claims: Any) -> registry.Variant:
        settings = {key: claims.pop(key) for key in ("configs", "design", "prepare") if key in claims}
        claims = {
            "arch": ("any",),
            "dtypes": ("float32",),
            "head_dim": (1, 512),
            "layouts": ("bhsd", "bshd", "strided"),
        } | claims
        claims.setdefault("ieee", True)
        variant = registry.Variant(name, op=op, run=run or math_run, requires=registry.Requires(**claims), **settings)
        registry.register(variant)
        names.append(name)
        return variant

    yield make
    for name in names:
        registry.unregister(name)
