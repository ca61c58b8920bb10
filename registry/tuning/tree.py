"""A small decision tree over a problem's facts: grown to serve every shape, pruned until each rule pays."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from registry.tuning.journal import CaseResults, Entry

CUTS = 40
"""Most places at which a fact is cut, between as many of its values."""
NEVER, UNKNOWN, ILLEGAL = 10.0, 0.4, 0.05
"""Costs of a choice that fails, was not measured with that config, or is illegal and so gives way to the next."""


@dataclass(frozen=True, order=True)
class Choice:
    """What a rule may put first: a variant, with a config or with the variant's own first one (config "")."""

    variant: str
    config: str = ""

    @property
    def settings(self) -> dict[str, Any] | None:
        return json.loads(self.config) if self.config else None

    @classmethod
    def of(cls, entry: Entry) -> Choice:
        return cls(entry.variant, json.dumps(entry.config, sort_keys=True))


@dataclass(frozen=True)
class Point:
    """One shape as the fit sees it."""

    case: CaseResults
    facts: Mapping[str, Any]
    cost: Mapping[Choice, float]
    held: bool


@dataclass
class Node:
    """A part of the space: one choice, or a split of it by one fact."""

    points: list[Point]
    choice: Choice
    cost: float
    fact: str = ""
    test: Any = None
    """The smallest number of the `yes` side, or the value that it has."""
    yes: Node | None = None
    no: Node | None = None

    @property
    def total(self) -> float:
        return self.cost if self.yes is None or self.no is None else self.yes.total + self.no.total


def cost_of(point: Point, choice: Choice) -> float:
    """What a choice loses on a shape: log time beyond noise, a guess where it was not measured."""
    found = point.cost.get(choice)
    if found is not None:
        return found
    if choice.variant in point.case.illegal or not any(c.variant == choice.variant for c in point.cost):
        firsts = [cost for other, cost in point.cost.items() if not other.config and cost < NEVER]
        return ILLEGAL + (min(firsts) if firsts else UNKNOWN)
    return UNKNOWN


def plainness(choice: Choice) -> tuple[bool, str, str]:
    """Among equals, the variant's own first config before a named one."""
    return bool(choice.config), choice.variant, choice.config


def _best(points: Sequence[Point], choices: Sequence[Choice], parent: Choice | None) -> tuple[Choice, float]:
    """The cheapest choice; within nothing, the parent's, then the plainest."""
    costs = [(sum(cost_of(point, choice) for point in points), choice) for choice in choices]
    least = min(cost for cost, _ in costs)
    ties = [choice for cost, choice in costs if cost <= least + 1e-9]
    if parent in ties and parent is not None:
        return parent, least
    plain = [choice for choice in ties if not choice.config] or ties
    return min(plain, key=lambda choice: (sum(_raw(point, choice) for point in points), plainness(choice))), least


def _raw(point: Point, choice: Choice) -> float:
    """The exact time of a choice, to decide between choices that the noise makes equal."""
    for entry in point.case.timed.values():
        if entry.variant == choice.variant and (entry.first if not choice.config else Choice.of(entry) == choice):
            return math.log(entry.ms)
    return 0.0


def grow(
    points: list[Point],
    facts: Sequence[str],
    kinds: Mapping[str, str],
    choices: Sequence[Choice],
    parent: Choice | None,
) -> Node:
    choice, cost = _best(points, choices, parent)
    node = Node(points, choice, cost)
    if cost <= 1e-9:
        return node
    split = _split(node, facts, kinds, choices)
    if split is None:
        return node
    node.fact, node.test, yes, no = split
    node.yes = grow(yes, facts, kinds, choices, choice)
    node.no = grow(no, facts, kinds, choices, choice)
    return node


