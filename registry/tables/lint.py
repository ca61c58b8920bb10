"""What is wrong with tables that load: unknown names, dead rows, evidence that is missing, old or against the pick."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from registry.tables.match import arch_covers, same_device
from registry.tables.model import Erratum, Layer, Rule, Table, TableSet, Use
from registry.tables.reach import Taken

Severity = Literal["error", "warning"]
Complaint = Callable[[Table, Rule, Use], "tuple[Severity, str] | None"]


@dataclass(frozen=True)
class LintFinding:
    """One thing that lint found, and where."""

    severity: Severity
    file: str
    line: int
    path: str
    code: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.path}: {self.severity}: {self.message} [{self.code}]"


@dataclass(frozen=True)
class Known:
    """What lint holds tables against. Each part that is left out is not checked."""

    variants: Mapping[str, str]
    """Each variant's op, by name."""
    config_complaint: Complaint | None = None
    """Why a config is not among the variant's declared ones. Variants that are not known are not asked about."""
    runs_on: Callable[[str, str], bool] | None = None
    """Whether a variant claims an architecture. Variants that are not known are not asked about."""
    stale: Callable[[Rule], Iterable[tuple[str, str]]] | None = None
    """Why a row's measurement may not hold here, each with a finding's code. Variants that are not known are not asked
    about."""
    arch_of: Callable[[str], str | None] | None = None
    """The architecture of a device name, None for a device that is not known."""
    devices: Sequence[str] = ()
    """Names of devices that are known, to suggest one."""
    root: Path | None = None
    """The folder that holds docs/. It lies in a checkout, not in an installed package."""


def lint(tables: TableSet, known: Known) -> list[LintFinding]:
    """Every finding of a loaded set, in file order. Errors are rows that cannot do what they say."""
    found = [LintFinding("error", e.file, e.line, e.path, e.code, e.problem) for e in tables.broken]
    for table in tables.tables:
        found.extend(_lint_file_name(table, known))
        found.extend(_lint_device(table, known))
        unreachable, compared = _unreachable(table)
        for rule in table.rules:
            found.extend(_lint_rule(table, rule, known, rule.index in unreachable))
        if compared < len(table.rules):
            message = f"{len(table.rules)} rules: of those after the first {compared}, only repetitions are looked for"
            found.append(LintFinding("warning", table.file, 1, "$.rules", "many-rules", message))
    first: dict[object, Erratum] = {}
    for erratum in tables.errata:
        found.extend(_lint_erratum(erratum, known, first.setdefault(erratum.forbids, erratum)))
    return sorted(found, key=lambda finding: (finding.file, finding.line, finding.path))


def _lint_file_name(table: Table, known: Known) -> Iterator[LintFinding]:
    """Shipped files are found by name, so `attention.sm90.yaml` must hold what it says; others had better."""
    expected, name = f"{table.op}.{table.arch}.", os.path.basename(table.file)
    message = f"holds {table.op} on {table.arch}: call it {expected}yaml"
    if table.layer is Layer.SHIPPED and not name.startswith(expected):
        yield LintFinding("error", table.file, 1, "$", "misnamed-file", message)
    elif name.partition(".")[0] in {*known.variants.values()} - {table.op}:
        yield LintFinding("warning", table.file, 1, "$", "misnamed-file", message)


def _lint_device(table: Table, known: Known) -> Iterator[LintFinding]:
    """What was measured on a device stands for it, listed or not: there the driver says the name."""
    if table.device is None or known.arch_of is None:
        return
    arch = known.arch_of(table.device)
    measured = any(rule.evidence and same_device(rule.evidence.device, table.device) for rule in table.rules)
    if arch is None and not measured:
        from registry.tables.schema import suggest

        message = f"no known device is {table.device!r}, so only one that its driver calls so takes this table"
        message += f"; {suggest(table.device, known.devices)}" if known.devices else ""
        yield LintFinding("warning", table.file, 1, "$.device", "unknown-device", message)
    elif arch is not None and not arch_covers(table.arch, arch):
        message = f"{table.device} is {arch}, the table is for {table.arch}: it is never used"
        yield LintFinding("error", table.file, 1, "$.device", "foreign-device", message)


def _unreachable(table: Table) -> tuple[set[int], int]:
    """The rules of which earlier ones take every problem, and how many rules were held against all earlier ones."""
    taken, found, compared = Taken(), set(), 0
    for rule in table.rules:
        if taken.all_of(rule.conditions):
            found.add(rule.index)
        compared += not taken.spent
        taken.add(rule.conditions)
    return found, compared


def _lint_rule(table: Table, rule: Rule, known: Known, unreachable: bool) -> Iterator[LintFinding]:
    def finding(severity: Severity, path: str, code: str, message: str, line: int = rule.line) -> LintFinding:
        return LintFinding(severity, table.file, line, f"$.rules[{rule.index}]{path}", code, message)

    if unreachable:
        yield finding("error", "", "unreachable-rule", "never matches: earlier rules take every problem it would take")
    seen: list[Use] = []
    for place, use in enumerate(rule.use):
        path = f".use[{place}]"
        if use in seen:
            listed = f"{use.variant} is listed twice with the same config"
            yield finding("warning", path, "duplicate-use", listed, use.line)
        seen.append(use)
        for severity, code, message in _lint_use(table, rule, use, known):
            yield finding(severity, path, code, message, use.line)
    for severity, path, code, message in (*_lint_nearest(table, rule, known), *_lint_evidence(table, rule, known)):
        yield finding(severity, path, code, message)


