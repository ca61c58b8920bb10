"""The shape of a table and of an errata file: msgspec structs, and the JSON Schema for editors made from them.

`when`, `config` and the architectures of errata are checked in registry.tables.load, the first two against what the op
and its problems declare.
"""

from __future__ import annotations

import datetime
import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from registry.disk import write_atomic
from registry.tables.reader import Document, type_name
from registry.tables.reader import Path as ValuePath

_NAME = r"[A-Za-z][A-Za-z0-9_-]*(\.[A-Za-z][A-Za-z0-9_-]*)*"
_STEM = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_ARCH = r"any|cpu|sm[1-9][0-9]{1,2}"
_PAGE = r"docs/[A-Za-z0-9_-]+\.md"

Name = Annotated[str, Meta(pattern=f"^{_NAME}$", max_length=100)]
TableArch = Annotated[
    str, Meta(pattern=f"^({_ARCH})$", description='"any", "cpu" or a compute capability such as "sm90".')
]
ARCH_PATTERN = rf"^({_ARCH}|sm[1-9][0-9]{{1,2}}\+)$"
ArchPattern = Annotated[  # held against its pattern in registry.tables.load: of `pattern | list` msgspec frees too much
    str, Meta(description='"any", "cpu", "sm90"; "sm90+" for newer too.', extra_json_schema={"pattern": ARCH_PATTERN})
]
Coordinate = Annotated[str, Meta(pattern="^[!-~]+$", max_length=100)]
Speed = Annotated[float, Meta(gt=0)]
Run = Annotated[str, Meta(pattern=rf"^{_STEM}(/{_STEM})*$")]
When = Annotated[
    dict[str, Any],
    Meta(
        description="Which problems this is about. Keys are facts of the op's problem; an absent key means any. "
        'Values: one scalar, a list of alternatives, "1024..", "..512", "128..256" (ends included) or "64 mod 128".',
        extra_json_schema={
            "additionalProperties": {
                "anyOf": [
                    {"type": ["string", "integer", "number", "boolean"]},
                    {"type": "array", "minItems": 1, "items": {"type": ["string", "integer", "number", "boolean"]}},
                ]
            }
        },
    ),
]
Config = Annotated[
    dict[str, Any],
    Meta(
        description="One of the variant's declared configs; without it, the variant's own first legal one.",
        extra_json_schema={"additionalProperties": {"type": ["string", "integer", "boolean"]}},
    ),
]


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A typing mistake in a key must not be read as an absent key."""


class RunnerUp(_Strict, frozen=True):
    """The best variant that was not picked, in the same measurement."""

    variant: Name
    tflops: Speed


class Evidence(_Strict, frozen=True):
    """The measurement behind a rule."""

    device: Annotated[str, Meta(min_length=1, description='The device as the driver names it, such as "NVIDIA H200".')]
    tflops: Annotated[float, Meta(gt=0, description="Speed of the rule's first pick.")]
    run: Annotated[Run, Meta(description="The run's raw results.")]
    date: datetime.date
    torch: str
    also: Annotated[
        list[Run],
        Meta(description="Raw results of other devices of the architecture that the rule was fitted to, too."),
    ] = []
    triton: str | None = None
    driver: str | None = None
    runner_up: RunnerUp | None = None
    source: Annotated[str, Meta(description="Hash of the picked variant's source.")] | None = None
    sources: Annotated[
        dict[Name, str], Meta(description="The same, when last measured, of all that a rule with `nearest` may pick.")
    ] = {}
    cases: Annotated[int, Meta(ge=1, description="How many measured problems this rule was fitted to.")] | None = None
    note: str | None = None


class UseEntry(_Strict, frozen=True):
    """One candidate: the first legal one of a rule runs."""

    variant: Name
    config: Config | None = None


class RuleEntry(_Strict, frozen=True):
    """One row: the first row of a table whose `when` matches a problem is the one that counts."""

    use: Annotated[list[UseEntry | Name], Meta(min_length=1)]
    when: When = {}
    nearest: (
        Annotated[
            dict[Coordinate, Annotated[float, Meta(gt=0, le=1000)]],
            Meta(
                min_length=1,
                description="Ranks the candidates by measured shapes, which lie beside the table, in "
                "*.measured.json: by trees fitted to all of them, or by the nearest where it has none. Here are the "
                "weights of the coordinates in which they are near. `use` is the order where none is near: a library's "
                "kernel first.",
            ),
        ]
        | None
    ) = None
    evidence: Evidence | None = None


class TableFile(_Strict, frozen=True):
    """A dispatch table of one op on one architecture or device. It ranks variants; it never makes one legal."""

    op: Name
    arch: TableArch
    rules: Annotated[list[RuleEntry], Meta(min_length=1)]
    device: Annotated[str, Meta(min_length=1, description="Narrows the table to one device.")] | None = None


class ErratumEntry(_Strict, frozen=True):
    """A combination that is known to be bad. It makes the variant illegal there."""

    variant: Name
    op: Name
    reason: Annotated[str, Meta(min_length=1, description="What goes wrong, in one line.")]
    link: Annotated[
        str,
        Meta(
            pattern=rf"^(https://\S+|{_PAGE}#[a-z0-9-]+)$",
            description='A public report, or where docs/ shows how to reproduce it: "docs/autows.md#rows".',
        ),
    ]
    severity: Literal["wrong-result", "crash", "hang", "compile-failure", "not-specialized"]
    arch: ArchPattern | Annotated[list[ArchPattern], Meta(min_length=1)] = "any"
    when: When = {}
    toolchain: Annotated[
        dict[Literal["torch", "triton", "cuda", "cudnn", "driver"], str],
        Meta(description='Affected versions, such as {torch: ">=2.11,<2.14"}.'),
    ] = {}


class ErrataFile(_Strict, frozen=True):
    """Known-bad combinations, as data."""

    errata: list[ErratumEntry]


_STRUCT_OF_KEY: dict[str, type[Struct]] = {
    "rules": RuleEntry,
    "use": UseEntry,
    "evidence": Evidence,
    "runner_up": RunnerUp,
    "errata": ErratumEntry,
}
_LOCATED = re.compile(r"(?P<problem>.*) - at (`key` in )?`\$(?P<path>.*)`", re.DOTALL)
_TYPES = re.compile(r"`(\w+(?: \| \w+)*)`")
_WORDS = {
    "object": "a mapping",
    "array": "a list",
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_File = TypeVar("_File", TableFile, ErrataFile)


def decode(document: Document, kind: type[_File]) -> _File:
    """The document as a struct. Raises TableError at the first value that does not fit."""
    if not isinstance(document.data, dict):
        raise document.error((), f"expects a mapping at the top, got {type_name(document.data)}")
    try:
        return msgspec.convert(document.data, kind)
    except msgspec.ValidationError as error:
        path, problem = _explain(document, str(error), kind)
        raise document.error(path, problem) from None


def suggest(name: str, known: Any) -> str:
    """A hint for a mistyped name: the near miss, or else everything there is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}"


