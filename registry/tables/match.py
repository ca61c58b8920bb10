"""What a `when` means: conditions on a problem's facts, compiled into cheap predicates, comparable with each other.

A condition is kept as sets (spans and residues of numbers, members of names), so that it can answer both "does this
value match?" and "does this cover that other condition?", which is how lint finds rows that can never be reached.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from registry.contract.capability import MOST_DIGITS
from registry.contract.target import plain_device

Kind = str
"""How a fact is matched: "int" and "float" by value or range, "bool" by being set, "str" by name, "arch" by pattern."""
Scalar = bool | int | float | str

_KINDS: Mapping[str, Kind] = {"int": "int", "float": "float", "str": "str"}
_DIGITS = rf"[0-9]{{1,{MOST_DIGITS}}}"
_NUMBER = rf"{_DIGITS}(?:\.{_DIGITS})?"
_RANGE = re.compile(rf"\s*(?P<low>{_NUMBER})?\s*\.\.\s*(?P<high>{_NUMBER})?\s*")
_RESIDUE = re.compile(rf"\s*(?P<rest>{_DIGITS})\s+mod\s+(?P<modulus>[1-9][0-9]{{0,{MOST_DIGITS - 1}}})\s*")
_ARCH = re.compile(r"any|cpu|sm[1-9][0-9]{1,2}\+?")


@dataclass(frozen=True)
class Field:
    """One fact that a `when` of an op may name. `values` lists the names allowed, where the op knows them all."""

    kind: Kind
    values: tuple[str, ...] = ()


def kind_of(annotation: Any) -> Kind:
    """The kind of a fact annotated like this. Anything that is no number or name is matched on whether it is set."""
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return _KINDS.get(name, "bool")


class BadValue(ValueError):
    """A value that a `when` cannot hold. `index` is its place in a list of alternatives."""

    def __init__(self, problem: str, index: int | None = None) -> None:
        super().__init__(problem)
        self.index = index


class Span(NamedTuple):
    """Numbers from low to high, both included."""

    low: float
    high: float


class Residue(NamedTuple):
    """Integers that leave `rest` when divided by `modulus`."""

    rest: int
    modulus: int


@dataclass(frozen=True)
class Condition:
    """What one key of a `when` asks of one fact."""

    name: str
    kind: Kind
    members: frozenset[Scalar] = frozenset()
    spans: tuple[Span, ...] = ()
    residues: tuple[Residue, ...] = ()
    universe: frozenset[Scalar] = frozenset()
    """All values there can be, where they are few and known."""

    @functools.cached_property
    def matches(self) -> Callable[[Any], bool]:
        """Does this value match? Made when it is first asked, since most rows of a large table never are."""
        return _predicate(self)

    @property
    def matches_all(self) -> bool:
        """True where no value fails."""
        if self.kind in ("int", "float"):
            return Span(0, math.inf) in self.spans
        return bool(self.universe) and self.covers(Condition(self.name, self.kind, self.universe))

    def covers(self, other: Condition) -> bool:
        """True where each value that `other` takes is taken here too. May miss a cover, never claims a false one."""
        if self.kind == "arch":
            return all(any(arch_covers(mine, theirs) for mine in self.members) for theirs in other.members)
        if self.kind in ("str", "bool"):
            return other.members <= self.members
        spans = all(any(mine.low <= span.low and span.high <= mine.high for mine in self.spans) for span in other.spans)
        everything = Span(0, math.inf) in self.spans
        return spans and (everything or set(other.residues) <= set(self.residues))

    def union(self, other: Condition) -> Condition:
        """The condition that takes what either takes."""
        return Condition(
            self.name,
            self.kind,
            self.members | other.members,
            _merge((*self.spans, *other.spans), whole=self.kind == "int"),
            tuple(sorted({*self.residues, *other.residues})),
            self.universe,
        )


def compile_condition(name: str, declared: Field | Kind, value: Any) -> Condition:
    """The condition that `name: value` in a `when` stands for. Raises BadValue."""
    declared = Field(declared) if isinstance(declared, str) else declared
    if isinstance(value, list):
        if not value:
            raise BadValue("the list of alternatives is empty")
        combined = None
        for index, item in enumerate(value):
            try:
                one = _PARSERS[declared.kind](name, declared, item)
            except BadValue as error:
                raise BadValue(str(error), index) from None
            combined = one if combined is None else combined.union(one)
        assert combined is not None
        return combined
    return _PARSERS[declared.kind](name, declared, value)


def arch_covers(pattern: Any, arch: Any) -> bool:
    """True where `pattern` ("any", "sm90", "sm80+", "cpu") means `arch`, or all that the pattern `arch` means."""
    if pattern in ("any", arch):
        return True
    if not (pattern.endswith("+") and arch.startswith("sm")):
        return False
    return int(arch[2:].rstrip("+")) >= int(pattern[2:-1])


def same_device(one: str, other: str) -> bool:
    """True where two device names mean one device, as `Target.named` takes them."""
    return plain_device(one) == plain_device(other)


def _parse_bool(name: str, declared: Field, value: Any) -> Condition:
    if not isinstance(value, bool):
        raise BadValue(f"expects true or false, got {value!r}")
    return Condition(name, "bool", frozenset({value}), universe=frozenset({True, False}))


def _parse_name(name: str, declared: Field, value: Any) -> Condition:
    if not isinstance(value, str):
        raise BadValue(f"expects a name, got {value!r}")
    if declared.values and value not in declared.values:
        raise BadValue(f"{value!r} is not one of {', '.join(one or repr(one) for one in declared.values)}")
    return Condition(name, "str", frozenset({value}), universe=frozenset(declared.values))


def _parse_arch(name: str, declared: Field, value: Any) -> Condition:
    if not (isinstance(value, str) and _ARCH.fullmatch(value)):
        raise BadValue(f"{value!r} is not an architecture; allowed: any, cpu, sm80, sm90, sm90+, ...")
    return Condition(name, "arch", frozenset({value}), universe=frozenset({"any"}))


def _parse_number(name: str, declared: Field, value: Any) -> Condition:
    whole = declared.kind == "int"
    if isinstance(value, str):
        return _parse_range(name, declared, value)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise BadValue(f"expects {'an integer' if whole else 'a number'} or a range such as '128..256', got {value!r}")
    if value < 0:
        raise BadValue(f"{value!r} is negative")
    return Condition(name, declared.kind, spans=(Span(value, value),))


def _parse_range(name: str, declared: Field, value: str) -> Condition:
    whole = declared.kind == "int"
    residue = _RESIDUE.fullmatch(value) if whole else None
    if residue:
        rest, modulus = int(residue["rest"]), int(residue["modulus"])
        if rest >= modulus:
            raise BadValue(f"{value!r} matches nothing: {rest} is not below {modulus}")
        return Condition(name, "int", residues=(Residue(rest, modulus),))
    found = _RANGE.fullmatch(value)
    if not found or (whole and "." in (found["low"] or "") + (found["high"] or "")):
        if re.search(rf"[0-9]{{{MOST_DIGITS + 1}}}", value):
            raise BadValue(f"{value[:40]!r} has a number of too many digits; allowed: {MOST_DIGITS}")
        raise BadValue(f"{value!r} is not a range; write '128..256', '1024..' or '..512'")
    if found["low"] is None and found["high"] is None:
        raise BadValue(f"the range {value!r} has no end; leave the key out to match any value")
    number = int if whole else float
    low = number(found["low"]) if found["low"] else 0
    high = number(found["high"]) if found["high"] else math.inf
    if low > high:
        raise BadValue(f"the range {value!r} is empty: its low end is above its high end")
    return Condition(name, declared.kind, spans=(Span(low, high),))


_PARSERS: Mapping[str, Callable[[str, Field, Any], Condition]] = {
    "bool": _parse_bool,
    "str": _parse_name,
    "arch": _parse_arch,
    "int": _parse_number,
    "float": _parse_number,
}


def _predicate(condition: Condition) -> Callable[[Any], bool]:
    members, spans, residues = condition.members, condition.spans, condition.residues
    if condition.kind == "bool":
        return lambda value: bool(value) in members
    if condition.kind == "arch":
        return lambda value: any(arch_covers(pattern, value) for pattern in members)
    if condition.kind == "str":
        return lambda value: value in members
    if len(spans) == 1 and not residues:
        low, high = spans[0]
        return lambda value: value is not None and low <= value <= high
    return lambda value: (
        value is not None
        and (
            any(low <= value <= high for low, high in spans)
            or any(value % modulus == rest for rest, modulus in residues)
        )
    )


def _merge(spans: Iterable[Span], whole: bool) -> tuple[Span, ...]:
    """Overlapping spans joined, and for integers neighbouring ones too."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.low <= merged[-1].high + (1 if whole else 0):
            merged[-1] = Span(merged[-1].low, max(merged[-1].high, span.high))
        else:
            merged.append(span)
    return tuple(merged)
