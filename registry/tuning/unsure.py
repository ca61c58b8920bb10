"""Which shapes are worth measuring for a table: those on which parts of what it knows disagree.

The trees of a rule come in parts, each of which was fitted without some of the measured shapes (tables/trees.py). Where
one part would run what another expects to be slow, the table guesses, and a measurement there teaches most. Of 2,000
random gradients the 160 of which the table was least sure lost 6.4% by its picks, where random ones lost 1.6%; of 3,500
attentions 330 lost 5.5%, where random ones lost 2.8%.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch import in_force
from registry.dispatch.catalog import catalog
from registry.ops.parts.cases import Case
from registry.tables.config_order import ASKED, Config, own_order
from registry.tables.measured import neighbours_of
from registry.tables.nearest import CAP, Neighbours
from registry.tuning.contestants import LineUp, Selection, line_up

Opinion = Mapping[tuple[str, int], float]
"""What each variant is expected to lose with each of its configs, in log time."""


def least_sure(cases: Sequence[Case], target: Target, count: int, selection: Selection | None = None) -> list[Case]:
    """`count` of these shapes, in the order given: those on which the tables in force know least what is fastest."""
    doubts = [doubt(case, target, selection) for case in cases]
    kept = sorted(range(len(cases)), key=lambda place: -doubts[place])[:count]
    return [cases[place] for place in sorted(kept)]


def doubt(case: Case, target: Target, selection: Selection | None = None) -> float:
    """What is lost, in log time, where one opinion chooses and another is right, the mean over all pairs; endless
    where no table knows anything."""
    planned = line_up(case, target, selection or Selection())
    if not planned.contestants:
        return 0.0
    found = list(_opinions(planned))
    lost = [_lost(one, other) for one, other in itertools.permutations(found, 2) if one.keys() & other.keys()]
    return sum(lost) / len(lost) if lost else math.inf


def _lost(one: Opinion, other: Opinion) -> float:
    """By the pick of one opinion, as the other has it."""
    both = sorted(one.keys() & other.keys())
    picked = min(both, key=one.__getitem__)
    return min(other[picked] - min(map(other.__getitem__, both)), CAP)


def _opinions(planned: LineUp) -> Iterator[Opinion]:
    configs: dict[str, list[Config]] = {}
    for one in planned.contestants:
        configs.setdefault(one.variant, []).append(one.config)
    neighbours, likeness = _neighbours(planned.problem), planned.problem.likeness()
    if neighbours is None:
        return
    orders = {name: _by_parts(neighbours, likeness, planned.problem, name, each) for name, each in configs.items()}
    for part, lost in enumerate(_of_variants(neighbours, likeness)):
        known = lost.keys() & configs.keys()
        if known:
            yield {
                (name, place): lost[name] + more
                for name in sorted(known)
                for place, more in enumerate(orders[name][part % len(orders[name])])
            }


def _neighbours(problem: Problem) -> Neighbours | None:
    """Those of the first rule for a problem, where it goes by what was measured."""
    target = problem.target
    match = next(in_force.tables().match(problem.op, problem.facts(), target.arch, target.name), None)
    return neighbours_of(match.table, match.rule) if match is not None and match.rule.nearest is not None else None


def _of_variants(neighbours: Neighbours, likeness: Mapping[str, float]) -> Iterator[Mapping[str, float]]:
    """What variants lose: as each part of the trees says, or as each of the nearest shapes."""
    if neighbours.trees is not None:
        here = neighbours.trees.at(likeness)
        for part in range(len(neighbours.trees.parts) - 1):
            yield neighbours.trees.lost(here, part)
    elif (advice := neighbours.ask(likeness)) is not None:
        for said in advice.said:
            yield {name: known.lost for name, known in said.items()}


def _by_parts(
    neighbours: Neighbours, likeness: Mapping[str, float], problem: Problem, name: str, configs: Sequence[Config]
) -> list[list[float]]:
    """What each config of a variant loses to its best, as each part of the trees for configs says."""
    trees = neighbours.config_trees.get(name)
    if trees is None or len(configs) < 2:
        return [[0.0]]
    order = own_order(configs, catalog.get().variants[name].costs(problem))[:ASKED]
    here = trees.trees.at(likeness)
    found = []
    for part in range(len(trees.trees.parts) - 1):
        pairs = zip(trees.told(order), order, strict=True)
        took = [trees.trees.sums(here + told, part)[0] + math.log(guess) for told, (_, guess) in pairs]
        found.append([each - min(took) for each in took])
    return found
