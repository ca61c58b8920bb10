"""Where to measure next: between neighbours on which different variants were fastest, until they are close together.

A table goes by the nearest measured shapes, so it errs where two of them disagree. The shape half way between tells on
which side it lies; `kreg tune --refine` measures such shapes until none is left or its budget is spent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from registry.contract.target import Target
from registry.errors import RegistryError
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.tables.search import nearest, tree_of
from registry.tuning import journal
from registry.tuning.fit import problem_of, target_of
from registry.tuning.journal import CaseResults
from registry.tuning.measure import Effort, SweepReport
from registry.tuning.taking_part import Settings, candidates, comparable

CLOSE = 1.15
"""Sizes within this factor of each other leave nothing to find between them."""
MATTERS = 1.03
"""A variant that takes so much longer than the fastest is the wrong one; less is a tie, and has no border."""
NEIGHBOURS = 8
"""So many are looked at; two are neighbours where no third is nearer to both."""
BATCH = 24
"""Shapes measured before looking again."""


@dataclass(frozen=True)
class _Measured:
    sizes: dict[str, Any]
    point: tuple[float, ...]
    winner: str
    times: dict[str, float]
    """The best of each variant."""

    def lost(self, variant: str) -> float:
        """How many times longer than the fastest; 1 for a variant that was not measured here, which says nothing."""
        return self.times.get(variant, self.times[self.winner]) / self.times[self.winner]


def between(cases: Sequence[CaseResults], target: Target) -> list[Case]:
    """Shapes half way between measured neighbours that disagree, first those where a wrong choice costs most."""
    measured = list(_measured(cases, target, Settings()))
    if len(measured) < 2:
        return []
    op, known = cases[0].op, {case.text for case in cases}
    tree = tree_of([one.point for one in measured])
    found: dict[Case, float] = {}
    for place, one in enumerate(measured):
        nearer: list[tuple[float, ...]] = []
        for away, near in nearest(tree, one.point, NEIGHBOURS + 1):
            if near == place:
                continue
            other = measured[near]
            between_them = any(math.dist(point, other.point) < away for point in nearer)
            nearer.append(other.point)
            cost = min(one.lost(other.winner), other.lost(one.winner))
            if one.winner != other.winner and cost > MATTERS and not between_them:
                case = _half_way(op, one.sizes, other.sizes, target)
                if case is not None and case.text not in known:
                    found[case] = max(cost, found.get(case, 0.0))
    return sorted(found, key=lambda case: (-found[case], case.text))


def refined(sweep: Callable[[list[Case], Effort], SweepReport], cases: list[Case], effort: Effort) -> SweepReport:
    """Sweep these cases, and then what lies between neighbours that disagree, all within one budget."""
    begun, report = time.monotonic(), sweep(cases, effort)
    asked: set[str] = set()
    """Half ways that nothing may run, or that could not be begun, leave no results: once is enough."""
    while not report.stopped:
        results = journal.read(report.path)
        found = between(results.of(cases[0].op), target_of(results.machine))
        more = [case for case in found if case.text not in asked][:BATCH]
        asked.update(case.text for case in more)
        left = None if effort.budget_s is None else effort.budget_s - (time.monotonic() - begun)
        if not more or (left is not None and left <= 0):
            break
        report = report.and_then(sweep(more, replace(effort, budget_s=left)))
    return report


def _measured(cases: Sequence[CaseResults], target: Target, settings: Settings) -> Iterator[_Measured]:
    """What can be compared, in the coordinates in which the op's problems are alike."""
    names: list[str] = []
    for case in cases:
        if not comparable(case, settings) or case.shape.get("operands"):  # strides of a recorded call are its own
            continue
        found = problem_of(case, target).likeness()
        names = names or list(found)
        times: dict[str, float] = {}
        for entry in candidates(case, settings):
            times[entry.variant] = min(entry.ms, times.get(entry.variant, math.inf))
        winner = min(times, key=times.__getitem__)
        sizes = dict(case.shape.get("shape", case.shape))
        yield _Measured(sizes, tuple(found.get(name, 0.0) for name in names), winner, times)


def _half_way(op: str, one: dict[str, Any], other: dict[str, Any], target: Target) -> Case | None:
    """One shape with the leading sizes half way to another's; None where those are close, or where it is no problem."""
    tuning = op_named(op).tuning
    words = [word for word, field in tuning.fields.items() if field in tuning.leading]
    here, there = {**tuning.defaults(one), **one}, {**tuning.defaults(other), **other}
    pairs = {word: (here[word], there[word]) for word in words if word in here and word in there}
    if all(max(pair) <= CLOSE * min(pair) for pair in pairs.values()):
        return None
    try:
        case = Case.of(op, **{**one, **{word: _middle(a, b) for word, (a, b) in pairs.items()}})
        case.problem(target)
    except RegistryError:
        return None
    return case


def _middle(one: int, other: int) -> int:
    """Half way in octaves, and as well aligned as both: what alignment changes is another border."""
    step = math.gcd(one, other, 8)
    return max(step, step * round(math.sqrt(one * other) / step))
