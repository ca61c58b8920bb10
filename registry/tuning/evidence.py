"""What measurements say about a table: the evidence behind each rule, the regret of its picks, and whether it is so.

Regret is the time of what the table picks over the time of the best variant and config measured on that shape. It is
evaluated by loading the table as the dispatcher does and walking its rules.
"""

from __future__ import annotations

import datetime
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.contract.problem import PROBLEM_TYPES
from registry.ops.known import op_named
from registry.tables import Layer, LayerFile, TableSet, kind_of, load_tables
from registry.tables.measured import read_beside
from registry.tables.model import Rule, Table, Use
from registry.tuning import journal
from registry.tuning.fit import WRONG, Settings, candidates, excluded
from registry.tuning.journal import CaseResults, Entry, Results


@dataclass(frozen=True)
class Regret:
    """How much slower than the best the picks are."""

    shapes: int
    mean: float = 0.0
    worst: float = 0.0
    worst_shape: str = ""
    uncovered: tuple[str, ...] = ()
    """Shapes that no rule speaks about, or whose pick was not measured."""

    def __str__(self) -> str:
        if not self.shapes:
            return "no shapes"
        text = f"mean {100 * self.mean:.2f}%, worst {100 * self.worst:.2f}%"
        text += f" ({self.worst_shape})" if self.worst > 0 else ""
        return f"{text} over {self.shapes} shapes" + (f", {len(self.uncovered)} not covered" if self.uncovered else "")


class _Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def is_file(self) -> bool:
        return True

    def open(self, mode: str = "rb") -> io.BytesIO:
        return io.BytesIO(self._text.encode())


def load_text(text: str, op: str) -> TableSet:
    ops = {op: {name: kind_of(how) for name, how in PROBLEM_TYPES[op].fact_kinds().items()}}
    return load_tables([LayerFile("fitted.yaml", Layer.ENVIRONMENT, _Text(text))], ops)


def cases_by_rule(table: TableSet, cases: Sequence[CaseResults]) -> dict[int, list[CaseResults]]:
    """Which measured shapes each rule of a one-table set decides."""
    found: dict[int, list[CaseResults]] = {}
    for case in cases:
        rule = matching(table, case)
        if rule is not None:
            found.setdefault(rule.index, []).append(case)
    return found


def matching(table: TableSet, case: CaseResults) -> Rule | None:
    """The rule that a shape's facts reach."""
    facts = {name: tuple(value) if isinstance(value, list) else value for name, value in case.facts.items()}
    arch, device = table.tables[0].arch, table.tables[0].device
    return next((match.rule for match in table.match(case.op, facts, arch, device)), None)


def entry_of(case: CaseResults, use: Use) -> Entry | None:
    """What was measured of one candidate of a rule."""
    for entry in case.entries.values():
        if entry.variant == use.variant and (entry.first if use.config is None else entry.config == dict(use.config)):
            return entry
    return None


def picked(case: CaseResults, rule: Rule) -> Entry | None:
    """The contestant that the dispatcher would run: the first that is legal and fits."""
    for use in rule.use:
        entry = entry_of(case, use)
        if entry is not None and (entry.timed or entry.failure is not None and entry.failure["why"] in WRONG):
            return entry
        if (
            entry is None
            and use.variant not in case.illegal
            and any(e.variant == use.variant for e in case.entries.values())
        ):
            return None
    return None


def regret(table: TableSet, cases: Sequence[CaseResults], settings: Settings) -> Regret:
    """Time of the pick over time of the best, less one."""
    found: list[tuple[float, str]] = []
    uncovered: list[str] = []
    for case in cases:
        rule = matching(table, case)
        entry = picked(case, rule) if rule is not None else None
        if entry is None:
            uncovered.append(case.text)
            continue
        best = min(other.ms for other in candidates(case, settings))
        found.append((entry.ms / best - 1 if entry.timed else math.inf, case.text))
    if not found:
        return Regret(len(uncovered), uncovered=tuple(uncovered))
    worst, shape = max(found)
    return Regret(len(cases), sum(lost for lost, _ in found) / len(found), worst, shape, tuple(uncovered))


