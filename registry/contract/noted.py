"""Numbers that note what is asked of them, which tells for which other numbers an answer would have been the same.

A question is asked once with `Noted` sizes in place of integers. They behave like integers; whenever the program learns
something about one (a comparison, a conversion), the condition under which it would learn the same is kept. Other sizes
that meet all conditions take the same way through the same code, and so get the same answer.
"""

from __future__ import annotations

import math
import operator
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from registry.contract.bounds import COMPARED, bounds_of
from registry.contract.written import function_of

__all__ = ["Following", "Noted", "Notes", "Unnoted", "gcd", "noting"]


class Unnoted(Exception):
    """Something was asked of a size that cannot be noted."""


LONGEST = 400
"""Steps in the code of one number, what it is made of counted wherever it stands. With 40 what a variant guesses was
too long: its cost was asked to be the same, not to lie between the same two edges."""


class _Here(threading.local):
    notes: Notes | None = None


_here = _Here()


def noting() -> bool:
    """Whether this thread asks with noted sizes: what fails then says nothing of the question itself."""
    return _here.notes is not None


class _Condition(NamedTuple):
    form: str
    operands: tuple[Any, ...]
    met: bool
    """Whether it was, or was not."""
    places: int

    @property
    def simple(self) -> bool:
        """Whether it holds a size as it is against a number."""
        size, *numbers = self.operands
        return type(size) is Noted and not size.operands and self.form in COMPARED and type(numbers[0]) in (int, float)


class Notes:
    """The conditions of one question, noted inside of a `with` block."""

    MOST = 512
    """Conditions; a question that asks more is not worth to be remembered so."""

    def __init__(self) -> None:
        self._conditions: dict[Hashable, _Condition] = {}
        self._made: dict[Hashable, Noted] = {}
        self.open = False

    def __enter__(self) -> Notes:
        self.open, _here.notes = True, self
        return self

    def __exit__(self, *error: object) -> None:
        self.open, _here.notes = False, None

    def sizes(self, values: Iterable[int]) -> list[Noted]:
        """One for each of these values; `Following` takes others in the same order."""
        return [Noted(value, f"x[{at}]", (), 1 << at, 0, self) for at, value in enumerate(values)]

    def keep(self, form: str, operands: tuple[Any, ...], met: bool) -> None:
        """Note a condition, and whether it was met. Of several bounds of one number the tightest is kept."""
        if not self.open:
            return
        tighter = _TIGHTER.get((form, met)) if type(operands[-1]) is not Noted else None
        about: Hashable = (form, met, id(operands[0])) if tighter is not None else (form, *map(_known, operands))
        there = self._conditions.get(about)
        if there is None:
            if len(self._conditions) >= self.MOST:
                raise Unnoted("too much is asked of the sizes")
        elif tighter is None or tighter(there.operands[1], operands[1]) == there.operands[1]:
            return
        self._conditions[about] = _Condition(form, operands, met, _places(operands))

    def made(self, value: Any, form: str, *operands: Any) -> Any:
        """A number that was worked out of these: one for all that are worked out so. After many steps the numbers
        themselves are kept."""
        about = (form, *map(_known, operands))
        found = self._made.get(about)
        if found is None:
            steps = 1
            for one in operands:
                if type(one) is Noted:
                    steps += one.steps
            if steps > LONGEST:
                for one in operands:
                    if type(one) is Noted:
                        one.plain()
                return value
            found = self._made[about] = Noted(value, form, operands, _places(operands), steps, self)
        return found

    def following(self, at: tuple[int, ...], numbers: Sequence[Mapping[str, str]] = ()) -> Following:
        """What follows for other sizes than these, which the question was put with."""
        return Following(at, tuple(self._conditions.values()), numbers)


def _known(operand: Any) -> Hashable:
    """What tells an operand from others. A noted one is its own, and must not be asked whether it equals another."""
    kind = type(operand)
    return id(operand) if kind is Noted else (kind, operand)


