"""The charts, as Vega-Lite specs that take their rows by name. The page fills them in; a test or a doc draws them.

Colours come from a palette that tells apart on light and on dark ground, and shapes tell what colours do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"  # an identifier: nothing is fetched from there
PALETTE = ["#e4572e", "#d99a00", "#2e86ab", "#5b8e3f", "#8d5fc7", "#c04b87", "#1a9988", "#7a7a7a", "#a0662a", "#5566cc"]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down"]

BINARY = "datum.value < 1024 ? format(datum.value, '~g') : format(datum.value / 1024, '~g') + 'k'"
"""Sizes are powers of two more often than of ten."""

Spec = dict[str, Any]


def _chart(description: str, **more: Any) -> Spec:
    return {"$schema": SCHEMA, "description": description, "background": "transparent", **more}


def _told_apart(names: Sequence[str], by: Sequence[str]) -> Spec:
    return {"field": "variant", "type": "nominal", "scale": {"domain": list(names), "range": by}, "title": None}


def _number(field: str, title: str, scale: str = "linear", **more: Any) -> Spec:
    shown = {"type": scale, **({"base": 2} if scale == "log" else {"zero": True}), **more}
    axis = {"labelExpr": BINARY, "labelOverlap": True, "tickCount": 8} if scale == "log" else {"format": "~s"}
    return {"field": field, "type": "quantitative", "title": title, "scale": shown, "axis": axis}


def _tooltip(*fields: str) -> list[Spec]:
    return [{"field": field} for field in fields]


ABOUT = {"calculate": "pow(2, round(2 * log(datum.x) / LN2) / 2)", "as": "about"}
"""Shapes of about one size, of which a line takes the fastest: between small batches and large ones it would zigzag."""


def _envelope(x: Spec, y: Spec, colour: Spec) -> Spec:
    """The line of the fastest shapes of each size."""
    fastest = {"op": "max", "field": "speed", "as": "most"}
    grouped = {"aggregate": [fastest], "groupby": ["panel", colour["field"], "about"]}
    return {
        "transform": [ABOUT, grouped],
        "mark": {"type": "line", "strokeWidth": 1.8, "opacity": 0.85, "aria": False},
        "encoding": {"x": {**x, "field": "about"}, "y": {**y, "field": "most"}, "color": colour},
    }


def _panels(about: str, points: Spec, encoding: Spec) -> Spec:
    """Points over a size, a panel for each combination of the op's panels, and a line along the fastest."""
    line = _envelope(encoding["x"], encoding["y"], encoding["color"])
    return _chart(
        about,
        data={"name": "rows"},
        facet={"field": "panel", "type": "nominal", "title": None, "sort": None},
        columns=3,
        spec={"width": 260, "height": 170, "layer": [line, {"mark": points, "encoding": encoding}]},
        resolve={"axis": {"x": "independent"}},
    )


