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
from registry.tables.measured import neighbours_of, read_beside
from registry.tables.model import Rule, Table
from registry.tables.nearest import REACH
from registry.tuning.grids import TRIAL, grid, names
from registry.tuning.journal import contestant_key
from registry.tuning.timing import quantile

FARTHEST = 3
"""Shapes of those that are far from all measured ones that are named."""
SAME = 0.01
"""A measured shape nearer than this is the very one: what lies beside a table is rounded."""


@dataclass(frozen=True)
class Pick:
    """What the dispatcher would run on one measured shape."""

    case: int
    variant: str
    source: str
    lost: float | None
    """Its time over that of the best measured, less one; None where it was not measured."""
    on_grid: bool
    far: float | None = None
    """How far the nearest measured shape of the table is, in its coordinates; None where no rule goes by them."""

    @property
    def new(self) -> bool:
        """Whether the table was made without this shape: only there does regret say how well it guesses."""
        return self.far is not None and self.far > SAME


def picks(found: Sheet) -> list[Pick]:
    """One for each shape that can be asked about. The op's `explain` answers, so every layer of tables counts."""
    known = {case.text for name in names(found.op) if name not in TRIAL for case in grid(found.op, name)}
    advisers = _advisers(found)
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
        far = _far(advisers.get(decision.because), problem)
        answers.append(Pick(number, decision.variant, decision.because, lost, case.text in known, far))
    return answers


def _advisers(found: Sheet) -> dict[str, Any]:
    """What rules that rank by the nearest measured shapes ask, by how a decision names the rule."""
    advisers = {}
    for table in _applying(found):
        for rule in table.rules:
            asked = neighbours_of(table, rule)
            if asked is not None:
                advisers[_source(table, rule)] = asked
    return advisers


def _far(adviser: Any, problem: Any) -> float | None:
    advice = adviser.ask(problem.likeness()) if adviser is not None else None
    return advice.distance if advice is not None else None


def _source(table: Table, rule: Rule) -> str:
    return f"{table.file}:{rule.line} rules[{rule.index}]"


def regret(found: Sequence[Pick]) -> list[dict[str, Any]]:
    """Mean, median, 95th percentile and worst on the grids, off them, and of the shapes that no table was made with."""
    lines = []
    for where, chosen in stretches(found).items():
        lost = sorted(pick.lost for pick in chosen if pick.lost is not None)
        if chosen:
            line: dict[str, Any] = {"where": where, "shapes": len(chosen), "unmeasured": len(chosen) - len(lost)}
            if lost:
                worst = max((p for p in chosen if p.lost is not None), key=lambda p: p.lost or 0.0)
                line |= {"mean": sum(lost) / len(lost), "median": quantile(lost, 0.5), "p95": quantile(lost, 0.95)}
                line |= {"worst": lost[-1], "worst_case": worst.case}
            lines.append(line)
    return lines


def stretches(found: Sequence[Pick]) -> dict[str, list[Pick]]:
    """The picks that regret is shown of, by what they have in common. Those of the last kind are among the others."""
    return {
        "on a grid": [pick for pick in found if pick.on_grid],
        "off every grid": [pick for pick in found if not pick.on_grid],
        "new to the table": [pick for pick in found if pick.new],
    }


def coverage(found: Sheet, answers: Sequence[Pick]) -> list[dict[str, Any]]:
    """Each rule of the tables that apply to this device: what it says, the shapes here that reach it, what its pick
    costs there, and where it speaks beyond them."""
    by_source: dict[str, list[Pick]] = {}
    for pick in answers:
        by_source.setdefault(pick.source, []).append(pick)
    lines = []
    for table in _applying(found):
        beside = read_beside(table)
        for rule in table.rules:
            here = by_source.get(_source(table, rule), [])
            bounds = beside.bounds(rule) if beside is not None else {}
            lost = [pick.lost for pick in here if pick.lost is not None]
            lines.append(
                {
                    "rule": f"{table.file} rules[{rule.index}]",
                    "when": ", ".join(map(_spelled, rule.conditions)) or "anything",
                    "use": _use(rule),
                    "measured": ", ".join(f"{name} {_stretch(*sizes)}" for name, sizes in bounds.items()),
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
    return (
        f"{said.cases or '?'} shapes of {', '.join([said.run, *said.also])}, {said.date}"
        if said is not None
        else "none recorded"
    )


def _beyond(found: Sheet, rule: Rule, here: Sequence[Pick]) -> list[str]:
    """The stretches of sizes that the rule reaches and no shape of these results does."""
    if not here:
        return ["no shape in these results reaches it"]
    if rule.nearest:
        return _far_ones(found, here)
    gaps = []
    for condition in rule.conditions:
        values = [v for pick in here if isinstance(v := found.cases[pick.case].facts.get(condition.name), (int, float))]
        gaps += _gaps(condition, values) if values else []
    return gaps


def _use(rule: Rule) -> str:
    """What runs by a rule."""
    first = rule.use[0].variant
    return f"what was fastest on the nearest measured shapes; far from all, {first}" if rule.nearest else first


def _stretch(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low}..{high}"


def _far_ones(found: Sheet, here: Sequence[Pick]) -> list[str]:
    """Shapes that no measured one is near: a library's kernel is first there, where it is not expected to lose much."""
    far = sorted((pick for pick in here if pick.far is not None and pick.far >= REACH), key=lambda p: -(p.far or 0.0))
    if not far:
        return []
    farthest = "; ".join(found.cases[pick.case].text for pick in far[:FARTHEST])
    first = "a library's kernel is first where it is not expected to lose much"
    return [f"no measured shape is near {len(far)} of {len(here)}, so {first}: {farthest}"]


def _gaps(condition: Condition, values: Sequence[float]) -> list[str]:
    low, high = min(values), max(values)
    gaps = []
    for span in condition.spans:
        if span.low < low / 2 and span.low > 0:
            gaps.append(f"{condition.name} {span.low:g}..{low:g}")
        if span.high > 2 * high:
            gaps.append(f"{condition.name} above {high:g}")
    return gaps


def _applying(found: Sheet) -> Sequence[Table]:
    """The tables in force that speak about this op here."""
    try:
        target = Target.named(found.device)
    except RegistryError:
        return ()
    return in_force.tables().applying(found.op, target.arch, found.device)
