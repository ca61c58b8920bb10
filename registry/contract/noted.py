"""Numbers that note what is asked of them: so one answer tells for which other numbers it would have been the same.

A question is put once with `Noted` sizes in the place of integers. They count like integers; each time that a program
learns something of one (a comparison, a conversion), the condition under which it would learn the same is kept. Other
sizes that meet all conditions take the same way through the same code, and so to the same answer.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Following", "Noted", "Notes", "Unnoted", "gcd", "noting"]


class Unnoted(Exception):
    """Something was asked of a size that cannot be noted."""


LONGEST = 256
"""Characters of the code of one number."""

_here = threading.local()


def noting() -> bool:
    """Whether this thread asks with noted sizes: what fails then says nothing of the question itself."""
    return getattr(_here, "notes", None) is not None


class Notes:
    """The conditions of one question, noted inside of a `with` block."""

    MOST = 1 << 14
    """Characters; a question that asks more is not worth to be remembered so."""

    def __init__(self) -> None:
        self._conditions: dict[str, None] = {}
        self._length = 0
        self.open = False

    def __enter__(self) -> Notes:
        self.open, _here.notes = True, self
        return self

    def __exit__(self, *error: object) -> None:
        self.open, _here.notes = False, None

    def sizes(self, values: Iterable[int]) -> list[Noted]:
        """One for each of these values; `Following` takes others in the same order."""
        return [Noted(value, f"x[{at}]", self) for at, value in enumerate(values)]

    def keep(self, condition: str) -> None:
        if self.open and condition not in self._conditions:
            self._conditions[condition] = None
            self._length += len(condition)
            if self._length > self.MOST:
                raise Unnoted("too much is asked of the sizes")

    def following(self, at: tuple[int, ...], numbers: Sequence[Mapping[str, str]] = ()) -> Following:
        """What follows for other sizes than these, which the question was put with."""
        return Following(at, tuple(self._conditions), numbers)


class Following:
    """What follows from sizes: whether they meet all conditions, and then the numbers that code was noted for.

    Sizes are told by where they differ from those of the question. Where few do, as in a cache that grows, only what
    hangs on these is asked again.
    """

    OFTEN = 4
    """How many sizes that differ in the same places it held for before code is written for them."""
    MOST = 64
    """Sets of places that are known; all are forgotten when there are more."""

    def __init__(self, at: tuple[int, ...], conditions: Sequence[str], numbers: Sequence[Mapping[str, str]]) -> None:
        self.at, self._conditions, self._numbers = at, conditions, numbers
        self._all = self._written(lambda code: True)
        self._where: dict[tuple[int, ...], Any] = {}

    def of(self, sizes: tuple[int, ...]) -> tuple[dict[str, Any], ...] | None:
        """None where a condition fails. Else numbers, of which those may be left out that are as they were."""
        where = tuple(itertools.compress(itertools.count(), map(operator.ne, sizes, self.at)))
        written = self._where.get(where, 0)
        try:
            if type(written) is not int:
                return written(sizes)  # type: ignore[no-any-return]
            found = self._all(sizes)
        except ArithmeticError:
            return None
        if found is not None:
            self._count(where, written)
        return found  # type: ignore[no-any-return]

    def _count(self, where: tuple[int, ...], seen: int) -> None:
        """One more that it held for."""
        if seen < self.OFTEN:
            if len(self._where) >= self.MOST:
                self._where.clear()
            self._where[where] = seen + 1
            return
        places = set(where)
        self._where[where] = self._written(lambda code: not places.isdisjoint(map(int, _PLACE.findall(code))))

    def _written(self, wanted: Callable[[str], bool]) -> Callable[[tuple[int, ...]], Any]:
        groups = [{name: code for name, code in group.items() if wanted(code)} for group in self._numbers]
        numbers = "".join(f"{{{', '.join(f'{name!r}: {code}' for name, code in group.items())}}}, " for group in groups)
        holds = " and ".join(filter(wanted, self._conditions)) or "True"
        found: Callable[[tuple[int, ...]], Any] = compiled(f"({numbers}) if {holds} else None", {})
        return found


_PLACE = re.compile(r"\bx\[(\d+)\]")


def compiled(code: str, scope: dict[str, Any]) -> Any:
    """A function of the sizes from code that was noted."""
    return eval(f"lambda x: {code}", {**_FUNCTIONS, **scope})


_FUNCTIONS = {"ceil": math.ceil, "floor": math.floor, "gcd": math.gcd, "inf": math.inf}


class Noted:
    """A number that is known, and the code that finds it from the sizes of the question. No int, so that nothing can
    read it past the notes. After its question it is its value and no more: somebody's cache may have kept it."""

    __slots__ = ("_notes", "code", "value")

    def __init__(self, value: Any, code: str, notes: Notes) -> None:
        self.value, self.code, self._notes = value, code, notes

    def _made(self, value: Any, code: str, other: Any = None) -> Any:
        """What was worked out of this number (and another). After many steps the numbers themselves are kept."""
        if len(code) <= LONGEST:
            return Noted(value, code, self._notes)
        for one in (self, other):
            if type(one) is Noted:
                one.plain()
        return value

    def plain(self) -> Any:
        """The number itself, which is now part of the answer."""
        self._notes.keep(f"{self.code} == {self.value!r}")
        return self.value

    def __bool__(self) -> bool:
        self._notes.keep(self.code if self.value else f"not {self.code}")
        return bool(self.value)

    def __hash__(self) -> int:
        return hash(self.plain())

    def __index__(self) -> int:
        return operator.index(self.plain())

    def __int__(self) -> int:
        return int(self.plain())

    def __float__(self) -> float:
        return float(self.plain())

    def __str__(self) -> str:
        return str(self.plain())

    def __format__(self, how: str) -> str:
        return format(self.plain(), how)

    def __repr__(self) -> str:
        return f"Noted({self.value!r})"

    def __neg__(self) -> Any:
        return self._made(-self.value, f"(-{self.code})")

    def __abs__(self) -> Any:
        return self._made(abs(self.value), f"abs({self.code})")

    def __ceil__(self) -> Any:
        return self._made(math.ceil(self.value), f"ceil({self.code})")

    def __floor__(self) -> Any:
        return self._made(math.floor(self.value), f"floor({self.code})")

    def bit_length(self) -> Any:
        return self._made(self.value.bit_length(), f"({self.code}).bit_length()")

    def bit_count(self) -> Any:
        return self._made(self.value.bit_count(), f"({self.code}).bit_count()")


