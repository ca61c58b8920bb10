"""Strict YAML: bytes in, plain data out, and the line of every value kept for the errors.

Only PyYAML's parser is used, never a constructor, so no tag can build an object. Scalars follow YAML 1.2's core schema
(`yes`, `on`, `12:30` and dates stay text). Refused: duplicate keys (PyYAML keeps the last one silently), anchors and
aliases (what YAML bombs are made of), other tags, several documents, deep nesting, big files, and infinite numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from registry.contract.capability import MOST_DIGITS
from registry.errors import TableError
from registry.notices import clip

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_MESSAGE = 300

Path = tuple[str | int, ...]

_FASTEST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CORE_TAG = "tag:yaml.org,2002:"
_CONSTANTS: Mapping[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_BYTE_ORDER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\xef\xbb\xbf": "UTF-8 with a byte order mark"}
_TYPE_NAMES = {
    dict: "a mapping",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "an integer",
    float: "a number",
}


def show_path(path: Path) -> str:
    """`("rules", 0, "when")` as `$.rules[0].when`."""
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{clip(part, 60)}" for part in path)


def type_name(value: Any) -> str:
    """What a reader of the file would call the value's type."""
    return "nothing" if value is None else _TYPE_NAMES.get(type(value), type(value).__name__)


@dataclass(frozen=True)
class Document:
    """One parsed file: its data, and where each value of it stands."""

    file: str
    data: Any
    lines: Mapping[Path, int]

    def line(self, path: Path) -> int:
        """The line of the value at `path`, or of the nearest value around it."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)

    def error(self, path: Path, problem: str) -> TableError:
        """The error to raise about the value at `path`."""
        return TableError(self.file, self.line(path), show_path(path), clip(problem, MAX_MESSAGE), "malformed")


def read_document(content: bytes, file: str, loader: Any = None) -> Document:
    """Parse one YAML file. Raises TableError, whatever the bytes are."""
    text = _decode(content, file)
    reader = _Reader(file, yaml.parse(text, Loader=loader or _FASTEST_LOADER))
    try:
        data = reader.document()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise TableError(file, line, show_path(tuple(reader.path)), f"is not YAML: {problem}") from None
    except yaml.YAMLError as error:
        problem = str(error).splitlines()[0]
        raise TableError(file, 1, show_path(tuple(reader.path)), f"is not YAML: {problem}") from None
    if data is None:
        raise TableError(file, 1, "$", "the file is empty")
    return Document(file, data, reader.lines)


def _decode(content: bytes, file: str) -> str:
    if len(content) > MAX_BYTES:
        raise TableError(file, 1, "$", f"is larger than {MAX_BYTES} bytes, the limit for a table")
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if content.startswith(mark):
            raise TableError(file, 1, "$", f"is {encoding}; save it as plain UTF-8")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TableError(file, line, "$", f"is not UTF-8: byte {content[error.start]:#04x} cannot be read") from None
    unprintable = yaml.reader.Reader.NON_PRINTABLE.search(text)
    if unprintable:
        line = text.count("\n", 0, unprintable.start()) + 1
        raise TableError(file, line, "$", f"holds the control character {unprintable.group()!r}")
    return text


class _Reader:
    """Builds plain data from parser events, and notes the line of each value on the way."""

    def __init__(self, file: str, events: Iterator[yaml.Event]) -> None:
        self._file, self._events = file, events
        self.path: list[str | int] = []
        self.lines: dict[Path, int] = {}

    def document(self) -> Any:
        self._next()  # StreamStart
        if isinstance(self._next(), yaml.StreamEndEvent):
            return None
        data = self._value(self._next())
        self._next()  # DocumentEnd
        following = self._next()
        if not isinstance(following, yaml.StreamEndEvent):
            self._fail(following, "holds a second document; one table per file")
        return data

    def _next(self) -> Any:
        """The next event. Untyped: PyYAML's stubs know neither marks nor tags of events."""
        return next(self._events)

    def _fail(self, event: Any, problem: str, code: str = "malformed") -> NoReturn:
        raise TableError(
            self._file, event.start_mark.line + 1, show_path(tuple(self.path)), clip(problem, MAX_MESSAGE), code
        )

    def _value(self, event: Any) -> Any:
        self.lines.setdefault(tuple(self.path), event.start_mark.line + 1)
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            self._fail(event, "anchors (&name) and aliases (*name) are not allowed; write the value out")
        if len(self.path) > MAX_DEPTH:
            self._fail(event, f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.SequenceStartEvent):
            self._check_tag(event, "seq")
            return self._sequence()
        self._check_tag(event, "map")
        return self._mapping()

    def _check_tag(self, event: Any, *allowed: str) -> None:
        if event.tag and event.tag not in [_CORE_TAG + name for name in allowed]:
            self._fail(event, f"the tag {event.tag} is not allowed; tables are plain data")

    def _sequence(self) -> list[Any]:
        items: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            self.path.append(len(items))
            items.append(self._value(event))
            self.path.pop()
        return items

    def _mapping(self) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._key(event)
            self.path.append(key)
            if key in entries:
                first = self.lines[tuple(self.path)]
                self._fail(event, f"the key {key!r} is here twice (first on line {first})", code="duplicate-key")
            self.lines[tuple(self.path)] = event.start_mark.line + 1
            entries[key] = self._value(self._next())
            self.path.pop()
        return entries

    def _key(self, event: Any) -> str:
        key: str | None = (
            event.value if isinstance(event, yaml.ScalarEvent) and not event.anchor and not event.tag else None
        )
        if not key:
            self._fail(event, "each key must be a plain name")
        return key

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        self._check_tag(event, "str", "int", "float", "bool", "null")
        value = event.value
        quoted = not event.tag and not event.implicit[0]
        if quoted or event.tag == _CORE_TAG + "str":
            return value
        if value in _CONSTANTS:
            return _CONSTANTS[value]
        if _INT.fullmatch(value):
            if len(value.lstrip("+-")) > MOST_DIGITS:
                self._fail(event, f"the number {value[:MOST_DIGITS]}... has too many digits; allowed: {MOST_DIGITS}")
            return int(value)
        if _NOT_FINITE.fullmatch(value) or (_FLOAT.fullmatch(value) and not math.isfinite(float(value))):
            self._fail(event, f"{value} is not a finite number")
        return float(value) if _FLOAT.fullmatch(value) else value
