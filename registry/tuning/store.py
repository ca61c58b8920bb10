"""The user's own measurements and tables, kept in the cache folder and shared by every process of the user.

A row is one contestant on one case, with what it was measured on: device, driver, torch, triton, and a hash of the
variant's source. Rows that no longer hold are passed over one by one and reported. Files are replaced whole, under a
lock; where the disk is full or read-only, what was there stays, and StoreError says where the new rows were left.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from registry.disk import make_folder, write_atomic, written
from registry.dispatch import in_force
from registry.dispatch.catalog import catalog
from registry.dispatch.staleness import other_versions, stale_code
from registry.errors import RegistryError
from registry.tables.files import beside, naming
from registry.tuning.journal import CaseResults, Entry, Results, lock
from registry.tuning.lines import (
    DAMAGED,
    check_config,
    check_facts,
    check_flops,
    check_machine,
    check_time,
    check_types,
    parsed,
)
from registry.tuning.machine import slug

KEYED = ("device", "driver", "torch", "triton")


class StoreError(RegistryError):
    """The cache could not be written. Nothing that was in it is lost."""


@dataclass(frozen=True)
class Row:
    """One measured contestant."""

    op: str
    case: str
    shape: dict[str, Any]
    facts: dict[str, Any]
    flops: float
    variant: str
    config: dict[str, Any]
    first: bool
    source: str
    """The fingerprint of the variant's source: dispatch/fingerprint.py."""
    machine: dict[str, Any]
    mode: str
    ms: float | None
    spread: float = 0.0
    failure: str = ""
    detail: str = ""
    """Of the failure."""

    @property
    def key(self) -> str:
        """What a newer measurement of the same thing replaces."""
        same = [self.op, self.case, self.variant, self.config, self.mode, [self.machine.get(n) for n in KEYED]]
        return json.dumps(same, sort_keys=True)


@dataclass(frozen=True)
class Stale:
    """A row that does not hold here, and why."""

    row: Row
    why: str

    def __str__(self) -> str:
        return f"{self.row.variant} on {self.row.case}: {self.why}"


@dataclass
class Loaded:
    """What the store has for one op on this machine."""

    rows: list[Row] = field(default_factory=list)
    stale: list[Stale] = field(default_factory=list)


def folder() -> Path:
    return in_force.cache_folder() / "measurements"


def rows_of(results: Results) -> list[Row]:
    """The rows of a sweep."""
    return [
        _row(results, case, entry)
        for case in results.cases.values()
        for entry in case.entries.values()
        if entry.samples or entry.failure
    ]


def _row(results: Results, case: CaseResults, entry: Entry) -> Row:
    return Row(
        case.op,
        case.text,
        case.shape,
        case.facts,
        case.flops,
        entry.variant,
        entry.config,
        entry.first,
        entry.fingerprint,
        results.machine,
        results.mode,
        entry.ms if entry.timed else None,
        round(entry.spread, 4) if entry.timed else 0.0,
        entry.failure["why"] if entry.failure else "",
        entry.failure.get("detail", "") if entry.failure else "",
    )


def path_for(op: str, device: str) -> Path:
    return folder() / f"{op}.{slug(device)}.jsonl"


def merge(rows: Iterable[Row]) -> dict[Path, int]:
    """Add rows, each in place of an older one of the same key. Returns how many each file has now.

    Several processes may merge at once: each waits for the other's lock and keeps the other's rows.
    """
    by_file: dict[Path, list[Row]] = {}
    for row in rows:
        by_file.setdefault(path_for(row.op, str(row.machine["device"])), []).append(row)
    return {path: _merge_file(path, fresh) for path, fresh in by_file.items()}


def _merge_file(path: Path, fresh: list[Row]) -> int:
    try:
        with locked(path):
            kept, _ = _read(path)
            merged = {row.key: row for row in [*kept, *fresh]}
            write_atomic(path, "".join(map(_line, merged.values())))
            return len(merged)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}; {_rescue(fresh)}") from error


def _rescue(rows: list[Row]) -> str:
    """Put rows that the cache did not take where there is room, so that a measurement is not lost to a full disk."""
    try:
        handle, name = tempfile.mkstemp(prefix="kreg-rows-", suffix=".jsonl")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(map(_line, rows))
    except OSError:
        return "the rows are kept by the sweep's own journal only"
    return f"the new rows are in {name}"


