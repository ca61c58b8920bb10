"""Measurements -> few rules: a small tree over the problem's facts, pruned so that every rule earns its line.

The cost of a choice on a shape is the log of its time over the best time; differences inside the noise cost nothing,
so that within noise the plain default wins. A split stays only if it saves more than `Settings.rule_cost` in sum.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.contract.problem import PROBLEM_TYPES
from registry.dispatch.catalog import catalog
from registry.errors import InvalidArgument
from registry.ops.known import op_named
from registry.ops.parts.cases import fold_of, held_out
from registry.tables.match import kind_of
from registry.tuning.journal import CaseResults, Entry
from registry.tuning.timing import quantile
from registry.tuning.tree import NEVER, Choice, Node, Point, cost_of, descend, grow, plainness, prune

WRONG = ("wrong", "hung", "crashed", "device error", "error")
"""Failures that must never be dispatched to; others (does not compile, does not fit) give way by themselves."""
RULE_COSTS = (0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3)
FOLDS = 5
CONFIGS = 12
"""Named configs that a rule may pick, those measured on most shapes: what few shapes say of a config holds for few."""
LEAST_SHAPES = 12
LOSS_WEIGHT = 4.0
"""A kernel of ours is put before the library's only on so many shapes, and where what it loses, weighed so, is less
than what it gains: to be slower than without us is worse than to miss a gain."""
SIMPLER = 0.001
"""Log time a shape that shorter tables may lose in cross-validation: a reader's time counts as well."""


@dataclass(frozen=True)
class Settings:
    """How the fit weighs speed against length."""

    margin: float = 0.015
    """Differences up to this share, or up to twice the standard error of a comparison, count as none."""
    rule_cost: float | None = None
    """What a further rule must save: log time summed over its shapes. Small values fit the noise of single shapes,
    large ones miss what is there. None: that of RULE_COSTS which serves shapes best that the tree has not seen."""
    held_out: float = 0.2
    exclude: tuple[str, ...] = ("peer.*",)
    """Variants that are measured for comparison and never picked."""

    def __post_init__(self) -> None:
        check_number("margin", self.margin, 0, 1)
        check_number("held_out", self.held_out, 0, 0.9)
        if self.rule_cost is not None:
            check_number("rule_cost", self.rule_cost, 0, 1e9)


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raise InvalidArgument for a number out of range, or for none (NaN)."""
    if not low <= value <= high:
        raise InvalidArgument(name, value, f"{low:g}..{high:g}")


@dataclass
class Fit:
    """The tree over the tuning set, and every point."""

    op: str
    tree: Node
    points: list[Point]
    kinds: Mapping[str, str]
    rule_cost: float
    libraries: frozenset[str]
    """Variants that compile nothing: kernels of libraries, which run where nobody has measured."""
    skipped: list[str] = field(default_factory=list)
    """Shapes whose contestants were not all timed, so that no comparison is fair."""


def fit(cases: Sequence[CaseResults], settings: Settings | None = None) -> Fit:
    """Fit the cases of one op. Raises ValueError where nothing was measured."""
    settings = settings or Settings()
    fair = [case for case in cases if comparable(case, settings)]
    if not fair:
        raise ValueError("no shape has been measured with all its contestants")
    op = fair[0].op
    kinds = {name: str(kind_of(how)) for name, how in PROBLEM_TYPES[op].fact_kinds().items()}
    share = settings.held_out if len(fair) >= 5 else 0.0
    points = [_point(case, kinds, settings, held_out(case.text, share)) for case in fair]
    tuning = [point for point in points if not point.held] or points
    rule_cost = settings.rule_cost if settings.rule_cost is not None else validated_rule_cost(tuning, op, kinds)
    tree = _grown(tuning, op, kinds)
    prune(tree, rule_cost)
    libraries = frozenset(name for name, variant in catalog.get().of(op).items() if variant.builds is None)
    distrust(tree, libraries)
    skipped = [case.text for case in cases if not comparable(case, settings)]
    return Fit(op, tree, points, kinds, rule_cost, libraries, skipped)


def _grown(points: list[Point], op: str, kinds: Mapping[str, str]) -> Node:
    measured = Counter(choice for point in points for choice in point.cost)
    usual = [choice for choice, count in measured.most_common() if choice.config and count >= len(points) / 5]
    choices = sorted({*(choice for choice in measured if not choice.config), *usual[:CONFIGS]}, key=plainness)
    return grow(points, _varying(points, op, kinds), kinds, choices, None)


def distrust(tree: Node, libraries: frozenset[str]) -> None:
    """Give leaves back to a library's kernel where ours has not shown, on enough shapes, to be never much slower.

    A leaf of few shapes joins the one beside it if what has shown it there gains here as well.
    """
    if tree.yes is None or tree.no is None:
        theirs = library_choice(tree.points, libraries)
        if tree.choice.variant not in libraries and not _trusted(tree.choice, tree.points, theirs, LEAST_SHAPES):
            assert theirs is not None  # without a library's kernel nothing is doubtful
            tree.choice, tree.cost = theirs, sum(cost_of(point, theirs) for point in tree.points)
        return
    wanted = [child.choice for child in (tree.yes, tree.no)]
    distrust(tree.yes, libraries)
    distrust(tree.no, libraries)
    sides = (tree.yes, tree.no)
    if any(side.yes is not None for side in sides):
        return
    for side, beside, was in zip(sides, sides[::-1], wanted, strict=True):
        given_back = was.variant not in libraries and side.choice.variant in libraries
        joins = given_back and _trusted(beside.choice, side.points, side.choice, len(side.points))
        if beside.choice.variant not in libraries and (joins or side.choice == beside.choice):
            tree.choice, tree.yes, tree.no = beside.choice, None, None
            tree.cost = sum(cost_of(point, tree.choice) for point in tree.points)
            return


def _trusted(choice: Choice, points: Sequence[Point], theirs: Choice | None, least: int) -> bool:
    """Whether so many shapes were measured with the choice, and what it loses there is little beside what it gains."""
    if theirs is None:
        return True
    lost = [cost_of(point, choice) - cost_of(point, theirs) for point in points if choice in point.cost]
    return len(lost) >= least and sum(x * LOSS_WEIGHT if x > 0 else x for x in lost) < 0


def library_choice(points: Sequence[Point], libraries: frozenset[str]) -> Choice | None:
    """The library's kernel that serves these shapes best, if one was measured."""
    known = {choice for point in points for choice in point.cost if choice.variant in libraries and not choice.config}
    return min(known, key=lambda c: (sum(cost_of(point, c) for point in points), plainness(c)), default=None)


