"""The timeline as a picture: a row for each role and one for its products, and what they add up to beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from registry.profiling.anatomy import Anatomy, CodeStep
from registry.profiling.figures import Figures, window
from registry.profiling.lives import BufferUse, Life, lives, uses
from registry.profiling.trace import Trace, WarpSpan, lanes
from registry.report.charts import SCHEMA, Spec
from registry.report.document import document
from registry.toolbox.scopes import ASYNC, WAIT
from registry.version import __version__

PRODUCTS = ["#2e86ab", "#5b8e3f", "#1a9988", "#8d5fc7"]
WORK = ["#e4572e", "#d99a00", "#c04b87", "#a0662a"]
WAITS = ["#9aa0a8", "#b9bec5", "#7c828b", "#cfd3d8", "#686e77", "#dfe2e6"]
USES = {"ahead": "#d8c56c", "held": "#8a7420", "written": "#d8c56c", "read": "#8a7420"}
MEMORY = "shared: "
AT_FIRST = 20_000
"""Cycles that a timeline shows before anyone zooms: the steady state, span by span."""
MOST_SPANS = 3000
"""In one picture: beyond, a browser becomes slow."""


def rows(
    trace: Trace, block: int, roles: Mapping[int, str], cycles: float | None = None, memory: Sequence[Life] = ()
) -> list[dict[str, Any]]:
    """The spans of one block while all roles were recorded, and when its buffers are in use; `cycles` cuts off what
    comes later."""
    spans = trace.of_block(block)
    low, high = window(spans, roles)
    high = min(high, low + cycles) if cycles else high
    found: list[dict[str, Any]] = []
    for warp, role in roles.items():
        for lane, held in lanes([span for span in spans if span.warp == warp]).items():
            name = f"{role}: {lane}" if lane else role
            found += [_row(span, name, low) for span in held if span.end > low and span.begin < high]
    found += [_held(one, low) for one in memory if one.end > low and one.begin < high]
    found.sort(key=lambda row: row["from"])
    return found[:MOST_SPANS]


def _held(one: Life, low: float) -> dict[str, Any]:
    slot = "" if one.slot is None else f" [{one.slot}]"
    begin, end = round(max(0.0, one.begin - low)), round(one.end - low)
    lane = f"{MEMORY}{one.buffer}{slot}"
    return {"lane": lane, "span": one.what, "kind": "memory", "from": begin, "to": end, "cycles": end - begin}


def _row(span: WarpSpan, lane: str, low: float) -> dict[str, Any]:
    kind = "product" if span.name.startswith(ASYNC) else "wait" if span.name.startswith(WAIT) else "work"
    shown = span.name.removeprefix(ASYNC) if kind == "product" else span.name
    begin, end = max(0.0, span.begin - low), span.end - low
    return {
        "lane": lane,
        "span": shown,
        "kind": kind,
        "from": round(begin),
        "to": round(end),
        "cycles": round(end - begin),
    }


def chart(
    shown: list[dict[str, Any]],
    title: str,
    *,
    zoom: bool = True,
    width: int | str = "container",
    cycles: int = AT_FIRST,
) -> Spec:
    """Waits in greys, work in warm colours, products in cool ones, memory in yellows; drag and scroll zoom in time."""
    kinds = {row["span"]: row["kind"] for row in shown}
    names: list[str] = []
    colours: list[str] = []
    for kind, palette in (("product", PRODUCTS), ("work", WORK), ("wait", WAITS)):
        of_kind = sorted(name for name, its in kinds.items() if its == kind)
        names += of_kind
        colours += [palette[number % len(palette)] for number in range(len(of_kind))]
    used = [name for name in USES if kinds.get(name) == "memory"]
    names, colours = names + used, colours + [USES[name] for name in used]
    order = sorted({row["lane"] for row in shown}, key=lambda lane: (lane.startswith(MEMORY), lane))
    spec: Spec = {
        "$schema": SCHEMA,
        "description": title,
        "background": "transparent",
        "width": width,
        "height": 26 * len(order),
        "data": {"name": "rows"},
        "mark": {"type": "bar", "height": {"band": 0.82}, "clip": True, "aria": False},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "title": "SM clock cycles",
                "axis": {"format": "~s"},
                "scale": {"domain": [0, min(cycles, max((row["to"] for row in shown), default=1))], "nice": False},
            },
            "x2": {"field": "to"},
            "y": {"field": "lane", "type": "nominal", "title": None, "sort": order, "axis": {"labelLimit": 200}},
            "color": {
                "field": "span",
                "type": "nominal",
                "title": None,
                "scale": {"domain": names, "range": colours},
                "legend": {"orient": "top", "columns": 7, "symbolType": "square"},
            },
            "tooltip": [{"field": name} for name in ("span", "lane", "cycles", "from")],
        },
    }
    if zoom:
        spec["params"] = [{"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}]
    return spec


def memory_chart(anatomy: Anatomy) -> Spec:
    """Where each buffer lies in a block's shared memory."""
    return {
        "$schema": SCHEMA,
        "description": "Shared memory of one block: each buffer from its first byte to its last; the table lists them",
        "background": "transparent",
        "width": "container",
        "height": 70,
        "data": {"name": "rows"},
        "mark": {"type": "bar", "height": 40, "stroke": "#88888866", "aria": False},
        "encoding": {
            "x": {
                "field": "from",
                "type": "quantitative",
                "title": "bytes",
                "axis": {"format": "~s"},
                "scale": {"domain": [0, max(1, anatomy.shared)], "nice": False},
            },
            "x2": {"field": "to"},
            "color": {"field": "buffer", "type": "nominal", "title": None, "legend": {"orient": "top", "columns": 8}},
            "tooltip": [{"field": name} for name in ("buffer", "bytes", "from")],
        },
    }


