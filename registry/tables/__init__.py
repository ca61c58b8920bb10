"""Dispatch tables: which variant is fastest where, as measured data in layers. They rank, and never make legal.

    tables = load_tables([*shipped_sources(), *environment_sources()], ops={"attention": {"head_dim": "int", ...}})
    for match in tables.match("attention", problem_facts, arch="sm90", device="NVIDIA H200"):
        match.use               # the candidates, best first; the dispatcher takes the first legal one
    tables.errata_for("attention", "torch_cudnn", problem_facts, target)

What is in force in a process, and for which ops, is the caller's business (registry.dispatch.in_force).
Importing this module loads neither msgspec nor yaml; the first load does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from registry.errors import TableError
from registry.tables.match import Field, Kind, kind_of
from registry.tables.model import Erratum, Layer, Match, Rule, Table, TableSet, Use

__all__ = [
    "Erratum",
    "Field",
    "Layer",
    "Match",
    "Rule",
    "Source",
    "Table",
    "TableSet",
    "TableStore",
    "Use",
    "environment_sources",
    "file_sources",
    "kind_of",
    "load_tables",
    "shipped_sources",
]

SHIPPED_PACKAGE = "registry.dispatch_tables"
ENVIRONMENT_VARIABLE = "REGISTRY_TABLES"
_SUFFIXES = (".yaml", ".yml")

OpFields = Mapping[str, Mapping[str, Field | Kind]]
"""Per op, the facts that a `when` may name and their kinds ("int", "float", "bool", "str", or a Field)."""


class Readable(Protocol):
    """What is needed of a file: a pathlib.Path and a package resource both have it."""

    def is_file(self) -> bool: ...
    def open(self, mode: Literal["rb"], /) -> IO[bytes]: ...


@dataclass(frozen=True)
class Source:
    """One YAML file to load, and the layer it belongs to. `name` is what errors and `explain` call it."""

    name: str
    layer: Layer
    file: Readable

    def read(self, limit: int) -> bytes:
        """At most `limit` bytes of the file. Never opens anything but a plain file, which a pipe or a device is not."""
        try:
            if not self.file.is_file():
                raise TableError(self.name, 1, "$", "no such file, or a folder without *.yaml tables")
            with self.file.open("rb") as stream:
                return stream.read(limit)
        except OSError as error:
            raise TableError(self.name, 1, "$", f"cannot be read: {error.strerror or error}") from None


def shipped_sources() -> list[Source]:
    """The tables and errata that come with the registry."""
    folder = resources.files(SHIPPED_PACKAGE)
    found = {entry.name: entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIXES)}
    return [Source(name, Layer.SHIPPED, found[name]) for name in sorted(found)]


def file_sources(paths: Iterable[str | os.PathLike[str]], layer: Layer) -> list[Source]:
    """Sources for files and for folders (their *.yaml, not deeper). What cannot be read is an error on loading."""
    found: list[Source] = []
    for path in (Path(os.path.expanduser(path)) for path in paths):
        found.extend(Source(str(entry), layer, entry) for entry in _tables_in(path) or [path])
    return found


def _tables_in(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.suffix in _SUFFIXES) if path.is_dir() else []
    except OSError:
        return []


def environment_sources(environ: Mapping[str, str] | None = None) -> list[Source]:
    """The files and folders that REGISTRY_TABLES lists. As with PATH, the first listed wins."""
    listed = (os.environ if environ is None else environ).get(ENVIRONMENT_VARIABLE, "")
    return file_sources(filter(None, listed.split(os.pathsep)), Layer.ENVIRONMENT)


def load_tables(
    sources: Iterable[Source],
    ops: OpFields,
    *,
    contain: Collection[Layer] = (),
    skip: Callable[[Table, Rule], str | None] | None = None,
) -> TableSet:
    """Load every source or raise TableError for the first that is wrong.

    contain  layers whose broken files are left out and listed in `.problems` instead, such as other people's plugins
    skip     asked about each row; a text leaves that row out and is listed in `.skipped`, such as a stale measurement
    """
    from registry.tables.load import load

    return load(sources, ops, contain, skip)


class TableStore:
    """Holds the tables in force. `reload` replaces them whole, or raises and leaves them as they were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.current = TableSet()

    def reload(self, sources: Iterable[Source], ops: OpFields, **options: Any) -> TableSet:
        """Load (see load_tables), then swap. Readers see the old set or the new one, never a mix."""
        with self._lock:
            loaded = load_tables(sources, ops, **options)
            self.current = loaded
            return loaded