def _code(value: Any) -> str | None:
    """The code of an operand; None for what is no number."""
    if type(value) is Noted:
        return value.code if value._notes.open else repr(value.value)
    return repr(value) if type(value) in (int, bool) or (type(value) is float and value == value) else None


def gcd(*numbers: Any) -> int:
    """math.gcd, of noted numbers too: it holds for all sizes that have the same one."""
    found = math.gcd(*(one.value if type(one) is Noted else one for one in numbers))
    noted = next((one for one in numbers if type(one) is Noted), None)
    if noted is not None:
        noted._notes.keep(f"gcd({', '.join(_code(one) or str(one) for one in numbers)}) == {found}")
    return found


def _arithmetic(symbol: str, how: Callable[[Any, Any], Any], turned: bool) -> Callable[[Noted, Any], Any]:
    def work_out(self: Noted, other: Any) -> Any:
        if not self._notes.open:
            return how(other, self.value) if turned else how(self.value, other)
        code = _code(other)
        if code is None:
            return NotImplemented
        value = other.value if type(other) is Noted else other
        if turned:
            return self._made(how(value, self.value), f"({code} {symbol} {self.code})", other)
        return self._made(how(self.value, value), f"({self.code} {symbol} {code})", other)

    return work_out


def _comparison(symbol: str, how: Callable[[Any, Any], bool]) -> Callable[[Noted, Any], Any]:
    def compare(self: Noted, other: Any) -> Any:
        code = _code(other)
        if code is None:
            return NotImplemented
        result = how(self.value, other.value if type(other) is Noted else other)
        if code != self.code and code != "inf":
            condition = f"{self.code} {symbol} {code}"
            self._notes.keep(condition if result else f"not {condition}")
        return result

    return compare


for _symbol, _name in (
    ("+", "add"),
    ("-", "sub"),
    ("*", "mul"),
    ("//", "floordiv"),
    ("/", "truediv"),
    ("%", "mod"),
    ("**", "pow"),
    ("<<", "lshift"),
    (">>", "rshift"),
    ("&", "and"),
    ("|", "or"),
    ("^", "xor"),
):
    _how = getattr(operator, f"__{_name}__")
    setattr(Noted, f"__{_name}__", _arithmetic(_symbol, _how, turned=False))
    setattr(Noted, f"__r{_name}__", _arithmetic(_symbol, _how, turned=True))
for _symbol, _name in (("<", "lt"), ("<=", "le"), ("==", "eq"), ("!=", "ne"), (">", "gt"), (">=", "ge")):
    setattr(Noted, f"__{_name}__", _comparison(_symbol, getattr(operator, f"__{_name}__")))
