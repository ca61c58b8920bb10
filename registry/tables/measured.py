"""Where a table was measured: for each rule the shapes behind it, in a file beside the table.

`attention.sm90.yaml` has `attention.sm90.measured.json`: of each shape the sizes that people know it by, its point in
the coordinates of the op, and what each contestant lost there to the fastest. A rule with `nearest` ranks by it;
`explain` says how far the nearest measured shape is, and lint what a rule covers. Where the file of such a rule is not
there, is no such file, or was written with another table, the rule's own order counts, and lint, doctor, `explain` and
a notice say so.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from registry import garbage, notices
from registry.tables.closer import Closer
from registry.tables.config_order import ConfigTrees
from registry.tables.files import Beside, beside, file_beside, state_of
from registry.tables.model import Rule, Table
from registry.tables.nearest import Config, Neighbours
from registry.tables.reader import MAX_BYTES, MAX_MESSAGE
from registry.tables.schema import Coordinate, Name
from registry.tables.shapes import DIGITS, Shape, Shapes, Sizes
from registry.tables.trees import Trees, trees_of

MOST_BYTES = 64 * MAX_BYTES
MOST = 1e6
"""Of coordinates, which are logs and shares, and of log times: what is beyond was not measured."""


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
    shapes: Mapping[int, Sequence[Shape]] = field(default_factory=dict)
    contestants: tuple[tuple[str, Config], ...] = ()
    trees: Mapping[int, Trees] = field(default_factory=dict)
    """Of rules that rank by them."""
    config_trees: Mapping[int, Mapping[str, ConfigTrees]] = field(default_factory=dict)
    """Of rules that pick configs by them, by variant."""
    closer: Mapping[int, Closer] = field(default_factory=dict)
    """Of rules that take a closer look."""
    _sorted: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def wrong_parts(self) -> list[str]:
        """What is wrong with parts of trees, which are read when somebody asks them."""
        found = []
        chosen = [
            (f" for configs of {name}", one.trees) for of in self.config_trees.values() for name, one in of.items()
        ]
        looks = [(" of a closer look", one.trees) for one in self.closer.values()]
        for what, trees in [*(("", trees) for trees in self.trees.values()), *looks, *chosen]:
            for at in range(len(trees.parts)):
                try:
                    trees.parts[at]
                except (ValueError, RecursionError) as error:
                    found.append(f"part {at} of the trees{what}: {notices.what_failed(error)}")
        return found

    def neighbours(self, rule: Rule) -> Neighbours | None:
        """What a rule that ranks by the nearest shapes asks; None where it does not, or where it has no shapes."""
        shapes = self.shapes.get(rule.index)
        if not rule.nearest or not shapes or not set(rule.nearest) <= set(self.coordinates):
            return None
        trees, config_trees = self.trees.get(rule.index), self.config_trees.get(rule.index, {})
        closer = self.closer.get(rule.index)
        return Neighbours(self.coordinates, rule.nearest, self.contestants, shapes, trees, config_trees, closer)

    def nearest(self, rule: Rule, facts: Mapping[str, Any]) -> Nearest | None:
        """The shape behind a rule that these facts are nearest to, None where the rule has none."""
        here: list[Any] = [facts.get(name) for name in self.facts]
        if not all(isinstance(size, int) for size in here):
            return None
        shapes, by_first = self.rules.get(rule.index, ()), self._by_first(rule.index)
        above = bisect.bisect_left(by_first, here[0], key=lambda place: shapes[place][0])
        best = math.inf, -1
        for places in (by_first[above:], by_first[:above][::-1]):
            for place in places:  # the farther away, the farther in the first size
                if _factor(here[0], shapes[place][0]) > best[0]:
                    break
                best = min(best, (max(map(_factor, here, shapes[place])), place))
        return Nearest(dict(zip(self.facts, shapes[best[1]], strict=True)), best[0]) if shapes else None

    def _by_first(self, index: int) -> list[int]:
        """The places of a rule's shapes by their first size."""
        if index not in self._sorted:
            shapes = self.rules.get(index, ())
            self._sorted[index] = sorted(range(len(shapes)), key=lambda place: shapes[place][0])
        return self._sorted[index]

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
    one, other = one if one > 1 else 1, other if other > 1 else 1
    return float(one / other if one > other else other / one)


def _beside(table: Table) -> Beside:
    """What is known of the file beside a table; of one that came from no file, its place."""
    if not table.beside:
        table.beside.append(file_beside(table.file, table.layer))
    found: Beside = table.beside[0]
    return found


