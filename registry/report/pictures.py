"""Single charts of a report as PNG files, for pages of documentation: drawn without a browser, on white."""

from __future__ import annotations

from typing import Any

from registry.report import charts, library
from registry.report.sheet import Sheet, group_rows, sheet
from registry.report.sources import Sources

STYLE = {"font": "sans-serif", "legend": {"orient": "top", "columns": 5}, "header": {"labelFontSize": 11}}


def pictures(sources: Sources) -> dict[str, bytes]:
    """By file name: each op's speed, roofline and warp groups, of the results that hold most of its shapes."""
    found: dict[str, bytes] = {}
    for op in dict.fromkeys(op for results in sources.runs.values() for op in results.ops):
        sheets = [sheet(results, run, op) for run, results in sources.runs.items() if op in results.ops]
        largest = max(sheets, key=lambda one: len(one.cases))
        for name, data in _of_sheet(largest, sources).items():
            found[f"{op}.{name}.png"] = data
    return found


def _of_sheet(found: Sheet, sources: Sources) -> dict[str, bytes]:
    drawn = {}
    shown = [_named(row, found) for row in found.rows if row["panel"] and (row["x"] or 0) > 0]
    unit = "TFLOPS" if any(row["tflops"] for row in found.rows) else "calls per second"
    if shown:
        drawn["speed"] = _drawn(charts.speed(found.variants, found.over, unit), {"rows": shown})
    points = [_named(row, found) for row in found.rows if row["intensity"] and row["tflops"]]
    limits = sources.limits.get(found.device)
    if points and limits:
        roof = charts.roof(limits, {row["dtype"] for row in points})
        spec = charts.roofline(found.variants, "the limits measured on this card")
        drawn["roofline"] = _drawn({**spec, "width": 720, "height": 360}, {"rows": points, "roof": roof})
    grouped = [_named(row, found) for row in group_rows(found) if row["panel"] and (row["x"] or 0) > 0]
    if grouped:
        drawn["warp_groups"] = _drawn(charts.groups(found.over, unit), {"rows": grouped})
    return drawn


def _named(row: dict[str, Any], found: Sheet) -> dict[str, Any]:
    speed = row["tflops"] or 1000 / row["ms"]
    return {**row, "variant": found.variants[row["variant"]], "shape": found.cases[row["case"]].text, "speed": speed}


def _drawn(spec: charts.Spec, rows: dict[str, list[dict[str, Any]]]) -> bytes:
    return library.png({**spec, "background": "white", "config": STYLE}, rows)
