"""Trying out: the first call of a problem times the few kernels that could be its fastest, and keeps the fastest.

    with registry.try_out() as found:
        model(batch)                 # or registry.warm(recorded)
    print(found)                     # what was timed, and what runs from now on, in the block and after it
    found.save("tables")             # the same as dispatch tables: REGISTRY_TABLES=tables pins it in other processes

Tables choose by what was measured on other shapes, and err by a few percent where none is near. Here the caller's own
tensors decide, among those that the tables expect to be within reach of the best.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from registry import notices
from registry.contract.describe import config_text
from registry.contract.problem import Problem
from registry.disk import write_atomic
from registry.dispatch import traced
from registry.dispatch.contenders import Contender, contenders
from registry.dispatch.plan import device_of
from registry.dispatch.plan_cache import forget_plans
from registry.dispatch.quarantine import did_not_compile, quarantine
from registry.dispatch.scope import Bind, Scope, Trial, block, changed
from registry.dispatch.tried import Took, TriedOut, tried
from registry.errors import InvalidArgument, shown
from registry.forks import new_lock
from registry.ops.parts.memory import copied
from registry.signals import interrupts

if TYPE_CHECKING:
    from registry.tuning.timing import Launches, Timer

__all__ = ["TryOuts", "try_out"]

MOST, LIMIT = 6, 32
"""Contenders of a problem: unless told, and at most. With four, 150 products lost 0.8% (worst 13), with six 0.7 (8),
for a first call of 69 ms instead of 56."""
MOST_COPIES = 32
"""Of a call's tensors."""
ROUNDS = 3
TURN_MS, LONG_TURN_MS = 1.0, 5.0
"""That one contender is timed for in a round, or two launches."""
AWAY, BEHIND = 2.0, 1.3
"""Who took so many times what the fastest took has no further turn: after a first look, after a round."""
NEAR = 0.05
"""Of its own size, by which a contender's result may differ from that of the tables' choice: rounding is far less."""
STAYS = 0.99
"""The choice of the tables stays unless another takes less than this share of its time: noise must not choose."""

SAVED = "# What registry.try_out found. Saving here again adds to it.\n"
"""By which a table that was saved is known."""


