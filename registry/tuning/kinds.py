"""The fits of a table, one for each kind of shapes that an op keeps apart.

What is fastest for one kind says little of another: trees that had seen 90 attentions of 32 bits beside 4,241 of 16
lost a fifth to a half more on three draws of those, and those of 32 bits were too few among them to be told well.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.dispatch.in_force import op_fields
from registry.ops.known import op_named
from registry.tables.match import compile_condition
from registry.tables.measured import MeasuredSizes, neighbours_of, read_beside
from registry.tables.model import Rule, Table
from registry.tables.shapes import DIGITS, Shape
from registry.tuning.config_trees import Pooled, pooled_config_trees
from registry.tuning.fit import Earlier, Fit, KnownShapes, fit, fit_known, known_of
from registry.tuning.journal import CaseResults
from registry.tuning.taking_part import Settings

Kind = Mapping[str, Any]
"""Conditions of a rule; of the kind that is left, which comes last, there are none."""


def parted(cases: Sequence[CaseResults]) -> list[tuple[Kind, list[CaseResults]]]:
    """The measured shapes of one op by kind, in the order of rules, without kinds that have none."""
    if not cases:
        return [({}, [])]
    op = cases[0].op
    kinds: list[tuple[Kind, list[CaseResults]]] = [(kind, []) for kind in (*op_named(op).tuning.apart, {})]
    for case in cases:
        next(own for kind, own in kinds if _is_of(op, kind, case.facts)).append(case)
    return [(kind, own) for kind, own in kinds if own]


def _is_of(op: str, kind: Kind, facts: Mapping[str, Any]) -> bool:
    fields = op_fields()[op]
    return all(
        name in facts and compile_condition(name, fields[name], value).matches(facts[name])
        for name, value in kind.items()
    )


def fits(
    cases: Sequence[CaseResults],
    machine: Mapping[str, Any],
    settings: Settings | None = None,
    before: Sequence[Earlier | None] = (),
) -> list[Fit]:
    """The fit of each kind, in the order of rules; with `before`, from what was fitted earlier. A kind of which no
    shape was measured with all its contestants has none. Raises ValueError where no kind has one."""
    known: list[tuple[Kind, KnownShapes, Earlier | None]] = []
    failed: ValueError | None = None
    for place, (kind, own) in enumerate(parted(cases)):
        try:
            known.append((kind, known_of(own, machine, settings), before[place] if place < len(before) else None))
        except ValueError as error:
            failed = error
    if failed is not None and not known:
        raise failed

    @functools.cache
    def pooled() -> dict[str, Pooled]:
        asked: set[str] = set()
        for _, one, held in known:
            if held is None or not held.whole:
                asked |= {name for timed in one.timed for name in timed} - {*(held.config_trees if held else ())}
        return pooled_config_trees([(one.coordinates, one.timed) for _, one, _ in known], asked)

    return [dataclasses.replace(fit_known(one, earlier, pooled), apart=kind) for kind, one, earlier in known]


def kept(
    table: Table, cases: Sequence[CaseResults], machine: Mapping[str, Any], *, other_shapes: bool = False
) -> list[Earlier | None]:
    """Of each kind what a table was fitted to, where its shapes are the same as those behind the table's rule, and its
    configs stand where they stood: others were added. Of another kind the trees for configs of those variants of which
    that is so, and whose source is the same. `other_shapes` may join them where no source has changed."""
    beside = read_beside(table)
    found: list[Earlier | None] = []
    for kind, own in parted(cases):
        rule = _rule_of(table, kind)
        if rule is None or beside is None or neighbours_of(table, rule) is None:
            found.append(None)
            continue
        before = earlier(rule, beside)
        again = fit(own, machine, before=before)
        if other_shapes:
            found.append(_with_todays_order(before, again.moved, rule))
        else:
            same = not again.moved and _told(beside_of([again]), 0) == _told(beside, rule.index)
            found.append(before if same else _of_same_variants(before, again.moved, rule))
    return found


def _of_same_variants(before: Earlier, moved: Sequence[str], rule: Rule) -> Earlier | None:
    """What stays where others are fitted anew. The order of a variant's configs is noted over all shapes that it was
    measured on, so another one tells of new shapes, too."""
    known, variants = rule.evidence.sources if rule.evidence is not None else {}, catalog.get().variants
    same = {name for name in before.config_trees if name in variants and name not in moved}
    same = {name for name in same if known.get(name) == fingerprint_of(variants[name])}
    trees = {name: one for name, one in before.config_trees.items() if name in same}
    return Earlier({}, config_trees=trees, whole=False) if trees else None


def _with_todays_order(before: Earlier, moved: Sequence[str], rule: Rule) -> Earlier | None:
    """The order of a variant's configs on some shapes is another one on more; None where its source is another, too."""
    known, variants = rule.evidence.sources if rule.evidence is not None else {}, catalog.get().variants
    if any(known.get(name) != fingerprint_of(variants[name]) for name in moved):
        return None
    again = {name: dataclasses.replace(before.config_trees[name], order="") for name in moved}
    return dataclasses.replace(before, config_trees={**before.config_trees, **again})