def _explain(document: Document, message: str, kind: type[Struct]) -> tuple[ValuePath, str]:
    """msgspec's message as a path into the file and a sentence about it."""
    located = _LOCATED.fullmatch(message)
    problem, shown = (located["problem"], located["path"]) if located else (message, "")
    path: ValuePath = tuple(int(index) if index else name for name, index in _STEP.findall(shown))
    named = re.search(r"`([^`]*)`$", problem)
    if named and "unknown field" in problem:
        key = named[1]
        return (*path, key), f"unknown key {key!r}; {suggest(key, _keys_at(path, kind))}"
    if named and "missing required field" in problem:
        return path, f"the key {named[1]!r} is missing"
    if path[-1:] == ("arch",) and "matching regex" in problem:
        return path, f"{_value_at(document.data, path)!r} is not an architecture; allowed: any, cpu, sm80, sm90, ..."
    if problem.startswith("Invalid enum value"):
        words = ", ".join(_words_at(path, kind))
        return path, f"{problem[:1].lower()}{problem[1:]}; allowed: {words}"
    value = _value_at(document.data, path)
    wants_text = re.search(r"Expected `(\w+ \| )*str\b", problem)
    hint = "; put it in quotes" if wants_text and isinstance(value, (int, float)) else ""
    hint = f", got {value!r}" if "matching regex" in problem else hint
    problem = _TYPES.sub(lambda types: " or ".join(_WORDS.get(t, t) for t in types[1].split(" | ")), problem)
    return path, problem[:1].lower() + problem[1:] + hint


def _keys_at(path: ValuePath, kind: type[Struct]) -> tuple[str, ...]:
    names = [part for part in path if isinstance(part, str)]
    return _STRUCT_OF_KEY.get(names[-1], kind).__struct_fields__ if names else kind.__struct_fields__


def _words_at(path: ValuePath, kind: type[Struct]) -> list[str]:
    """The words that a field takes, or the keys of one."""
    *parents, field = [part for part in path if isinstance(part, str)]
    owner = _STRUCT_OF_KEY.get(parents[-1], kind) if parents else kind
    return sorted(_words_of(get_type_hints(owner)[field]))


def _words_of(hint: Any) -> set[str]:
    given = get_args(hint)
    return set(given) if get_origin(hint) is Literal else {word for one in given for word in _words_of(one)}


def _value_at(data: Any, path: ValuePath) -> Any:
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data


SCHEMAS: Mapping[str, type[Struct]] = {"table.schema.json": TableFile, "errata.schema.json": ErrataFile}


def schema_text(kind: type[Struct]) -> str:
    """JSON Schema of a struct, as draft 7: what yaml-language-server and check-jsonschema both read in full."""
    schema = msgspec.json.schema(kind)
    root = {"allOf": [{"$ref": schema.pop("$ref")}]}  # draft 7 ignores what stands beside a $ref
    text = json.dumps({"$schema": "http://json-schema.org/draft-07/schema#", **root, **schema}, indent=2)
    return text.replace('"$defs"', '"definitions"').replace("#/$defs/", "#/definitions/") + "\n"


def write_schema(folder: Path) -> list[Path]:
    """Write the schemas that shipped tables name in their first line. Returns what was written."""
    written = []
    for name, kind in SCHEMAS.items():
        path = Path(folder) / name
        write_atomic(path, schema_text(kind))
        written.append(path)
    return written


if __name__ == "__main__":
    import sys

    for changed in write_schema(Path(sys.argv[1])):
        print(changed)
