"""Which rows of a table can never be reached: what earlier rows take, kept so that thousands can be asked.

Earlier rows are gathered in groups that differ in one key alone, each with the union of what they take in that key.
A row is taken where one group, or several side by side, take all of it. A group is only asked about rows that share a
value with one of its plain conditions.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from registry.tables.match import Condition, Residue, Scalar

WORK = 200_000
"""Groups that are asked about, by default, before only repetitions are looked for: about a second."""

Conditions = tuple[Condition, ...]
_Point = tuple[str, Scalar]


class Taken:
    """What the rows so far take. `all_of` may miss a row that is never reached, and never claims a false one."""

    def __init__(self) -> None:
        self.work = WORK
        self._rows: set[frozenset[Condition]] = set()
        self._by_key: dict[str, _Groups] = {}

    @property
    def spent(self) -> bool:
        """Whether rows are only held against their repetitions by now, since the work can grow with the square."""
        return self.work <= 0

    def add(self, rule: Conditions) -> None:
        self._rows.add(frozenset(rule))
        if not self.spent:
            for own in rule:
                groups = self._by_key.setdefault(own.name, _Groups())
                groups.of(frozenset(rule) - {own}, own).union.add(own)

    def all_of(self, rule: Conditions) -> bool:
        """True where earlier rows take every problem of this one."""
        if frozenset() in self._rows or frozenset(rule) in self._rows:
            return True
        by_name = {condition.name: condition for condition in rule}
        return any(self._along(name, groups, by_name) for name, groups in self._by_key.items() if not self.spent)

    def _along(self, name: str, groups: _Groups, rule: Mapping[str, Condition]) -> bool:
        """Whether the groups that agree on every other key take the row, together, in this one."""
        agreeing: list[_Union] = []
        for group in groups.near(rule):
            self.work -= 1
            if all(_takes(condition, rule) for condition in group.rest):
                if group.union.covers(rule.get(name)):
                    return True
                agreeing.append(group.union)
        if len(agreeing) < 2:
            return False
        whole = _Union(agreeing[0].alike)
        for union in agreeing:
            self.work -= len(union) // 8
            whole.join(union)
        return whole.covers(rule.get(name))


def _takes(wide: Condition, rule: Mapping[str, Condition]) -> bool:
    narrow = rule.get(wide.name)
    return wide.matches_all if narrow is None else wide.covers(narrow)


class _Union:
    """What conditions on one fact take together: spans sorted and apart, so that one more costs a search."""

    def __init__(self, alike: Condition) -> None:
        self.alike = alike
        """Any of them: of the fact's name, kind and universe."""
        self._gap = 1 if alike.kind == "int" else 0
        self._members: set[Scalar] = set()
        self._residues: set[Residue] = set()
        self._lows: list[float] = []
        self._highs: list[float] = []

    def __len__(self) -> int:
        return len(self._lows)

    def add(self, condition: Condition) -> None:
        self._take(condition.members, condition.residues, condition.spans)

    def join(self, other: _Union) -> None:
        self._take(other._members, other._residues, zip(other._lows, other._highs, strict=True))

    def _take(
        self, members: Iterable[Scalar], residues: Iterable[Residue], spans: Iterable[tuple[float, float]]
    ) -> None:
        self._members.update(members)
        self._residues.update(residues)
        for low, high in spans:  # joined with those that it overlaps or, of integers, meets
            first = bisect_left(self._highs, low - self._gap)
            last = bisect_right(self._lows, high + self._gap)
            if first < last:
                low, high = min(low, self._lows[first]), max(high, self._highs[last - 1])
            self._lows[first:last] = [low]
            self._highs[first:last] = [high]

    def covers(self, narrow: Condition | None) -> bool:
        """As `Condition.covers` says it of their union; of None, as `matches_all` does."""
        if self.alike.kind not in ("int", "float"):
            named = replace(self.alike, members=frozenset(self._members))
            return named.matches_all if narrow is None else named.covers(narrow)
        everything = self._within(0, math.inf)
        if narrow is None or everything:
            return everything
        return all(self._within(*span) for span in narrow.spans) and self._residues.issuperset(narrow.residues)

    def _within(self, low: float, high: float) -> bool:
        place = bisect_right(self._lows, low) - 1
        return place >= 0 and high <= self._highs[place]


@dataclass
class _Group:
    """Rows that agree in `rest`, and what they take together in the key that is left."""

    rest: frozenset[Condition]
    union: _Union


class _Groups:
    """The groups of one key, found by the values that their plain conditions ask for."""

    def __init__(self) -> None:
        self._groups: dict[frozenset[Condition], _Group] = {}
        self._at: dict[_Point | None, list[_Group]] = {}

    def of(self, rest: frozenset[Condition], own: Condition) -> _Group:
        found = self._groups.get(rest)
        if found is None:
            found = self._groups[rest] = _Group(rest, _Union(own))
            plain = min(filter(None, map(_points, rest)), key=len, default=[None])
            for point in plain:
                self._at.setdefault(point, []).append(found)
        return found

    def near(self, rule: Mapping[str, Condition]) -> Iterator[_Group]:
        """Every group whose rest may take this row, and some more."""
        for point in (None, *(_first_point(condition) for condition in rule.values())):
            yield from self._at.get(point, ())


def _points(condition: Condition) -> list[_Point | None]:
    """All values that a condition takes, where it lists them; none where it does not, or takes all there are."""
    if condition.kind == "arch" or condition.residues or condition.matches_all:
        return []
    if any(span.low != span.high for span in condition.spans):
        return []
    return [(condition.name, value) for value in (*condition.members, *(span.low for span in condition.spans))]


def _first_point(condition: Condition) -> _Point:
    """A value that whatever takes all of this condition takes."""
    values = (*condition.members, *(span.low for span in condition.spans))
    return condition.name, values[0] if values else ""
