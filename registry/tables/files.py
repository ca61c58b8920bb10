"""Where tables come from: files as they are shipped, listed in the environment, or named. Nothing is parsed here."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from registry.errors import TableError
from registry.tables.match import Field, Kind
from registry.tables.model import Layer

SHIPPED_PACKAGE = "registry.dispatch_tables"
ENVIRONMENT_VARIABLE = "REGISTRY_TABLES"
_SUFFIXES = (".yaml", ".yml")
_MEASURED_SUFFIX = ".measured.json"
_NAMES_BESIDE = re.compile(rb"^# With measured shapes: sha256 ([0-9a-f]{64})\r?$", re.MULTILINE)
"""A comment, so that versions which do not know it read the table, too."""

OpFields = Mapping[str, Mapping[str, Field | Kind]]
"""Per op, the facts that a `when` may name and their kinds ("int", "float", "bool", "str", or a Field)."""


class Readable(Protocol):
    """What is needed of a file: a pathlib.Path and a package resource both have it."""

    def is_file(self) -> bool: ...
    def open(self, mode: Literal["rb"], /) -> IO[bytes]: ...


State = tuple[int, ...]
"""What changes when a file does: its place on the disk, size and time. Empty where there is no file."""


@dataclass
class Beside:
    """The file of measured shapes beside a table, which is opened at first use, and what the table's own reading says
    of it: somebody may have tuned since, and rules know their shapes by a number only."""

    file: Readable
    digest: str = ""
    """That the table names; "" where it names none, as those do that were written before tables did."""
    state: State | None = None
    """When the table was read; None where nobody can tell."""
    found: Any = None
    """A tables.measured.MeasuredSizes, or why there is none, once it was read."""

    def belongs(self, digest: str, state: State | None) -> bool:
        """Whether what was read there is what the table was written with."""
        if self.digest:
            return digest == self.digest
        return None in (self.state, state) or state == self.state


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
                if isinstance(self.file, Path) and self.file.is_dir():
                    os.listdir(self.file)  # or says why nobody may look for tables in it
                raise TableError(self.name, 1, "$", "no such file, or a folder without *.yaml tables")
            with self.file.open("rb") as stream:
                return stream.read(limit)
        except OSError as error:
            raise TableError(self.name, 1, "$", f"cannot be read: {error.strerror or error}") from None

    def beside(self, content: bytes) -> Beside:
        """The file beside this table, of which this is the content."""
        if not isinstance(self.file, Path):
            return file_beside(self.name, self.layer)
        path, named = beside(self.file), _NAMES_BESIDE.findall(content)
        return Beside(path, named[-1].decode() if named else "", _state_at(path))


def shipped_files() -> list[LayerFile]:
    """The tables and errata that come with the registry."""
    folder = resources.files(SHIPPED_PACKAGE)
    found = {entry.name: entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIXES)}
    return [LayerFile(name, Layer.SHIPPED, found[name]) for name in sorted(found)]


def files_at(paths: Iterable[str | os.PathLike[str]], layer: Layer) -> list[LayerFile]:
    """Files by their paths, and folders (their *.yaml, not deeper). What cannot be read is an error on loading. They
    are called what they are called here, and found again from whatever folder the process has gone to."""
    found: list[LayerFile] = []
    for path in (Path(os.path.expanduser(path)) for path in paths):
        found.extend(LayerFile(str(entry), layer, _absolute(entry)) for entry in _tables_in(path) or [path])
    return found


def beside(table_path: Path) -> Path:
    """The file of measured shapes that belongs to a table."""
    return table_path.with_name(table_path.stem + _MEASURED_SUFFIX)


def file_beside(name: str, layer: Layer) -> Beside:
    """The file beside a table that is known by its name alone."""
    path = beside(Path(name))
    return Beside(resources.files(SHIPPED_PACKAGE) / path.name if layer is Layer.SHIPPED else path)


def naming(text: str, measured_text: str) -> str:
    """The text of a table, with a last line that names the file beside it, so that no other is taken for it."""
    digest = hashlib.sha256(measured_text.encode()).hexdigest()
    return f"{text.rstrip()}\n# With measured shapes: sha256 {digest}\n"


def state_of(found: os.stat_result) -> State:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _state_at(path: Path) -> State:
    try:
        return state_of(os.stat(path))
    except OSError:
        return ()


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except OSError:  # the folder that the process is in is gone
        return path


def _tables_in(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.suffix in _SUFFIXES) if path.is_dir() else []
    except OSError:
        return []


def environment_files(environ: Mapping[str, str] | None = None) -> list[LayerFile]:
    """The files and folders that REGISTRY_TABLES lists. As with PATH, the first listed wins."""
    listed = (os.environ if environ is None else environ).get(ENVIRONMENT_VARIABLE, "")
    return files_at(filter(None, listed.split(os.pathsep)), Layer.ENVIRONMENT)
