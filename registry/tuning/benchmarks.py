"""Variants as the dispatcher would run them, timed for pytest-benchmark: all of a shape together, in shuffled rounds.

`pytest benchmarks` of a checkout and `pytest --registry-bench NAME` of an installed package both measure by this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.dispatch.scope import Forced, Scope
from registry.dispatch.select import decide
from registry.errors import RegistryError
from registry.notices import told
from registry.ops.parts.cases import Case
from registry.ops.parts.workload import workload
from registry.tuning.contestants import Selection, line_up
from registry.tuning.grids import grid, names
from registry.tuning.machine import Monitor
from registry.tuning.timing import StandingClock, timer_for, turn_order

CLOCK = StandingClock()
"""What pytest-benchmark reads: measured launches move it."""


@dataclass(frozen=True)
class Dispatched:
    """A variant on a shape, with the config that the dispatcher would give it."""

    case: Case
    variant: str
    config: tuple[tuple[str, Any], ...]
    flops: float

    @property
    def label(self) -> str:
        return f"{self.case.op}-{self.case.text}-{self.variant}"


@dataclass
class Rounds:
    """Times of one contestant in seconds, one for each round, and the device's state in the last one."""

    seconds: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    """Why it was not timed."""


def dispatched(op: str, target: Target, wanted: str = "", variants: Sequence[str] = ()) -> Iterator[Dispatched]:
    """Every legal variant on every shape of the grids that this op has of `wanted` (default: a few shapes)."""
    for case in _cases(op, target, wanted):
        planned = line_up(case, target, Selection(variants))
        for name in dict.fromkeys(contestant.variant for contestant in planned.contestants):
            decision = decide(planned.problem, Scope(forced=((op, Forced(name)),)))
            yield Dispatched(case, name, tuple(decision.config.items()), planned.flops)


def refused(op: str, target: Target, wanted: str, variant: str) -> str:
    """Why a variant is not among the `dispatched`, by the first shape that it refuses; empty where there is none."""
    for case in _cases(op, target, wanted):
        if why := line_up(case, target, Selection((variant,))).illegal.get(variant):
            return f"{variant} on {case.text}: {why}"
    return ""


def _cases(op: str, target: Target, wanted: str) -> list[Case]:
    wanted = wanted or ("tiny" if target.arch == "cpu" else "quick")
    known = [name for name in wanted.split("+") if name in (*names(op), "all")]
    return grid(op, "+".join(known)) if known else []


def measured(
    together: Sequence[Dispatched], target: Target, turns: int = 10, graph: bool = False
) -> dict[Dispatched, Rounds]:
    """All contestants of one shape in shuffled rounds, but for those that fail or whose first result is wrong."""
    device = "cpu" if target.arch == "cpu" else "cuda"
    load = workload(together[0].case, device)
    timer: Any = timer_for(device, "graph" if graph else "events", Monitor())
    sets = load.copies(timer.MEMORY_BYTES) if hasattr(timer, "MEMORY_BYTES") else [load.tensors]
    problem = load.problem()
    variants = catalog.get().variants
    launches: dict[Dispatched, Any] = {}
    found = {contestant: Rounds() for contestant in together}
    with load.settings():
        expected = load.expected()
        for one in together:
            try:
                launches[one] = load.launches(load.op.bind(variants[one.variant], problem, dict(one.config)), sets)
                verdict = load.judge(launches[one][0](), expected)
                found[one].failure = "" if verdict.ok else f"wrong: {'; '.join(verdict.complaints)}"
            except Exception as error:
                found[one].failure = told(error)
        for turn in range(turns):
            for contestant in turn_order([one for one in together if not found[one].failure], turn):
                sample = timer.sample(launches[contestant], 10.0, 25.0)
                found[contestant].seconds.append(sample.ms / 1e3)
                found[contestant].state = sample.state
    return found


def report(benchmark: Any, contestant: Dispatched, found: Rounds) -> None:
    """Hand what was measured to pytest-benchmark's fixture. Raises RegistryError for what could not be."""
    if found.failure:
        raise RegistryError(f"{contestant.variant} on {contestant.case.text}: {found.failure}")
    benchmark.group = f"{contestant.case.op} {contestant.case.text}"
    benchmark.extra_info.update(variant=contestant.variant, config=dict(contestant.config), **found.state)
    median = sorted(found.seconds)[len(found.seconds) // 2]
    benchmark.extra_info["tflops"] = round(contestant.flops / median / 1e12, 4)
    times = iter(found.seconds)
    benchmark.pedantic(lambda: CLOCK.advance(next(times)), rounds=len(found.seconds), iterations=1)
