"""One op of one results file as rows: what was measured of each shape, against whom, and how it is to be shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.errors import RegistryError
from registry.notices import what_failed
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.tuning.journal import CaseResults, Entry, Results
from registry.tuning.timing import quantile

MOST_PANELS = 12
LANGUAGES = ("triton", "gluon")
"""`Design.dsl` of kernels that are compiled here; the others call what a library compiled."""


@dataclass
class Sheet:
    """The shapes of one op in one file, in the order in which a reader would look for them."""

    op: str
    run: str
    device: str
    cases: list[CaseResults]
    problems: list[Any]
    """The Problem of each case on the device that it was measured on; None where the shape can no longer be read."""
    variants: list[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The fastest config of each variant on each shape: case and variant as indices, and its figures."""
    over: str = ""
    notes: list[str] = field(default_factory=list)


def sheet(results: Results, run: str, op: str) -> Sheet:
    """The rows of an op. Shapes of which nothing was timed are left out, and counted in the notes."""
    cases = [case for case in results.of(op) if case.timed]
    tuning = op_named(op).tuning
    device = str(results.machine.get("device", ""))
    cases.sort(key=lambda case: tuple(_order(case.facts.get(name)) for name in (*tuning.panels, *tuning.order)))
    names = {entry.variant for case in cases for entry in case.timed.values()}
    found = Sheet(op, run, device, cases, [_problem(case, device) for case in cases], sorted(names, key=standing))
    found.over = tuning.over or next(iter(tuning.leading), "")
    untimed = len(results.of(op)) - len(cases)
    found.notes += [f"Not shown, since nothing of them could be timed: {counted(untimed, 'shape')}"] if untimed else []
    unread = found.problems.count(None)
    found.notes += (
        [f"Not spelled as in this version, so without bytes and picks: {counted(unread, 'shape')}"] if unread else []
    )
    for number, case in enumerate(cases):
        found.rows += _rows(found, number, case, tuning.panels)
    _few_panels(found)
    return found


def standing(name: str) -> tuple[bool, bool, str]:
    """Own kernels first, then libraries, then those of vendors."""
    return not is_own(name), "." in name, name


def is_own(name: str) -> bool:
    """Whether a variant is a kernel written here or by a plugin that is installed, and not a library's behind torch or
    one that results alone know. The yardstick of a ratio is the best of all others."""
    variant = catalog.get().variants.get(name)
    return variant is not None and variant.design.dsl in LANGUAGES


def declared(name: str) -> Variant | None:
    """The declaration behind a name in results. A vendor's copy of a variant here has that one's traits."""
    variants = catalog.get().variants
    return variants.get(name) or variants.get(name.rpartition(".")[2])


def warp_groups(entry: Entry) -> int | None:
    """How many warp groups issue matrix products in this config, as declared."""
    variant = declared(entry.variant)
    if variant is None or not variant.design.warp_specialized:
        return None
    try:
        return variant.design_for(entry.config).warp_groups
    except Exception:  # a config of another version of that variant
        return None


def _problem(case: CaseResults, device: str) -> Any:
    try:
        target = Target.named(device)
    except RegistryError:
        target = Target.named("cpu")
    try:
        return Case.from_data(case.shape).problem(target)
    except Exception:  # written by a version that spelled shapes in another way
        return None


def _rows(found: Sheet, number: int, case: CaseResults, panels: tuple[str, ...]) -> list[dict[str, Any]]:
    best = case.best
    peers = [entry.ms for name, entry in best.items() if not is_own(name)]
    moved = _bytes(found.op, found.problems[number])
    rows = []
    for name, entry in best.items():
        row: dict[str, Any] = {"case": number, "variant": found.variants.index(name), "ms": _digits(entry.ms)}
        row["tflops"] = _digits(case.tflops(entry))
        row["ratio"] = _digits(min(peers) / entry.ms) if peers else None
        row["x"] = case.facts.get(found.over)
        row["panel"] = ", ".join(f"{_label(name)} {_value(case.facts.get(name))}" for name in panels)
        row["intensity"] = _digits(case.flops / moved) if moved and case.flops else None
        row["dtype"] = case.facts.get("dtype")
        rows.append(row)
    return rows


def group_rows(found: Sheet) -> list[dict[str, Any]]:
    """The fastest config of each number of warp groups, for variants that were measured with several."""
    rows = []
    known = {(row["case"], found.variants[row["variant"]]): row for row in found.rows}
    for number, case in enumerate(found.cases):
        best: dict[tuple[str, int], Entry] = {}
        for entry in case.timed.values():
            groups = warp_groups(entry)
            if groups is not None:
                key = (entry.variant, groups)
                best[key] = min(best.get(key, entry), entry, key=lambda e: e.ms)
        for (name, groups), entry in best.items():
            if sum(other == name for other, _ in best) > 1:
                speed = _digits(case.tflops(entry))
                rows.append({**known[number, name], "groups": groups, "ms": _digits(entry.ms), "tflops": speed})
    return rows


def _few_panels(found: Sheet) -> None:
    """The panels with the most shapes; what is left out of the picture is still in the table."""
    sizes: dict[str, int] = {}
    for row in found.rows:
        sizes[row["panel"]] = sizes.get(row["panel"], 0) + 1
    kept = set(sorted(sizes, key=lambda panel: -sizes[panel])[:MOST_PANELS])
    if len(sizes) > len(kept):
        found.notes.append(
            f"Charts leave out {len(sizes) - len(kept)} of {len(sizes)} panels: those with the fewest shapes"
        )
        for row in found.rows:
            row["panel"] = row["panel"] if row["panel"] in kept else ""


def _bytes(op: str, problem: Any) -> float:
    try:
        return op_named(op).bytes_moved(problem) if problem is not None else 0.0
    except Exception as error:
        raise RegistryError(f"bytes_moved of {op} failed: {what_failed(error)}") from error


def clocks(results: Results) -> dict[str, Any]:
    """Least, usual and most of the clock, power and temperature while it was measured, and why the clock was held."""
    samples = [s for case in results.cases.values() for e in case.entries.values() for s in e.samples.values()]
    found: dict[str, Any] = {}
    for name in ("sm_mhz", "watts", "celsius"):
        values = sorted(v for s in samples if isinstance(v := s.get(name), (int, float)))
        if values:
            found[name] = [round(values[0]), round(quantile(values, 0.5)), round(values[-1])]
    held: dict[str, int] = {}
    for sample in samples:
        for why in sample.get("throttle") or ():
            held[str(why)] = held.get(str(why), 0) + 1
    return (
        {**found, "throttle": {why: round(count / len(samples), 4) for why, count in held.items()}} if held else found
    )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _label(name: str) -> str:
    return name.replace("_", " ")


def _value(value: Any) -> str:
    return "yes" if value is True else "no" if value is False else str(value)


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers by size, names by letter, nothing last."""
    if isinstance(value, (bool, int, float)):
        return 0, float(value), ""
    return (1, 0.0, value) if isinstance(value, str) else (2, 0.0, "")


def facts_of(case: CaseResults) -> Mapping[str, Any]:
    return {name: value for name, value in case.facts.items() if value not in (None, False, "", 0.0)}