def speed(names: Sequence[str], over: str, unit: str) -> Spec:
    """Points for each shape and a line along the fastest, a panel for each combination of the op's panels."""
    x = _number("x", over.replace("_", " "), "log")
    y = _number("speed", unit)
    colour, shape = _told_apart(names, PALETTE), _told_apart(names, SHAPES)
    points = {"type": "point", "filled": True, "size": 28, "opacity": 0.55, "aria": False, "cursor": "pointer"}
    encoding = {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": _tooltip("variant", "shape", "speed", "ms")}
    about = f"{unit} of each variant's best config over {over}; the table above holds the same figures"
    return _panels(about, points, encoding)


def roofline(names: Sequence[str], limits: str) -> Spec:
    """Every shape at its work per byte, below the roof of what the card itself was measured to reach."""
    x = _number("intensity", "floating-point operations per byte moved", "log")
    y = {**_number("tflops", "TFLOPS"), "scale": {"type": "log"}, "axis": {"format": "~g", "tickCount": 6}}
    colour, shape = _told_apart(names, PALETTE), _told_apart(names, SHAPES)
    tip = _tooltip("variant", "shape", "tflops", "intensity")
    points = {"type": "point", "filled": True, "size": 22, "opacity": 0.6, "aria": False, "cursor": "pointer"}
    roof = {"type": "line", "strokeDash": [6, 3], "strokeWidth": 1.8, "aria": False}
    label = {"type": "text", "align": "right", "dy": -7, "fontSize": 11, "aria": False}
    return _chart(
        f"Roofline: TFLOPS over operations per byte, and {limits}",
        width="container",
        height=340,
        layer=[
            {
                "data": {"name": "roof"},
                "mark": roof,
                "encoding": {"x": x, "y": y, "detail": {"field": "line"}, "color": {"value": "#888888"}},
            },
            {
                "data": {"name": "roof"},
                "transform": [{"filter": "datum.end"}],
                "mark": {**label, "color": "#888888"},
                "encoding": {"x": x, "y": y, "text": {"field": "dtype"}},
            },
            {
                "data": {"name": "rows"},
                "mark": points,
                "encoding": {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": tip},
            },
        ],
    )


ROOF = (0.25, 16384.0)
"""Operations per byte between which a roof is drawn."""


def roof(limits: dict[str, Any], dtypes: Iterable[str]) -> list[dict[str, Any]]:
    """Up the slope of the memory's rate, then along the dtype's own limit."""
    lines = []
    for dtype in sorted(set(dtypes) & limits["tflops"].keys()):
        most, per_byte = limits["tflops"][dtype], limits["gbs"] / 1e3
        corners = [(ROOF[0], ROOF[0] * per_byte), (most / per_byte, most), (ROOF[1], most)]
        lines += [{"intensity": x, "tflops": y, "line": dtype, "end": False} for x, y in corners]
        at = ROOF[1] / 8 ** sum(line["end"] for line in lines)  # labels beside each other, since roofs may be close
        lines.append({"intensity": at, "tflops": most, "line": dtype, "end": True, "dtype": f"{dtype} {most:.0f}"})
    return lines


def groups(over: str, unit: str) -> Spec:
    """The best config of each number of consumer warp groups, shape by shape."""
    x, y = _number("x", over.replace("_", " "), "log"), _number("speed", unit)
    colour = {"field": "groups", "type": "nominal", "title": "warp groups", "scale": {"range": PALETTE}}
    shape = {"field": "groups", "type": "nominal", "title": "warp groups", "scale": {"range": SHAPES}}
    points = {"type": "point", "filled": True, "size": 30, "opacity": 0.6, "aria": False, "cursor": "pointer"}
    tip = _tooltip("variant", "groups", "shape", "speed")
    encoding = {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": tip}
    return _panels(
        f"{unit} by the number of warp groups that issue products, each with its best config", points, encoding
    )


def regret() -> Spec:
    """The share of shapes whose pick costs at most so much more than the best."""
    return _chart(
        "Dispatch regret: the share of shapes on which the pick costs at most so much more than the best measured",
        width="container",
        height=220,
        data={"name": "rows"},
        mark={"type": "line", "interpolate": "step-after", "strokeWidth": 2.2, "aria": False},
        encoding={
            "x": {
                "field": "lost",
                "type": "quantitative",
                "title": "slower than the best measured",
                "axis": {"format": "%"},
            },
            "y": {"field": "share", "type": "quantitative", "title": "share of shapes", "axis": {"format": "%"}},
            "color": {"field": "where", "type": "nominal", "title": None, "scale": {"range": PALETTE}},
            "strokeDash": {"field": "where", "type": "nominal", "title": None},
        },
    )


def calls(count: int) -> Spec:
    """CPU time of a call: the middle half of the rounds, and the median."""
    y = {"field": "call", "type": "nominal", "title": None, "sort": None, "axis": {"labelLimit": 320}}
    scale = {"zero": True}
    return _chart(
        "CPU time per call in microseconds: median and the middle half of the rounds",
        width="container",
        height=24 * count,
        data={"name": "rows"},
        layer=[
            {
                "mark": {"type": "bar", "height": 10, "opacity": 0.85, "color": PALETTE[2], "aria": False},
                "encoding": {
                    "y": y,
                    "x": {"field": "median", "type": "quantitative", "title": "microseconds", "scale": scale},
                    "tooltip": _tooltip("call", "median", "low", "high"),
                },
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2, "aria": False, "color": "#888888"},
                "encoding": {"y": y, "x": {"field": "low", "type": "quantitative"}, "x2": {"field": "high"}},
            },
        ],
    )