class TryOuts:
    """What a `try_out` block has found."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.outer: TryOuts | None = None
        """Of the block around this one, which sees what is found in here, too."""
        self.found: list[TriedOut] = []
        self.seconds = 0.0
        """Spent so far: compiling, above all."""

    def __repr__(self) -> str:
        return f"<TryOuts of {len(self.found)} problems, {self.seconds:.1f} s>"

    def __str__(self) -> str:
        lines = []
        for one in self.found:
            lines.append(one.problem.summary())
            lines += [f"  {1e3 * t.ms:10.1f} us  {t.variant} ({config_text(t.config)})" for t in one.timed]
        return "\n".join(lines) or "nothing was tried out"

    def trial(self, problem: Problem, scope: Scope, bind: Bind) -> Trial | None:
        """What the first launch of a plan calls; None where there is nothing to find out."""
        rivals = contenders(problem, scope, self.most)
        if not rivals:
            return None

        def compare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if kwargs.get("schedule") is None:  # that is of one variant, and of a step that others share
                self._compare(problem, rivals, bind, args, kwargs)

        return compare

    def _compare(
        self, problem: Problem, rivals: Sequence[Contender], bind: Bind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        begun, took = time.perf_counter(), {}
        try:
            with _alone, torch.no_grad(), device_of(args[0]):
                took = _compared(problem, rivals, bind, args, kwargs)
        except Exception as error:  # the tables' choice runs, and raises what is broken for good
            if interrupts(error):
                raise
            notices.notice(f"{problem.summary()} is not tried out: {notices.what_failed(error)}")
        seconds = time.perf_counter() - begun
        for one in self._and_around():
            one.seconds += seconds
        if took:
            order = sorted(took, key=lambda at: took[at] * (STAYS if at == 0 else 1.0))
            timed = tuple(Took(rivals[at].variant.name, dict(rivals[at].config), took[at]) for at in order)
            found = TriedOut(problem, timed)
            with _alone:
                for one in self._and_around():
                    one.found.append(found)
                tried.add(found)

    def _and_around(self) -> Iterator[TryOuts]:
        """This block and those that it is in."""
        yield self
        if self.outer is not None:
            yield from self.outer._and_around()

    def forget(self) -> None:
        """Choose by the tables again, as if none of it had been tried out."""
        tried.forget(self.found)
        forget_plans()

    def save(self, folder: str | Path) -> list[Path]:
        """Write it as dispatch tables, one for each op and device, which hold for calls of these very sizes:
        `REGISTRY_TABLES` puts them in force. What was saved there before stays, but for the same sizes, and processes
        may save at once; a table that was not is no place for it: InvalidArgument, and nothing is written. A problem
        that no table can tell from others, as one with a window, is left out, with a notice."""
        from registry.tuning.machine import slug
        from registry.tuning.store import locked

        if not isinstance(folder, (str, Path)) or not str(folder):
            raise InvalidArgument("folder", shown(folder), "the path of a folder")
        tables: dict[Path, list[TriedOut]] = {}
        for one in filter(_tables_tell, self.found):
            path = Path(os.path.expanduser(folder)) / f"{one.problem.op}.{slug(one.problem.target.name)}.yaml"
            tables.setdefault(path, []).append(one)
        for path in tables:
            _saved(path)  # who is refused by one has written none
        try:
            for path, own in tables.items():
                with locked(path):
                    write_atomic(path, _table(own, _saved(path)))
        except OSError as error:
            raise InvalidArgument("folder", shown(str(folder)), f"one that can be written to ({error})") from error
        return list(tables)


@block
def try_out(most: int = MOST) -> Iterator[TryOuts]:
    """Have the first call of each problem inside the block time up to `most` kernels and configs, and run the fastest.

    Later calls of it and of problems like it run what was found, in this block and after it, on every thread, until the
    process ends or `forget()` is called on what the block gives. Nothing is tried out where the problem itself was
    measured, where a variant was asked for (`use`, `prefer`), while a CUDA graph is captured, and for a call with a
    schedule. A first call takes seconds where kernels have to be compiled, else 60 to 120 ms; it waits for the device,
    and takes up to 160 MiB for copies of its tensors. A kernel is left out if its results differ from those of the
    tables' choice by more than rounding may. Of nested blocks, the outer one also has what the inner one found.
    """
    if traced.is_tracing():
        traced.refuse("try_out")
    if isinstance(most, bool) or not isinstance(most, int) or not 2 <= most <= LIMIT:
        raise InvalidArgument("most", shown(most), f"a number of contenders, 2..{LIMIT}")
    found = TryOuts(most)

    def inside(scope: Scope) -> Scope:
        found.outer = scope.trying if isinstance(scope.trying, TryOuts) else None  # told anew where that one ends first
        return replace(scope, trying=found)

    try:
        with changed(inside):
            yield found
    finally:
        if found.found:
            forget_plans()


_alone = new_lock()
"""Two at once would time each other."""


def _compared(
    problem: Problem, rivals: Sequence[Contender], bind: Bind, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[int, float]:
    """Milliseconds of those that run, by their place."""
    timer = _timer(args[0].device)
    sets = _rotated(args, kwargs, getattr(timer, "MEMORY_BYTES", 0))
    launches: dict[int, Launches] = {}
    told: tuple[Any, ...] | None = None
    for at, one in enumerate(rivals):
        launch = bind(one.variant, problem, one.config)
        calls = [functools.partial(launch, *tensors, **named) for tensors, named in sets]
        found = _results(one, problem, calls[0], told)
        if found is not None:
            launches[at], told = calls, told or tuple(map(copied, found))  # others may write to the same `out`
    del told
    try:
        return _timed(timer, launches)
    finally:
        getattr(timer, "forget", lambda: None)()  # it knows launches, and these their tensors


def _results(
    one: Contender, problem: Problem, call: Callable[[], Any], told: tuple[Any, ...] | None
) -> tuple[Any, ...] | None:
    """What a launch, which compiles, returns. None for who fails, or returns other than was `told` before: it is out,
    and says so."""
    try:
        returned = call()
    except Exception as error:
        if interrupts(error):
            raise
        if did_not_compile(error):
            quarantine.add(one.variant.name, problem, error)
            return None
        wrong = notices.what_failed(error)
    else:
        found = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
        wrong = problem.misfit(returned) or next(filter(None, map(_other, found, told or ())), "")
        if not wrong:
            return found
    notices.notice(f"{one.variant.name} is not tried out on {problem.summary()}: {wrong}")
    return None


def _other(found: Any, told: Any) -> str:
    """Why a result is not what the tables' choice returns; "" where it is, but for rounding."""
    if not isinstance(told, torch.Tensor) or not isinstance(found, torch.Tensor):
        return "" if type(found) is type(told) else f"returned {type(found).__name__}, not {type(told).__name__}"
    if (found.shape, found.dtype) != (told.shape, told.dtype):
        return f"returned {tuple(found.shape)} of {found.dtype}, not {tuple(told.shape)} of {told.dtype}"
    size = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    if found.element_size() == 1 or not found.is_floating_point():
        found, told = found.float(), told.float()
    same = (found == told) | (found.isnan() & told.isnan())
    apart, whole = size(torch.where(same, 0.0, found - told)), size(torch.where(told.isfinite(), told, 0.0))
    return "" if apart <= NEAR * whole else f"a result is {float(apart / whole):.2g} of its size off"


