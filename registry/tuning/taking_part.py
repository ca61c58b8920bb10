"""Which shapes and contestants take part in a fit, and what each of these is held to have lost."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from registry.dispatch.catalog import catalog
from registry.tables.nearest import NEVER, Config
from registry.tables.shapes import HERE, Result
from registry.tuning.journal import CaseResults, Entry

if TYPE_CHECKING:
    from registry.tuning.contestants import Contestant

WRONG = ("wrong", "hung", "crashed", "device error", "error")
"""Failures that must never be dispatched to; others (does not compile, does not fit) give way by themselves."""

SHORT_MS = 0.03
"""Below this a single launch is mostly that. Left out, 336 attentions lost 1.9%, each asked of the others; not 2.4%."""
UNEVEN = "not all contestants were timed, so that no comparison is fair"
BY_LAUNCHES = f"under {1e3 * SHORT_MS:.0f} us by single launches, where others were timed by replayed graphs"


@dataclass(frozen=True)
class Settings:
    """What takes part in a fit."""

    exclude: tuple[str, ...] = ("peer.*",)
    """Variants that are measured for comparison and never picked."""


Firsts = dict[str, tuple[Entry | None, bool]]
"""Of each variant its own first config, if that was timed, and whether it is the one that it puts first today."""


def firsts_of(timed: Sequence[Entry], declared: Mapping[str, Config | None]) -> Firsts:
    found: Firsts = {}
    for name in dict.fromkeys(entry.variant for entry in timed):
        first = own_first([entry for entry in timed if entry.variant == name], declared[name])
        found[name] = first, first is not None and first.config == declared[name]
    return found


def own_first(own: Sequence[Entry], declared: Config | None) -> Entry | None:
    """The config that a variant puts first today, where that one was timed; else what was its first at the time."""
    today = next((entry for entry in own if entry.config == declared), None)
    return today or next((entry for entry in own if entry.first), None)


def asked_of(
    case: CaseResults,
    firsts: Firsts,
    told: Collection[str],
    settings: Settings,
    sources: Mapping[str, str],
    settled: Collection[str],
) -> tuple[list[Entry], list[Entry]]:
    """The contestants that could run by a table, and those that must never run; and those that run on this very shape
    alone.

    Of a variant that guesses no costs that is its own first config, and its fastest here alone. Of one that does, but
    was measured with an earlier source, and of one whose first config was not timed since, it is the fastest alone: it
    tells how good the variant is, not which config is. A variant whose first config was timed on shapes enough
    (`settled`) is judged by those: what the best of many earlier configs took is less than it will take, and more where
    the config that came first since is better. Of one whose configs trees tell (`told`) it is the fastest, which runs
    where the shape itself was measured.
    """
    variants = catalog.get().variants
    timed = candidates(case, settings)
    chooses = {name for name in firsts if name in variants and variants[name].cost is not None}
    own = {name: first for name, (first, _) in firsts.items() if name not in chooses}
    stale = {e.variant for e in timed if e.variant in sources and e.fingerprint != sources[e.variant]}
    untimed = {name for name, (_, is_today) in firsts.items() if not is_today}
    stale -= {name for name in own if firsts[name][1]}
    own |= {name: min((e for e in timed if e.variant == name), key=lambda e: e.ms) for name in {*stale, *told}}
    gone = ((stale | untimed) & set(settled)) - chooses
    kept = [e for e in timed if e.variant not in gone and own.get(e.variant) in (None, e)]
    kept += [e for e in case.entries.values() if is_wrong(e) and not excluded(e.variant, settings)]
    untold = [name for name in own if name not in stale and name not in told]
    fastest = [min((e for e in timed if e.variant == name), key=lambda e: e.ms) for name in untold]
    return kept, [e for e in fastest if own[e.variant] not in (None, e) and e.fingerprint == sources.get(e.variant)]


def results_of(
    case: CaseResults,
    problem: Any,
    asked: tuple[Sequence[Entry], Sequence[Entry]],
    places: Mapping[Any, int],
    settings: Settings,
) -> tuple[Result, ...]:
    """What these contestants lost on a shape."""
    best = min(entry.ms for entry in candidates(case, settings))
    lost = lambda entry: NEVER if entry.failure is not None else round(math.log(entry.ms / best), 4)  # noqa: E731
    could, here = asked
    found = [Result(places[key_of(one)], lost(one), round(guess_of(one, problem), 4)) for one in could]
    return *found, *(Result(places[key_of(one)], lost(one), HERE) for one in here)


def guess_of(entry: Entry | Contestant, problem: Any) -> float:
    """The log of what the variant guesses of a contestant's time; 0 where it guesses nothing, as of a config of an
    earlier version, mostly."""
    variant = catalog.get().variants.get(entry.variant)
    costs = variant.costs(problem) if variant is not None else None
    guess = costs(entry.config) if costs is not None else None
    return math.log(guess) if guess is not None else 0.0


def key_of(entry: Entry) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """A contestant, as what it is found by."""
    return entry.variant, tuple(entry.config.items())


def is_wrong(entry: Entry) -> bool:
    """Whether a contestant failed in a way that must keep it from ever being dispatched to there."""
    return entry.failure is not None and entry.failure["why"] in WRONG


@functools.lru_cache(maxsize=1024)
def excluded(variant: str, settings: Settings) -> bool:
    return any(fnmatch.fnmatch(variant, pattern) for pattern in settings.exclude)


def candidates(case: CaseResults, settings: Settings) -> list[Entry]:
    """The timed contestants that a rule may pick."""
    return [entry for entry in case.timed.values() if not excluded(entry.variant, settings)]


def telling(cases: list[CaseResults], settings: Settings) -> list[CaseResults]:
    """Without the short ones that were timed by single launches, where others were timed by replayed graphs: of a few
    microseconds it is launches that such times compare, and near shapes must not contradict each other."""
    if all(case.mode == cases[0].mode for case in cases):
        return cases
    best = lambda case: min(entry.ms for entry in candidates(case, settings))  # noqa: E731
    return [case for case in cases if case.mode == "graph" or best(case) >= SHORT_MS]


def comparable(case: CaseResults, settings: Settings) -> bool:
    """Whether every contestant that passed the gate had its turn."""
    waiting = [
        e for e in case.entries.values() if e.failure is None and not e.samples and not excluded(e.variant, settings)
    ]
    return not waiting and bool(candidates(case, settings))
