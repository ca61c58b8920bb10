"""Where a table was measured: for each rule the shapes behind it, in a file beside the table.

`attention.sm90.yaml` has `attention.sm90.measured.json`: of each shape the sizes that people know it by, its point in
the coordinates of the op, and what each contestant lost there to the fastest. A rule with `nearest` ranks by it;
`explain` says how far the nearest measured shape is, and lint what a rule covers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from registry.tables.files import SHIPPED_PACKAGE
from registry.tables.model import Layer, Rule, Table
from registry.tables.nearest import Config, Neighbours, Result, Shape
from registry.tables.reader import MAX_BYTES

SUFFIX = ".measured.json"
MOST = 2**63
MOST_BYTES = 16 * MAX_BYTES
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Nearest:
    """The measured shape that a problem is nearest to: how far it is along the fact where it is farthest."""

    shape: Mapping[str, int]
    factor: float

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.shape.items())
        if self.factor == 1:
            return f"this very size ({sizes})"
        return f"within a factor of {self.factor:.2f} ({sizes})"


@dataclass(frozen=True)
class MeasuredSizes:
    """The measured shapes behind the rules of one table."""

    facts: tuple[str, ...]
    rules: Mapping[int, tuple[Sizes, ...]]
    coordinates: tuple[str, ...] = ()
    shapes: Mapping[int, tuple[Shape, ...]] = field(default_factory=dict)
    contestants: tuple[tuple[str, Config], ...] = ()

    def neighbours(self, rule: Rule) -> Neighbours | None:
        """What a rule that ranks by the nearest shapes asks; None where it does not, or where it has no shapes."""
        shapes = self.shapes.get(rule.index)
        if not rule.nearest or not shapes or not set(rule.nearest) <= set(self.coordinates):
            return None
        return Neighbours(self.coordinates, rule.nearest, self.contestants, shapes)

    def nearest(self, rule: Rule, facts: Mapping[str, Any]) -> Nearest | None:
        """The shape behind a rule that these facts are nearest to, None where the rule has none."""
        here = [facts.get(name) for name in self.facts]
        if not all(isinstance(size, int) for size in here):
            return None
        shapes = self.rules.get(rule.index, ())
        far = [
            max((_factor(size, other) for size, other in zip(here, shape, strict=True)), default=1.0)
            for shape in shapes
        ]
        if not far:
            return None
        least = min(range(len(far)), key=far.__getitem__)
        return Nearest(dict(zip(self.facts, shapes[least], strict=True)), far[least])

    def bounds(self, rule: Rule) -> dict[str, tuple[int, int]]:
        """The smallest and the largest measured size of each fact."""
        columns = zip(*self.rules.get(rule.index, ()), strict=True)
        return {name: (min(sizes), max(sizes)) for name, sizes in zip(self.facts, columns, strict=False)}

    def beyond(self, rule: Rule) -> list[str]:
        """What a rule takes that lies outside of its measured sizes, for people."""
        asked = {condition.name: condition.spans for condition in rule.conditions}
        found = []
        for name, (low, high) in self.bounds(rule).items():
            spans = asked.get(name)
            if rule.nearest:
                continue  # it puts nothing of ours first where no measured shape is near
            if spans is None:
                found.append(f"any {name}, measured {low}..{high}")
            elif any(span.low < low or span.high > high for span in spans):
                taken = ", ".join(f"{span.low:g}..{span.high:g}" for span in spans)
                found.append(f"{name} {taken}, measured {low}..{high}")
        return found


def _factor(one: Any, other: Any) -> float:
    """How many times the larger is the smaller; sizes of zero count as one."""
    small, large = sorted((max(1, one), max(1, other)))
    return float(large / small)


def beside(table_path: Path) -> Path:
    """The file of measured sizes that belongs to a table."""
    return table_path.with_name(table_path.stem + SUFFIX)


def read_beside(table: Table) -> MeasuredSizes | None:
    """What lies beside a table; None where nothing does, or nothing that can be read as this."""
    if table.layer is Layer.SHIPPED:
        file: Any = resources.files(SHIPPED_PACKAGE) / beside(Path(table.file)).name
    else:
        file = beside(Path(table.file))
    try:
        if not file.is_file():
            return None
        with file.open("rb") as stream:
            return _parsed(json.loads(stream.read(MOST_BYTES)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def neighbours_of(table: Table, rule: Rule) -> Neighbours | None:
    """The measured shapes that a rule ranks by, read at first use; None for a rule that ranks by its own order."""
    if rule.nearest is None:
        return None
    if rule.index not in table.asked:
        beside_it = read_beside(table)
        table.asked[rule.index] = beside_it.neighbours(rule) if beside_it is not None else None
    return table.asked[rule.index]


def _parsed(data: Mapping[str, Any]) -> MeasuredSizes:
    facts, coordinates = tuple(map(str, data["facts"])), tuple(map(str, data["coordinates"]))
    contestants = tuple((str(name), dict(config)) for name, config in data["contestants"])
    hash(tuple(tuple(config.values()) for _, config in contestants))  # or they cannot be looked up
    shapes = {int(index): tuple(map(_shape, found)) for index, found in data["rules"].items()}
    for shape in (shape for found in shapes.values() for shape in found):
        if len(shape.sizes) != len(facts) or len(shape.point) != len(coordinates):
            raise ValueError("a shape has not one size for each fact, or not one value for each coordinate")
        if not all(0 <= size <= MOST for size in shape.sizes) or not all(map(math.isfinite, shape.point)):
            raise ValueError("no problem has this size or lies there")
        if not all(math.isfinite(value) for result in shape.results for value in (result.lost, result.guess)):
            raise ValueError("a result is no number")
        if not all(0 <= result.contestant < len(contestants) for result in shape.results):
            raise ValueError("a shape names a contestant that is not listed")
    return MeasuredSizes(
        facts,
        {i: tuple(shape.sizes for shape in found) for i, found in shapes.items()},
        coordinates,
        shapes,
        contestants,
    )


def _shape(data: Sequence[Sequence[Any]]) -> Shape:
    sizes, point, flat = data
    results = tuple(Result(int(c), float(lost), float(guess)) for c, lost, guess in _threes(flat))
    return Shape(tuple(map(int, sizes)), tuple(map(float, point)), results)


def _threes(flat: Sequence[Any]) -> Iterable[tuple[Any, Any, Any]]:
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def text(found: MeasuredSizes) -> str:
    """The file of these shapes: a line each."""
    parts = []
    for index, shapes in sorted(found.shapes.items()):
        lines = [json.dumps(_flat(shape), separators=(",", ":")) for shape in shapes]
        parts.append(f'"{index}": [\n' + ",\n".join(lines) + "\n]")
    contestants = ",\n".join(json.dumps([name, dict(config)]) for name, config in found.contestants)
    return (
        f'{{"facts": {json.dumps(found.facts)}, "coordinates": {json.dumps(found.coordinates)},\n'
        f'"contestants": [\n{contestants}\n],\n"rules": {{\n' + ",\n".join(parts) + "\n}}\n"
    )


def _flat(shape: Shape) -> list[list[float]]:
    results = [x for r in shape.results for x in (r.contestant, round(r.lost, 4), round(r.guess, 4))]
    return [list(shape.sizes), [round(value, 3) for value in shape.point], results]