def damaged(op: str, device: str) -> list[str]:
    """What in the file of an op and device is no row, for people. The next merge leaves it out."""
    path = path_for(op, device)
    with contextlib.suppress(OSError):
        return [f"{path}: line {number} is damaged and passed over" for number in _read(path)[1]]
    return []


def _line(row: Row) -> str:
    """Without a detail that says nothing: versions before it take a row that has one for damaged."""
    kept = {name: value for name, value in asdict(row).items() if name != "detail" or value}
    return json.dumps(kept, separators=(",", ":")) + "\n"


def _row_of(line: str) -> Row:
    """A line as a row. Raises one of DAMAGED for what is none."""
    row = Row(**parsed(line))
    texts = dict.fromkeys(("op", "case", "variant", "source", "mode", "failure", "detail"), (str,))
    check_types(vars(row), {**texts, "shape": (dict,), "machine": (dict,), "flops": (int, float), "first": (bool,)})
    check_types(vars(row), {"spread": (int, float), "ms": (int, float, type(None))})
    if row.ms is not None:
        check_time(row.ms)
    check_flops(row.flops)
    if not 0 <= row.spread < 1e6:
        raise ValueError(f"spread: got {row.spread}")
    check_config(row.config)
    check_facts(row.op, row.facts)
    check_machine(row.machine)
    return row


def _read(path: Path) -> tuple[list[Row], list[int]]:
    """(rows, numbers of the lines that are none)."""
    rows: list[Row] = []
    bad: list[int] = []
    if not path.is_file():
        return rows, bad
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        try:
            rows.append(_row_of(line))
        except DAMAGED:
            bad.append(number)
    return rows, bad


def load(op: str, machine: Mapping[str, Any]) -> Loaded:
    """The rows of an op that hold on this machine with these versions and sources; the others with their reasons."""
    found = Loaded()
    try:
        rows, _ = _read(path_for(op, str(machine["device"])))
    except OSError:
        return found
    variants = catalog.get().of(op)
    here = {name: str(machine.get(name)) for name in KEYED}
    for row in rows:
        measured = {name: str(row.machine.get(name)) for name in KEYED}
        why = next(other_versions(measured, here), None) or stale_code(row.variant, row.source, variants)
        if why:
            found.stale.append(Stale(row, why))
        else:
            found.rows.append(row)
    return found


def as_results(rows: Iterable[Row], machine: dict[str, Any], path: str = "the cache") -> Results:
    """Rows as results that the fit takes."""
    found = Results(path, dict(machine))
    for row in rows:
        found.mode = row.mode
        fresh = CaseResults(row.op, row.case, row.shape, row.facts, row.flops, done=True)
        case = found.cases.setdefault(row.case, fresh)
        entry = Entry(row.variant, row.config, row.first, row.source)
        if row.failure:
            entry.failure = {"why": row.failure, "detail": row.detail}
        elif row.ms is not None:
            low, high = row.ms * (1 - row.spread), row.ms * (1 + row.spread)
            entry.samples = {turn: {"ms": ms} for turn, ms in enumerate((low, low, row.ms, high, high))}
        case.entries[f"{row.variant} {json.dumps(row.config, sort_keys=True)}"] = entry
    return found


def write_table(op: str, device: str, text: str, measured_text: str) -> Path:
    """Put a table in force for this user, from the next process on. Replaces the last one whole."""
    path = in_force.tuned_folder() / f"{op}.{slug(device)}.yaml"
    try:
        with locked(path):
            write_both(path, text, measured_text)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror or error}; the table before it stays in force") from error
    return path


def write_both(path: Path, text: str, measured_text: str) -> None:
    """A table and the file beside it, both on the disk before either takes its place. The table last: it is what
    counts. It names the other, so that a table which a crash left beside another's shapes is taken to have none."""
    with written(beside(path), measured_text) as put_shapes, written(path, naming(text, measured_text)) as put_table:
        put_shapes()
        put_table()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file against other processes of the registry, through a lock file beside it that stays."""
    make_folder(path.parent)
    handle = os.open(path.parent / f".{path.name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock(handle, path, wait=True)
        yield
    finally:
        os.close(handle)