def _timed(timer: Timer, launches: dict[int, Launches]) -> dict[int, float]:
    """The median of each contender's turns."""
    from registry.tuning.timing import GraphTimer, quantile, turn_order

    if len(launches) < 2:
        return {}
    first = {at: timer.sample(calls, 0.0, TURN_MS).ms for at, calls in launches.items()}
    # A card grows slower, for some more than for others: of 40 products two lost 8 and 13% by a cool one's times.
    long = min(first.values()) > GraphTimer.LONG_MS
    turn_ms, heat_ms = (LONG_TURN_MS, GraphTimer.HEAT_MS) if long else (TURN_MS, 0.0)
    turns: dict[int, list[float]] = {at: [] for at in launches}
    took = dict(first)
    for number in range(ROUNDS):
        near = [at for at in took if took[at] <= (BEHIND if number else AWAY) * min(took.values())]
        for at in turn_order(near, number):
            turns[at].append(timer.sample(launches[at], heat_ms, turn_ms).ms)
            took[at], heat_ms = quantile(sorted(turns[at]), 0.5), 0.0
    return took


_timers: dict[torch.device, Timer] = {}


def _timer(device: torch.device) -> Timer:
    from registry.tuning.timing import QueueTimer, WallTimer

    if device not in _timers:
        _timers[device] = QueueTimer() if device.type == "cuda" else WallTimer()
    return _timers[device]


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _rotated(args: tuple[Any, ...], kwargs: dict[str, Any], wanted: int) -> list[Call]:
    """The call, and the same on copies of its tensors until they fill so many bytes: what one launch leaves in a cache
    must not make the next one fast. Fewer where memory is short."""
    sets, values = [(args, kwargs)], [*args, *kwargs.values()]
    each = sum(value.numel() * value.element_size() for value in values if isinstance(value, torch.Tensor))
    with contextlib.suppress(torch.OutOfMemoryError):
        for _ in range(min(MOST_COPIES, -(-wanted // max(each, 1)) - 1)):
            sets.append((tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}))
    return sets


def _saved(path: Path) -> list[dict[str, Any]]:
    """The rows that were saved there before. Raises InvalidArgument for a table of another origin, and for a damaged
    one."""
    from registry.errors import TableError
    from registry.tables.reader import read_document

    try:
        content = path.read_bytes()
        data = read_document(content, path.name).data if SAVED.encode() in content else None
        rules = data.get("rules") if isinstance(data, dict) else None
        if isinstance(rules, list) and all(map(_is_row, rules)):
            return rules
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, TableError):
        pass
    got = f"{shown(str(path.parent))}, which has a table {path.name} that try_out did not save, or that is damaged"
    raise InvalidArgument("folder", got, "one without, or with what was saved there before")


def _is_row(rule: Any) -> bool:
    return isinstance(rule, dict) and isinstance(rule.get("when"), dict) and isinstance(rule.get("use"), list)


def _table(found: Sequence[TriedOut], saved: Sequence[dict[str, Any]]) -> str:
    """The table of one op and device. What was found last counts, and what was saved before where nothing was. Of more
    than a table may hold the oldest go, with a notice."""
    from registry.tables.reader import MAX_BYTES
    from registry.tuning.rules import HEADER, dump

    rules: dict[str, dict[str, Any]] = {}
    for rule in (*map(_rule, reversed(found)), *saved):
        rules.setdefault(repr(sorted(rule["when"].items())), rule)
    problem = found[0].problem
    head = {"op": problem.op, "arch": problem.target.arch, "device": problem.target.name}
    text = HEADER + SAVED + dump({**head, "rules": []})
    rows = [dump({"rules": [rule]}).removeprefix("rules:\n") for rule in rules.values()]
    ends = itertools.accumulate((len(row.encode()) for row in rows), initial=len(text.encode()))
    fit = bisect.bisect_right([*ends], MAX_BYTES) - 1
    if fit < len(rows):
        at = f"{problem.op} on {problem.target.name}"
        notices.notice(f"not saved, for a table holds no more: the oldest {len(rows) - fit} of {len(rows)} for {at}")
    return text + "".join(rows[:fit])


def _rule(found: TriedOut) -> dict[str, Any]:
    """A row of a table that holds for problems with these facts."""
    kinds = found.problem.fact_kinds()
    use = [{"variant": one.variant, "config": dict(one.config)} for one in found.timed]
    return {"when": {name: _condition(kinds[name], value) for name, value in found.problem.facts().items()}, "use": use}


def _tables_tell(found: TriedOut) -> bool:
    """Whether a row of a table can hold for this problem and no other; who is left out is noticed."""
    problem, kinds = found.problem, found.problem.fact_kinds()
    alike = [name for name, value in problem.facts().items() if _condition(kinds[name], value) is None]
    if alike:
        notices.notice(f"not saved, for no table tells its {', '.join(alike)} from others: {problem.summary()}")
    return not alike


def _condition(kind: Any, value: Any) -> Any:
    """What a table says of a fact; None where that would hold for other values, too, as of a flag that has sizes."""
    from registry.tables.match import kind_of

    if kind_of(kind) == "bool":
        return bool(value) if value is None or isinstance(value, bool) else None
    return value if isinstance(value, str) or (value is not None and value >= 0) else None
