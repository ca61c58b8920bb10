"""Where a table was measured: for each rule the sizes of the shapes behind it, in a file beside the table.

`attention.sm90.yaml` has `attention.sm90.measured.json`: `{"facts": [names], "rules": {"0": [[sizes], ...]}}`. Picking
reads none of it; `explain` says how far the nearest measured shape is, and lint what a rule covers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from registry.tables.files import SHIPPED_PACKAGE
from registry.tables.model import Layer, Rule, Table
from registry.tables.reader import MAX_BYTES

SUFFIX = ".measured.json"
MOST = 2**63
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
    """The measured sizes behind the rules of one table."""

    facts: tuple[str, ...]
    rules: Mapping[int, tuple[Sizes, ...]]

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
            return _parsed(json.loads(stream.read(MAX_BYTES)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _parsed(data: Mapping[str, Any]) -> MeasuredSizes:
    facts = tuple(map(str, data["facts"]))
    rules = {int(index): tuple(tuple(map(int, shape)) for shape in shapes) for index, shapes in data["rules"].items()}
    if any(len(shape) != len(facts) for shapes in rules.values() for shape in shapes):
        raise ValueError("a shape has not one size for each fact")
    if any(not 0 <= size <= MOST for shapes in rules.values() for shape in shapes for size in shape):
        raise ValueError("no tensor has this size")
    return MeasuredSizes(facts, rules)


def text(facts: Sequence[str], rules: Mapping[int, Sequence[Sizes]]) -> str:
    """The file of these sizes: a line a rule."""
    lines = [f'"{index}": {json.dumps(sorted(set(map(tuple, shapes))))}' for index, shapes in sorted(rules.items())]
    body = ",\n".join(lines)
    return f'{{"facts": {json.dumps(list(facts))}, "rules": {{\n{body}\n}}}}\n'
