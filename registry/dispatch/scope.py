"""`use`, `prefer` and `record`: choices and observers that hold inside a `with` block.

They live in one ContextVar, so threads and asyncio tasks never see each other's. Autograd may run a backward on a
thread of its own, so the op saves the scope of the forward and enters it again around the backward.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from registry.contract.capability import MOST_DIGITS, too_long
from registry.dispatch import traced
from registry.dispatch.catalog import catalog
from registry.errors import InvalidArgument, RegistryError, shown
from registry.forks import new_lock

if TYPE_CHECKING:
    from registry.contract.problem import Problem
    from registry.contract.variant import Variant
    from registry.dispatch.decision import Decision

_P = ParamSpec("_P")
_T = TypeVar("_T", covariant=True)
Launch = Callable[..., Any]
Bind = Callable[["Variant", "Problem", Any], Launch]
"""(variant, problem, config) -> a launch."""
Trial = Callable[[tuple[Any, ...], dict[str, Any]], None]


def freeze_config(config: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A config as a hashable, order-free key."""
    return tuple(sorted(config.items()))


@dataclass(frozen=True)
class Forced:
    """A variant that must run, and its config where one was named too."""

    variant: str
    config: tuple[tuple[str, Any], ...] | None = None


class Trying(Protocol):
    """What a `try_out` block asks of plans."""

    most: int

    def trial(self, problem: Problem, scope: Scope, bind: Bind) -> Trial | None:
        """What the first launch of a plan calls with its arguments before it decides again; None where the choice
        stands."""


@dataclass(frozen=True)
class Scope:
    """What `use`, `prefer`, `record` and `try_out` blocks around the caller ask for."""

    forced: tuple[tuple[str, Forced], ...] = ()
    """(op, what must run), one entry an op."""
    preferred: tuple[str, ...] = ()
    recorders: tuple[Recorder, ...] = ()
    trying: Trying | None = None
    key: str | None = field(default=None, compare=False)
    """The part that belongs in a memo key; None where nothing is forced, preferred or tried out."""

    def __post_init__(self) -> None:
        # As text: that is hashed once, and tells True from 1.
        chosen = self.forced or self.preferred or self.trying
        tried = self.trying.most if self.trying is not None else 0
        object.__setattr__(self, "key", repr((self.forced, self.preferred, tried)) if chosen else None)

    def forced_for(self, op: str) -> Forced | None:
        """What must run for an op, if anything."""
        return dict(self.forced).get(op)

    def forcing(self, more: Mapping[str, Forced]) -> Scope:
        """The same, with what else must run, by op."""
        return replace(self, forced=tuple(sorted({**dict(self.forced), **more}.items())))


Change = Callable[[Scope], Scope]
"""What a block makes of the scope that it is in."""
EMPTY = Scope()
current: contextvars.ContextVar[Scope] = contextvars.ContextVar("registry.scope", default=EMPTY)
_blocks: contextvars.ContextVar[tuple[Scope, tuple[Change, ...]]]
_blocks = contextvars.ContextVar("registry.scope_blocks", default=(EMPTY, ()))
"""What the current scope comes from: one to begin with, and what each block that is open makes of it."""


def named_for(op: str, variant: str | None, settles: bool = False) -> str | None:
    """The variant that a call of a torch op names: a graph that is traced inside of a `use` block must remember it.

    `settles` says that the op's kernel knows choices that are made when a graph is compiled (traced.SETTLED).
    """
    if traced.is_tracing():
        return traced.variant_for(op, variant) if settles else traced.asked_of(traced.variant_for(op, variant))
    if variant is not None:
        return variant
    forced = current.get().forced_for(op)
    return None if forced is None or forced.config is not None else forced.variant


