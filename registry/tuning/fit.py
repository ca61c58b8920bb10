"""Measurements -> what a table ranks by: the measured shapes, weights of the coordinates in which they are near, trees.

Weights are found by leaving out one shape at a time: those are good under which the shapes that are then nearest speak
for what was fastest on it. Where there are shapes enough, trees are fitted: to what the configs of a variant took
(tuning/config_trees.py), and to what the variants lose by those that they choose (tuning/trees.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.errors import InvalidArgument
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.tables.closer import Closer
from registry.tables.config_order import ConfigTrees, own_order
from registry.tables.nearest import NEVER, Config
from registry.tables.shapes import DIGITS, Shape
from registry.tables.trees import Trees
from registry.tuning.closer import closer_look
from registry.tuning.config_trees import Pooled, Timed, fitted_config_trees, order_digest
from registry.tuning.journal import CaseResults
from registry.tuning.taking_part import (
    BY_LAUNCHES,
    UNEVEN,
    Settings,
    asked_of,
    candidates,
    comparable,
    excluded,
    firsts_of,
    is_wrong,
    key_of,
    results_of,
    telling,
)
from registry.tuning.trees import fitted_trees
from registry.tuning.weights import LEAST, found_weights


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raise InvalidArgument for a number out of range, or for none (NaN)."""
    if not low <= value <= high:
        raise InvalidArgument(name, value, f"{low:g}..{high:g}")


@dataclass
class Fit:
    """The measured shapes of an op, and how near they are to each other."""

    op: str
    cases: list[CaseResults]
    """Those of `shapes`, in their order."""
    shapes: list[Shape]
    problems: list[Any]
    """Those of `cases`, on `target`."""
    declared: Sequence[Mapping[str, Config | None]]
    """For each of these, what each variant measured there puts first today."""
    timed: Sequence[Mapping[str, Timed]]
    """And what was timed of those with several configs."""
    coordinates: tuple[str, ...]
    contestants: tuple[tuple[str, Config], ...]
    weights: dict[str, float]
    trees: Trees | None
    config_trees: Mapping[str, ConfigTrees]
    """Each with the digest of the order that it was fitted to; today's, where nobody kept one."""
    closer: Closer | None
    orders: Mapping[str, str]
    """Of the same variants that digest today."""
    libraries: frozenset[str]
    """Variants that compile nothing: kernels of libraries, which run where nobody has measured."""
    target: Target
    skipped: dict[str, str] = field(default_factory=dict)
    """Shapes that are left out, and why."""
    apart: Mapping[str, Any] = field(default_factory=dict)
    """What tells problems of this kind from others of the op, which have fits of their own (tuning/kinds.py)."""

    @property
    def moved(self) -> list[str]:
        """Variants that declare other configs today than those that their trees know by place, or in another order."""
        return [name for name, trees in self.config_trees.items() if trees.order != self.orders.get(name, trees.order)]


@dataclass(frozen=True)
class Earlier:
    """What was found before of the same shapes; or, where it is not `whole`, only the trees that stay."""

    weights: Mapping[str, float]
    trees: Trees | None = None
    config_trees: Mapping[str, ConfigTrees] = field(default_factory=dict)
    closer: Closer | None = None
    whole: bool = True


@dataclass(frozen=True)
class KnownShapes:
    """What is known of measured shapes of one op before anything is fitted to them."""

    cases: Sequence[CaseResults]
    settings: Settings
    fair: list[CaseResults]
    """Those that take part."""
    could: Collection[int]
    """Those that could if others had been timed as they were, by identity."""
    target: Target
    problems: list[Any]
    coordinates: tuple[str, ...]
    points: list[tuple[float, ...]]
    sources: Mapping[str, str]
    configs: list[dict[str, Sequence[Config]]]
    timed: list[dict[str, Timed]]


