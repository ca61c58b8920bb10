"""`use` inside of what torch.compile traces, which knows no ContextVar: the choice becomes an argument of the torch op.

A variant of a forward op can become one. All else is refused where it stands, for a graph that forgot it would run
something else than was asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from registry.dispatch.catalog import catalog
from registry.errors import InvalidArgument, UnknownVariant
from registry.notices import notice

_F = TypeVar("_F", bound=Callable[..., Any])
is_tracing = torch.compiler.is_dynamo_compiling

_asked: list[tuple[str, str]] = []
"""(op, variant) of the blocks that are being traced, innermost last; empty while nobody traces."""


def _by_the_tracer(function: _F) -> _F:
    """Have a tracer call this rather than trace it, so that what it says reaches the user as it is.

    It is what torch.compiler.assume_constant_result does, which would import all of torch.compile, and triton, at once.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@contextlib.contextmanager
def using(*names: str) -> Iterator[None]:
    """`use(*names)` for a tracer."""
    for name in names:
        _asked.append((_forward_op_of(name), name))
    try:
        yield
    finally:
        for _ in names:
            _asked.pop()


def variant_for(op: str) -> str | None:
    """The variant that the blocks being traced ask for."""
    for asked_op, name in reversed(_asked):
        if asked_op == op:
            return name
    return None


@_by_the_tracer
def refuse(what: str) -> None:
    """Raise for what a graph cannot hold."""
    raise InvalidArgument(what, "a block inside of a compiled function", "a block around the call of that function")


@_by_the_tracer
def _forward_op_of(name: str) -> str:
    variants = catalog.get().variants
    if name not in variants:
        raise UnknownVariant(name, "any", sorted(variants))
    op = variants[name].op
    if op.endswith("_backward"):
        allowed = "variants of forward ops, or `use` around the whole training step"
        raise InvalidArgument("use", f"{name!r}, a variant of {op}, inside of a compiled function", allowed)
    return op


@_by_the_tracer
def tell_elsewhere(door: str, because: str) -> None:
    """Log a call that an integration hands back to its library."""
    notice(f"{door}: not run by a variant of the registry: {because}")
