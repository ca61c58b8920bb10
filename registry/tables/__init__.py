"""Dispatch tables: measured data, in layers, that say which variant is fastest where. They rank, they never permit.

    tables = load_tables([*shipped_files(), *environment_files()], ops={"attention": {"head_dim": "int", ...}})
    for match in tables.match("attention", problem_facts, arch="sm90", device="NVIDIA H200"):
        match.use               # the candidates, best first; the dispatcher takes the first legal one
    tables.errata_for("attention", "torch_cudnn", problem_facts, target)

Which tables are in force in a process is decided elsewhere (registry.dispatch.in_force).
Importing this module loads neither msgspec nor yaml; the first load does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from registry.forks import new_lock
from registry.tables.files import LayerFile, OpFields, environment_files, files_at, shipped_files
from registry.tables.match import Condition, Field, kind_of
from registry.tables.model import Erratum, Layer, Match, Rule, Table, TableSet, Use

__all__ = [
    "Condition",
    "Erratum",
    "Field",
    "Layer",
    "Match",
    "Rule",
    "LayerFile",
    "Table",
    "TableSet",
    "TableStore",
    "Use",
    "environment_files",
    "files_at",
    "kind_of",
    "load_tables",
    "shipped_files",
]


def load_tables(
    files: Iterable[LayerFile],
    ops: OpFields,
    *,
    contain: Collection[Layer] = (),
    by_op: Collection[Layer] = (),
    skip: Callable[[Table, Rule], str | None] | None = None,
) -> TableSet:
    """Load every file or raise TableError for the first that is wrong.

    contain  layers whose broken files are left out and listed in `.problems` instead, such as other people's plugins
    by_op    layers whose broken files are listed in `.refused` with each op that they concern, where that can be told;
             else as with `contain`. Errata of which that cannot be told concern all
    skip     asked about each row; a text leaves that row out and is listed in `.skipped`, such as a stale measurement
    """
    from registry.tables.load import load

    return load(files, ops, contain, by_op, skip)


class TableStore:
    """Holds the tables in force. `reload` replaces them whole, or raises and leaves them as they were."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self.current = TableSet()

    def reload(self, files: Iterable[LayerFile], ops: OpFields, **options: Any) -> TableSet:
        """Load (see load_tables), then swap. Readers see the old set or the new one, never a mix."""
        with self._lock:
            loaded = load_tables(files, ops, **options)
            self.current = loaded
            return loaded
