"""Lint of tables against this installation: its variants, their configs, its versions and the devices it knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from registry.contract.capability import arch_matches
from registry.contract.target import Target, known_names
from registry.dispatch import in_force
from registry.dispatch.catalog import catalog
from registry.dispatch.staleness import stale_evidence
from registry.errors import InvalidArgument
from registry.ops.known import all_ops
from registry.tables import Layer, TableSet, files_at, load_tables
from registry.tables.files import SHIPPED_PACKAGE
from registry.tables.lint import Known, LintFinding, lint
from registry.tables.measured import read_beside
from registry.tables.model import Rule, Table
from registry.tuning.declared import DeclaredConfigs


def known_here() -> Known:
    """What the tables are held against."""
    folder = results_folder()
    return Known(
        variants={name: variant.op for name, variant in catalog.get().variants.items()},
        config_complaint=DeclaredConfigs().complaint,
        runs_on=lambda name, arch: arch_matches(catalog.get().variants[name].requires.arch, arch),
        stale=stale_evidence,
        arch_of=_arch_of,
        devices=known_names(),
        root=folder.parents[1] if folder else None,
    )


def lint_tables(tables: TableSet) -> list[LintFinding]:
    """Every finding of a loaded set."""
    return lint(tables, known_here())


def load_files(paths: list[Path]) -> TableSet:
    """The tables of these files and folders, whatever tables are in force; broken files are among its problems."""
    all_ops()
    return load_tables(files_at(paths, Layer.ENVIRONMENT), in_force.op_fields(), contain=tuple(Layer))


def results_folder() -> Path | None:
    """The raw results that the shipped tables were made from: they lie in a checkout, not in an installed package."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    return folder if folder.is_dir() else None


def unproven(tables: TableSet, folder: Path) -> list[LintFinding]:
    """What in the shipped tables' evidence the raw results do not bear out. So are those that are named by their path
    in the checkout."""
    from registry.tuning.evidence import verify

    found, own = [], folder.parents[1] / SHIPPED_PACKAGE.rpartition(".")[2]
    shipped = (t for t in tables.tables if t.layer is Layer.SHIPPED or Path(t.file).resolve().parent == own)
    for table in shipped:
        problems = verify(table, folder)
        if read_beside(table) is None and any(rule.evidence for rule in table.rules):
            problems.append("no file of measured sizes lies beside the table")
        found += [LintFinding("error", table.file, 1, "$", "unproven", problem) for problem in problems]
    return found


@dataclass(frozen=True)
class Coverage:
    """What a rule of a table was measured on."""

    file: str
    line: int
    index: int
    variant: str
    shapes: int
    bounds: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {low}..{high}" for name, (low, high) in self.bounds.items())
        of = f"measured on {self.shapes} sizes: {sizes}" if self.shapes else "measured nowhere"
        return f"{self.file}:{self.line}: rules[{self.index}] {self.variant}: {of}"


def coverage(tables: TableSet) -> tuple[list[Coverage], list[LintFinding]]:
    """What each rule of the measured tables covers, and the rules that reach past it.

    Only a kernel of a library may be ranked first where nobody has measured: one that is compiled here may not.
    """
    covered: list[Coverage] = []
    past: list[LintFinding] = []
    for table in tables.tables:
        beside = read_beside(table)
        if beside is None:
            continue
        known = catalog.get().of(table.op)
        past += [LintFinding("error", table.file, 1, "$", "unreadable", what) for what in beside.wrong_parts()]
        for rule in table.rules:
            name = "the nearest" if rule.nearest else rule.use[0].variant
            shapes = len(beside.rules.get(rule.index, ()))
            covered.append(Coverage(table.file, rule.line, rule.index, name, shapes, beside.bounds(rule)))
            if rule.nearest:
                past += list(_past_nearest(table, rule))
                continue
            if name not in known or known[name].builds is None:
                continue
            beyond = beside.beyond(rule) if shapes else ["nothing of it was measured"]
            for what in beyond:
                message = f"{name} is ranked first past its evidence: {what}"
                place = f"$.rules[{rule.index}]"
                past.append(LintFinding("error", table.file, rule.line, place, "past-evidence", message))
    return covered, past


def _past_nearest(table: Table, rule: Rule) -> Iterator[LintFinding]:
    """Rules by the nearest shapes put nothing of ours first where none is near. What is left to get wrong is the order
    where none is."""
    known = catalog.get().of(table.op)
    ours = [use.variant not in known or known[use.variant].builds is not None for use in rule.use]
    place = f"$.rules[{rule.index}]"
    if ours[0] and not all(ours):
        message = (
            f"{rule.use[0].variant} is ranked first past its evidence: {rule.use[ours.index(False)].variant} is not"
        )
        yield LintFinding("error", table.file, rule.line, f"{place}.use", "past-evidence", message)


def together(findings: Iterable[LintFinding]) -> list[tuple[LintFinding, int]]:
    """The first of those findings that differ in their line only, and how many more there are."""
    found: dict[tuple[str, ...], list[LintFinding]] = {}
    for finding in findings:
        found.setdefault((finding.severity, finding.file, finding.code, finding.message), []).append(finding)
    return [(same[0], len(same) - 1) for same in found.values()]


def _arch_of(device: str) -> str | None:
    try:
        return Target.named(device).arch
    except InvalidArgument:
        return None
