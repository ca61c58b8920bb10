"""One benchmark suite from the declarations: every variant on every shape of a grid, timed on the device's clock.

    pytest benchmarks/test_variants.py --grid paper18 --benchmark-autosave
    pytest benchmarks/test_variants.py --grid paper18 --benchmark-compare --benchmark-compare-fail=median:3%

All variants of a shape are timed together, in shuffled rounds, as in `kreg tune`; pytest-benchmark then reads the times
off a clock that the measured launches move. Results are kept in one folder for each device.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

STORAGE = "file://./.benchmarks"
"""pytest-benchmark's own default, which knows nothing of GPUs."""


@dataclass(frozen=True)
class Dispatched:
    """A variant on a shape, with the config that the dispatcher would give it."""

    case: Any
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


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel variants")
    group.addoption("--grid", default=None, help="A named grid, or several joined by +. Default: quick; tiny on a CPU.")
    group.addoption("--op", action="append", metavar="OP", help="Only this op (repeatable).")
    group.addoption("--variants", action="append", default=[], metavar="NAME", help="Only these (repeatable).")
    group.addoption("--peers", action="store_true", help="Also time the kernels of benchmarks/peers.py.")
    group.addoption("--graph", action="store_true", help="Time replays of CUDA graphs.")
    group.addoption("--turns", type=int, default=10, help="Rounds of each shape.")
    group.addoption("--fake-clock", metavar="NAME=FACTOR", help="Run nothing: made-up times.")


@functools.cache
def target() -> Any:
    import torch

    from registry import Target

    return Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    from registry.tuning.machine import slug

    if getattr(config.option, "benchmark_storage", None) == STORAGE:
        config.option.benchmark_storage = f"file://{Path(__file__).parent / 'saved' / slug(target().name)}"


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Runs of different devices and versions must be told apart."""
    from registry.tuning.machine import describe

    machine_info["kernel_registry"] = describe(target())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "contestant" in metafunc.fixturenames:
        found = contestants(metafunc.config)
        metafunc.parametrize("contestant", found, ids=[c.label for c in found])


def contestants(config: pytest.Config) -> list[Dispatched]:
    """Every legal variant on every shape, from the declarations alone."""
    from registry.dispatch.scope import Forced, Scope
    from registry.dispatch.select import decide
    from registry.ops.known import all_ops
    from registry.tuning.contestants import Selection, line_up
    from registry.tuning.extra import load_plugins
    from registry.tuning.grids import grid, names

    if config.getoption("--peers"):
        load_plugins([str(Path(__file__).with_name("peers.py"))])
    wanted = config.getoption("--grid") or ("tiny" if target().arch == "cpu" else "quick")
    found = []
    for op in config.getoption("--op") or sorted(all_ops()):
        known = [name for name in wanted.split("+") if name in (*names(op), "all")]
        for case in grid(op, "+".join(known)) if known else []:
            planned = line_up(case, target(), Selection(config.getoption("--variants")))
            for name in dict.fromkeys(c.variant for c in planned.contestants):
                decision = decide(planned.problem, Scope(forced=((op, Forced(name)),)))
                found.append(Dispatched(case, name, tuple(decision.config.items()), planned.flops))
    return found


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Iterator[Callable[[Dispatched], Rounds]]:
    """The times of a contestant. Asking for the first one of a shape times all that were selected of that shape."""
    selected = [item.callspec.params["contestant"] for item in request.session.items if hasattr(item, "callspec")]
    fake = request.config.getoption("--fake-clock")
    turns = request.config.getoption("--turns")
    done: dict[Dispatched, Rounds] = {}

    def ask(contestant: Dispatched) -> Rounds:
        if contestant not in done:
            together = [c for c in dict.fromkeys(selected) if c.case == contestant.case]
            done.update(made_up(together, turns, fake) if fake else measure(together, turns, request.config))
        return done[contestant]

    yield ask


def made_up(together: list[Dispatched], turns: int, fake: str) -> dict[Dispatched, Rounds]:
    """Times by a hash of the name with a little noise; those of the named variant longer by the factor."""
    name, _, factor = fake.partition("=")
    found = {}
    for contestant in together:
        noise = random.Random(contestant.label)
        base = noise.uniform(1e-4, 1e-3) * (float(factor) if contestant.variant == name else 1.0)
        found[contestant] = Rounds([base * noise.uniform(0.995, 1.005) for _ in range(turns)])
    return found


def measure(together: list[Dispatched], turns: int, config: pytest.Config) -> dict[Dispatched, Rounds]:
    """All contestants of one shape in shuffled rounds."""
    from registry.dispatch.catalog import catalog
    from registry.ops.parts.workload import workload
    from registry.tuning.machine import Monitor
    from registry.tuning.timing import timer_for, turn_order

    device = "cpu" if target().arch == "cpu" else "cuda"
    load = workload(together[0].case, device)
    timer = timer_for(device, "graph" if config.getoption("--graph") else "events", Monitor())
    sets = load.copies(timer.MEMORY_BYTES) if hasattr(timer, "MEMORY_BYTES") else [load.tensors]
    problem = load.problem()
    variants = catalog.get().variants
    launches = {c: load.launches(load.op.bind(variants[c.variant], problem, dict(c.config)), sets) for c in together}
    found = {contestant: Rounds() for contestant in together}
    with load.settings():
        for turn in range(turns):
            for contestant in turn_order(together, turn):
                sample = timer.sample(launches[contestant], 10.0, 25.0)
                found[contestant].seconds.append(sample.ms / 1e3)
                found[contestant].state = sample.state
    return found