def read_beside(table: Table) -> MeasuredSizes | None:
    """What lies beside a table, read once; None where nothing does, or nothing that can be read as this."""
    place = _beside(table)
    if place.found is None:
        place.found = _read(table)
    return place.found if isinstance(place.found, MeasuredSizes) else None


def neighbours_of(table: Table, rule: Rule) -> Neighbours | None:
    """The measured shapes that a rule ranks by, read at first use; None for a rule that ranks by its own order."""
    if rule.nearest is None:
        return None
    if rule.index not in table.asked:
        table.asked[rule.index] = found = _ready(table, rule)
        if found is None:
            notices.notice(f"{table.file}:{rule.line} rules[{rule.index}]: {without_shapes(table, rule)}")
    return table.asked[rule.index]


def _ready(table: Table, rule: Rule) -> Neighbours | None:
    """Those of one rule. Trees that turn out to be none make the whole file one that cannot be read."""
    beside_it = read_beside(table)
    found = beside_it.neighbours(rule) if beside_it is not None else None
    try:
        return found.ready() if found is not None else None
    except (ValueError, RecursionError) as error:
        _beside(table).found = _no_such_file(table, error)
        return None


def without_shapes(table: Table, rule: Rule) -> str:
    """Why a rule that ranks by measured shapes cannot; "" where it can, and for all other rules."""
    if rule.nearest is None or neighbours_of(table, rule) is not None:
        return ""
    found, file = _beside(table).found, beside(Path(table.file)).name
    if not isinstance(found, MeasuredSizes):
        why = str(found)
    elif not found.shapes.get(rule.index):
        why = f"{file} has no shapes for it"
    else:
        missing = sorted(set(rule.nearest) - set(found.coordinates))
        why = f"{file} has no coordinate {', '.join(missing)}; it has {', '.join(found.coordinates)}"
    return f"has no measured shapes to rank by: {why}. Its own order counts"


def bytes_beside(table: Table) -> bytes:
    """What lies beside a table, as it lies there. Raises OSError or ValueError, also where it is not the table's."""
    return _bytes_beside(table)[0]


def _bytes_beside(table: Table) -> tuple[bytes, str]:
    """The same with its digest."""
    place, name = _beside(table), beside(Path(table.file)).name
    if not place.file.is_file():
        raise FileNotFoundError(f"there is no {name}")
    with place.file.open("rb") as stream:
        data = stream.read(MOST_BYTES + 1)
        state = state_of(os.fstat(stream.fileno())) if place.state is not None else None
    if len(data) > MOST_BYTES:
        raise ValueError(f"{name} has more than {MOST_BYTES >> 20} MiB")
    digest = hashlib.sha256(data).hexdigest()
    if not place.belongs(digest, state):
        raise ValueError(OF_ANOTHER)
    return data, digest


OF_ANOTHER = (
    "it is not the one that this table was written with: both were written anew since (registry.reload_tables() reads "
    "them), or a crash left one of them (tune again)"
)

MOST_KNOWN = 8
_known: dict[str, MeasuredSizes] = {}
"""By what the file holds: tables are read anew, time and again, and the shipped ones' shapes stay what they were."""


def _read(table: Table) -> MeasuredSizes | str:
    """The shapes, or what is wrong with their file."""
    try:
        data, digest = _bytes_beside(table)
        if digest in _known:
            return _known[digest]
        with garbage.none_looked_for():
            found = _checked(Decoder(_File).decode(data))
        _known.update({digest: found} if len(_known) < MOST_KNOWN else {})
        return found
    except (OSError, ValueError, RecursionError) as error:
        return _no_such_file(table, error)


def _no_such_file(table: Table, error: BaseException) -> str:
    return notices.clip(f"{beside(Path(table.file)).name}: {notices.what_failed(error)}", MAX_MESSAGE)


_Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
_Row = tuple[tuple[Annotated[int, Meta(ge=0)], ...], tuple[_Number, ...], tuple[_Number, ...]]


class _Trees(Struct, forbid_unknown_fields=True):
    coordinates: list[Coordinate]
    variants: list[Name]
    parts: list[Raw]

    def made(self) -> Trees:
        return trees_of(self.coordinates, self.variants, [partial(_LISTED.decode, part) for part in self.parts])


class _ConfigTrees(_Trees, forbid_unknown_fields=True):
    order: str = ""


_LISTED = Decoder(list[Any])


