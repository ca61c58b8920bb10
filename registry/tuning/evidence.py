"""What measurements say about a table: the evidence behind each rule, the regret of its picks, and whether it is so.

Regret is the time of what the table picks over the time of the best variant and config measured on that shape. Each
shape is asked about as if it had not been measured: its neighbours answer.
"""

from __future__ import annotations

import datetime
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from registry import garbage
from registry.contract.problem import PROBLEM_TYPES
from registry.dispatch.catalog import catalog
from registry.dispatch.select import guesses_of, runs_of
from registry.tables import Layer, LayerFile, TableSet, kind_of, load_tables
from registry.tables.measured import MeasuredSizes, read_beside
from registry.tables.model import Rule, Table
from registry.tables.nearest import Advice, Config
from registry.tuning import journal
from registry.tuning.fit import Fit
from registry.tuning.journal import CaseResults, Entry, Results
from registry.tuning.kinds import beside_of, earlier, fits, parted
from registry.tuning.taking_part import Settings, candidates, excluded, guess_of, is_wrong, own_first
from registry.tuning.timing import quantile

Pick = tuple[CaseResults, Entry | None]
"""A shape and the contestant that runs there, where that was measured."""


@dataclass(frozen=True)
class Regret:
    """How much slower than the best the picks are; endless where one failed, NaN where none was measured."""

    shapes: int
    mean: float = math.nan
    p95: float = math.nan
    """The 95th percentile."""
    worst: float = math.nan
    worst_shape: str = ""
    uncovered: tuple[str, ...] = ()
    """Shapes on which nothing that was picked was measured."""

    def __str__(self) -> str:
        if not self.shapes:
            return "no shapes"
        if math.isnan(self.worst):
            return f"unknown: nothing could be left out in turn (too few shapes: {self.shapes}, or no pick timed there)"
        text = f"mean {100 * self.mean:.2f}%, 95th percentile {100 * self.p95:.1f}%, worst {100 * self.worst:.1f}%"
        text += f" ({self.worst_shape})" if self.worst > 0 else ""
        if math.isinf(self.worst):
            text = f"endless, as what would run fails on {self.worst_shape},"
        return f"{text} over {self.shapes} shapes" + (f", {len(self.uncovered)} not covered" if self.uncovered else "")

    def data(self) -> dict[str, Any]:
        """For JSON, which has no such numbers: None for them."""
        return {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in asdict(self).items()}


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


def picks_left_out(found: Fit, settings: Settings) -> list[Pick]:
    """What the dispatcher would run on each shape, going by the other shapes; None where that was timed as it no longer
    is, and where there are no others."""
    if len(found.cases) < 2:
        return [(case, None) for case in found.cases]
    neighbours = beside_of([found]).neighbours(Rule(0, 0, (), (), nearest=found.weights))
    names = sorted({name for name, _ in found.contestants}, key=lambda name: (name not in found.libraries, name))
    picks: list[Pick] = []
    for place, case in enumerate(found.cases):
        shape = found.shapes[place]
        here = dict(zip(found.coordinates, shape.point, strict=True))
        problem = found.problems[place]
        advice = neighbours.ask(here, place, guesses_of(problem), runs_of(problem)) if neighbours is not None else None
        ranked = advice.ranked(names, found.libraries) if advice is not None else names
        entry = _picked(found, place, ranked, advice, settings)
        told = {found.contestants[result.contestant][0] for result in shape.results}
        picks.append((case, entry if entry is not None and entry.variant in told else None))
    return picks


def _picked(found: Fit, place: int, ranked: Sequence[str], advice: Advice | None, settings: Settings) -> Entry | None:
    """The contestant that runs: of the first variant that is legal and fits, the config that is advised."""
    case, problem = found.cases[place], found.problems[place]
    for name in ranked:
        own = [e for e in case.entries.values() if e.variant == name and (e.timed or is_wrong(e))]
        if own and not excluded(name, settings):
            if name in found.config_trees and (timed := found.timed[place].get(name)) is not None:
                chosen = timed.configs[timed.order(found.config_trees[name], place)[0]]
            else:
                first = own_first(own, found.declared[place][name])
                own.sort(key=lambda entry: entry is not first)
                variant = catalog.get().variants.get(name)
                guess = _guesses(own, problem) if variant is not None and variant.cost is not None else None
                configs = [entry.config for entry in own]
                chosen = (advice.configs(name, configs, guess) if advice is not None else configs)[0]
            return next(entry for entry in own if entry.config == chosen)
    return None