def _places(operands: Iterable[Any]) -> int:
    """The sizes that these hang on, a bit for each."""
    found = 0
    for one in operands:
        if type(one) is Noted:
            found |= one.places
    return found


_TIGHTER: dict[tuple[str, bool], Callable[[Any, Any], Any]] = {
    ("{} < {}", True): min,
    ("{} <= {}", True): min,
    ("{} > {}", False): min,
    ("{} >= {}", False): min,
    ("{} < {}", False): max,
    ("{} <= {}", False): max,
    ("{} > {}", True): max,
    ("{} >= {}", True): max,
}
"""Of two numbers that something was compared with, the one whose answer holds the other's."""


class Following:
    """What follows from sizes: whether they meet all conditions, and then the numbers that code was noted for.

    Sizes are told by where they differ from those of the question. Where few do, as in a cache that grows, only what
    hangs on these is asked again. Where half of them do, all are taken to differ: their sets are many.
    """

    MOST = 8
    """Sets of places that have code of their own."""

    def __init__(
        self, at: tuple[int, ...], conditions: Sequence[_Condition], numbers: Sequence[Mapping[str, str]]
    ) -> None:
        self.at, self._numbers = at, numbers
        simple = [one for one in conditions if one.simple]
        self._conditions = [*simple, *(one for one in conditions if not one.simple)]  # what is told sooner first
        bounds = [(one.places.bit_length() - 1, one.form, one.operands[1], one.met) for one in simple]
        self._bounded, self._lows, self._highs = bounds_of(bounds)
        self._where: dict[tuple[bool, ...], Any] = {}

    def of(self, sizes: tuple[int, ...]) -> tuple[dict[str, Any], ...] | None:
        """None where a condition fails. Else numbers, of which those may be left out that are as they were."""
        where = tuple(map(operator.ne, sizes, self.at))
        written = self._where.get(where)
        if written is None:
            if not self._within(sizes):
                return None
            written = self._written_for(where)
        try:
            return written(sizes)  # type: ignore[no-any-return]
        except ArithmeticError:
            return None

    def _within(self, sizes: tuple[int, ...]) -> bool:
        """Whether sizes lie within bounds, which most of other sizes do not: no code is written to find that out."""
        bounded = [sizes[place] for place in self._bounded]
        return not (any(map(operator.lt, bounded, self._lows)) or any(map(operator.gt, bounded, self._highs)))

    def _written_for(self, where: tuple[bool, ...]) -> Callable[[tuple[int, ...]], Any]:
        if len(self._where) >= self.MOST or 2 * sum(where) >= len(where):
            where = (True,) * len(where)
        found: Callable[[tuple[int, ...]], Any] | None = self._where.get(where)
        if found is None:
            found = self._where[where] = self._written(sum(1 << at for at, differs in enumerate(where) if differs))
        return found

    def _written(self, differing: int) -> Callable[[tuple[int, ...]], Any]:
        """Code for sizes that differ in these places: each number is worked out once, what is as it was not at all."""
        lines: list[str] = []
        names: dict[int, str] = {}
        numbers: list[Any] = []

        def number(value: Any) -> str:
            numbers.append(value)
            return f"k{len(numbers) - 1}"

        def text(one: Any) -> str:
            if type(one) is not Noted:
                return number(one)
            if not one.places & differing and one.value == one.value:
                return number(one.value)
            if not one.operands:
                return one.form
            name = names.get(id(one))
            if name is None:
                worked_out = one.form.format(*map(text, one.operands))
                name = names[id(one)] = f"y{len(names)}"
                lines.append(f"{name} = {worked_out}")
            return name

        for one in self._conditions:
            if one.places & differing:
                asked = one.form.format(*map(text, one.operands))
                lines.append(f"if {'not ' if one.met else ''}({asked}): return None")
        groups = [
            {
                name: code
                for name, code in group.items()
                if any(differing >> int(place) & 1 for place in _PLACE.findall(code))
            }
            for group in self._numbers
        ]
        made = "".join(f"{{{', '.join(f'{name!r}: {code}' for name, code in group.items())}}}, " for group in groups)
        lines.append(f"return ({made})")
        known = "".join(f", k{at}" for at in range(len(numbers)))
        return function_of(f"def following(x{known}):\n " + "\n ".join(lines), numbers)


