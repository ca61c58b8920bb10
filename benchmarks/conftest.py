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
from pathlib import Path
from typing import Any

import pytest

STORAGE = "file://./.benchmarks"
"""pytest-benchmark's own default, which knows nothing of GPUs."""


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


def contestants(config: pytest.Config) -> list[Any]:
    """Every legal variant on every shape, from the declarations alone."""
    from registry.ops.known import all_ops
    from registry.tuning.benchmarks import dispatched
    from registry.tuning.extra import load_plugins

    if config.getoption("--peers"):
        load_plugins([str(Path(__file__).with_name("peers.py"))])
    ops, chosen = config.getoption("--op") or sorted(all_ops()), config.getoption("--variants")
    return [one for op in ops for one in dispatched(op, target(), config.getoption("--grid") or "", chosen)]


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """The times of a contestant. Asking for the first one of a shape times all that were selected of that shape."""
    from registry.tuning import benchmarks

    selected = [item.callspec.params["contestant"] for item in request.session.items if hasattr(item, "callspec")]
    fake = request.config.getoption("--fake-clock")
    turns = request.config.getoption("--turns")
    done: dict[Any, Any] = {}

    def ask(contestant: Any) -> Any:
        if contestant not in done:
            together = [c for c in dict.fromkeys(selected) if c.case == contestant.case]
            graph = request.config.getoption("--graph")
            done.update(
                made_up(together, turns, fake) if fake else benchmarks.measured(together, target(), turns, graph)
            )
        return done[contestant]

    yield ask


def made_up(together: list[Any], turns: int, fake: str) -> dict[Any, Any]:
    """Times by a hash of the name with a little noise; those of the named variant longer by the factor."""
    from registry.tuning.benchmarks import Rounds

    name, _, factor = fake.partition("=")
    found = {}
    for contestant in together:
        noise = random.Random(contestant.label)
        base = noise.uniform(1e-4, 1e-3) * (float(factor) if contestant.variant == name else 1.0)
        found[contestant] = Rounds([base * noise.uniform(0.995, 1.005) for _ in range(turns)])
    return found