class _File(Struct, forbid_unknown_fields=True):
    """As it is written: `text`."""

    facts: list[Name]
    coordinates: list[Coordinate]
    contestants: list[tuple[Name, dict[str, int | float | str | bool]]]
    rules: dict[str, list[_Row]]
    trees: dict[str, _Trees] = {}
    closer: dict[str, _Trees] = {}
    config_trees: dict[str, dict[Name, _ConfigTrees]] = {}
    same: dict[str, dict[Name, tuple[int, str]]] = {}
    """Trees for configs that are those of another rule, with an order of their own."""

    def chosen(self) -> dict[int, dict[str, ConfigTrees]]:
        """The trees for configs of each rule."""
        found = {
            int(index): {name: ConfigTrees(one.made(), one.order) for name, one in own.items()}
            for index, own in self.config_trees.items()
        }
        for index, names in self.same.items():
            for name, (rule, order) in names.items():
                if name not in self.config_trees.get(str(rule), {}):
                    raise ValueError(f"rule {index} has the trees of rule {rule} for configs of {name}, which has none")
                found.setdefault(int(index), {})[name] = ConfigTrees(found[rule][name].trees, order)
        return found


def _checked(file: _File) -> MeasuredSizes:
    """What was read, held against itself."""
    if len(set(file.coordinates)) < len(file.coordinates):
        raise ValueError("a coordinate is listed twice")
    for listed in file.rules.values():
        if listed and not file.facts:
            raise ValueError("no fact is listed that a shape is known by")
        for sizes, point, flat in listed:
            if len(sizes) != len(file.facts) or len(point) != len(file.coordinates):
                raise ValueError("a shape has not one size for each fact, or not one value for each coordinate")
            if len(flat) % 3:
                raise ValueError("a result is not of three numbers")
            if not all(c.is_integer() and 0 <= c < len(file.contestants) for c in flat[::3]):
                raise ValueError("a shape names a contestant that is not listed")
    return MeasuredSizes(
        tuple(file.facts),
        {int(index): tuple([sizes for sizes, *_ in listed]) for index, listed in file.rules.items()},
        tuple(file.coordinates),
        {int(index): Shapes(listed) for index, listed in file.rules.items()},
        tuple(file.contestants),
        {int(index): found.made() for index, found in file.trees.items()},
        file.chosen(),
        {int(index): Closer(found.made()) for index, found in file.closer.items()},
    )


def text(found: MeasuredSizes) -> str:
    """The file of these shapes: a line each. Raises ValueError for what could not be read again."""
    parts = []
    for index, shapes in sorted(found.shapes.items()):
        lines = [_dumped(_flat(shape)) for shape in shapes]
        parts.append(f'"{index}": [\n' + ",\n".join(lines) + "\n]")
    contestants = ",\n".join(json.dumps([name, dict(config)]) for name, config in found.contestants)
    made = (
        f'{{"facts": {json.dumps(found.facts)}, "coordinates": {json.dumps(found.coordinates)},\n'
        f'"contestants": [\n{contestants}\n],\n"rules": {{\n' + ",\n".join(parts) + "\n}" + _trees_text(found) + "}\n"
    )
    _checked(Decoder(_File).decode(made))  # what is written must load
    return made


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _trees_text(found: MeasuredSizes) -> str:
    rules = [f'"{index}": {_listed(trees)}' for index, trees in sorted(found.trees.items())]
    chosen, same = [], []
    written: dict[int, int] = {}  # the first rule that has these very trees
    for index, each in sorted(found.config_trees.items()):
        own = [name for name in sorted(each) if written.setdefault(id(each[name].trees), index) == index]
        lines = ",\n".join(f'"{name}": {_listed(each[name].trees, order=each[name].order)}' for name in own)
        chosen += [f'"{index}": {{\n{lines}}}'] if own else []
        others = {name: [written[id(each[name].trees)], each[name].order] for name in sorted(each) if name not in own}
        same += [f'"{index}": {_dumped(others)}'] if others else []
    looks = [f'"{index}": {_listed(one.trees)}' for index, one in sorted(found.closer.items())]
    named = (("trees", rules), ("closer", looks), ("config_trees", chosen), ("same", same))
    return "".join(f',\n"{name}": {{\n' + ",\n".join(parts) + "\n}" for name, parts in named if parts)


def _listed(trees: Trees, **more: str) -> str:
    """A line each, behind what more there is to say."""
    listed = {name: value for name, value in more.items() if value} | trees.listed()
    lines = [",\n".join(map(_dumped, part)) for part in listed.pop("parts")]
    return f'{json.dumps(listed)[:-1]}, "parts": [[\n' + "\n],[\n".join(lines) + "\n]]}"


def _flat(shape: Shape) -> list[list[float]]:
    results = [x for r in shape.results for x in (r.contestant, round(r.lost, 4), round(r.guess, 4))]
    return [list(shape.sizes), [round(value, DIGITS) for value in shape.point], results]