def _split(
    node: Node, facts: Sequence[str], kinds: Mapping[str, str], choices: Sequence[Choice]
) -> tuple[str, Any, list[Point], list[Point]] | None:
    """The cut that saves most. Where no single cut saves anything, the one that best sorts the shapes that are badly
    served from the others: a corner takes several cuts, of which only the last one pays."""
    cuts: list[tuple[float, float, int, str, Any, tuple[list[Point], list[Point]]]] = []
    for fact in facts:
        for test in _tests([point.facts.get(fact) for point in node.points], kinds[fact]):
            sides: tuple[list[Point], list[Point]] = ([], [])
            for point in node.points:
                sides[passes(point.facts.get(fact), test, kinds[fact])].append(point)
            total = sum(_best(side, choices, node.choice)[1] for side in sides)
            cuts.append((total, sum(_mixture(side, node.choice) for side in sides), len(cuts), fact, test, sides))
    if not cuts:
        return None
    best = min(cuts, key=lambda cut: (round(cut[0], 9), cut[2]))
    if best[0] >= node.cost - 1e-9:
        best = min(cuts, key=lambda cut: (round(cut[1], 9), cut[2]))
        if best[1] >= _mixture(node.points, node.choice) - 1e-9:
            return None
    _, _, _, fact, test, (no, yes) = best
    return fact, test, yes, no


def _mixture(points: Sequence[Point], choice: Choice) -> float:
    """Gini impurity of "served well" and "served badly" by a choice, times the number of points."""
    bad = sum(cost_of(point, choice) > 1e-9 for point in points)
    return 2 * bad * (len(points) - bad) / len(points)


def prune(node: Node, rule_cost: float) -> None:
    """Undo, from the bottom, splits that save less than their rules cost."""
    if node.yes is None or node.no is None:
        return
    prune(node.yes, rule_cost)
    prune(node.no, rule_cost)
    extra = sum(leaf.choice != node.choice for leaf, _ in leaves(node))
    if not extra or node.total + rule_cost * extra >= node.cost:
        node.yes = node.no = None


def descend(node: Node, facts: Mapping[str, Any], kinds: Mapping[str, str]) -> Choice:
    """The choice of the leaf that these facts lead to."""
    while node.yes is not None and node.no is not None:
        node = node.yes if passes(facts.get(node.fact), node.test, kinds[node.fact]) else node.no
    return node.choice


def leaves(node: Node) -> Iterator[tuple[Node, tuple[tuple[str, Any, bool], ...]]]:
    """Each leaf with the (fact, test, whether it passes) that lead to it."""
    if node.yes is None or node.no is None:
        yield node, ()
        return
    for passed, side in ((False, node.no), (True, node.yes)):
        for leaf, path in leaves(side):
            yield leaf, ((node.fact, node.test, passed), *path)


def passes(value: Any, test: Any, kind: str) -> bool:
    return bool(value >= test) if kind in ("int", "float") else value == test


def _tests(values: Sequence[Any], kind: str) -> list[Any]:
    """Where a fact can be cut: round numbers between neighbours, or one value against the rest."""
    distinct = sorted(set(values))
    if kind in ("int", "float"):
        if len(distinct) > CUTS:  # an even choice among the ranks: random shapes have a value each
            distinct = [distinct[round(i * (len(distinct) - 1) / (CUTS - 1))] for i in range(CUTS)]
        return [border(low, high) for low, high in zip(distinct, distinct[1:], strict=False)]
    return distinct if len(distinct) > 2 else distinct[1:]


def border(low: float, high: float) -> float:
    """A round number in (low, high]: the power of two nearest the middle of the scale, else a round binary one."""
    if not (isinstance(low, int) and isinstance(high, int)):
        return high
    middle = math.sqrt(max(low, 1) * high)
    powers = [1 << power for power in range(high.bit_length() + 1) if low < 1 << power <= high]
    if powers:
        return min(powers, key=lambda value: abs(math.log(value / middle)))
    for power in range(high.bit_length(), 0, -1):
        step = 1 << power
        value = round(middle / step) * step
        if low + (high - low) / 4 < value <= high - (high - low) / 4:
            return value
    return high
