"""What is installed, what was found, and what is wrong: as data, for `kreg doctor` and for a notebook.

from registry.doctor import examine
examine()["quarantined"]        # in this very process
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Collection
from dataclasses import asdict
from importlib import metadata
from typing import Any

import click

from registry import notices
from registry.contract.declared import never_met
from registry.contract.describe import plain_data
from registry.contract.target import Target
from registry.disk import no_folder
from registry.dispatch import compiled_calls, in_force
from registry.dispatch.catalog import catalog
from registry.dispatch.discovery import load_commands
from registry.dispatch.quarantine import quarantine
from registry.errors import RegistryError, TableError
from registry.installed import DISTRIBUTION
from registry.tables import TableSet
from registry.tables.lint import LintFinding
from registry.tuning.lint import lint_tables
from registry.version import __version__

ENVIRONMENT_PREFIX = "REGISTRY_"


def examine(taken: Collection[str] = ()) -> dict[str, Any]:
    """Everything that `kreg doctor` shows. `taken` are names of commands that no plugin can add."""
    found = catalog.get()
    commands = load_commands(click.Group(), taken)
    failed = {failure.plugin: failure.error for failure in (*commands, *found.failures)}
    tables, broken = _tables()
    refused = tables.broken if tables is not None else ()
    findings = lint_tables(tables) if tables is not None else []
    compiled_calls.wanted()  # where the environment asks for what there is not, a notice says so
    told = {(error.file, error.line, error.problem) for error in refused}
    return {
        "versions": versions(),
        "devices": devices(),
        "installation": strangers(),
        "plugins": {
            "loaded": list(found.plugins),
            "failed": [{"plugin": plugin, "error": error} for plugin, error in failed.items()],
            "variants": len(found.variants),
            "never_run": [
                {"variant": name, "origin": variant.origin, "why": why}
                for name, variant in sorted(found.variants.items())
                if (why := "; ".join(never_met(variant)))
            ],
        },
        "tables": {
            "in_force": _tables_in_force(tables) if tables is not None else [],
            "errata": len(tables.errata) if tables is not None else 0,
            "broken": [str(error) for error in (*([broken] if broken else ()), *refused)],
            "skipped": [
                f"{table.file}:{rule.line} rules[{rule.index}]: {why}"
                for table, rule, why in (tables.skipped if tables is not None else ())
            ],
            "findings": [asdict(f) for f in findings if (f.file, f.line, f.message) not in told],
        },
        "quarantined": [
            {"variant": variant, "problem_class": plain_data(kind), "error": error}
            for variant, kind, error in quarantine.items()
        ],
        "notices": _others(tables, findings),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT_PREFIX)
        },
        "folders": _folders(),
        "unusable": _unusable(),
    }


def _folders() -> dict[str, str]:
    try:
        return {"cache": str(in_force.cache_folder()), "tuned tables": str(in_force.tuned_folder())}
    except RegistryError as error:
        return {"cache": str(error)}


def _unusable() -> list[str]:
    """Why the cache folder cannot hold what is measured; a container that only serves may live with that."""
    try:
        why = no_folder(in_force.tuned_folder())
    except RegistryError:  # which stands in place of the folder
        return []
    return [f"{why}: nothing that is measured can be kept; {in_force.CACHE_VARIABLE} names another"] if why else []


def _others(tables: TableSet | None, findings: list[LintFinding]) -> dict[str, int]:
    """Every notice, and how often it was met, but those of what the report says of tables and quarantines anyway."""
    told = set(in_force.wrong_with(tables)) if tables is not None else set()

    def stands_there(text: str) -> bool:
        of_table = any(text.startswith(f"{f.file}:{f.line} ") and text.endswith(f": {f.message}") for f in findings)
        held = ((f"{variant} is quarantined for ", f": {error}") for variant, _, error in quarantine.items())
        return text in told or of_table or any(text.startswith(begin) and text.endswith(end) for begin, end in held)

    return {text: count for text, count in notices.counts().items() if not stands_there(text)}


def ailments(report: dict[str, Any]) -> list[str]:
    """What of a report is wrong, rather than worth knowing: failed plugins, broken tables, lint errors, quarantines."""
    found = list(report["installation"])
    found.extend(f"plugin {failure['plugin']} failed" for failure in report["plugins"]["failed"])
    found.extend(f"table left out: {error}" for error in report["tables"]["broken"])
    found.extend(
        f"{f['file']}:{f['line']}: {f['message']}" for f in report["tables"]["findings"] if f["severity"] == "error"
    )
    found.extend(f"{entry['variant']} is quarantined" for entry in report["quarantined"])
    return found


def strangers() -> list[str]:
    """Other distributions that ship a package of our name: whichever came last has overwritten files of the other."""
    found, package, own = [], "registry", DISTRIBUTION
    for distribution in metadata.distributions():
        listed = (distribution.read_text("top_level.txt") or "").split()
        record = distribution.read_text("RECORD")  # `files` makes a path of each of tens of thousands of lines
        if record is None:
            record = "\n".join(file.as_posix() for file in distribution.files or ())
        if package not in listed and f"\n{package}/" not in f"\n{record}":
            continue
        name = str(distribution.metadata["Name"])  # a long page to read: of the few that matter
        if name.lower().replace("_", "-") != own:
            found.append(f"{name} ships a package {package!r} too: uninstall it, then install {own} again")
    front = getattr(sys.modules.get(package), "__all__", ())
    if "register" not in front:
        found.append(f"`import {package}` gives another package: uninstall that, then install {own} again")
    return found


def versions() -> dict[str, str]:
    """Versions of everything that a kernel's legality or speed may hang on."""
    import torch

    target = devices_targets()[0] if torch.cuda.is_available() else None
    return {
        "kernel-registry": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": _distribution("triton"),
        "cuda": torch.version.cuda or "none: this torch is built without CUDA",
        "cudnn": (target.cudnn if target else "") or "none",
        "driver": (target.driver if target else "") or "none found",
    }


def devices_targets() -> list[Target]:
    """The targets of this machine's GPUs."""
    import torch

    return [Target.of(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]


def devices() -> list[dict[str, Any]]:
    """Each GPU as the registry sees it."""
    return [
        {"name": t.name, "arch": t.arch, "sm_count": t.sm_count, "shared_memory": t.shared_memory}
        for t in devices_targets()
    ]


def _distribution(name: str) -> str:
    try:
        importlib.import_module(name)
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
    except Exception as error:  # a broken install must not take the doctor down
        return f"does not import: {type(error).__name__}: {error}"


def _tables() -> tuple[TableSet | None, TableError | None]:
    try:
        return in_force.tables(), None
    except TableError as error:
        return None, error


def _tables_in_force(tables: TableSet) -> list[dict[str, Any]]:
    """Highest layer first, as they are asked."""
    ordered = sorted(tables.tables, key=lambda table: (table.op, -table.layer, -table.specificity))
    return [
        {
            "file": table.file,
            "layer": table.layer.name.lower(),
            "op": table.op,
            "arch": table.arch,
            "device": table.device,
            "rules": len(table.rules),
        }
        for table in ordered
    ]
