"""Fixtures shared by all tests: made-up variants that come and go, and a registry that forgets between tests.

Also what the processes of a session share, and the order of the tests among them. Nothing here imports torch before a
test runs: the process that only hands out tests to the workers has no use for it.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import again
import forked
import kept_builds
import pytest
import shared

if TYPE_CHECKING:
    import registry

_end_of_session = shared.begin()  # before anything imports torch


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "run the tests that compile, and write what came of it to tests/builds"
    parser.addoption("--keep-builds", action="store_true", help=about)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--keep-builds"):
        os.environ[kept_builds.KEEPING] = "1"  # also for the processes that this one starts


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Iterator[int]:  # type: ignore[misc]
    """One worker more than cores, for tests wait, too: 4:35 instead of 5:16 on two cores. Two more gain nothing."""
    return (yield) + 1


BUILDS_FOR_CPUS = bool(shutil.which("g++")) and Path(sysconfig.get_path("include"), "Python.h").is_file()
"""torch.compile makes its kernels for CPUs with a C++ compiler and Python's headers, which not every machine has."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[Any]:  # type: ignore[misc]
    try:
        return (yield)
    except Exception as error:
        if BUILDS_FOR_CPUS or not type(error).__module__.startswith("torch._inductor"):
            raise
        pytest.skip("torch.compile finds no C++ compiler, or no Python headers, here")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if again.WITHIN_ANOTHER:
        return
    if config.getoption("--keep-builds"):
        terminalreporter.write_line(f"written: {', '.join(path.name for path in kept_builds.write())}")
    elif missing := kept_builds.missing():
        some = ", ".join(sorted(missing)[:3])
        terminalreporter.write_line(f"{len(missing)} builds were compiled ({some}, ...): `make builds` keeps them")


def pytest_unconfigure() -> None:
    _end_of_session()


def pytest_collection_finish() -> None:
    """What is there by now stays: to look through it for garbage again and again takes a sixth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The slowest tests first, so that no worker is left alone with one at the end.

    With --dist worksteal each worker begins with its own stretch of the list: each stretch gets its share of them.
    Those that import what takes seconds, the same `together`, lie in one.
    """
    items[:] = again.chosen(items)
    if kept_builds.KEEPING in os.environ:
        items[:] = kept_builds.that_ask(items)
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    shares, rest = _shares(items, workers)
    ordered: list[pytest.Item] = []
    for worker, own in enumerate(shares):
        fill = max(0, len(items) * (worker + 1) // workers - len(ordered) - len(own))
        ordered += own + rest[:fill]
        rest = rest[fill:]
    items[:] = ordered + rest


def _shares(items: list[pytest.Item], workers: int) -> tuple[list[list[pytest.Item]], list[pytest.Item]]:
    """(the slow tests of each worker, the others)."""
    bundles: dict[object, list[tuple[float, pytest.Item]]] = {}
    rest = []
    for item in items:
        if (mark := item.get_closest_marker("slow")) is None:
            rest.append(item)
        else:
            bundles.setdefault(mark.kwargs.get("together", item), []).append((mark.args[0], item))
    shares: list[list[tuple[float, pytest.Item]]] = [[] for _ in range(workers)]
    for bundle in sorted(bundles.values(), key=_seconds, reverse=True):
        min(shares, key=_seconds).extend(bundle)
    return [[item for _, item in sorted(share, key=lambda one: -one[0])] for share in shares], rest


def _seconds(share: list[tuple[float, pytest.Item]]) -> float:
    return sum(seconds for seconds, _ in share)


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Quarantines, notices and plans of one test never reach the next."""
    yield
    import registry
    from registry import notices
    from registry.dispatch.quarantine import quarantine

    quarantine.clear()
    notices.clear()
    registry.forget_plans()


@pytest.fixture
def seeded() -> None:
    """Random numbers are the same whenever the test runs."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="module")
def quick_python() -> Iterator[None]:
    """For the tests of a module sys.executable is one that has imported torch already; `forked.REAL` has not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forked.python())
        yield


@pytest.fixture
def put_in_force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Puts a file or folder of tables in force through REGISTRY_TABLES; the shipped ones come back after the test."""

    import registry

    def put(tables: Path) -> None:
        monkeypatch.setenv("REGISTRY_TABLES", str(tables))
        registry.reload_tables()

    yield put
    monkeypatch.delenv("REGISTRY_TABLES", raising=False)
    registry.reload_tables()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a process of its own: what a shell began in the background ignores it, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def takes_back() -> Iterator[None]:
    """What is registered meanwhile, by an example say, is gone after the test."""
    from made_up import taken_back

    with taken_back():
        yield


@pytest.fixture
def declare(takes_back: None) -> Callable[..., registry.Variant]:
    """Register a made-up variant, of attention unless told; it is taken back after the test."""
    from made_up import math_run

    import registry

    settings_of = registry.Variant.__dataclass_fields__.keys() - {"name", "op", "run", "requires"}

    def make(name: str = "test.kernel", *, op: str = "attention", run: Any = None, **claims: Any) -> registry.Variant:
        settings = {key: claims.pop(key) for key in settings_of if key in claims}
        plain: dict[str, Any] = {"arch": ("any",), "dtypes": ("float32",), "ieee": True}
        if op.startswith("attention"):
            plain["head_dim"] = (1, 512)
        if op in ("attention", "attention_backward"):
            plain["layouts"] = ("bhsd", "bshd", "strided")
        requires = registry.Requires(**plain | claims)
        return registry.register(registry.Variant(name, op=op, run=run or math_run, requires=requires, **settings))

    return make
