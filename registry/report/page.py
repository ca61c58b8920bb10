"""What a report shows, as the plain data that the page's script draws."""

from __future__ import annotations

import datetime
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from registry import garbage
from registry.contract.describe import config_text
from registry.dispatch.catalog import catalog
from registry.errors import RegistryError
from registry.ops.known import all_ops
from registry.report import against, charts, dispatch
from registry.report.document import document
from registry.report.sheet import Sheet, clocks, facts_of, group_rows, is_own, sheet
from registry.report.sources import Sources
from registry.tuning.journal import CaseResults, Entry, Results
from registry.tuning.timing import quantile
from registry.version import __version__

MOST_BYTES = 6_000_000
MOST_WAITS = 2
WAIT = "wait "
"""As in registry.toolbox.scopes, which needs Triton; a report does not."""
SHEET_KEYS = ("case", "variant", "ms", "tflops", "ratio", "x", "panel", "intensity", "dtype")


@garbage.none_looked_for()
def page(sources: Sources, old: Sources | None = None, title: str = "Measured kernels") -> str:
    """The whole report. Samples of configs that are not a variant's best are left out where it would grow too large."""
    sheets = sheets_of(sources)
    for every_sample in (True, False):
        data = payload(sources, old, title, every_sample, sheets)
        text = document(title, data, "page.js")
        if len(text.encode()) <= MOST_BYTES:
            break
    return text


