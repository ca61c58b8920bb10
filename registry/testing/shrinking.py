"""The smallest problem that fails as a given one does: axis by axis towards the plainest and least value."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from registry.notices import told
from registry.ops.parts.kit import Spec
from registry.ops.parts.trials import Trial, named
from registry.testing.outcomes import Finding
from registry.testing.subject import Subject

SECONDS = 10.0
TRIES = 120
Fails = Callable[[Subject, Trial], Finding]


def smallest_failure(subject: Subject, trial: Trial, check: Fails) -> str:
    """One line about the smallest failing problem that was found in a few seconds."""
    axes = subject.kit.axes(subject.variant.requires, subject.size)
    deadline, tries = time.monotonic() + SECONDS, 0
    best, said = trial, ""
    shrinking = True
    while shrinking:
        shrinking = False
        for candidate in _smaller(subject, best, axes):
            if tries >= TRIES or time.monotonic() > deadline:
                return _line(best, said)
            tries += 1
            try:
                complaints = check(subject, candidate).complaints
            except (Exception, SystemExit) as error:
                complaints = (told(error),)
                if "CUDA error" in complaints[0]:
                    return _line(candidate, complaints[0])  # nothing can run in this process any more
            if complaints:
                best, said, shrinking = candidate, complaints[0], True
                break
    return _line(best, said)


def _line(trial: Trial, said: str) -> str:
    return f"the smallest that fails: {trial.name}" + (f": {said}" if said else "") + f"\n      {trial.about}"


def _smaller(subject: Subject, trial: Trial, axes: dict[str, list[Any]]) -> Iterator[Trial]:
    """The trial with one axis made plainer or smaller."""
    for axis, values in axes.items():
        now = trial.spec.get(axis)
        for value in _below(values, now):
            made = _legal(subject, trial, trial.spec | {axis: value}, axes)
            if made is not None:
                yield made


def _below(values: list[Any], now: Any) -> list[Any]:
    """Values that are simpler: of sizes the smaller ones, of the rest the plainest."""
    sizes = [value for value in values if _size(value) is not None]
    if _size(now) is not None and len(sizes) == len(values):
        return sorted((v for v in values if _size(v) < _size(now)), key=_size)  # type: ignore[operator,arg-type,return-value]
    return values[:1] if now != values[0] else []


def _size(value: Any) -> float | None:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return None
    if isinstance(value, tuple):
        parts = [_size(one) for one in value]
        return None if not parts or None in parts else sum(parts)  # type: ignore[arg-type]
    return float(value)


def _legal(subject: Subject, trial: Trial, spec: Spec, axes: dict[str, list[Any]]) -> Trial | None:
    """The trial of another spec with the same config, if that may run."""
    if not subject.kit.sensible(spec):
        return None
    return named(subject.variant, subject.op, subject.kit, subject.target, spec, axes, trial.config)