def known_of(cases: Sequence[CaseResults], machine: Mapping[str, Any], settings: Settings | None = None) -> KnownShapes:
    """Of cases of one op, measured on this machine where they name no other. Raises ValueError where nothing was
    measured."""
    settings = settings or Settings()
    whole = [case for case in cases if comparable(case, settings)]
    fair = telling(whole, settings)
    if not fair:
        raise ValueError("no shape has been measured with all its contestants")
    target = target_of(machine)
    problems = [problem_of(case, target_of(case.machine) if case.machine else target) for case in fair]
    likenesses = [problem.likeness() for problem in problems]
    coordinates = tuple(dict.fromkeys(name for found in likenesses for name in found))
    points = [tuple(round(found.get(name, 0.0), DIGITS) for name in coordinates) for found in likenesses]
    sources = {name: fingerprint_of(variant) for name, variant in catalog.get().of(fair[0].op).items()}
    configs = [_configs(case, problem) for case, problem in zip(fair, problems, strict=True)]
    timed = [
        _timed(case, problem, own, dict(zip(coordinates, point, strict=True)), sources, settings)
        for case, problem, own, point in zip(fair, problems, configs, points, strict=True)
    ]
    could = {id(case) for case in whole}
    return KnownShapes(cases, settings, fair, could, target, problems, coordinates, points, sources, configs, timed)


def fit(
    cases: Sequence[CaseResults],
    machine: Mapping[str, Any],
    settings: Settings | None = None,
    before: Earlier | None = None,
) -> Fit:
    """Fit the cases of one op, measured on this machine where they name no other; with `before`, the shapes for what
    was fitted before.

    Raises ValueError where nothing was measured.
    """
    return fit_known(known_of(cases, machine, settings), before)


def fit_known(
    known: KnownShapes, before: Earlier | None = None, pooled: Callable[[], Mapping[str, Pooled]] | None = None
) -> Fit:
    """The same of what is known. `pooled`: trees for configs that have seen other cases of the op, too."""
    stay = before.config_trees if before is not None else {}
    before = before if before is not None and before.whole else None
    settings, fair, problems, coordinates = known.settings, known.fair, known.problems, known.coordinates
    points, sources, configs, timed = known.points, known.sources, known.configs, known.timed
    op, target = fair[0].op, known.target
    declared = [_declared(own, problem) for own, problem in zip(configs, problems, strict=True)]
    config_trees = stay
    if before is None:
        config_trees = fitted_config_trees(coordinates, timed, pooled() if pooled is not None else None, stay)
    orders = {name: _order(name, problems, configs) for name in config_trees.keys() & catalog.get().of(op).keys()}
    config_trees = {
        name: dataclasses.replace(trees, order=trees.order or orders.get(name, ""))
        for name, trees in config_trees.items()
    }
    firsts = [firsts_of(candidates(case, settings), today) for case, today in zip(fair, declared, strict=True)]
    shown = Counter(name for found in firsts for name, (_, is_today) in found.items() if is_today)
    settled = {name for name, count in shown.items() if count >= LEAST}
    told = [own.keys() & config_trees.keys() for own in timed]
    asked = [asked_of(*one, settings, sources, settled) for one in zip(fair, firsts, told, strict=True)]
    contestants = tuple(dict.fromkeys(key_of(entry) for could, here in asked for entry in (*could, *here)))
    places = {key: place for place, key in enumerate(contestants)}
    leading = op_named(op).tuning.leading
    sizes = [tuple(problem.facts()[name] for name in leading) for problem in problems]
    each = zip(fair, problems, asked, strict=True)
    results = [results_of(case, problem, entries, places, settings) for case, problem, entries in each]
    shapes = list(map(Shape, sizes, points, results))
    named = tuple((name, dict(config)) for name, config in contestants)
    libraries = frozenset(name for name, variant in catalog.get().of(op).items() if variant.builds is None)
    before = before or _found(coordinates, named, shapes, problems, timed, config_trees)
    every = [one.trees for one in config_trees.values()] + ([before.trees] if before.trees is not None else [])
    every += [before.closer.trees] if before.closer is not None else []
    asked_about = {*before.weights, *(name for trees in every for name in trees.coordinates)}
    kept = [place for place, name in enumerate(coordinates) if name in asked_about]
    shapes = [dataclasses.replace(shape, point=tuple(shape.point[place] for place in kept)) for shape in shapes]
    coordinates = tuple(coordinates[place] for place in kept)
    taken = {id(case) for case in fair}
    left = [case for case in known.cases if id(case) not in taken]
    skipped = {case.text: BY_LAUNCHES if id(case) in known.could else UNEVEN for case in left}
    found = coordinates, named, dict(before.weights), before.trees, config_trees, before.closer, orders
    return Fit(op, fair, shapes, problems, declared, timed, *found, libraries, target, skipped)


