"""From YAML files to a TableSet: read, hold against the schema and the op's facts, compile."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from registry.errors import TableError
from registry.notices import clip, what_failed
from registry.signals import interrupts
from registry.tables.files import LayerFile, OpFields
from registry.tables.match import BadValue, Condition, Field, Kind, compile_condition
from registry.tables.model import Erratum, Layer, Rule, Table, TableSet, Use
from registry.tables.reader import MAX_BYTES, MAX_MESSAGE, Document, Path, read_document, type_name
from registry.tables.schema import (
    ARCH_PATTERN,
    ErrataFile,
    ErratumEntry,
    RuleEntry,
    TableFile,
    UseEntry,
    decode,
    suggest,
)

MAX_VERSIONS = 200
"""Characters of a version range: numbers of thousands of digits are read, and fail when they are compared."""
_ERRATA_KEY = re.compile(rb"""^[{ ]*["']?errata["']?\s*:""", re.M)
_OP = rb"""["']?op["']?\s*:\s*(?:&\S+\s+)?["']?([A-Za-z0-9_.-]+)"""
_OP_KEY, _ANY_OP_KEY = re.compile(rb"^[{ ]*" + _OP, re.M), re.compile(rb"(?<![\w.-])" + _OP)
"""Of a table its own key; of errata the key of any entry, in any of YAML's spellings."""
ARCH_FIELD = Field("arch")  # patterns such as "sm80+", so that an "any" table can tell GPUs apart


def load(
    files: Iterable[LayerFile],
    ops: OpFields,
    contain: Collection[Layer] = (),
    by_op: Collection[Layer] = (),
    skip: Callable[[Table, Rule], str | None] | None = None,
) -> TableSet:
    """See registry.tables.load_tables."""
    tables: list[Table] = []
    errata: list[Erratum] = []
    problems: list[TableError] = []
    refused: list[tuple[str, TableError]] = []
    unread: list[tuple[str, TableError]] = []
    for file in files:
        try:
            loaded = _load_one(file, ops)
        except TableError as error:
            concerned, of_errata = _ops_of(file, ops) if file.layer in by_op else ([], False)
            refused.extend((op, error) for op in concerned)
            unread.extend((op, error) for op in concerned if of_errata)
            if concerned:
                continue
            if file.layer in contain or file.layer in by_op:
                problems.append(error)
            else:
                raise
            continue
        if isinstance(loaded, Table):
            tables.append(loaded)
        else:
            errata.extend(loaded)
    kept, skipped = _leave_out(tables, skip)
    return TableSet(tuple(kept), tuple(errata), tuple(problems), tuple(refused), tuple(unread), tuple(skipped))


def _leave_out(
    tables: list[Table], skip: Callable[[Table, Rule], str | None] | None
) -> tuple[list[Table], list[tuple[Table, Rule, str]]]:
    if skip is None:
        return tables, []
    kept: list[Table] = []
    skipped: list[tuple[Table, Rule, str]] = []
    for table in tables:
        why = {rule.index: skip(table, rule) for rule in table.rules}
        skipped.extend((table, rule, reason) for rule in table.rules if (reason := why[rule.index]))
        left = dataclasses.replace(table, rules=tuple(rule for rule in table.rules if not why[rule.index]))
        left.beside.extend(table.beside)
        kept.append(left)
    return kept, skipped


def _ops_of(file: LayerFile, ops: OpFields) -> tuple[list[str], bool]:
    """The ops that a broken file is about, as far as that can be seen: by its text, where it is no YAML; and whether it
    holds errata. Those of which no op can be seen are about all: what they know to be wrong would run."""
    try:
        content = file.read(MAX_BYTES)
    except TableError:
        return [], False
    try:
        data = read_document(content, file.name).data
        data = data if isinstance(data, dict) else {}
        errata = "errata" in data
        entries = data["errata"] if errata else data
        entries = entries if isinstance(entries, list) else [entries]
        named = [one.get("op") for one in entries if isinstance(one, dict)]
    except TableError:
        errata = _ERRATA_KEY.search(content) is not None
        keys = _ANY_OP_KEY.findall(content) if errata else _OP_KEY.findall(content)[:1]
        named = [key.decode() for key in keys]
    known = [op for op in ops if op in named]
    return known or (list(ops) if errata else []), errata


def _load_one(file: LayerFile, ops: OpFields) -> Table | list[Erratum]:
    """One file. Whatever is wrong with it is a TableError, so that no value gets past those who contain them."""
    try:
        return _load_checked(file, ops)
    except TableError:
        raise
    except Exception as error:
        if interrupts(error):
            raise
        problem = clip(f"cannot be used: {what_failed(error)}", MAX_MESSAGE)
        raise TableError(file.name, 1, "$", problem) from error


def _load_checked(file: LayerFile, ops: OpFields) -> Table | list[Erratum]:
    content = file.read(MAX_BYTES + 1)
    document = read_document(content, file.name)
    if isinstance(document.data, dict) and "errata" in document.data:
        entries = decode(document, ErrataFile).errata
        return [_erratum(document, ops, index, entry) for index, entry in enumerate(entries)]
    table = _table(document, file.layer, ops)
    table.beside.append(file.beside(content))
    return table


def _table(document: Document, layer: Layer, ops: OpFields) -> Table:
    file = decode(document, TableFile)
    fields = _fields_of(document, ("op",), file.op, ops)
    rules = tuple(_rule(document, fields, index, entry) for index, entry in enumerate(file.rules))
    return Table(document.file, layer, file.op, file.arch, file.device, rules)


def _rule(document: Document, fields: Mapping[str, Field | Kind], index: int, entry: RuleEntry) -> Rule:
    path: Path = ("rules", index)
    conditions = _conditions(document, fields, path, entry.when)
    use = tuple(_use(document, (*path, "use", place), candidate) for place, candidate in enumerate(entry.use))
    return Rule(index, document.line(path), conditions, use, entry.evidence, entry.nearest)


def _use(document: Document, path: Path, entry: UseEntry | str) -> Use:
    if isinstance(entry, str):
        return Use(entry, line=document.line(path))
    for key, value in (entry.config or {}).items():
        if not isinstance(value, (int, str)):
            got = "a number with a fraction" if isinstance(value, float) else type_name(value)
            raise document.error((*path, "config", key), f"expects an integer, text, true or false; got {got}")
    return Use(entry.variant, entry.config, document.line(path))


def _erratum(document: Document, ops: OpFields, index: int, entry: ErratumEntry) -> Erratum:
    path: Path = ("errata", index)
    fields = _fields_of(document, (*path, "op"), entry.op, ops)
    return Erratum(
        file=document.file,
        index=index,
        line=document.line(path),
        variant=entry.variant,
        op=entry.op,
        arch=_archs(document, (*path, "arch"), entry.arch),
        conditions=_conditions(document, fields, path, entry.when),
        toolchain={
            name: _versions(document, (*path, "toolchain", name), text) for name, text in entry.toolchain.items()
        },
        reason=entry.reason,
        link=entry.link,
        severity=entry.severity,
    )


def _archs(document: Document, path: Path, given: str | list[str]) -> tuple[str, ...]:
    archs = [(path, given)] if isinstance(given, str) else [((*path, place), arch) for place, arch in enumerate(given)]
    for where, arch in archs:
        if not re.fullmatch(ARCH_PATTERN, arch):
            allowed = "any, cpu, sm90, sm90+, ..."
            raise document.error(where, f"{clip(arch, 60)!r} is not an architecture; allowed: {allowed}")
    return tuple(arch for _, arch in archs)


def _versions(document: Document, path: Path, text: str) -> SpecifierSet:
    try:
        if len(text) > MAX_VERSIONS:
            raise ValueError
        return SpecifierSet(text)
    except (InvalidSpecifier, ValueError):
        raise document.error(path, f"{clip(text, 60)!r} is not a version range such as '>=2.11,<2.14'") from None


def _fields_of(document: Document, path: Path, op: str, ops: OpFields) -> Mapping[str, Field | Kind]:
    if op not in ops:
        raise document.error(path, f"unknown op {op!r}; {suggest(op, ops)}")
    return {**ops[op], "arch": ARCH_FIELD}


def _conditions(
    document: Document, fields: Mapping[str, Field | Kind], parent: Path, when: Mapping[str, Any]
) -> tuple[Condition, ...]:
    found = []
    for name, value in when.items():
        path = (*parent, "when", name)
        if name not in fields:
            raise document.error(path, f"unknown key {name!r}; {suggest(name, fields)}")
        try:
            found.append(compile_condition(name, fields[name], value))
        except BadValue as error:
            raise document.error(path if error.index is None else (*path, error.index), str(error)) from None
    return tuple(found)