@contextlib.contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Make `scope` the current one inside the block, whatever was around it."""
    was, blocks = current.set(scope), _blocks.set((scope, ()))
    if scope is not EMPTY:
        traced.enter(1)
    try:
        yield
    finally:
        current.reset(was)
        _blocks.reset(blocks)
        if scope is not EMPTY:
            traced.enter(-1)


@contextlib.contextmanager
def changed(change: Change) -> Iterator[None]:
    """Change the current scope inside the block. Blocks may end in any order, as those in generators do: what the
    others ask for stays in force."""
    scope, others = change(current.get()), _blocks.get()
    current.set(scope)
    _blocks.set((others[0], (*others[1], change)))
    traced.enter(1)
    try:
        yield
    finally:
        first, blocks = _blocks.get()
        left = tuple([one for one in blocks if one is not change])
        _blocks.set((first, left))
        current.set(functools.reduce(lambda scope, change: change(scope), left, first))
        traced.enter(-1)


class Block(contextlib.ContextDecorator, contextlib.AbstractContextManager[_T]):
    """A context that can be entered again and again: inside itself, by other threads, and as a decorator."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[_T]]) -> None:
        self._make = make

    def __enter__(self) -> _T:
        one = self._make()
        found = one.__enter__()
        _open.set((*_open.get(), (self, one)))
        return found

    def __exit__(self, *failure: Any) -> bool | None:
        entered = _open.get()
        last = max((at for at, (block, _) in enumerate(entered) if block is self), default=None)
        if last is None:
            raise RegistryError(
                "a block ends in another thread or task than the one it began in, where it stays in force; allowed: "
                "the same (close generators where they ran)"
            )
        _open.set(entered[:last] + entered[last + 1 :])
        return entered[last][1].__exit__(*failure)

    def __call__(self, function: Any) -> Any:
        """The function inside of the block, each call of it; one that is async as a whole."""
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            allowed = "a function, or one that is async; in a generator the block goes inside, around what it calls"
            raise InvalidArgument("function", f"{getattr(function, '__name__', '?')}, a generator", allowed)
        if isinstance(function, type) or not callable(function):
            got = f"{function.__name__}, a class" if isinstance(function, type) else shown(function)
            raise InvalidArgument("function", got, "a function, which a block can be a decorator of")
        if not inspect.iscoroutinefunction(function):
            return super().__call__(function)

        @functools.wraps(function)
        async def inside(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return inside


_open: contextvars.ContextVar[tuple[tuple[Block[Any], contextlib.AbstractContextManager[Any]], ...]]
_open = contextvars.ContextVar("registry.open_blocks", default=())
"""The blocks that this thread or task is in, innermost last, each with what one entry of it has to undo."""


def block(function: Callable[_P, Iterator[_T]]) -> Callable[_P, contextlib.AbstractContextManager[_T]]:
    """contextlib.contextmanager for blocks that can be entered again. A tracer gets the plain kind, which it knows."""
    once = contextlib.contextmanager(function)

    @functools.wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> contextlib.AbstractContextManager[_T]:
        return once(*args, **kwargs) if traced.is_tracing() else Block(lambda: once(*args, **kwargs))

    return make


@block
def use(*names: str, config: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Run exactly these variants, at most one for each op, inside the block, or raise IllegalVariant with the reasons.

    With `config`, the one variant named runs with that config: one that it declares for the problem, or another of the
    same keys and types if the variant's own rule takes it, which is noticed and shown by `explain`.

    Inside a function that torch.compile traces it takes only variants of forward ops, without a config.
    """
    if traced.is_tracing():
        if config is not None:
            traced.refuse("use(..., config=)")
        with traced.using(*names):
            yield
        return
    if config is not None and len(names) != 1:
        raise InvalidArgument("config", f"{len(names)} variants with one config", "one variant name with a config")
    if config is not None and not _is_flat(config):
        allowed = f"a flat dict of numbers (integers of {MOST_DIGITS} digits at most), strings and bools"
        raise InvalidArgument("config", shown(config), allowed)
    frozen = freeze_config(config) if config is not None else None
    forced = {op: Forced(name, frozen) for op, name in traced.by_op(_op_of, names).items()}
    with changed(lambda scope: scope.forcing(forced)):
        yield


@block
def prefer(names: str | list[str] | tuple[str, ...]) -> Iterator[None]:
    """Try these variants first, in this order, inside the block, then those of `prefer` blocks around it.

    A fallback is logged once and counted.
    """
    if traced.is_tracing():
        traced.refuse("prefer")
    if not isinstance(names, (str, list, tuple)):
        raise InvalidArgument("names", shown(names), "the name of a variant, or a list of names")
    wanted = (names,) if isinstance(names, str) else tuple(names)
    for name in wanted:
        _op_of(name)

    def first(scope: Scope) -> Scope:
        outer = (name for name in scope.preferred if name not in wanted)
        return replace(scope, preferred=(*wanted, *outer))

    with changed(first):
        yield


@block
def record() -> Iterator[Recorder]:
    """Record what really runs inside the block, forward and backward, with counts."""
    if traced.is_tracing():
        traced.refuse("record")
    recorder = Recorder()
    with changed(lambda scope: replace(scope, recorders=(*scope.recorders, recorder))):
        yield recorder


def _is_flat(config: object) -> bool:
    plain = (int, float, str, bool)
    return isinstance(config, Mapping) and all(
        isinstance(k, str) and isinstance(v, plain) and not too_long(v) for k, v in config.items()
    )


def _op_of(name: str) -> str:
    return catalog.get().named(name).op


@dataclass(frozen=True)
class Ran:
    """One kind of launch: which variant ran which problem with which config."""

    op: str
    variant: str
    config: tuple[tuple[str, Any], ...]
    problem: Problem
    because: str


ELSEWHERE = "elsewhere"
"""Among the ops of a Recorder's counts: what an integration was called for and handed back to the library."""


def went_elsewhere(door: str, because: str) -> None:
    """Count a call that came by an integration and that no variant ran; logged once for each reason.

    A compiled graph says it when it is traced, and counts nothing when it runs.
    """
    traced.tell_elsewhere(door, because)
    if traced.is_tracing():
        return
    for recorder in current.get().recorders:
        recorder.add_elsewhere(f"{door}: {because}")


_counting = new_lock()
"""One for all recorders, so that each holds nothing but counts, and can be copied and sent to another process."""


class Recorder:
    """What ran inside a `record()` block."""

    def __init__(self) -> None:
        self._counts: Counter[Ran] = Counter()
        self._elsewhere: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Recorder {self.counts}>"

    def __getstate__(self) -> dict[str, Any]:
        with _counting:  # as they are now, though others count on
            return {"_counts": Counter(self._counts), "_elsewhere": Counter(self._elsewhere)}

    def add_elsewhere(self, because: str) -> None:
        """Count one call that was handed back."""
        with _counting:
            self._elsewhere[because] += 1

    def add(self, decision: Decision) -> None:
        """Count one launch of a decision."""
        ran = Ran(
            decision.problem.op, decision.variant, freeze_config(decision.config), decision.problem, decision.because
        )
        with _counting:
            self._counts[ran] += 1

    @property
    def launches(self) -> dict[Ran, int]:
        """Every distinct launch with its count."""
        with _counting:
            return dict(self._counts)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """op -> variant -> number of launches, and "elsewhere" -> why -> calls that an integration handed back."""
        found: dict[str, dict[str, int]] = {}
        for ran, count in self.launches.items():
            per_op = found.setdefault(ran.op, {})
            per_op[ran.variant] = per_op.get(ran.variant, 0) + count
        with _counting:
            return found | ({ELSEWHERE: dict(self._elsewhere)} if self._elsewhere else {})

    @property
    def problems(self) -> dict[Problem, int]:
        """Every distinct problem with its count: what to tune or to warm."""
        found: Counter[Problem] = Counter()
        for ran, count in self.launches.items():
            found[ran.problem] += count
        return dict(found)
