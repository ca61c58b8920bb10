"""Checks, what came of them, and what the failures among them have in common."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from registry.notices import told
from registry.ops.parts.judging import Verdict

__all__ = ["Check", "Finding", "Outcome", "Report", "in_common"]


@dataclass(frozen=True)
class Finding:
    """What one check found; no complaint means that it passed."""

    complaints: tuple[str, ...] = ()
    error: float | None = None
    yardstick: float | None = None
    limit: float | None = None
    note: str = ""
    """What a reader should know, whether it passed or not."""

    @staticmethod
    def of(verdict: Verdict, *complaints: str) -> Finding:
        return Finding((*complaints, *verdict.complaints), verdict.error, verdict.yardstick, verdict.limit)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check."""

    name: str
    passed: bool
    error: float | None = None
    """Relative to the float64 oracle (absolute for an LSE); None where nothing was measured."""
    yardstick: float | None = None
    """The same error of torch's computation in that dtype."""
    limit: float | None = None
    """What was allowed: from the yardstick, or from a floor where torch happens to be exact."""
    detail: str = ""
    seconds: float = 0.0
    about: str = ""
    """The problem and the config, in full."""
    traits: tuple[str, ...] = ()
    """The problem and the config, in words that may be compared."""
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" + (f"\n      {self.about}" if self.about else "")


@dataclass(frozen=True)
class Check:
    """One check that is ready to run."""

    name: str
    call: Callable[[], Finding]
    about: str = ""
    traits: tuple[str, ...] = ()
    smallest: Callable[[], str] | None = None
    """Looks for the smallest problem that fails as this one does, and tells what it is."""

    def run(self) -> Outcome:
        """Run it; an exception is a failure like any other, and so is an attempt to end the process."""
        start = time.perf_counter()
        try:
            found = _by_name(self.name, self.call)
        except (Exception, SystemExit) as error:
            found = Finding((told(error),))
        seconds = time.perf_counter() - start
        numbers = found.error, found.yardstick, found.limit
        passed, detail = not found.complaints, "; ".join(found.complaints)
        return Outcome(self.name, passed, *numbers, detail, seconds, self.about, self.traits, found.note)


def _by_name(name: str, call: Callable[[], Finding]) -> Finding:
    """Call through a frame of that name: the traceback of a crash, or of a hang, then names the check."""

    def frame(call: Callable[[], Finding]) -> Finding:
        return call()

    frame.__code__ = frame.__code__.replace(co_name=f"check [{name}]")
    return frame(call)


@dataclass
class Report:
    """All outcomes for one variant (or op) in one place."""

    subject: str
    target: str
    level: str
    cases: list[Outcome]
    smallest: str = ""
    """The smallest failure that was found, where one was looked for."""

    @property
    def passed(self) -> bool:
        """True where there were cases and none failed."""
        return bool(self.cases) and not self.failures

    @property
    def failures(self) -> list[Outcome]:
        return [case for case in self.cases if not case.passed]

    @property
    def worst(self) -> float:
        """The largest error in units of what was allowed."""
        measured = [c.error / c.limit for c in self.cases if c.error is not None and c.limit]
        return max(measured, default=math.nan)

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)

    def line(self) -> str:
        """One row of a table."""
        state = "ok" if self.passed else "FAILED" if self.cases else "nothing to check"
        return (
            f"{self.subject:28} {self.target[:16]:16} {self.level:5} {len(self.cases):5} cases "
            f"{len(self.failures):4} failed  error/allowed {self.worst:5.2f}  {self.seconds:6.1f} s  {state}"
        )

    def __str__(self) -> str:
        more = len(self.failures) - MOST_SHOWN
        lines = [self.line(), *(f"  - {case}" for case in self.failures[:MOST_SHOWN])]
        lines += [f"  - and {more} more (--json has them all)"] if more > 0 else []
        lines += [f"  {case.note}" for case in self.cases if case.note]
        lines += [f"  {text}" for text in (in_common(self.cases), self.smallest) if text]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


MOST_SHOWN = 12
"""Failures of a report that are printed in full."""
MOST_WORDS = 6


def in_common(cases: Sequence[Outcome]) -> str:
    """What all failures share and not every success has; "" where there is no such thing, or one failure alone."""
    failed = [set(case.traits) for case in cases if case.traits and not case.passed]
    passed = [set(case.traits) for case in cases if case.traits and case.passed]
    if len(failed) < 2 or not passed:
        return ""
    shared = functools.reduce(set.__and__, failed)
    usual = functools.reduce(set.__and__, passed)
    words = sorted(shared - usual, key=lambda word: (sum(word in traits for traits in passed), word))
    decisive = [word for word in words if not any(word in traits for traits in passed)]
    if decisive:
        return f"all {len(failed)} failures have {', '.join(decisive[:MOST_WORDS])}; nothing that passed does"
    return f"all {len(failed)} failures have {', '.join(words[:MOST_WORDS])}" if words else ""