_PLACE = re.compile(r"\bx\[(\d+)\]")


def _literal(value: Any) -> str:
    return f"({value!r})" if value < 0 else repr(value)


class Noted:
    """A number that is known, and how it was worked out from the sizes of the question. No int, so that nothing can
    read it past the notes. After its question it is its value and no more: somebody's cache may have kept it."""

    __slots__ = ("_notes", "form", "operands", "places", "steps", "value")

    def __init__(self, value: Any, form: str, operands: tuple[Any, ...], places: int, steps: int, notes: Notes) -> None:
        self.value, self.form, self.operands = value, form, operands
        self.places, self.steps, self._notes = places, steps, notes

    @property
    def code(self) -> str:
        """Code that finds it from the sizes."""
        return self.form.format(*(one.code if type(one) is Noted else _literal(one) for one in self.operands))

    def plain(self) -> Any:
        """The number itself, which is now part of the answer."""
        if self.value != self.value:
            raise Unnoted("no number")
        self._notes.keep("{} == {}", (self, self.value), True)
        return self.value

    def __bool__(self) -> bool:
        self._notes.keep("{}", (self,), bool(self.value))
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
        return self._made(-self.value, "(-{})")

    def __abs__(self) -> Any:
        return self._made(abs(self.value), "abs({})")

    def __ceil__(self) -> Any:
        return self._made(math.ceil(self.value), "ceil({})")

    def __floor__(self) -> Any:
        return self._made(math.floor(self.value), "floor({})")

    def bit_length(self) -> Any:
        return self._made(self.value.bit_length(), "({}).bit_length()")

    def bit_count(self) -> Any:
        return self._made(self.value.bit_count(), "({}).bit_count()")

    def _made(self, value: Any, form: str) -> Any:
        return self._notes.made(value, form, self) if self._notes.open else value


def _operand(value: Any) -> Any:
    """What is noted of an operand; None for what is no number."""
    if type(value) is Noted:
        return value if value._notes.open else value.value
    return value if type(value) in (int, bool) or (type(value) is float and value == value) else None


def gcd(*numbers: Any) -> int:
    """math.gcd, of noted numbers too: it holds for all sizes that have the same one."""
    if Noted not in map(type, numbers):
        return math.gcd(*numbers)
    found = math.gcd(*(one.value if type(one) is Noted else one for one in numbers))
    noted = next((one for one in numbers if type(one) is Noted), None)
    if noted is not None:
        form = f"gcd({', '.join('{}' for _ in numbers)}) == {found}"
        noted._notes.keep(form, tuple(map(_operand, numbers)), True)
    return found


def _arithmetic(symbol: str, how: Callable[[Any, Any], Any], turned: bool) -> Callable[[Noted, Any], Any]:
    form = f"({{}} {symbol} {{}})"

    def work_out(self: Noted, other: Any) -> Any:
        if not self._notes.open:
            return how(other, self.value) if turned else how(self.value, other)
        operand = _operand(other)
        if operand is None:
            return NotImplemented
        value = other.value if type(other) is Noted else other
        if turned:
            return self._notes.made(how(value, self.value), form, operand, self)
        return self._notes.made(how(self.value, value), form, self, operand)

    return work_out


def _comparison(symbol: str, how: Callable[[Any, Any], bool]) -> Callable[[Noted, Any], Any]:
    form = f"{{}} {symbol} {{}}"

    def compare(self: Noted, other: Any) -> Any:
        if not self._notes.open:
            return how(self.value, other)
        operand = _operand(other)
        if operand is None:
            return NotImplemented
        result = how(self.value, other.value if type(other) is Noted else other)
        if operand is not self and not (type(operand) is float and operand == math.inf):
            self._notes.keep(form, (self, operand), result)
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
