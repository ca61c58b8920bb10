"""The tables in force in this process: where the files of each layer lie, reading them, and what errata forbid."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from registry import notices
from registry.contract.capability import Reason
from registry.contract.problem import PROBLEM_TYPES, Problem
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.dispatch.staleness import stale_rule
from registry.dispatch.tried import tried
from registry.errors import RegistryError
from registry.forks import new_lock
from registry.tables import (
    Condition,
    Field,
    Layer,
    LayerFile,
    Table,
    TableSet,
    TableStore,
    environment_files,
    files_at,
    kind_of,
    shipped_files,
)
from registry.tables.files import state_of

CACHE_VARIABLE = "REGISTRY_CACHE"

_store = TableStore()
_lock = new_lock()
_loaded = False


def tables() -> TableSet:
    """The tables in force, read at first use."""
    if not _loaded:
        reload(by_op=(Layer.ENVIRONMENT,))
    return _store.current


def reload(by_op: tuple[Layer, ...] = ()) -> TableSet:
    """Read every layer again. On an error the tables in force stay as they are, and TableError is raised.

    A broken file of the layers `by_op` fails the calls of the ops that it is about instead. A table that does not say
    its op fails none, errata that do not say theirs fail all.
    """
    global _loaded
    catalog.get()  # before the lock: discovery runs plugins' code, which may come back here
    with _lock:
        found = _store.reload(
            layer_files(), op_fields(), contain=(Layer.PLUGIN, Layer.TUNED), by_op=by_op, skip=stale_rule
        )
        _loaded = True
    for text in wrong_with(found):
        notices.notice(text)
    return found


def expire() -> None:
    """Have the tables read again when somebody asks for them, as at first use."""
    global _loaded
    with _lock:
        _loaded = False


def wrong_with(found: TableSet) -> list[str]:
    """What to tell the user about tables that were just read: files and rows left out, names that nobody declares."""
    known = catalog.get().variants
    wrong = [f"dispatch table left out: {error}" for error in found.broken]
    for table, rule, why in found.skipped:
        wrong.append(f"{table.file}:{rule.line} rules[{rule.index}] left out: {why}")
    for table in found.tables:
        for name in sorted({use.variant for rule in table.rules for use in rule.use} - known.keys()):
            wrong.append(f"{table.file}: names variant {name!r}, which no plugin declares")
    return wrong


def digest() -> str:
    """8 hex digits over what decisions follow from: variants, rules, measured shapes and errata, as they are in every
    process, and what was tried out in this one."""
    found = tables()
    rules = [
        (table.arch, table.device, _shown(rule.conditions), [(u.variant, str(u.config)) for u in rule.use])
        + ((rule.nearest, _shapes_of(table)) if rule.nearest else ())
        for table in found.tables
        for rule in table.rules
    ]
    errata = [(e.variant, e.arch, _shown(e.conditions), str(e.toolchain)) for e in found.errata]
    held = [(key, [(one.variant, str(one.config)) for one in found.timed]) for key, found in tried.held.items()]
    own = sorted(catalog.registrations().items())
    told = repr((sorted(catalog.get().variants), rules, errata, *([sorted(held, key=repr)] if held else []), *own))
    return hashlib.sha256(told.encode()).hexdigest()[:8]


def _shapes_of(table: Table) -> str:
    """A hash of the measured shapes beside a table. They are megabytes, and hashed again where the file has changed."""
    from registry.tables.measured import bytes_beside

    place = table.beside[0]
    try:
        state = place.digest, place.state, state_of(os.stat(place.file)) if isinstance(place.file, Path) else None
        known, found = _hashes.get(place.file, (None, ""))
        if known != state or state[-1] is None:
            found = hashlib.sha256(bytes_beside(table)).hexdigest()
            _hashes[place.file] = state, found
        return found
    except (OSError, ValueError):
        return ""


_hashes: dict[Any, tuple[Any, str]] = {}
"""File -> what told it from others of its name, and its hash."""


def _shown(conditions: Iterable[Condition]) -> list[Any]:
    return [(c.name, sorted(map(str, c.members)), c.spans, c.residues) for c in conditions]


def layer_files() -> list[LayerFile]:
    """Every file of every layer."""
    found = shipped_files()
    for _, path in catalog.get().tables:
        found.extend(files_at([path], Layer.PLUGIN))
    try:
        tuned = tuned_folder()
        if any(path.suffix == ".yaml" for path in tuned.iterdir()):
            found.extend(files_at([tuned], Layer.TUNED))
    except FileNotFoundError:  # nothing was tuned here yet
        pass
    except (OSError, RegistryError, ValueError) as error:  # no folder, no such home, no right to look
        notices.notice(f"the user's own tables are left out: {notices.what_failed(error)}")
    found.extend(environment_files())
    return found


def op_fields() -> dict[str, dict[str, Field]]:
    """Per op, the facts that a table may match on, and their kinds."""
    return {
        op: {name: Field(kind_of(how), cls.known_values.get(name, ())) for name, how in cls.fact_kinds().items()}
        for op, cls in PROBLEM_TYPES.items()
        if op
    }


def cache_folder() -> Path:
    """Where this user's own measurements are kept: $REGISTRY_CACHE, else the platform's cache folder. RegistryError
    where there is none: containers run as users who have no home."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return _settled(given)
    from platformdirs import user_cache_path

    try:
        return user_cache_path("kernel-registry")
    except RuntimeError as error:
        raise RegistryError(f"there is no cache folder: {error}; {CACHE_VARIABLE} names one") from error


@functools.cache
def _settled(given: str) -> Path:
    """The folder of that name from where the process was when it first met it: a later chdir does not move it."""
    return Path(os.path.expanduser(given)).absolute()


def tuned_folder() -> Path:
    """The user's own tables, written by tuning."""
    return cache_folder() / "tables"


def errata_reasons(
    variant: Variant, problem: Problem, found: TableSet | None = None, facts: Mapping[str, Any] | None = None
) -> list[Reason]:
    """Known-bad combinations as reasons; of these tables, if they are not those in force now."""
    found = tables() if found is None else found
    facts = problem.facts() if facts is None else facts
    errata = found.errata_for(problem.op, variant.name, facts, problem.target)
    return [Reason("erratum", "errata", e.reason, e.unaffected, f"see {e.reference}") for e in errata]
