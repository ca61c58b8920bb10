"""The tables in force held against measurements: what they pick costs so much more than the best, and where they speak
without having been measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from registry.contract.target import Target
from registry.dispatch import in_force
from registry.errors import RegistryError
from registry.ops.known import op_named
from registry.report.sheet import Sheet
from registry.tables.match import Condition
from registry.tables.model import Rule
from registry.tuning.grids import TRIAL, grid, names
from registry.tuning.journal import contestant_key
from registry.tuning.timing import quantile


@dataclass(frozen=True)
class Pick:
    """What the dispatcher would run on one measured shape."""

    case: int
    variant: str
    source: str
    lost: float | None
    """Its time over that of the best measured, less one; None where it was not measured."""
    on_grid: bool


def picks(found: Sheet) -> list[Pick]:
    """One for each shape that can be asked about. `registry.explain` answers, so every layer of tables counts."""
    known = {case.text for name in names(found.op) if name not in TRIAL for case in grid(found.op, name)}
    answers = []
    for number, (case, problem) in enumerate(zip(found.cases, found.problems, strict=True)):
        if problem is None:
            continue
        try:
            decision = op_named(found.op).explain(problem)
        except RegistryError:
            continue
        entry = case.timed.get(contestant_key(decision.variant, decision.config))
        best = min(e.ms for e in case.timed.values())
        lost = entry.ms / best - 1 if entry is not None else None
        answers.append(Pick(number, decision.variant, decision.because, lost, case.text in known))
    return answers


def regret(found: Sequence[Pick]) -> list[dict[str, Any]]:
    """Mean, median, 95th percentile and worst on the grids, and off them."""
    lines = []
    for where, on_grid in (("on a grid", True), ("off every grid", False)):
        chosen = [pick for pick in found if pick.on_grid is on_grid]
        lost = sorted(pick.lost for pick in chosen if pick.lost is not None)
        if chosen:
            line: dict[str, Any] = {"where": where, "shapes": len(chosen), "unmeasured": len(chosen) - len(lost)}
            if lost:
                worst = max((p for p in chosen if p.lost is not None), key=lambda p: p.lost or 0.0)
                line |= {"mean": sum(lost) / len(lost), "median": quantile(lost, 0.5), "p95": quantile(lost, 0.95)}
                line |= {"worst": lost[-1], "worst_case": worst.case}
            lines.append(line)
    return lines


def coverage(found: Sheet, answers: Sequence[Pick]) -> list[dict[str, Any]]:
    """Each rule of the tables that apply to this device: what it says, the shapes here that reach it, what its pick
    costs there, and where it speaks beyond them."""
    try:
        target = Target.named(found.device)
    except RegistryError:
        return []
    by_source: dict[str, list[Pick]] = {}
    for pick in answers:
        by_source.setdefault(pick.source, []).append(pick)
    lines = []
    for table in in_force.tables().applying(found.op, target.arch, found.device):
        for rule in table.rules:
            here = by_source.get(f"{table.file}:{rule.line} rules[{rule.index}]", [])
            lost = [pick.lost for pick in here if pick.lost is not None]
            lines.append(
                {
                    "rule": f"{table.file} rules[{rule.index}]",
                    "when": ", ".join(map(_spelled, rule.conditions)) or "anything",
                    "use": [use.variant for use in rule.use],
                    "shapes": len(here),
                    "lost": sum(lost) / len(lost) if lost else None,
                    "evidence": _evidence(rule),
                    "beyond": _beyond(found, rule, here),
                }
            )
    return lines


def _spelled(condition: Condition) -> str:
    """As the table writes it."""
    numbers = [
        f"{low:g}" if low == high else f"{f'{low:g}' if low else ''}..{f'{high:g}' if high < math.inf else ''}"
        for low, high in condition.spans
    ]
    rests = [f"{residue.rest} mod {residue.modulus}" for residue in condition.residues]
    values = [*numbers, *rests, *sorted(map(str, condition.members))]
    return f"{condition.name} {' or '.join(values)}"


def _evidence(rule: Rule) -> str:
    said = rule.evidence
    return f"{said.cases or '?'} shapes of {said.run}, {said.date}" if said is not None else "none recorded"


def _beyond(found: Sheet, rule: Rule, here: Sequence[Pick]) -> list[str]:
    """The stretches of sizes that the rule reaches and no shape of these results does."""
    if not here:
        return ["no shape in these results reaches it"]
    gaps = []
    for condition in rule.conditions:
        values = [v for pick in here if isinstance(v := found.cases[pick.case].facts.get(condition.name), (int, float))]
        gaps += _gaps(condition, values) if values else []
    return gaps


def _gaps(condition: Condition, values: Sequence[float]) -> list[str]:
    low, high = min(values), max(values)
    gaps = []
    for span in condition.spans:
        if span.low < low / 2 and span.low > 0:
            gaps.append(f"{condition.name} {span.low:g}..{low:g}")
        if span.high > 2 * high:
            gaps.append(f"{condition.name} above {high:g}")
    return gaps
