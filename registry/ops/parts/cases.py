"""What is measured: one Case is an op and a shape, spelled so that it fits on a command line and in a results file.

    Case.parse("attention", "b=4,hq=16,hkv=4,s=4096,d=128,causal")

A recorded case also carries the strides and alignment of each operand, so that what is measured is what was called.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from registry.contract.describe import long_dtype
from registry.contract.problem import Problem
from registry.disk import write_atomic
from registry.errors import InvalidArgument, shown
from registry.ops.known import op_named

if TYPE_CHECKING:
    from registry.dispatch.scope import Recorder

Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides (both in elements) and base alignment (in bytes) of one recorded operand."""


@dataclass(frozen=True)
class Case:
    """One op on one shape. Two cases of equal `text` are the same measurement."""

    op: str
    shape: tuple[tuple[str, Any], ...]
    operands: tuple[tuple[str, Layout], ...] = ()

    @classmethod
    def of(cls, op: str, operands: Mapping[str, Layout] | None = None, **shape: Any) -> Case:
        """The case of these sizes, in one spelling: known order, defaults left out."""
        tuning = op_named(op).tuning
        unknown = [name for name in shape if name not in tuning.fields]
        if unknown:
            raise InvalidArgument("shape", repr(unknown[0]), ", ".join(tuning.fields))
        default = tuning.defaults(shape)
        kept = [(n, shape[n]) for n in tuning.fields if n in shape and not (n in default and shape[n] == default[n])]
        return cls(
            op, tuple((n, tuple(v) if isinstance(v, list) else v) for n, v in kept), tuple((operands or {}).items())
        )

    @classmethod
    def parse(cls, op: str, text: str) -> Case:
        """From "b=4,hq=16,s=4096,d=128,causal" (commas or blanks; a bare word is true; window=255:0; dtype=bf16)."""
        fields, words = op_named(op).tuning.fields, parse_words(text)
        for word, value in words.items():
            if "dtype" in fields.get(word, "") and isinstance(value, str):
                words[word] = long_dtype(value)
        try:
            case = cls.of(op, **words)
        except TypeError:  # a default that is worked out of what is no number
            for word, value in words.items():
                _check_word(op, word, value)
            raise
        for word, value in case.shape:
            _check_word(op, word, value)
        return case

    @property
    def sizes(self) -> dict[str, Any]:
        return dict(self.shape)

    @property
    def text(self) -> str:
        """The shape as `parse` takes it; recorded strides appear as a short hash."""
        words = [name if value is True else f"{name}={_word(value)}" for name, value in self.shape]
        if self.operands:
            words.append(f"strides#{digest(self.operands)[:6]}")
        return ",".join(words)

    def problem(self, target: Any) -> Problem:
        """The problem that a call of this case would be, on a real or made-up target; allocates nothing."""
        problem: Problem = op_named(self.op).tuning.workload(self, "meta", 0).problem(target)
        return problem

    def data(self) -> dict[str, Any]:
        """As JSON holds it; `from_data` reads it back."""
        found: dict[str, Any] = {"op": self.op, "shape": dict(self.shape)}
        return {**found, "operands": {n: list(o) for n, o in self.operands}} if self.operands else found

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Case:
        operands = {n: (tuple(o[0]), tuple(o[1]), int(o[2])) for n, o in data.get("operands", {}).items()}
        return cls.of(data["op"], operands, **data["shape"])

    def check(self) -> Case:
        """Itself, if a call may have been recorded like this: of no elements, too."""
        for word, value in self.shape:
            _check_word(self.op, word, value, least=0)
        for name, (shape, strides, alignment) in self.operands:
            numbers = (*shape, *strides, alignment)
            if len(shape) != len(strides) or any(type(one) is not int or not 0 <= one <= MOST for one in numbers):
                raise InvalidArgument(name, shown((shape, strides, alignment)), "[sizes, as many strides, alignment]")
        return self


MOST = 2**40
"""More of anything than a machine has; torch counts in 64 bits."""


