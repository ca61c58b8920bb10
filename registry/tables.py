"""Dispatch tables: which variant is fastest where, as measured data in layers. They rank, and never make legal.

    tables = load_tables([*shipped_sources(), *environment_sources()], ops={"attention": {"head_dim": "int", ...}})
    for match in tables.match("attention", problem_facts, arch="sm90", device="NVIDIA H200"):
        match.use               # the candidates, best first; the dispatcher takes the first legal one
    tables.errata_for("attention", "torch_cudnn", problem_facts, target)

`matches`, `errata_reasons` and `reload` at the end are the same questions asked of the tables in force in this process.
Importing this module loads neither msgspec nor yaml; the first load does.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol

from registry import notices
from registry.errors import TableError
from registry.tables_match import Field, Kind, kind_of, kind_of_value
from registry.tables_model import Erratum, Layer, Match, Rule, Table, TableSet, Use

if TYPE_CHECKING:
    from registry.capability import Reason
    from registry.problem import Problem
    from registry.variant import Variant

__all__ = [
    "Erratum", "Field", "Layer", "Match", "Rule", "Source", "Table", "TableSet", "TableStore", "Use",
    "all_sources", "current", "environment_sources", "errata_reasons", "file_sources", "load_tables", "matches",
    "op_fields", "reload", "shipped_sources",
]  # fmt: skip

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
    for path in (Path(path).expanduser() for path in paths):
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
    from registry.tables_load import load

    return load(sources, ops, contain, skip)


class TableStore:
    """Holds the tables in force. `reload` replaces them whole, or raises and leaves them as they were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.current: TableSet | None = None

    def reload(self, sources: Iterable[Source], ops: OpFields, **options: Any) -> TableSet:
        """Load (see load_tables), then swap. Readers see the old set or the new one, never a mix."""
        with self._lock:
            loaded = load_tables(sources, ops, **options)
            self.current = loaded
            return loaded


# --- the tables in force in this process --------------------------------------------------------------------------

_CONTAINED = (Layer.PLUGIN, Layer.TUNED)
_DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8")
_store = TableStore()


def current() -> TableSet:
    """The tables in force, loaded from every layer at first use."""
    return _store.current or reload()


def reload() -> TableSet:
    """Read every layer again. A broken table of the user's is raised and the tables in force stay as they are; a broken
    one of a plugin or a cache is left out. Whatever is left out or names nothing is a notice."""
    from registry.discovery import catalog
    from registry.op import all_ops
    from registry.tables_lint import Known, lint

    ops = {name: op_fields(op.problem_type) for name, op in all_ops().items()}
    loaded = _store.reload(all_sources(), ops, contain=_CONTAINED)
    for problem in loaded.problems:
        notices.notice(f"table left out: {problem}")
    variants = {name: variant.op for name, variant in catalog.get().variants.items()}
    for finding in lint(loaded, Known(variants)):
        if finding.code == "unknown-variant":
            notices.notice(f"passed over: {finding}")
    return loaded


def all_sources() -> list[Source]:
    """Every file that counts here: shipped, plugins', and the environment's."""
    from registry.discovery import catalog

    plugins = [source for _, path in catalog.get().tables for source in file_sources([path], Layer.PLUGIN)]
    return [*shipped_sources(), *plugins, *environment_sources()]


def op_fields(problem_type: type[Problem]) -> dict[str, Field | Kind]:
    """What a `when` may name for problems of this type, and the kind of each: its fields and its derived facts."""
    fields = {f.name: f for f in dataclasses.fields(problem_type) if f.name not in ("target", "operands")}
    kinds: dict[str, Field | Kind] = {name: kind_of(field.type) for name, field in fields.items()}
    required = {
        name: 1 if kinds[name] in ("int", "float") else ""
        for name, field in fields.items()
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    sample: Any = problem_type(target=None, **required)  # type: ignore[arg-type]
    derived = {name: kind_of_value(value) for name, value in sample.derived_facts().items()}
    return {**kinds, **derived, "dtype": Field("str", _DTYPES)}


def matches(problem: Problem) -> Iterator[Match]:
    """The rule that counts in each table that speaks about the problem, highest layer first."""
    return current().match(problem.op, problem.facts(), problem.target.arch, problem.target.name)


def errata_reasons(variant: Variant, problem: Problem) -> list[Reason]:
    """Why errata forbid a variant for a problem, if they do."""
    tables = current()
    if not any(erratum.variant == variant.name for erratum in tables.errata):
        return []
    from registry.capability import Reason

    found = tables.errata_for(problem.op, variant.name, problem.facts(), problem.target)
    return [Reason("erratum", "known bad", e.reason, e.unaffected, fix=f"see {e.link}") for e in found]