def _found(
    coordinates: tuple[str, ...],
    contestants: tuple[tuple[str, Config], ...],
    shapes: Sequence[Shape],
    problems: Sequence[Any],
    timed: Sequence[Mapping[str, Timed]],
    config_trees: Mapping[str, ConfigTrees],
) -> Earlier:
    """What is fitted to shapes of which nothing was found before."""
    each = zip(itertools.count(), shapes, timed, strict=False)
    chosen = [_as_chosen(*one, contestants, config_trees) for one in each]
    weights = found_weights(coordinates, contestants, chosen)
    trees = fitted_trees(coordinates, contestants, chosen, weights)
    closer = closer_look(trees, coordinates, contestants, chosen, problems) if trees is not None else None
    return Earlier(weights, trees, closer=closer)


def target_of(machine: Mapping[str, Any]) -> Target:
    """The device of a results file, whether it is here or not; of one that nobody has heard of, what others of its
    architecture are like."""
    name, arch = str(machine["device"]), str(machine.get("arch", "cpu"))
    for known in (name, arch):
        with contextlib.suppress(InvalidArgument):
            found = Target.named(known)
            sms = int(machine.get("sm_count") or found.sm_count)
            return found if known == name else dataclasses.replace(found, name=name, sm_count=sms)
    return Target(arch, name, int(machine.get("sm_count") or 1))


def problem_of(case: CaseResults, target: Target) -> Any:
    """The problem of a measured shape."""
    shape = case.shape if "op" in case.shape else {"op": case.op, "shape": case.shape}
    return Case.from_data(shape).problem(target)


def _timed(
    case: CaseResults,
    problem: Any,
    declared: Mapping[str, Sequence[Config]],
    likeness: Mapping[str, float],
    sources: Mapping[str, str],
    settings: Settings,
) -> dict[str, Timed]:
    """What was timed of the variants with several configs, as their source is today."""
    found: dict[str, Timed] = {}
    ran = [e for e in case.entries.values() if (e.timed or is_wrong(e)) and e.fingerprint == sources.get(e.variant)]
    for name in dict.fromkeys(entry.variant for entry in ran if not excluded(entry.variant, settings)):
        took = {key_of(entry): entry.ms if entry.timed else math.inf for entry in ran if entry.variant == name}
        variant = catalog.get().variants[name]
        configs = declared[name] if len(took) > 1 else []
        ms = {at: took[key] for at, config in enumerate(configs) if (key := (name, tuple(config.items()))) in took}
        if len(ms) > 1 and min(ms.values()) < math.inf:
            cost = variant.costs(problem)
            found[name] = Timed(likeness, configs, cost, ms)
    return found


def _as_chosen(
    place: int, shape: Shape, timed: Mapping[str, Timed], contestants: Sequence[Any], trees: Mapping[str, ConfigTrees]
) -> Shape:
    """A shape with what its variants lose by the configs that trees choose which have not seen it: that is what they
    lose on a shape that nobody measured."""
    more = {}
    for name in timed.keys() & trees.keys():
        ms = timed[name].ms
        chosen = ms[timed[name].order(trees[name], place)[0]]
        more[name] = math.log(chosen / min(ms.values())) if chosen < math.inf else NEVER
    results = (r._replace(lost=r.lost + more.get(contestants[r.contestant][0], 0.0)) for r in shape.results)
    return dataclasses.replace(shape, results=tuple(results))


def _configs(case: CaseResults, problem: Any) -> dict[str, Sequence[Config]]:
    """What each variant measured there declares for it today."""
    variants, names = catalog.get().variants, dict.fromkeys(entry.variant for entry in case.entries.values())
    return {name: variants[name].configs_for(problem) if name in variants else () for name in names}


def _order(name: str, problems: Sequence[Any], configs: Sequence[Mapping[str, Sequence[Config]]]) -> str:
    """The digest of a variant's own order on all shapes on which it was measured, whatever its source was then."""
    variant, measured = catalog.get().variants[name], zip(problems, configs, strict=True)
    return order_digest(own_order(own[name], variant.costs(one)) for one, own in measured if name in own)


def _declared(configs: Mapping[str, Sequence[Config]], problem: Any) -> dict[str, Config | None]:
    variants = catalog.get().variants
    return {
        name: next((one for one in declared if not variants[name].refusals(problem, one)), None)
        for name, declared in configs.items()
    }