def _check_word(op: str, word: str, value: Any, least: int = 1) -> None:
    """Raise for a value that no problem of the op has."""
    problem, field = op_named(op).problem_type, op_named(op).tuning.fields[word]
    kind, known = str(problem.fact_kinds().get(field, "")), problem.known_values.get(field, ())
    if kind == "int" and not (type(value) is int and least <= value <= MOST):
        raise InvalidArgument(word, shown(value), f"a whole number of {least} to {MOST}")
    if kind == "bool" and not isinstance(value, bool):
        raise InvalidArgument(word, shown(value), "true or false, or the word alone")
    if kind == "str" and known and value not in known:
        raise InvalidArgument(word, shown(value), ", ".join(filter(None, known)))


def parse_words(text: str) -> dict[str, Any]:
    """ "b=4,causal,window=255:0" as a dict."""
    found: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, given, value = word.partition("=")
        if name in found:
            raise InvalidArgument(name, "two values", "one")
        try:
            found[name] = _scalar(value) if given else True
        except ValueError as error:
            raise InvalidArgument(name, shown(value), "numbers between colons, such as 255:0") from error
    return found


def _scalar(text: str) -> Any:
    if ":" in text:
        return tuple(int(part) for part in text.split(":"))
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _word(value: Any) -> str:
    return ":".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def digest(value: Any) -> str:
    """A short stable hash of plain data, the same in every process and version."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


# --- files --------------------------------------------------------------------------------------------------------


def from_file(op: str, path: Path) -> list[Case]:
    """Shapes from a file: one shape a line in the `parse` spelling (# comments), or what `save_recorded` wrote."""
    cases = []
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgument(str(path), f"the byte {error.object[error.start]:#x}", "a text of UTF-8") from error
    for number, line in enumerate(lines, 1):
        line = line.split("#", 1)[0].strip()
        if not line:
            continue
        try:
            if line.startswith("{"):
                data = json.loads(line)
                cases += [Case.from_data(data).check()] if data.get("op") == op else []
            else:
                cases.append(Case.parse(op, line))
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise InvalidArgument(f"{path}:{number}", shown(line), f"a shape of {op} ({error})") from error
    return unique(cases)


def of_problem(problem: Problem) -> Case:
    """The case that asks what a recorded problem asked, memory facts included where they are not the plain ones."""
    fields = op_named(problem.op).tuning.fields
    sizes = {word: getattr(problem, field) for word, field in fields.items() if field}
    if sizes.get("layout") == "strided":  # not a word of a shape: the strides themselves are kept
        del sizes["layout"]
    case = Case.of(problem.op, **sizes)
    plain = case.problem(problem.target)
    if plain.operands == problem.operands:
        return case
    operands = {fact.name: (fact.shape, fact.strides, fact.base_alignment) for fact in problem.operands}
    return Case(case.op, case.shape, tuple(operands.items()))


def save_recorded(problems: Recorder | Iterable[Problem], path: str | Path) -> int:
    """Write a `registry.record()` block, or problems such as its own, for `kreg tune --recorded`, in the place of what
    was there. Returns how many."""
    given: Any = getattr(problems, "problems", problems)  # of a block
    listed = list(given) if isinstance(given, Iterable) else [given]
    for one in listed:
        if not isinstance(one, Problem):
            raise InvalidArgument("problems", shown(one), "a record() block, or a list of Problems such as its own")
    if not str(path):
        raise InvalidArgument("path", "''", "the path of a file")
    lines = [json.dumps(case.data()) for case in unique(map(of_problem, listed))]
    write_atomic(Path(os.path.expanduser(path)), "".join(line + "\n" for line in lines))
    return len(lines)


def unique(cases: Iterable[Case]) -> list[Case]:
    """Each case once, in the order given."""
    return list(dict.fromkeys(cases))


def spread(cases: Sequence[Case]) -> list[Case]:
    """The cases in an order of which every beginning is a fair sample, so that a budget may cut anywhere."""
    return sorted(cases, key=lambda case: digest([case.op, case.text]))