def earlier(rule: Rule, beside: MeasuredSizes) -> Earlier:
    """What was found when this rule was fitted."""
    index = rule.index
    trees, configs = beside.trees.get(index), beside.config_trees.get(index, {})
    return Earlier(rule.nearest or {}, trees, configs, beside.closer.get(index))


def _rule_of(table: Table, kind: Kind) -> Rule | None:
    """That of this kind; of the general one the last."""
    fields = op_fields()[table.op]
    asked = [compile_condition(name, fields[name], value) for name, value in kind.items()]
    if not kind:
        return table.rules[-1]
    return next((rule for rule in table.rules if all(one in rule.conditions for one in asked)), None)


def _told(beside: MeasuredSizes, index: int) -> list[Any]:
    """The shapes of a rule, as people know them, with what each contestant lost that says something of others."""
    names = [(name, tuple(config.items())) for name, config in beside.contestants]
    told = lambda shape: [(names[r.contestant], r.lost, r.guess) for r in shape.results if not r.here]  # noqa: E731
    return [(one.sizes, told(one)) for one in beside.shapes[index]]


def beside_of(found: Sequence[Fit]) -> MeasuredSizes:
    """What lies beside the table of these fits: all in the same coordinates."""
    coordinates = tuple(dict.fromkeys(name for one in found for name in one.coordinates))
    named = dict.fromkeys((name, tuple(config.items())) for one in found for name, config in one.contestants)
    places = {key: place for place, key in enumerate(named)}
    return MeasuredSizes(
        op_named(found[0].op).tuning.leading,
        {index: tuple(shape.sizes for shape in one.shapes) for index, one in enumerate(found)},
        coordinates,
        {index: tuple(_placed(one, coordinates, places)) for index, one in enumerate(found)},
        tuple((name, dict(config)) for name, config in named),
        {index: one.trees for index, one in enumerate(found) if one.trees is not None},
        {index: one.config_trees for index, one in enumerate(found) if one.config_trees},
        {index: one.closer for index, one in enumerate(found) if one.closer is not None},
    )


def _placed(found: Fit, coordinates: Sequence[str], places: Mapping[Any, int]) -> list[Shape]:
    """The shapes of a fit, in these coordinates and with contestants at these places."""
    there = [places[name, tuple(config.items())] for name, config in found.contestants]
    shapes = []
    for shape, problem in zip(found.shapes, found.problems, strict=True):
        likeness = problem.likeness()
        point = tuple(round(likeness.get(name, 0.0), DIGITS) for name in coordinates)
        results = tuple(result._replace(contestant=there[result.contestant]) for result in shape.results)
        shapes.append(dataclasses.replace(shape, point=point, results=results))
    return shapes