def validated_rule_cost(points: list[Point], op: str, kinds: Mapping[str, str]) -> float:
    """By cross-validation among the tuning shapes alone: of the good ones the dearest, which makes the fewest rules."""
    lost = dict.fromkeys(RULE_COSTS, 0.0)
    for fold in range(FOLDS):
        grown = [point for point in points if fold_of(point.case.text, FOLDS) != fold]
        asked = [point for point in points if fold_of(point.case.text, FOLDS) == fold]
        if not grown or not asked:
            continue
        tree = _grown(grown, op, kinds)
        for rule_cost in RULE_COSTS:  # each prunes what the one before has left: a dearer rule survives no better
            prune(tree, rule_cost)
            lost[rule_cost] += sum(cost_of(point, descend(tree, point.facts, kinds)) for point in asked)
    return max(cost for cost in RULE_COSTS if lost[cost] <= min(lost.values()) + SIMPLER * len(points))


def excluded(variant: str, settings: Settings) -> bool:
    return any(fnmatch.fnmatch(variant, pattern) for pattern in settings.exclude)


def candidates(case: CaseResults, settings: Settings) -> list[Entry]:
    """The timed contestants that a rule may pick."""
    return [entry for entry in case.timed.values() if not excluded(entry.variant, settings)]


def comparable(case: CaseResults, settings: Settings) -> bool:
    """Whether every contestant that passed the gate had its turn."""
    waiting = [
        e for e in case.entries.values() if e.failure is None and not e.samples and not excluded(e.variant, settings)
    ]
    return not waiting and bool(candidates(case, settings))


def _point(case: CaseResults, kinds: Mapping[str, str], settings: Settings, held: bool) -> Point:
    timed = candidates(case, settings)
    best = min(timed, key=lambda entry: entry.ms)
    compared = {id(entry): compare(entry, best) for entry in timed}
    errors = sorted(error for entry, (_, error) in zip(timed, compared.values(), strict=True) if entry is not best)
    usual = quantile(errors, 0.5) if errors else 0.0
    cost: dict[Choice, float] = {}
    for entry in timed:
        ratio, uncertainty = compared[id(entry)]
        lost = 0.0 if ratio <= 1 + max(settings.margin, 2 * uncertainty, 2 * usual) else math.log(ratio)
        cost[Choice.of(entry)] = lost
        if entry.first:
            cost[Choice(entry.variant)] = lost
    for entry in case.entries.values():
        if entry.failure is not None and not excluded(entry.variant, settings):
            cost[Choice.of(entry)] = NEVER
            if entry.first or entry.failure["why"] in WRONG and Choice(entry.variant) not in cost:
                cost[Choice(entry.variant)] = NEVER
    facts = {name: _value(value, kinds[name]) for name, value in case.facts.items() if name in kinds}
    return Point(case, facts, cost, held)


def compare(entry: Entry, other: Entry) -> tuple[float, float]:
    """How many times as long as the other one takes, and the standard error of that.

    Compared within each round, where both met the same clocks and heat, so that slow drifts cancel.
    """
    rounds = sorted(entry.samples.keys() & other.samples.keys())
    ratios = sorted(entry.samples[turn]["ms"] / other.samples[turn]["ms"] for turn in rounds)
    if len(ratios) < 3:
        return entry.ms / other.ms, 0.0
    half = (quantile(ratios, 0.75) - quantile(ratios, 0.25)) / 2
    return quantile(ratios, 0.5), 1.25 * 1.48 * half / math.sqrt(len(ratios))


def _value(value: Any, kind: str) -> Any:
    return bool(value) if kind == "bool" else value


def _varying(points: Sequence[Point], op: str, kinds: Mapping[str, str]) -> list[str]:
    """Facts that differ between the points, the usual ones first, without those that repeat another one."""
    tuning = op_named(op).tuning
    order = tuning.order
    names = sorted(kinds, key=lambda name: (order.index(name) if name in order else len(order), name))
    found: list[str] = []
    seen: set[tuple[int, ...]] = set()
    for name in names:
        column = [point.facts.get(name) for point in points]
        if name in tuning.redundant or len(set(column)) < 2:
            continue
        ranks = {value: rank for rank, value in enumerate(dict.fromkeys(column))}
        pattern = tuple(ranks[value] for value in column)
        if pattern not in seen:
            seen.add(pattern)
            found.append(name)
    return found
