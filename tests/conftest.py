"""Fixtures shared by all tests: made-up variants that come and go, and a registry that forgets between tests.

Also what the processes of a session share, and the order of the tests among them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import shared

_end_of_session = shared.begin()  # before anything imports torch

import again  # noqa: E402
from made_up import math_run  # noqa: E402

import registry  # noqa: E402
from registry import notices  # noqa: E402
from registry.dispatch.quarantine import quarantine  # noqa: E402


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
    """
    items[:] = again.chosen(items)
    seconds = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("slow"))}
    slow = sorted(seconds, key=lambda item: -seconds[item])  # type: ignore[arg-type]
    rest = [item for item in items if item not in seconds]
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        stretch = len(items) * (worker + 1) // workers - len(ordered)
        own = slow[worker::workers]
        fill = max(0, stretch - len(own))
        ordered += own + rest[:fill]
        rest = rest[fill:]
    items[:] = ordered + rest


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Quarantines, notices and plans of one test never reach the next."""
    yield
    quarantine.clear()
    notices.clear()
    registry.forget_plans()


@pytest.fixture
def declare() -> Iterator[Callable[..., registry.Variant]]:
    """Register a made-up attention variant; it is taken back after the test."""
    names: list[str] = []

    def make(name: str = "test.kernel", *, op: str = "attention", run: Any = None, **claims: Any) -> registry.Variant:
        settings = {key: claims.pop(key) for key in ("configs", "design", "prepare") if key in claims}
        claims = {
            "arch": ("any",),
            "dtypes": ("float32",),
            "head_dim": (1, 512),
            "layouts": ("bhsd", "bshd", "strided"),
        } | claims
        claims.setdefault("ieee", True)
        variant = registry.Variant(name, op=op, run=run or math_run, requires=registry.Requires(**claims), **settings)
        registry.register(variant)
        names.append(name)
        return variant

    yield make
    for name in names:
        registry.unregister(name)
