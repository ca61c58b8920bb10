"""What loaded tables are: frozen, compiled, and asked by the dispatcher. Light to import: no msgspec, no yaml."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from registry.errors import TableError
from registry.tables.match import Condition, arch_covers, same_device

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

    from registry.tables.nearest import Neighbours
    from registry.tables.schema import Evidence

Facts = Mapping[str, Any]


class Layer(IntEnum):
    """Where a table came from. A higher layer is asked first; within one, device before arch before "any"."""

    SHIPPED = 0
    PLUGIN = 1
    TUNED = 2
    ENVIRONMENT = 3


@dataclass(frozen=True)
class Use:
    """One candidate of a rule. Without a config, the variant's own first legal one is meant."""

    variant: str
    config: Mapping[str, int | str | bool] | None = None
    line: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Rule:
    """One row: if every condition holds, `use` ranks the candidates."""

    index: int
    line: int
    conditions: tuple[Condition, ...]
    use: tuple[Use, ...]
    evidence: Evidence | None = None
    nearest: Mapping[str, float] | None = None
    """The weights of coordinates: candidates are ranked by the measured shapes that are nearest in these."""

    def matches(self, facts: Facts) -> bool:
        """True where the facts meet every condition. A fact that the problem does not have matches nothing."""
        for name, matches in self._checks:  # noqa: SIM110 - a generator takes longer than most conditions
            if name not in facts or not matches(facts[name]):
                return False
        return True

    @functools.cached_property
    def _checks(self) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
        return tuple([(condition.name, condition.matches) for condition in self.conditions])

    @functools.cached_property
    def told(self) -> dict[str, Any] | None:
        """The measurement behind the row as plain data, made once: each decision by the row carries it."""
        if self.evidence is None:
            return None
        from msgspec import to_builtins

        found: dict[str, Any] = to_builtins(self.evidence)
        return found


