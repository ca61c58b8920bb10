"""What a sweep looks like: a bar with the time left on a terminal, a line now and then in a log, results at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from registry.contract.describe import config_text
from registry.notices import printable
from registry.tuning.watching import Watcher

if TYPE_CHECKING:
    from registry.tuning.contestants import LineUp
    from registry.tuning.journal import CaseResults, Results
    from registry.tuning.measure import SweepReport

SHOWN = 4
"""Variants of a shape."""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType):  # type: ignore[type-arg]
    """ "90", "90s", "10m", "1.5h" in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(value).strip())
        if not found or float(found[1]) <= 0:
            self.fail(f"got {value!r}; allowed: a time such as 90s, 10m or 1h", param, ctx)
        return float(found[1]) * _UNITS[found[2]]


class SweepView(Watcher):
    """Draws the progress of a sweep. Where the output is no terminal it prints a line now and then."""

    EVERY_S = 10.0

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._last = time.monotonic()
        self._steps = self._done = 0
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> SweepView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, planned: Sequence[LineUp], steps: int) -> None:
        contestants = sum(len(p.contestants) for p in planned)
        self.console.print(f"{len(planned)} shapes, {contestants} contestants to measure")
        self._steps = steps
        if self.console.is_terminal and steps:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self.console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=steps)

    def step(self, text: str) -> None:
        self._done += 1
        text = printable(text)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text[:100])
        elif time.monotonic() - self._last >= self.EVERY_S:
            self._last = time.monotonic()
            self.console.print(f"{self._done}/{self._steps}  {text}", markup=False, soft_wrap=True)

    def resize(self, steps: int) -> None:
        self._steps += steps
        if self._bar is not None:
            self._bar.update(self._task, total=self._steps)

    def note(self, text: str) -> None:
        self.console.print(f"left out: {printable(text)}", markup=False, soft_wrap=True)


def results_lines(results: Results, op: str) -> list[str]:
    """A line a shape: the fastest contestant of each variant, fastest first; of one that is alone, by which config."""
    lines = []
    for case in sorted(results.of(op), key=lambda case: _order(case)):
        ranked = sorted(case.best.values(), key=lambda entry: entry.ms)[:SHOWN]
        shown = "  ".join(f"{entry.variant} {_speed(case, entry)}" for entry in ranked)
        if len(ranked) == 1 and ranked[0].config:
            shown += f" ({config_text(ranked[0].config)})"
        lines.append(f"{case.text}: {shown or 'nothing could be timed'}  (noise {100 * case.noise:.1f}%)")
    return lines


def _order(case: CaseResults) -> tuple[Any, ...]:
    return tuple(
        (name, value if isinstance(value, (int, float)) else 0) for name, value in case.facts.items() if name != "op"
    )


def _speed(case: CaseResults, entry: Any) -> str:
    tflops = case.tflops(entry)
    return f"{tflops:.0f} TFLOPS" if tflops >= 10 else f"{entry.ms * 1e3:.1f} us"


def report_lines(report: SweepReport) -> list[str]:
    """What became of a sweep, in a few lines."""
    lines = [f"measured {report.measured} shapes in {report.turns} turns; raw results: {report.path}"]
    if report.pruned:
        lines.append(f"{report.pruned} configs were ruled out by what they declare to need, before compiling")
    if report.nobody:
        shapes = "1 shape has" if len(report.nobody) == 1 else f"{len(report.nobody)} shapes have"
        lines.append(f"{shapes} nothing to measure, such as {report.nobody[0]}")
    if report.silent:
        lines.append(f"left out, for their declarations never answered: {', '.join(report.silent)}")
    if report.restarts:
        lines.append(f"{report.restarts} contestants hung or fell and were left out; their process was replaced")
    if report.failed:
        lines.append(f"{len(report.failed)} contestants were left out")
    if report.stopped:
        lines.append(
            f"stopped: {report.stopped}; {len(report.unreached)} shapes left; the same command goes on from here"
        )
        lines += [f"  not measured to the end: {text}" for text in report.unreached]
    return lines
