"""What `kreg tune` makes of measurements: a table, where it goes, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from registry.cli import FINDING, OK
from registry.cli._files import table_to_keep
from registry.cli._page import Page, print_json
from registry.cli._sweep import report_lines, results_lines
from registry.notices import both_ends, printable

LISTED = 100
"""Of measured shapes."""
SHOWN = 8
"""Of failures, and of shapes that are left out for one reason."""


def fit(op: str, options: dict[str, Any], settings: Any, path: Path, report: Any) -> int:
    """Make the table of what `path` holds, write and show it; `report`: of the sweep before, if there was one."""
    from registry.tuning import journal, store
    from registry.tuning.helpers import helpers
    from registry.tuning.kinds import fits, kept
    from registry.tuning.rules import make_table

    results = journal.read(path)
    notes = [f"{path}: line {number} is damaged and passed over" for number in results.bad_lines]
    raw = results
    own = options["out"] is None
    if own:
        results, more = _through_cache(op, results)
        notes += more
    if results.cases and "device" not in results.machine:
        raise journal.ResultsError(
            f"{path}: the line is lost that says what it was measured on; a sweep into it adds one"
        )
    run = options["run_name"] or _run_of(path)
    also = [journal.read(other) for other in options["also"]]
    notes += [f"{other.path}: line {number} is damaged and passed over" for other in also for number in other.bad_lines]
    results = results.joined(also)
    try:
        before = []
        of_table = table_to_keep(op, options)
        if of_table is not None:
            before = kept(of_table, results.of(op), results.machine, other_shapes=options["keep_trees"])
        if options["keep_trees"] and (anew := before.count(None)):
            notes.append(
                f"kinds fitted anew: {anew} (--table has none such, or a variant has changed since it was made)"
            )
        if options["keep_trees"] and also:
            notes.append("what shapes of --also lose, left out in turn, is too good: kept trees may have seen them")
        with helpers(options["processes"]):
            found = fits(results.of(op), results.machine, settings, before)
        fitted = make_table(
            results, found, run, settings, device=own or options["per_device"], also=list(map(_run_of, options["also"]))
        )
    except ValueError as error:
        _print(op, raw, report, [*notes, f"no table: {error}", *_failures(raw, op)], None, options)
        return FINDING
    where = ""
    if options["table_path"] is not None:
        store.write_both(options["table_path"], fitted.text, fitted.measured)
        where = str(options["table_path"])
    elif own:
        where = str(store.write_table(op, results.machine["device"], fitted.text, fitted.measured))
    _print(op, raw, report, notes, (fitted, where), options)
    return FINDING if report is not None and report.stopped else OK


def _run_of(path: Path) -> str:
    """What evidence calls raw results: their place in the folder of all."""
    return f"{path.parent.name}/{path.stem}".lstrip("./")


def _failures(results: Any, op: str) -> list[str]:
    """What failed, once each, and how to try it again: contestants that failed are not measured twice by themselves."""
    found: dict[str, int] = {}
    for case in results.of(op):
        for entry in case.entries.values():
            if entry.failure is not None:
                text = f"{entry.variant}: {entry.failure['why']}: {entry.failure.get('detail', '')}".strip(": ")
                text = both_ends(text, 300)
                found[text] = found.get(text, 0) + 1
    if not found:
        return []
    lines = [f"failed{f' {count} times' if count > 1 else ''}: {text}" for text, count in found.items()]
    return [*_first(lines), "what failed is measured again when its source changes, or with --retry-failed"]


def _first(lines: Sequence[str], most: int = SHOWN, where: str = "") -> list[str]:
    """So many of them, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more{where}"] if len(lines) > most else [])]


def _left_out(skipped: Mapping[str, str]) -> list[str]:
    """What was measured and takes no part, by why."""
    lines = []
    for why in dict.fromkeys(skipped.values()):
        lines += _first([f"not in the fit ({why}): {text}" for text, own in skipped.items() if own == why])
    return lines


def _through_cache(op: str, results: Any) -> tuple[Any, list[str]]:
    """Add a sweep to the user's store and take back everything there that still holds on this machine."""
    from registry.tuning import store

    rows = store.rows_of(results)
    damaged = store.damaged(op, str(results.machine.get("device")))  # before a merge leaves it out
    try:
        store.merge(rows)
    except store.StoreError as error:
        return results, [*damaged, f"the cache did not take the results: {error}"]
    loaded = store.load(op, results.machine)
    notes = [*damaged, *(f"passed over: {stale}" for stale in loaded.stale)]
    same_mode = [row for row in loaded.rows if row.mode == results.mode]
    return store.as_results(same_mode, results.machine, results.path), notes


def _print(op: str, results: Any, report: Any, notes: list[str], made: Any, options: dict[str, Any]) -> None:
    from registry.contract.describe import config_text

    fitted, where = made or (None, "")
    if options["as_json"]:
        print_json(_data(op, results, report, notes, fitted, where))
        return
    page = Page()
    for line in _first(results_lines(results, op), LISTED, f": kreg report {results.path} draws them all"):
        page.line(line)
    page.gap()
    for line in [*(report_lines(report) if report else []), *notes]:
        page.line(line)
    if fitted is None:
        return
    for warning in fitted.warnings:
        page.line(f"never dispatched to: {warning}", style="red")
    for text in fitted.unheard:
        page.line(text, style="yellow")
    for line in _left_out(fitted.skipped):
        page.line(line)
    page.line(f"regret of each shape by the others, as if it had not been measured: {fitted.regret}")
    for kind, regret in fitted.kinds if len(fitted.kinds) > 1 else ():
        page.line(f"  {config_text(kind) or 'of other kinds'}: {regret}")
    page.line(f"for comparison, one variant for all, each time with its best config: {fitted.single}")
    if where:
        page.line(f"table: {where}")
    else:
        page.gap()
        click.echo(printable(fitted.text))


def _data(op: str, results: Any, report: Any, notes: list[str], fitted: Any, where: str) -> dict[str, Any]:
    from dataclasses import asdict

    found: dict[str, Any] = {"op": op, "results": results.path, "shapes": len(results.of(op)), "notes": notes}
    if report is not None:
        found["sweep"] = asdict(report)
    if fitted is not None:
        kinds = [{"when": dict(kind), **regret.data()} for kind, regret in fitted.kinds]
        found |= {"rules": fitted.rules, "regret": fitted.regret.data(), "single": fitted.single.data(), "kinds": kinds}
        found |= {"warnings": fitted.warnings, "unheard": fitted.unheard, "table": where or fitted.text}
    return found
