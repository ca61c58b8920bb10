"""Where tables come from: files as they are shipped, listed in the environment, or named. Nothing is parsed here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Literal, Protocol

from registry.errors import TableError
from registry.tables.match import Field, Kind
from registry.tables.model import Layer

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
class LayerFile:
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


def shipped_files() -> list[LayerFile]:
    """The tables and errata that come with the registry."""
    folder = resources.files(SHIPPED_PACKAGE)
    found = {entry.name: entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIXES)}
    return [LayerFile(name, Layer.SHIPPED, found[name]) for name in sorted(found)]


def files_at(paths: Iterable[str | os.PathLike[str]], layer: Layer) -> list[LayerFile]:
    """Files by their paths, and folders (their *.yaml, not deeper). What cannot be read is an error on loading."""
    found: list[LayerFile] = []
    for path in (Path(os.path.expanduser(path)) for path in paths):
        found.extend(LayerFile(str(entry), layer, entry) for entry in _tables_in(path) or [path])
    return found


def _tables_in(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.suffix in _SUFFIXES) if path.is_dir() else []
    except OSError:
        return []


def environment_files(environ: Mapping[str, str] | None = None) -> list[LayerFile]:
    """The files and folders that REGISTRY_TABLES lists. As with PATH, the first listed wins."""
    listed = (os.environ if environ is None else environ).get(ENVIRONMENT_VARIABLE, "")
    return files_at(filter(None, listed.split(os.pathsep)), Layer.ENVIRONMENT)
