"""Lint of tables against this installation: its variants, their configs, its versions and the devices it knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from registry.contract.target import Target
from registry.dispatch import in_force
from registry.dispatch.catalog import catalog
from registry.dispatch.staleness import stale_evidence
from registry.errors import InvalidArgument
from registry.ops.known import all_ops
from registry.tables import Layer, TableSet, file_sources, load_tables
from registry.tables.lint import Finding, Known, lint


def known_here() -> Known:
    """What the tables are held against."""
    folder = results_folder()
    return Known(
        variants={name: variant.op for name, variant in catalog.get().variants.items()},
        declares=_declares,
        stale=stale_evidence,
        arch_of=_arch_of,
        root=folder.parents[1] if folder else None,
    )


def lint_tables(tables: TableSet) -> list[Finding]:
    """Every finding of a loaded set."""
    return lint(tables, known_here())


def lint_files(paths: list[Path]) -> list[Finding]:
    """Every finding of these files and folders, broken files included, whatever tables are in force."""
    all_ops()
    sources = file_sources(paths, Layer.ENVIRONMENT)
    return lint_tables(load_tables(sources, in_force.op_fields(), contain=tuple(Layer)))


def results_folder() -> Path | None:
    """The raw results that the shipped tables were made from: they lie in a checkout, not in an installed package."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    return folder if folder.is_dir() else None


def unproven(tables: TableSet, folder: Path) -> list[Finding]:
    """What in the shipped tables' evidence the raw results do not bear out."""
    from registry.tuning.evidence import verify

    return [
        Finding("error", table.file, 1, "$", "unproven", problem)
        for table in tables.tables
        if table.layer is Layer.SHIPPED
        for problem in verify(table, folder)
    ]


def together(findings: Iterable[Finding]) -> list[tuple[Finding, int]]:
    """The first of those findings that differ in their line only, and how many more there are."""
    found: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        found.setdefault((finding.severity, finding.file, finding.code, finding.message), []).append(finding)
    return [(same[0], len(same) - 1) for same in found.values()]


def _declares(name: str, config: Mapping[str, Any]) -> bool | None:
    """Whether the variant declares the config. Configs that are a function of the problem cannot be told."""
    variant = catalog.get().variants[name]
    return None if callable(variant.configs) else dict(config) in [dict(declared) for declared in variant.configs]


def _arch_of(device: str) -> str | None:
    try:
        return Target.named(device).arch
    except InvalidArgument:
        return None