def evidence(
    results: Results, rule: Rule, cases: Sequence[CaseResults], run: str, settings: Settings
) -> dict[str, Any]:
    """Geometric mean speed of a rule's first pick on the shapes that reach it, and of the next best variant."""
    machine = results.machine
    first = rule.use[0]
    entries = [(case, entry) for case in cases if (entry := entry_of(case, first)) is not None and entry.timed]
    speed = speed_of(entries)
    found: dict[str, Any] = {"device": machine["device"], "tflops": speed}
    rivals = {}
    for name in sorted({e.variant for case, _ in entries for e in case.timed.values()} - {first.variant}):
        best = [
            (case, min(es, key=lambda e: e.ms))
            for case, _ in entries
            if (es := [e for e in case.timed.values() if e.variant == name])
        ]
        if len(best) == len(entries) and not excluded(name, settings):
            rivals[name] = speed_of(best)
    if rivals:
        name = max(rivals, key=lambda n: rivals[n])
        if rivals[name] <= speed:
            found["runner_up"] = {"variant": name, "tflops": rivals[name]}
        else:
            found["note"] = f"{name} reaches {rivals[name]:g}: not worth a rule of its own"
    found |= {"run": run, "date": datetime.date.fromisoformat(machine["date"]), "torch": machine["torch"]}
    found |= {name: machine[name] for name in ("triton", "driver") if machine.get(name)}
    fingerprints = {entry.fingerprint for _, entry in entries if entry.fingerprint}
    return {
        **found,
        **({"source": fingerprints.pop()} if len(fingerprints) == 1 else {}),
        "cases": max(1, len(entries)),
    }


def speed_of(entries: Sequence[tuple[CaseResults, Entry]]) -> float:
    """Geometric mean of TFLOPS, to four digits."""
    logs = [math.log(case.tflops(entry)) for case, entry in entries if case.flops]
    return float(f"{math.exp(sum(logs) / len(logs)):.4g}") if logs else 1e-9


# --- verification -------------------------------------------------------------------------------------------------

ROUNDING = 0.005
"""How far a figure in a table may be from the one recomputed: tables hold four digits."""


def verify(table: Table, results_folder: Path, settings: Settings | None = None) -> list[str]:
    """What in a table's evidence the raw results do not bear out; empty where every row is proven.

    `evidence.run` names the file: "h200/attention" is results_folder/h200/attention.jsonl.
    """
    settings = settings or Settings()
    alone = TableSet((table,))
    known: dict[str, Results | str] = {}
    found: list[str] = []
    beside = read_beside(table)
    for rule in table.rules:
        if rule.evidence is None:
            continue
        run = rule.evidence.run
        if run not in known:
            known[run] = _raw_results(Path(results_folder) / f"{run}.jsonl")
        results = known[run]
        if isinstance(results, str):
            found.append(f"rules[{rule.index}]: {results}")
            continue
        cases = [case for case in results.of(table.op) if matching(alone, case) is rule]
        found += [f"rules[{rule.index}]: {problem}" for problem in _differences(results, rule, cases, run, settings)]
        if beside is not None and set(beside.rules.get(rule.index, ())) != set(sizes(table.op, cases)):
            found.append(f"rules[{rule.index}]: the measured sizes beside the table are not those of {run}")
    return found


def sizes(op: str, cases: Sequence[CaseResults]) -> list[tuple[int, ...]]:
    """The facts of measured shapes that a rule's reach is judged by."""
    names = op_named(op).tuning.leading
    return [tuple(case.facts[name] for name in names) for case in cases]


def _raw_results(path: Path) -> Results | str:
    if not path.is_file():
        return f"no raw results at {path}"
    try:
        return journal.read(path)
    except (journal.ResultsError, OSError) as error:
        return f"raw results cannot be read: {error}"


def _differences(results: Results, rule: Rule, cases: list[CaseResults], run: str, settings: Settings) -> list[str]:
    claimed: Any = rule.evidence
    if not any((entry := entry_of(case, rule.use[0])) is not None and entry.timed for case in cases):
        return [f"{run} has no measurement of {rule.use[0].variant} on a shape that this rule decides"]
    actual = evidence(results, rule, cases, run, settings)
    found = []
    for name in ("device", "torch", "triton", "driver", "source", "cases"):
        said = getattr(claimed, name)
        if said is not None and said != actual.get(name):
            found.append(f"{name}: the table says {said}, {run} says {actual.get(name)}")
    if claimed.date != actual["date"]:
        found.append(f"date: the table says {claimed.date}, {run} says {actual['date']}")
    found += _speed_differences("tflops", claimed.tflops, actual["tflops"], run)
    rival = actual.get("runner_up")
    if claimed.runner_up is not None and rival is None:
        found.append(f"runner_up: the table names {claimed.runner_up.variant}, {run} has none that is slower")
    elif claimed.runner_up is not None and rival is not None:
        if claimed.runner_up.variant != rival["variant"]:
            found.append(f"runner_up: the table names {claimed.runner_up.variant}, {run} has {rival['variant']}")
        else:
            found += _speed_differences("runner_up.tflops", claimed.runner_up.tflops, rival["tflops"], run)
    return found


def _speed_differences(name: str, said: float, actual: float, run: str) -> list[str]:
    if abs(said / actual - 1) <= ROUNDING:
        return []
    return [f"{name}: the table says {said:g}, {run} says {actual:g}"]