def _guesses(entries: Sequence[Entry], problem: Any) -> Callable[[Config], float]:
    """What a variant guesses of its measured configs, those of an earlier version among them."""
    found = {frozenset(entry.config.items()): math.exp(guess_of(entry, problem)) for entry in entries}
    return lambda config: found[frozenset(config.items())]


def regret_of(picks: Sequence[Pick], settings: Settings) -> Regret:
    """Time of each pick over time of the best, less one."""
    found: list[tuple[float, str]] = []
    for case, entry in picks:
        best = min(other.ms for other in candidates(case, settings))
        if entry is not None:
            found.append((entry.ms / best - 1 if entry.timed else math.inf, case.text))
    uncovered = tuple(case.text for case, entry in picks if entry is None)
    if not found:
        return Regret(len(uncovered), uncovered=uncovered)
    worst, shape = max(found)
    lost = sorted(value for value, _ in found)
    return Regret(len(picks), sum(lost) / len(lost), quantile(lost, 0.95), worst, shape, uncovered)


def evidence(
    results: Results, picks: Sequence[Pick], run: str, settings: Settings, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Geometric mean speed of what is picked on shapes left out, and of the best single variant there: of those shapes
    that were measured on the table's own device, or where there are none, on the first of others. Where no pick was
    timed, the fastest on each shape is what runs there. `also` names the raw results of those."""
    timed = [(case, entry) for case, entry in picks if entry is not None and entry.timed]
    timed = timed or [(case, min(candidates(case, settings), key=lambda entry: entry.ms)) for case, _ in picks]
    there = None if not timed or any(case.machine is None for case, _ in timed) else timed[0][0].machine
    entries = [(case, entry) for case, entry in timed if case.machine == there]
    machine = there or results.machine
    missing = [name for name in ("device", "date", "torch") if not machine.get(name)]
    if missing:
        raise journal.ResultsError(
            f"{results.path}: its machine has no {', '.join(missing)}: no table can be made of it"
        )
    speed = speed_of(entries)
    found: dict[str, Any] = {"device": machine["device"], "tflops": speed}
    best: dict[str, list[tuple[CaseResults, Entry]]] = {}
    for case, _ in entries:
        for name, entry in case.best.items():
            if not excluded(name, settings):
                best.setdefault(name, []).append((case, entry))
    rivals = {name: speed_of(best[name]) for name in sorted(best) if len(best[name]) == len(entries)}
    name = max(rivals, key=lambda n: rivals[n], default="")
    if name and rivals[name] > speed:
        found["note"] = f"{name} alone, each time with its best config, reaches {rivals[name]:g}"
    else:
        if {entry.variant for _, entry in entries} == {name}:  # picked for all: no rival of itself
            del rivals[name]
            name = max(rivals, key=lambda n: rivals[n], default="")
        if name:
            found["runner_up"] = {"variant": name, "tflops": rivals[name]}
    found |= {"run": run} | ({"also": list(also)} if also else {})
    found |= {"date": datetime.date.fromisoformat(machine["date"]), "torch": machine["torch"]}
    found |= {name: machine[name] for name in ("triton", "driver") if machine.get(name)}
    return {**found, "sources": _sources(picks, settings), "cases": max(1, len(timed))}


def _sources(picks: Sequence[Pick], settings: Settings) -> dict[str, str]:
    """The fingerprint of each variant in its last measurement."""
    known: dict[str, str] = {}
    for case, _ in picks:
        for entry in candidates(case, settings):
            known[entry.variant] = entry.fingerprint
    return dict(sorted(known.items()))


def speed_of(entries: Sequence[tuple[CaseResults, Entry]]) -> float:
    """Geometric mean of TFLOPS, to four digits; of calls whose op counts no work, each as one operation."""
    logs = [math.log(case.tflops(entry)) for case, entry in entries if case.flops]
    logs = logs or [-math.log(entry.ms * 1e9) for _, entry in entries]
    return float(f"{math.exp(sum(logs) / len(logs)):.4g}")


# --- verification -------------------------------------------------------------------------------------------------

ROUNDING = 0.005
"""How far a figure in a table may be from the one recomputed: tables hold four digits."""


@garbage.none_looked_for()
def verify(table: Table, results_folder: Path, settings: Settings | None = None) -> list[str]:
    """What in a table's evidence the raw results do not bear out; empty where every row is proven.

    `evidence.run` names the file: "h200/attention" is results_folder/h200/attention.jsonl.
    """
    told = [rule for rule in table.rules if rule.evidence is not None]
    if not told:
        return []
    beside, claimed = read_beside(table), told[0].evidence
    results = _raw_results(Path(results_folder), [claimed.run, *claimed.also])  # type: ignore[union-attr]
    if isinstance(results, str):
        return [f"rules[{rule.index}]: {results}" for rule in told]
    if beside is None or any(rule.nearest is None for rule in told):
        return [f"rules[{rule.index}]: it has evidence, but no measured shapes to rank by" for rule in told]
    return _unproven(results, table, told, beside, settings or Settings())


def _raw_results(folder: Path, runs: Sequence[str]) -> Results | str:
    """Those of the first run with those of the others, or why there are none."""
    paths = [folder / f"{run}.jsonl" for run in runs]
    for path in paths:
        if not path.is_file():
            return f"no raw results at {path}"
    try:
        results, *others = map(journal.read, paths)
        return results.joined(others)
    except (journal.ResultsError, OSError) as error:
        return f"raw results cannot be read: {error}"


def _unproven(
    results: Results, table: Table, told: Sequence[Rule], beside: MeasuredSizes, settings: Settings
) -> list[str]:
    run = Path(results.path).stem
    kinds = len(parted(results.of(table.op)))
    if kinds != len(told):  # before any that nobody fitted is
        return [f"{len(told)} rules have evidence, {run} has shapes of {kinds} kinds"]
    try:
        fitted = fits(results.of(table.op), results.machine, settings, [earlier(rule, beside) for rule in told])
    except ValueError as error:
        return [f"rules[{told[0].index}]: {run}: {error}"]
    if len(fitted) != len(told):
        return [f"{len(told)} rules have evidence, {run} was measured with all contestants for {len(fitted)} kinds"]
    found = []
    if beside_of(fitted) != beside:
        found.append(f"rules[{told[0].index}]: the measured shapes beside the table are not those of {run}")
    for rule, one in zip(told, fitted, strict=True):
        problems = [*_differences(results, rule, one, settings), *_moved(one)]
        found += [f"rules[{rule.index}]: {problem}" for problem in problems]
    return found


def _differences(results: Results, rule: Rule, fitted: Fit, settings: Settings) -> list[str]:
    claimed: Any = rule.evidence
    run, found = claimed.run, []
    actual = evidence(results, picks_left_out(fitted, settings), run, settings, claimed.also)
    for name in ("device", "torch", "triton", "driver", "sources", "cases"):
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


def _moved(fitted: Fit) -> list[str]:
    """Trees know a config by its place, too: where another one stands there, they speak of one and mean the other."""
    again = f"fit the table again (kreg tune {fitted.op} --fit-only)"
    return [
        f"{name} declares its configs in another order, or others, than when it was fitted: {again}"
        for name in fitted.moved
    ]


def _speed_differences(name: str, said: float, actual: float, run: str) -> list[str]:
    if abs(said / actual - 1) <= ROUNDING:
        return []
    return [f"{name}: the table says {said:g}, {run} says {actual:g}"]
