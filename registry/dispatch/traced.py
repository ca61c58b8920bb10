"""`use` inside of what torch.compile traces, which knows no ContextVar: the choice becomes an argument of the torch op.

A variant of a forward op can become one. All else is refused where it stands, for a graph that forgot it would run
something else than was asked for.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from registry.dispatch.catalog import catalog
from registry.errors import InvalidArgument
from registry.forks import new_lock
from registry.notices import notice, what_failed

_F = TypeVar("_F", bound=Callable[..., Any])
is_tracing = torch.compiler.is_dynamo_compiling

SETTLED = "*"
"""How the choice of a graph begins that was traced while nobody asked for a variant or watched what runs: it is made
once, when the graph is compiled, and torch's own operations stand in the graph where they are chosen."""
choice: str | None = SETTLED
"""What a graph is told that nobody names a variant for: SETTLED with the era of the variants and tables in force; None
where any scope is entered, on any thread. A global that the tracer guards: where it changes, graphs are traced again,
so that one with a choice in it is not run for somebody who asks for another, or records."""
graph_forms: dict[Any, Callable[..., Any]] = {}
"""Torch op -> what takes its arguments and answers by torch's own operations, or NotImplemented."""

_whole: list[Callable[..., Any]] = []
"""What a graph holds as it is, of which the compiler does not know yet."""
_lent = False
_scopes = 0
_era = ""
_counting = new_lock()
_settling = new_lock()
"""Who finds an era last has seen all that had changed by then."""
_asked: list[tuple[str, str]] = []
"""(op, variant) of the blocks that are being traced, innermost last; empty while nobody traces."""


def by_the_tracer(function: _F) -> _F:
    """Have a tracer call this rather than trace it, so that what it says reaches the user as it is.

    It is what torch.compiler.assume_constant_result does, which would import all of torch.compile, and triton, at once.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def in_one_piece(function: _F) -> _F:
    """Have a graph hold this function as it is, once the tracer has run `meet_compiler`.

    For an autograd.Function that functorch transforms: the tracer, which looks into each, does not get through those.
    """
    _whole.append(function)
    return function


@contextlib.contextmanager
def using(*names: str) -> Iterator[None]:
    """`use(*names)` for a tracer."""
    asked = by_op(_forward_op_of, names)
    _asked.extend(asked.items())
    try:
        yield
    finally:
        for _ in asked:
            _asked.pop()


def by_op(op_of: Callable[[str], str], names: tuple[str, ...]) -> dict[str, str]:
    """The variant of each op that `use` is given."""
    found: dict[str, str] = {}
    for name in names:
        if isinstance(name, (list, tuple)):
            raise InvalidArgument("use", "a list", "names, each an argument of its own")
        op = op_of(name)
        if found.setdefault(op, name) != name:
            raise InvalidArgument("use", f"{found[op]} and {name}, both of {op}", "one variant an op")
    return found


def variant_for(op: str, named: str | None = None) -> str | None:
    """The variant that the call, or the blocks being traced, ask for; else a choice that is settled when the graph is
    compiled."""
    meet_compiler()
    if named is not None:
        return named
    if _asked:  # so that graphs guard little
        for asked_op, name in reversed(_asked):
            if asked_op == op:
                return name
    # a program outlives the tables, blocks and machine that it was made with
    return None if is_exporting() else choice


def asked_of(variant: str | None) -> str | None:
    """The variant that the argument of a torch op asks for."""
    return None if variant is not None and variant.startswith(SETTLED) else variant


def enter(entered: int) -> None:
    """Count a scope that is entered (1) or left (-1)."""
    global _scopes
    with _counting:
        _scopes += entered
        _choose()


def new_era() -> None:
    """Variants or tables may have changed: if so, what graphs have settled is settled again. Graphs of the same ones
    stay good, for the compiler gives a function up that it had to trace more than a few times."""
    with _settling:
        if _era:
            _find_era()


def _find_era() -> None:
    global _era
    from registry.dispatch import in_force

    found = in_force.digest()
    with _counting:
        _era = found
        _choose()


def _choose() -> None:
    global choice
    choice = None if _scopes > 0 else SETTLED + _era


@by_the_tracer
def is_exporting() -> bool:
    """Whether torch.export is at work. The tracer asks: inside of a trace torch 2.11 says so of torch.compile, too."""
    return torch.compiler.is_exporting()


@by_the_tracer
def meet_compiler() -> None:
    """Tell the compiler what graphs may hold in the place of our ops, and how they call them, before it asks."""
    global _lent
    while _whole:
        _keep_whole(_whole.pop())
    if not _era:
        from registry.dispatch import in_force

        in_force.tables()  # runs plugins' code where they are not loaded yet: not under the lock
        with _settling:
            _find_era()
    if not _lent and "torch._inductor" in sys.modules:  # no other compiler asks for them
        _lent = True
        for lend, otherwise in lenders:
            try:
                lend()
            except Exception as error:  # parts of torch that it promises to nobody
                notice(f"compiled graphs {otherwise}: {what_failed(error)}")


def _keep_whole(function: Callable[..., Any]) -> None:
    from torch._dynamo import eval_frame

    torch.compiler.allow_in_graph(function)
    with contextlib.suppress(AttributeError):  # not to be traced by itself either, where a graph broke outside of it
        eval_frame.skip_code(function.__code__)  # type: ignore[attr-defined]


def lend_again() -> None:
    """There is another op."""
    global _lent
    _lent = False


def _lend_forms() -> None:
    from torch._inductor import decomposition, lowering
    from torch._library.utils import get_layout_constraint_tag

    for op, form in graph_forms.items():
        if op not in decomposition.decompositions:
            strides = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op))
            lowering.make_fallback(op, strides, warn=False, override_decomp=True)  # for those that stay
            decomposition.decompositions[op] = form
    decomposition.fast_random_decomps.cache_clear()


lenders: list[tuple[Callable[[], None], str]] = [(_lend_forms, "call the registry's ops for torch's own kernels too")]
"""What tells Inductor, and what compiled graphs do where that fails."""


@by_the_tracer
def refuse(what: str) -> None:
    """Raise for what a graph cannot hold."""
    raise InvalidArgument(what, "a block inside of a compiled function", "a block around the call of that function")


@by_the_tracer
def _forward_op_of(name: str) -> str:
    op = catalog.get().named(name).op
    if op.endswith("_backward"):
        allowed = "variants of forward ops, or `use` around the whole training step"
        raise InvalidArgument("use", f"{name!r}, a variant of {op}, inside of a compiled function", allowed)
    return op


@by_the_tracer
def tell_elsewhere(door: str, because: str) -> None:
    """Log a call that an integration hands back to its library."""
    notice(f"{door}: not run by a variant of the registry: {because}")
