"""How slow this core is at Python, for tests that hold times to a budget."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

FUNCTIONS = 400


def arithmetic() -> Any:
    """A fixed piece of Python alone, in a loop: all that it needs lies in the core's first cache."""
    found: dict[int, float] = {}
    for at in range(100):
        found[at % 7] = found.get(at % 7, 0.0) + math.log2(at + 1.5)
    return sorted(found.items(), key=lambda pair: -pair[1])


def many_functions() -> Any:
    """A fixed piece of Python that goes once through many functions and makes objects of several kinds, as a decision
    does. Small or shared caches slow that down by more than a loop: decisions took 2.1 to 2.4 times as long as here on
    a machine whose loops took 1.7 times as long."""
    found = None
    for at, function in enumerate(_functions()):
        found = function(at, None if at % 16 == 0 else found)
    return found


class _Thing:
    def __init__(self, made: Any, kept: tuple[Any, ...], name: str) -> None:
        self.made, self.kept, self.name = made, kept, name
        self.lock = threading.Lock()

    def first(self) -> Any:
        return self.kept[0] if self.name in self.made.args[0] else 0


_TEXT = """
def function_{at}(x, before):
    kept = (x, x + {at}, before)
    told = {{"size": kept, "of": x * {at}, "name_{at}": before}}
    thing = Thing(partial(dict, told, at=x), kept, "name_{at}")
    if thing.first() > {at}.5 and told.get("name_{at}") is not None:
        told["of"] += 1
    return thing
"""


@functools.cache
def _functions() -> list[Callable[[int, Any], Any]]:
    scope: dict[str, Any] = {"Thing": _Thing, "partial": functools.partial}
    exec("".join(_TEXT.format(at=at) for at in range(FUNCTIONS)), scope)
    return [scope[f"function_{at}"] for at in range(FUNCTIONS)]


KNOWN_US = {arithmetic: 9.6, many_functions: 240.0}
"""The loop on the machine of the budgets, where a new attention was planned in 120 us (16.5, where that took 205); many
functions on a later one, whose loop takes as long."""


def slower_by(*kinds: Callable[[], Any]) -> float:
    """How many times as long as on the machine that budgets were set on, at that of these kinds of work (of all) which
    takes longest; at least once. At best: it may be busy."""
    return max(1.0, *(_takes(work) / KNOWN_US[work] for work in kinds or KNOWN_US))


def _takes(work: Callable[[], Any]) -> float:
    """Microseconds."""
    best, times = math.inf, 100 if work is arithmetic else 2
    for _ in range(100):
        begun = time.thread_time()
        for _ in range(times):
            work()
        best = min(best, (time.thread_time() - begun) / times)
    return best * 1e6
