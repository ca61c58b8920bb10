"""Functions of Gluon kernels on Python's integers: what they compute of sizes alone, without a GPU or a compiler."""

from __future__ import annotations

import types
from types import ModuleType, SimpleNamespace
from typing import Any

LANGUAGE = SimpleNamespace(
    minimum=min, maximum=max, where=lambda test, a, b: a if test else b, cdiv=lambda a, b: -(-a // b)
)


def on_numbers(module: ModuleType, name: str, **called: Any) -> types.FunctionType:
    """A function of a kernel's module, whose constants become numbers; those that it calls are given."""
    from triton.language import constexpr

    plain = getattr(module, name).fn
    known = {key: one.value if isinstance(one, constexpr) else one for key, one in plain.__globals__.items()}
    return types.FunctionType(plain.__code__, {**known, **called, "gl": LANGUAGE})