def page(
    about: Mapping[str, str],
    trace: Trace | None,
    anatomy: Anatomy,
    roles: Mapping[int, str],
    sums: Figures | None,
    blocks: int,
    steps: Sequence[CodeStep] = (),
) -> str:
    """The whole profile as one file."""
    chosen = trace.blocks[:: max(1, len(trace.blocks) // max(1, blocks))][:blocks] if trace is not None else []
    timelines = []
    for block in chosen:
        assert trace is not None
        shown = rows(trace, block, roles, memory=lives(anatomy, steps, trace, block, roles))
        spec = chart(shown, f"What each role of block {block} does over time; the tables hold the sums")
        timelines.append({"block": block, "rows": shown, "spec": spec})
    held = [
        {"buffer": buffer.name, "from": buffer.offset, "to": buffer.offset + buffer.bytes, "bytes": buffer.bytes}
        for buffer in anatomy.buffers
    ]
    tiles = [row for row, buffer in zip(held, anatomy.buffers, strict=True) if buffer.kind != "barriers"]
    data = {
        "about": about,
        "version": __version__,
        "damaged": trace.damaged if trace is not None else 0,
        "timelines": timelines,
        "figures": figures_data(sums) if sums is not None else None,
        "roles": roles_data(anatomy, roles),
        "shared": anatomy.shared,
        "memory": {"rows": tiles, "spec": memory_chart(anatomy)},
        "buffers": buffers_data(anatomy, roles),
        "uses": uses_data(uses(anatomy, steps, trace, roles)) if trace is not None else [],
    }
    return document(about["title"], data, "profile.js")


def figures_data(sums: Figures) -> dict[str, Any]:
    """As plain data; the same for --json."""
    return {
        "blocks": sums.blocks,
        "cycles": round(sums.cycles),
        "any_in_flight": _rounded(sums.any_in_flight),
        "roles": [
            {
                "role": one.role,
                "stalled": round(one.stalled, 4),
                "in_flight": _rounded(one.in_flight),
                "covered": _rounded(one.covered),
                "covered_by_own": _rounded(one.covered_by_own),
                "spans": [
                    [line.name, round(line.share, 4), line.count, round(line.median), round(line.most)]
                    for line in one.lines
                ],
            }
            for one in sums.roles
        ],
    }


def uses_data(found: Sequence[BufferUse]) -> list[dict[str, Any]]:
    """When buffers are in use, as plain data; the same for --json."""
    return [
        {
            "buffer": one.buffer,
            "slots": one.slots,
            "bytes": one.bytes,
            "ahead": round(one.ahead, 4),
            "held": round(one.held, 4),
            "times": one.times,
            "median_ahead": None if one.median_ahead is None else round(one.median_ahead),
            "median_held": round(one.median_held),
            "in_use": round(one.in_use),
        }
        for one in found
    ]


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 4)


def roles_data(anatomy: Anatomy, roles: Mapping[int, str]) -> list[dict[str, Any]]:
    return [
        {
            "role": roles.get(role.first_warp, f"role {role.number}"),
            "warps": f"{role.first_warp} to {role.first_warp + role.warps - 1}"
            if role.warps > 1
            else f"{role.first_warp}",
            "registers": role.registers,
        }
        for role in anatomy.roles
    ]


def buffers_data(anatomy: Anatomy, roles: Mapping[int, str]) -> list[dict[str, Any]]:
    named = {role.number: roles.get(role.first_warp, f"role {role.number}") for role in anatomy.roles}
    list_of = lambda numbers: ", ".join(named[n] for n in sorted(numbers) if n in named)  # noqa: E731
    return [
        {
            "buffer": buffer.name,
            "kind": buffer.kind,
            "shape": buffer.shape,
            "offset": buffer.offset,
            "bytes": buffer.bytes,
            "written": list_of(buffer.writers),
            "read": list_of(buffer.readers),
            "waited": list_of(buffer.waiters),
            "lives": buffer.lives,
        }
        for buffer in anatomy.buffers
    ]
