"""Calls that differ in sizes alone, and that are decided alike: a cache that grows by a token, the next batch's length.

One of the first few such calls (answers.py) is asked with sizes that note what is asked of them (contract/noted.py):
shapes and strides, every number of them. Where the decision is the same as with plain numbers, it holds for all sizes
that meet what was noted, and their Problem follows from the code that was. So a new shape is decided by evaluating one
expression.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from registry.contract.noted import Following, Noted, Notes, Unnoted
from registry.contract.problem import Problem
from registry.contract.variant import Variant
from registry.contract.written import compiled
from registry.dispatch.answers import Answers
from registry.dispatch.decision import Decision
from registry.dispatch.launches import Launches
from registry.dispatch.plan import Plan
from registry.dispatch.scope import Scope
from registry.dispatch.select import Moment, decide, moved
from registry.signals import interrupts

MOST = 128
"""Kinds of calls that are known by their sizes; the oldest few go when there are more."""
COST = 16
"""Of finding what a decision holds for, in decisions."""
LAUNCHED = 8
"""Ways of one kind to launch; the oldest goes when there are more."""

Sizes = tuple[int, ...]


class Asked(Protocol):
    """What of an op is needed here."""

    def asked(self, settings: Any, with_grad: bool, *tensors: Any) -> tuple[Problem, Scope]: ...
    def trivial(self, problem: Problem) -> Decision | None: ...
    def planned(
        self, decision: Callable[[], Decision], launch: Any, scope: Scope, with_grad: bool, default: Any
    ) -> Plan: ...
    def launch_of_any_size(self, variant: Variant, noted: Problem, config: Any) -> Any: ...
    def launches(self, variant: Variant, problem_of: Callable[[Any], Problem], config: Any) -> Launches | None: ...
    def prepared(self, decision: Callable[[], Decision]) -> Any: ...
    @property
    def variants(self) -> Mapping[str, Variant]: ...
    def default(self, problem: Problem) -> Any: ...


@dataclasses.dataclass(frozen=True)
class _Way:
    """One answer, and for which sizes it is the answer."""

    holds: Following
    problem: _Made
    moment: Moment
    decision: Decision
    launch: Any
    """One for all of these sizes; None where each has its own."""
    launches: Launches | None
    """Which are made of one another."""
    scope: Scope
    default: Any

    def of(self, sizes: Sizes) -> _Way | None:
        return self if self.moment is Moment.now() and self.holds.of(sizes) is not None else None

    def decided(self, sizes: Sizes) -> Decision:
        return moved(self.decision, self.problem(sizes))


class _Kind:
    def __init__(self) -> None:
        self.ways: Answers[_Way] = Answers(COST)
        self.launches: list[tuple[Any, Launches | None]] = []
        """Of (variant, config, how a Problem follows from the sizes): they outlive the ways."""
        self._met, self._plans = 1.0, 0

    def looks(self) -> bool:
        """Whether to look among the launches for a plan that was made in full: where half of the looks find one, which
        is what they cost; of others one in eight, to see whether that has changed."""
        self._plans += 1
        return self._met > 0.5 or self._plans % 8 == 0

    def looked(self, found: bool) -> None:
        self._met += (found - self._met) / 16


class Alike:
    """What is known of an op's calls by their kind: all of their facts but shapes and strides."""

    def __init__(self, op: Asked) -> None:
        self._op = op
        self._kinds: dict[Hashable, _Kind] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def clear(self) -> None:
        self._kinds.clear()

    def plan(self, kind: Hashable, sizes: Sizes, with_grad: bool) -> Plan | None:
        """A plan for these sizes, where it is known how they are decided."""
        known = self._kinds.get(kind)
        way = known.ways.find(sizes) if known is not None else None
        if way is None:
            return None
        decided = functools.partial(way.decided, sizes)
        launch = way.launch
        if way.launches is not None:
            launch = way.launches.of(sizes, functools.partial(self._op.prepared, decided))
        plan = self._op.planned(decided, launch, way.scope, with_grad, way.default)
        plan.passing = launch is not None
        return plan

    def decided(self, kind: Hashable, sizes: Sizes, plan: Plan, settings: Any, tensors: Sequence[Any]) -> None:
        """Take note of a plan that was made in full."""
        known = self._kinds.get(kind)
        if known is None:
            if len(self._kinds) >= MOST:
                for old in list(itertools.islice(self._kinds, MOST // 16)):
                    del self._kinds[old]
            known = self._kinds[kind] = _Kind()
        if known.ways.wanted(sizes):
            way = self._way(known, plan, settings, sizes, tensors)
            if way is not None:
                known.ways.add(way)
        self._bind_as_known(known, plan, sizes)

    def _bind_as_known(self, kind: _Kind, plan: Plan, sizes: Sizes) -> None:
        """Have a plan that was made in full launch what is made of another launch, where one is known."""
        if not kind.launches or not kind.looks():
            return
        launch, decision = None, plan.decision
        for (variant, config, problem_of), launches in kind.launches:
            if launches is None or variant != decision.variant or config != decision.config:
                continue
            try:
                same = problem_of(sizes) == decision.problem
            except ArithmeticError:
                continue
            if same:
                launch = launches.of(sizes, functools.partial(self._op.prepared, lambda: decision))
                break
        if launch is not None:
            plan.bind(launch)
        kind.looked(launch is not None)

    def _way(self, kind: _Kind, plan: Plan, settings: Any, sizes: Sizes, tensors: Sequence[Any]) -> _Way | None:
        notes, moment = Notes(), Moment.now()
        try:
            with notes:
                noted = iter(notes.sizes(sizes))
                problem, scope = self._op.asked(settings, plan.with_grad, *(_Sized.of(t, noted) for t in tensors))
                if self._op.trivial(problem) is not None:
                    return None
                decision = decide(problem, scope)
                default = _plain(self._op.default(problem))
                config = _plain(decision.config)
                variant = self._op.variants[decision.variant]
                launch = self._op.launch_of_any_size(variant, problem, config)
            problem_of, holds, known = _Made.like(problem), notes.following(sizes), plan.decision
            alike = (decision.variant, config, decision.because) == (known.variant, known.config, known.because)
            if not alike or holds.of(sizes) is None or problem_of(sizes) != known.problem:
                return None
            decision = moved(decision, known.problem)
            launches = self._launches(kind, variant, config, problem_of, sizes) if launch is None else None
            return _Way(holds, problem_of, moment, decision, launch, launches, scope, default)
        except (
            Exception
        ) as error:  # of code that takes integers alone: its calls are decided one by one, as they would be
            if interrupts(error):
                raise
            return None

    def _launches(self, kind: _Kind, variant: Variant, config: Any, problem_of: _Made, sizes: Sizes) -> Launches | None:
        about = variant.name, config, problem_of
        for known, launches in kind.launches:
            if known == about:
                return launches
        found = self._op.launches(variant, problem_of, config)
        if found is not None:
            found.learn(sizes)
        kind.launches = [(about, found), *kind.launches[: LAUNCHED - 1]]
        return found


def _plain(value: Any) -> Any:
    """The same with numbers in the place of noted ones, which are now part of the answer."""
    if type(value) is Noted:
        return value.plain()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (tuple, list) else value


# --- from noted problems to those of other sizes ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Made:
    """What makes the Problem of other sizes, noted ones too. Equal ones make equal Problems."""

    code: str
    scope: dict[str, Any]
    make: Callable[[Any], Problem] = dataclasses.field(compare=False)

    @classmethod
    def like(cls, problem: Problem) -> _Made:
        scope: dict[str, Any] = {"remade": _remade}
        code = _code(problem, scope)
        return cls(code, scope, compiled(code, scope))

    def __call__(self, sizes: Any) -> Problem:
        return self.make(sizes)


def _code(value: Any, scope: dict[str, Any]) -> str:
    """Code that makes a value like this one, of other sizes. What has no size in it is shared."""
    if type(value) is Noted:
        return value.code
    if type(value) is tuple and any(map(has_sizes, value)):
        return f"({''.join(f'{_code(one, scope)}, ' for one in value)})"
    if dataclasses.is_dataclass(value) and has_sizes(value):
        fields = _fields(value)
        changed = {name: one for name, one in fields.items() if has_sizes(one)}
        kept = {name: one for name, one in fields.items() if name not in changed}
        return f"remade({_named(type(value), scope)}, {_named(kept, scope)}, " + (
            ", ".join(f"{name}={_code(one, scope)}" for name, one in changed.items()) + ")"
        )
    return _named(value, scope)


def _named(value: Any, scope: dict[str, Any]) -> str:
    name = f"c{len(scope)}"
    scope[name] = value
    return name


def has_sizes(value: Any) -> bool:
    """Whether there is a noted size in it."""
    if type(value) is tuple:
        return any(map(has_sizes, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(map(has_sizes, _fields(value).values()))
    return type(value) is Noted


def _fields(value: Any) -> dict[str, Any]:
    """Those of a dataclass, without what it has worked out since."""
    return {field.name: vars(value)[field.name] for field in dataclasses.fields(value)}


def _remade(kind: type, kept: dict[str, Any], **changed: Any) -> Any:
    made: Any = object.__new__(kind)
    made.__dict__.update(kept, **changed)
    return made


# --- tensors of noted sizes ---------------------------------------------------------------------------------------


class _Sized(torch.Tensor):
    """A tensor as the checks of arguments see it, with noted shape and strides. It answers nothing else."""

    @classmethod
    def of(cls, tensor: Any, sizes: Any) -> Any:
        """In the order in which `sizes_of` lists them."""
        if tensor is None:
            return None
        dims = tensor.dim()
        shape = tuple(itertools.islice(sizes, dims))
        strides = tuple(itertools.islice(sizes, dims))
        known = {name: getattr(tensor, name) for name in _SAME}
        known |= {name: functools.partial(_same, getattr(tensor, name)()) for name in _SAME_CALLED}
        known |= {"shape": shape, "numel": functools.partial(math.prod, shape)}
        known |= {"size": functools.partial(_one_of, shape), "stride": functools.partial(_one_of, strides)}
        found = tensor.detach().as_subclass(cls)
        object.__setattr__(found, "known_", known)
        return found

    def __getattribute__(self, name: str) -> Any:
        known = object.__getattribute__(self, "__dict__")["known_"]
        if name in known:
            return known[name]
        if name == "__class__":
            return _Sized
        raise Unnoted(f"a tensor is asked for {name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Unnoted(f"a tensor is handed to {func}")


_SAME = ("dtype", "device", "layout", "requires_grad", "is_nested", "is_cuda", "is_cpu", "is_meta", "ndim", "itemsize")
_SAME_CALLED = ("dim", "element_size", "data_ptr", "get_device", "storage_offset")


def _same(answer: Any) -> Any:
    return answer


def _one_of(values: tuple[Noted, ...], dim: int | None = None) -> Any:
    return values if dim is None else values[dim]