@dataclass(frozen=True)
class Table:
    """One file: an op on an architecture ("any" for all) or on one device of it."""

    file: str
    layer: Layer
    op: str
    arch: str
    device: str | None
    rules: tuple[Rule, ...]
    asked: dict[int, Neighbours | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The measured shapes of rules that rank by them, once they were asked: see tables.measured."""
    beside: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    """The one tables.files.Beside of the file that it was read from: what lies beside it, or why that is nothing."""

    @functools.cached_property
    def matches(self) -> tuple[Match, ...]:
        """What a problem finds here, rule by rule."""
        return tuple([Match(self, rule) for rule in self.rules])

    def applies(self, op: str, arch: str, device: str | None) -> bool:
        """True where the table speaks about this op on this device."""
        here = device is not None and same_device(self.device, device) if self.device else True
        return op == self.op and arch_covers(self.arch, arch) and here

    @property
    def specificity(self) -> int:
        """2 for one device, 1 for one architecture, 0 for any."""
        return 2 if self.device else int(self.arch != "any")


@dataclass(frozen=True)
class Match:
    """The first matching rule of one table, and where it stands."""

    table: Table
    rule: Rule

    @property
    def use(self) -> tuple[Use, ...]:
        """The candidates, best first."""
        return self.rule.use

    @functools.cached_property
    def where(self) -> str:
        """Where the row stands, for people: "attention.sm90.yaml:12 rules[3]"."""
        return f"{self.table.file}:{self.rule.line} rules[{self.rule.index}]"

    @property
    def evidence(self) -> dict[str, Any] | None:
        """The measurement behind the row as plain data."""
        return self.rule.told


@dataclass(frozen=True)
class Erratum:
    """A combination known to be bad. Where it applies, the variant is illegal."""

    file: str
    index: int
    line: int
    variant: str
    op: str
    arch: tuple[str, ...]
    conditions: tuple[Condition, ...]
    toolchain: Mapping[str, SpecifierSet]
    reason: str
    link: str
    severity: str

    @property
    def forbids(self) -> tuple[object, ...]:
        """What it forbids and for which report. One place may be bad for two reasons, of which one is mended first."""
        where = frozenset(self.arch), frozenset(self.conditions), frozenset(self.toolchain.items())
        return self.op, self.variant, *where, self.link

    @property
    def page(self) -> tuple[str, str] | None:
        """(file, anchor) where the link is a page of our own, None where it is a public report."""
        file, _, anchor = self.link.partition("#")
        return None if self.link.startswith("https:") else (file, anchor)

    @property
    def reference(self) -> str:
        """Where to read more, for people: docs/ lies in the checkout, not in an installed package."""
        return f"{self.link} of kernel-registry" if self.page else self.link

    @property
    def unaffected(self) -> str:
        """Where the variant may run again, for people."""
        outside = [f"{name} outside {versions}" for name, versions in sorted(self.toolchain.items())]
        return " or ".join(outside) or "another variant"

    def applies(self, facts: Facts, target: Any) -> bool:
        """True where problem and target are in the bad region. A version that is not known is taken as not affected:
        a real device knows its own, and a made-up one launches nothing."""
        return (
            any(arch_covers(pattern, target.arch) for pattern in self.arch)
            and all(c.name in facts and c.matches(facts[c.name]) for c in self.conditions)
            and all(_affected(affected, getattr(target, name, "")) for name, affected in self.toolchain.items())
        )


def _affected(affected: SpecifierSet, version: str | None) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return bool(version) and affected.contains(Version(str(version)), prereleases=True)
    except InvalidVersion:
        return False


@dataclass(frozen=True)
class TableSet:
    """All layers, loaded and checked. Immutable: a reload makes a new one."""

    tables: tuple[Table, ...] = ()
    errata: tuple[Erratum, ...] = ()
    problems: tuple[TableError, ...] = ()
    """Files of contained layers that could not be used."""
    refused: tuple[tuple[str, TableError], ...] = ()
    """Files that could not be used and must not pass in silence: calls of that op raise the error."""
    unread_errata: tuple[tuple[str, TableError], ...] = ()
    """Those of them that hold errata: nobody knows what may run."""
    skipped: tuple[tuple[Table, Rule, str], ...] = ()
    """Rows left out one by one, and why."""
    _order: dict[tuple[str, str, str | None], tuple[Table, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _asked: dict[str, frozenset[str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def broken(self) -> tuple[TableError, ...]:
        """What is wrong with each file that could not be used, once for each."""
        return (*self.problems, *{id(error): error for _, error in self.refused}.values())

    def check(self, op: str) -> None:
        """Raise for a file about an op that could not be used and must not pass in silence."""
        for name, error in self.refused:
            if name == op:
                raise error

    def match(self, op: str, facts: Facts, arch: str, device: str | None = None) -> Iterator[Match]:
        """The rule that counts in each table that applies, highest layer first."""
        self.check(op)
        facts = {**facts, "arch": arch}
        for table in self.applying(op, arch, device):
            for match in table.matches:
                if match.rule.matches(facts):
                    yield match
                    break

    def asked_about(self, op: str) -> frozenset[str]:
        """The facts of an op's problems that any row names, or an erratum."""
        found = self._asked.get(op)
        if found is None:
            rows: list[Rule | Erratum] = [rule for table in self.tables if table.op == op for rule in table.rules]
            rows += [erratum for erratum in self.errata if erratum.op == op]
            found = self._asked[op] = frozenset(condition.name for row in rows for condition in row.conditions)
        return found

    def applying(self, op: str, arch: str, device: str | None = None) -> tuple[Table, ...]:
        """The tables that speak about this op on this device, highest layer first."""
        key = (op, arch, device)
        found = self._order.get(key)
        if found is None:
            tables = (table for table in self.tables if table.applies(op, arch, device))
            found = tuple(sorted(tables, key=lambda table: (-table.layer, -table.specificity)))
            self._order[key] = found
        return found

    def errata_for(self, op: str, variant: str, facts: Facts, target: Any) -> list[Erratum]:
        """Every erratum that forbids `variant` here. `target` has `.arch` and versions (`.torch`, `.triton`, ...)."""
        for name, error in self.unread_errata:
            if name == op:
                raise error
        known = self.errata_of.get((op, variant))
        if known is None:  # of most
            return []
        facts = {**facts, "arch": target.arch}
        return [erratum for erratum in known if erratum.applies(facts, target)]

    @functools.cached_property
    def errata_of(self) -> Mapping[tuple[str, str], list[Erratum]]:
        """By op and variant."""
        found: dict[tuple[str, str], list[Erratum]] = {}
        for erratum in self.errata:
            found.setdefault((erratum.op, erratum.variant), []).append(erratum)
        return found