def _lint_use(table: Table, rule: Rule, use: Use, known: Known) -> Iterator[tuple[Severity, str, str]]:
    wrong = _wrong_variant(table.op, use.variant, known.variants)
    if wrong:
        yield "warning", "unknown-variant", wrong
        return
    if known.runs_on and table.arch != "any" and not known.runs_on(use.variant, table.arch):
        yield "warning", "never-runs", f"{use.variant} does not run on {table.arch}"
    elif use.config is not None and known.config_complaint:
        complaint = known.config_complaint(table, rule, use)
        if complaint:
            severity, why = complaint
            yield severity, "unknown-config", f"{use.variant} declares no such config: {why}"


def _wrong_variant(op: str, name: str, variants: Mapping[str, str]) -> str | None:
    if name not in variants:
        from registry.tables.schema import suggest

        return f"unknown variant {name!r}; {suggest(name, [v for v, of in variants.items() if of == op])}"
    return None if variants[name] == op else f"{name!r} is a variant of {variants[name]}, not of {op}"


def _lint_nearest(table: Table, rule: Rule, known: Known) -> Iterator[tuple[Severity, str, str, str]]:
    """Of a rule that ranks by measured shapes: whether there are some, and of whom."""
    if rule.nearest is None:
        return
    from registry.tables.measured import neighbours_of, without_shapes

    shapes = neighbours_of(table, rule)
    if shapes is None:
        yield "error", ".nearest", "no-shapes", without_shapes(table, rule)
        return
    if not all(trees.order for trees in shapes.config_trees.values()):
        message = "fitted before the order of configs was kept, so that a change of it goes unseen"
        yield "warning", ".nearest", "unkept-order", f"{message}; kreg tune {table.op} --fit-only --keep adds it"
    for name in sorted({name for name, _ in shapes.contestants}):
        wrong, code = _wrong_variant(table.op, name, known.variants), "unknown-variant"
        if not wrong and known.config_complaint:
            wrong, code = (
                _measured_undeclared(table, rule, name, shapes.contestants, known.config_complaint),
                "unknown-config",
            )
        if wrong:
            yield "warning", ".nearest", code, f"measured shapes beside the table: {wrong}"


def _measured_undeclared(
    table: Table, rule: Rule, name: str, contestants: Iterable[tuple[str, Mapping[str, Any]]], complaint: Complaint
) -> str:
    """What a variant was measured with and declares for no problem: a decision passes over such configs."""
    asked = [
        (config, complaint(table, rule, Use(name, config, rule.line))) for one, config in contestants if one == name
    ]
    found = [(config, answer[1]) for config, answer in asked if answer is not None and answer[0] == "error"]
    if not found:
        return ""
    config, why = found[0]
    return f"{name} declares {len(found)} of its {len(asked)} configs nowhere, such as {dict(config)}: {why}"


def _lint_evidence(table: Table, rule: Rule, known: Known) -> Iterator[tuple[Severity, str, str, str]]:
    evidence = rule.evidence
    if evidence is None:
        if table.arch != "any":  # an "any" table is the ranking for where nobody measured
            yield "warning", "", "missing-evidence", "says nothing about how it was measured"
        return
    runner_up = evidence.runner_up
    if runner_up and runner_up.tflops > evidence.tflops:
        picked, other = f"{rule.use[0].variant} at {evidence.tflops:g}", f"{runner_up.variant} at {runner_up.tflops:g}"
        yield "error", ".evidence.runner_up", "slower-than-runner-up", f"picks {picked} TFLOPS over {other}"
    arch = known.arch_of(evidence.device) if known.arch_of else None
    if arch and table.arch not in ("any", arch):
        message = f"{evidence.device} is {arch}, the table is for {table.arch}"
        yield "error", ".evidence.device", "foreign-evidence", message
    if known.stale and rule.use[0].variant in known.variants:
        for code, why in known.stale(rule):
            yield "warning", ".evidence", code, f"{why}; tune again"


def _lint_erratum(erratum: Erratum, known: Known, first: Erratum) -> Iterable[LintFinding]:
    path = f"$.errata[{erratum.index}]"
    if first is not erratum:
        repeated = f"forbids what {first.file}:{first.line} does, for the same link"
        yield LintFinding("warning", erratum.file, erratum.line, path, "duplicate-erratum", repeated)
    wrong = _wrong_variant(erratum.op, erratum.variant, known.variants)
    if wrong:
        yield LintFinding("warning", erratum.file, erratum.line, path, "unknown-variant", wrong)
    if erratum.page and known.root is not None and not _is_in(known.root, *erratum.page):
        missing = f"there is no {erratum.link}"
        yield LintFinding("error", erratum.file, erratum.line, f"{path}.link", "unknown-page", missing)


def _is_in(root: Path, page: str, anchor: str) -> bool:
    """Whether a page has a heading with that anchor, which is made of the heading as Git hosts make it."""
    try:
        text = (root / page).read_text(encoding="utf-8")
    except OSError:
        return False
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
