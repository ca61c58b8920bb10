"""Which variants and configs may well be the fastest of a problem: what a `try_out` block compares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from registry.contract.capability import Config
from registry.contract.problem import Problem
from registry.contract.variant import Variant
from registry.dispatch.scope import Scope
from registry.dispatch.select import Moment, Question, Ranked

WITHIN = 0.4
"""Log time that a contender may be expected to lose to the best. Of shapes left out in turn, the best of four such
loses 0.4% (products; of those within 0.2 0.65), 0.3 (attention; 0.4) and 0.2 (gradients; 0.3), of two 1.1, 0.7 and 0.6,
of six 0.2, 0.2 and 0.1, where the first alone loses 3.5, 1.9 and 1.4."""
UNTOLD = 0.1
"""What the next variant of an order, and the next config of a variant, are taken to lose where no measurement tells."""


@dataclass(frozen=True)
class Contender:
    """One variant with one config."""

    variant: Variant
    config: Config
    behind: float
    """Log time that it is expected to lose to the best."""


def contenders(problem: Problem, scope: Scope, most: int) -> list[Contender]:
    """Those that are expected to be fastest, the pick of `decide` first, and another variant than its among them where
    one is near: so the best of four loses 0.32% of products for 0.36 and 0.14% of gradients for 0.21. None where there
    is nothing to find out: the pick was asked for, tried out or measured itself, or nothing else comes near."""
    question = Question(problem, Moment.now(), scope.preferred)
    places = list(itertools.islice(question.legal(), 2 * most))
    if not places or scope.forced_for(problem.op) is not None:
        return []
    pick, config, _ = places[0]
    if pick.settled or (pick.advice is not None and pick.advice.measured):
        return []
    first = Contender(question.variants[pick.variant], config, 0.0)
    others = [
        one
        for rank, (place, config, _) in enumerate(places)
        if rank == 0 or place.variant not in question.late
        for one in _of_variant(question, rank, pick, place, config)
        if one.behind <= WITHIN and (one.variant.name, one.config) != (first.variant.name, first.config)
    ]
    near = sorted(others, key=lambda one: one.behind)
    found = [first, *near[: most - 1]]
    another = next((one for one in near if one.variant is not first.variant), None)
    if another is not None and all(one.variant is first.variant for one in found):
        found[-1] = another
    return found if len(found) > 1 else []


def _of_variant(question: Question, rank: int, pick: Ranked, place: Ranked, config: Config) -> Iterator[Contender]:
    """The configs of a variant, with what each is expected to lose to the best of all."""
    variant, problem = question.variants[place.variant], question.problem
    if pick.advice is None:
        lost = rank * UNTOLD
    else:
        known = pick.advice.lost if place.match is pick.match else {}
        lost = known.get(variant.name, math.inf) - known.get(pick.variant, 0.0)
    if place.config is not None:
        yield Contender(variant, config, lost)
        return
    legal = variant.legal_configs(problem)
    if place.advice is None:
        told = [(at * UNTOLD, one) for at, one in enumerate(legal)]
    else:
        cost = variant.costs(problem)
        told = place.advice.behind(variant.name, legal, cost)
    for more, one in told:
        yield Contender(variant, one, lost + more)