@dataclass
class Sheets:
    """Every op of every file with what would run on its shapes, which takes longer than all else."""

    found: list[tuple[Sheet, Results, list[dispatch.Pick]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@garbage.none_looked_for()
def sheets_of(sources: Sources) -> Sheets:
    made = Sheets()
    for run, results in sources.runs.items():
        for op in results.ops:
            if op not in all_ops():
                made.notes.append(f"{run}: op {op} is not known here: not shown")
                continue
            try:
                one = sheet(results, run, op)
                made.found += [(one, results, dispatch.picks(one))] if one.cases else []
            except RegistryError as error:
                made.notes.append(f"{run}: {op}: {error}")
    return made


def payload(
    sources: Sources, old: Sources | None, title: str, every_sample: bool = True, sheets: Sheets | None = None
) -> dict[str, Any]:
    """All that the page's script shows, as plain data."""
    configs, sheets = _Numbered(), sheets or sheets_of(sources)
    notes = list(sources.passed_over) + [f"compared with: {note}" for note in (old.passed_over if old else ())]
    notes += sheets.notes
    ops: dict[str, list[dict[str, Any]]] = {}
    for one, results, picks in sheets.found:
        ops.setdefault(one.op, []).append(_sheet_data(one, results, picks, configs, every_sample))
    if not every_sample:
        notes.append("to stay small, the page holds the samples of each variant's fastest config only")
    for of_op in ops.values():
        of_op.sort(key=lambda found: -len(found["cases"]))
    return {
        "title": title,
        "made": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "notes": notes,
        "ops": ops,
        "configs": configs.texts,
        "runs": [_run_data(name, results) for name, results in sources.runs.items()],
        "calls": [_calls_data(name, found) for name, found in sources.calls.items()],
        "timelines": [_timeline_data(row) for row in sources.timelines],
        "limits": sources.limits,
        "roofs": {device: charts.roof(limits, limits["tflops"]) for device, limits in sources.limits.items()},
        "against": against.compare(sources.runs, old.runs) if old is not None else None,
        "specs": {"regret": charts.regret()},
    }


class _Numbered:
    """Texts that many rows share, once each."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def _sheet_data(
    found: Sheet, results: Results, answers: list[dispatch.Pick], configs: _Numbered, every_sample: bool
) -> dict[str, Any]:
    chosen = {pick.case: pick for pick in answers}
    measured = any(row["tflops"] for row in found.rows)
    unit = "TFLOPS" if measured else "calls per second"
    grouped = group_rows(found)
    places = {name: number for number, name in enumerate(found.variants)}
    best: dict[int, dict[int, float]] = {}
    for row in found.rows:
        best.setdefault(row["case"], {})[row["variant"]] = row["ms"]
    return {
        "run": found.run,
        "device": found.device,
        "mode": results.mode,
        "over": found.over,
        "unit": unit,
        "variants": found.variants,
        "own": [is_own(name) for name in found.variants],
        "strangers": [name for name in found.variants if name not in catalog.get().variants],
        "notes": found.notes,
        "rows": {key: [row[key] for row in found.rows] for key in SHEET_KEYS},
        "groups": {key: [row[key] for row in grouped] for key in (*SHEET_KEYS, "groups")} if grouped else None,
        "cases": [
            _case_data(case, chosen.get(number), configs, places, None if every_sample else best.get(number, {}))
            for number, case in enumerate(found.cases)
        ],
        "regret": dispatch.regret(answers),
        "lost": {
            where: sorted(round(p.lost, 5) for p in chosen if p.lost is not None)
            for where, chosen in dispatch.stretches(answers).items()
        },
        "rules": dispatch.coverage(found, answers),
        "rerun": _rerun(found.op, results),
        "specs": {
            "speed": charts.speed(found.variants, found.over, unit),
            "roofline": charts.roofline(found.variants, "the limits measured on this card"),
            **({"groups": charts.groups(found.over, unit)} if grouped else {}),
        },
    }


def _case_data(
    case: CaseResults,
    pick: dispatch.Pick | None,
    configs: _Numbered,
    places: Mapping[str, int],
    best: Mapping[int, float] | None,
) -> dict[str, Any]:
    """Samples of all configs, or of those alone that are the `best` of each variant."""
    entries = []
    for entry in sorted(case.entries.values(), key=lambda e: e.ms if e.timed else float("inf")):
        if entry.timed or entry.failure is not None:
            whole = best is None or (entry.timed and best.get(places[entry.variant]) == float(f"{entry.ms:.4g}"))
            entries.append(_entry_data(entry, configs, places, whole))
    data = {"shape": case.text, "flops": case.flops, "noise": round(case.noise, 4), "entries": entries}
    data["facts"] = dict(facts_of(case))
    data["illegal"] = case.illegal
    if "operands" in case.shape:
        data["recorded"] = json.dumps(case.shape)
    if pick is not None:
        data["pick"] = [pick.variant, pick.source, None if pick.lost is None else round(pick.lost, 4)]
    return data


def _entry_data(entry: Entry, configs: _Numbered, places: Mapping[str, int], whole: bool) -> list[Any]:
    """[variant or its name, config, median ms, spread, samples, clocks, failure]"""
    variant: int | str = places.get(entry.variant, entry.variant)
    config = configs(config_text(entry.config))
    if entry.failure is not None:
        why = f"{entry.failure['why']}: {entry.failure.get('detail', '')}".strip(": ")
        return [variant, config, None, None, [], [], why[:300]]
    samples = list(entry.samples.values())
    clock = sorted(s["sm_mhz"] for s in samples if isinstance(s.get("sm_mhz"), (int, float)))
    shown = [float(f"{s['ms']:.4g}") for s in samples] if whole else []
    middle = [float(f"{entry.ms:.4g}"), round(entry.spread, 4)]
    return [variant, config, *middle, shown, [clock[0], clock[-1]] if clock else [], ""]


def _rerun(op: str, results: Results) -> str:
    """The command that measures one cell again, but for the shape and the variant."""
    graph = " --graph" if results.mode == "graph" else ""
    return f"kreg tune {shlex.quote(op)} --only VARIANT{graph} --out rerun.jsonl"


def _run_data(name: str, results: Results) -> dict[str, Any]:
    counts = {op: sum(bool(case.timed) for case in results.of(op)) for op in results.ops}
    return {
        "name": name,
        "path": results.path,
        "mode": results.mode,
        "machine": results.machine,
        "clocks": clocks(results),
        "shapes": counts,
        "bad": len(results.bad_lines),
    }


def _timeline_data(row: Mapping[str, Any]) -> dict[str, Any]:
    """One recorded launch: what each role waits for longest."""
    roles = row["figures"]["roles"]
    waits = {one["role"]: [[name, share] for name, share, *_ in one["spans"] if name.startswith(WAIT)] for one in roles}
    return {
        "variant": row["variant"],
        "shape": row["shape"],
        "config": config_text(row["config"]),
        "in_flight": row["figures"]["any_in_flight"],
        "roles": [[one["role"], one["stalled"], one["covered"], waits[one["role"]][:MOST_WAITS]] for one in roles],
    }


def _calls_data(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        {
            "call": call,
            "median": round(quantile(values, 0.5), 2),
            "low": round(quantile(values, 0.25), 2),
            "high": round(quantile(values, 0.75), 2),
        }
        for call, values in found["figures"].items()
    ]
    return {
        "name": name,
        "machine": found["machine"],
        "unit": str(found.get("unit", "")),
        "rows": rows,
        "spec": charts.calls(len(rows)),
    }
