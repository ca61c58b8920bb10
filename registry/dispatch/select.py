"""legal -> rank -> pick. `explain` and the launch both go through `decide`, so they cannot disagree."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from registry import notices
from registry.contract.capability import Config, Reason, config_reasons, reasons_against
from registry.contract.describe import config_text
from registry.contract.problem import Problem
from registry.contract.target import interpreted_as
from registry.contract.variant import Order, Variant
from registry.dispatch.catalog import catalog
from registry.dispatch.configs import undeclared, unfit
from registry.dispatch.decision import Candidate, Decision
from registry.dispatch.discovery import Catalog
from registry.dispatch.quarantine import Held, quarantine, quarantine_reason
from registry.dispatch.scope import EMPTY, Forced, Scope
from registry.dispatch.tried import Held as TriedHeld
from registry.dispatch.tried import key_of, tried
from registry.errors import IllegalVariant, NoLegalVariant

if TYPE_CHECKING:  # tables are read at the first decision, not at import
    from registry.tables import Match, Rule, Table, TableSet, Use
    from registry.tables.closer import Guess, Runs
    from registry.tables.nearest import Advice, Neighbours


LATE = "; behind the others of the rule: it builds a kernel for each new length, which no measurement has"


class Ranked(NamedTuple):
    """A place in the order: a variant, the config the table wants for it, and where that was said."""

    variant: str
    config: Config | None
    because: str
    match: Match | None = None
    advice: Advice | None = None
    """What the measured shapes nearest to the problem say, where the rule goes by them."""
    settled: bool = False
    """Whether somebody asked for it, or it was tried out."""


@dataclass(frozen=True)
class Moment:
    """All that decisions depend on besides their problems. Nothing in it changes, so reasons can be asked for later."""

    catalog: Catalog
    tables: TableSet
    held: Held
    tried: TriedHeld
    _contending: dict[int, tuple[dict[str, Use], tuple[str, ...], tuple[str, ...]]] = field(
        default_factory=dict, init=False, compare=False
    )
    """By the id of a rule of these tables."""

    @classmethod
    def now(cls) -> Moment:
        global _latest
        now = catalog.get(), _in_force().tables(), quarantine.held, tried.held
        latest = _latest
        if latest is None or not (
            latest.catalog is now[0] and latest.tables is now[1] and latest.held is now[2] and latest.tried is now[3]
        ):
            _latest = latest = cls(*now)
        return latest

    def contending(self, match: Match) -> tuple[dict[str, Use], tuple[str, ...], tuple[str, ...]]:
        """What a rule names, by variant, the variants, and those that are a library's."""
        found = self._contending.get(id(match.rule))
        if found is None:
            uses, known = {use.variant: use for use in match.use}, self.catalog.of(match.table.op)
            libraries = tuple([name for name in uses if name in known and known[name].builds is None])
            found = self._contending[id(match.rule)] = uses, tuple(uses), libraries
        return found


@functools.cache
def _in_force() -> Any:
    """What reads the tables, which nothing does before the first decision."""
    from registry.dispatch import in_force

    return in_force


@functools.cache
def _measured() -> Any:
    """What reads the shapes behind them."""
    from registry.tables import measured

    return measured


INTERPRETED = ("triton", "aten")
"""`Design.dsl` of what runs on CPU tensors that stand for a GPU's."""
_latest: Moment | None = None
"""Shared by the decisions made under it: a plan keeps its own for as long as it lives."""


class Question:
    """One problem put to the variants of a moment. The launch asks it for a pick; `explain` and errors for reasons."""

    def __init__(self, problem: Problem, moment: Moment, preferred: tuple[str, ...]) -> None:
        self.problem, self.preferred, self.tables = problem, preferred, moment.tables
        self.variants = moment.catalog.of(problem.op)
        self._moment, self._held, self._tried = moment, moment.held, moment.tried
        self._facts = problem.facts(moment.tables.asked_about(problem.op))
        self.late: set[str] = set()
        """Variants that build a kernel for each new length, where lengths grow."""
        if problem.growing:
            self.late = {name for name, variant in self.variants.items() if variant.builds_each_size}

    def rank(self) -> Iterator[Ranked]:
        """Every variant, best first: preferences, what was tried out, table rules from the highest layer down, then
        heuristics."""
        problem, target = self.problem, self.problem.target
        for name in self.preferred:
            yield Ranked(name, None, "preferred", settled=True)
        likeness = problem.likeness() if self._tried else None
        if likeness is not None:
            yield from self._tried_out(likeness)
        for match in self.tables.match(problem.op, self._facts, target.arch, target.name):
            advice = advice_of(match.table, match.rule, problem, likeness)
            uses = match.use if advice is None else self._by_advice(match, advice)
            for use in uses if not self.late else sorted(uses, key=lambda use: use.variant in self.late):
                where = match.where + LATE if use.variant in self.late else match.where
                yield Ranked(use.variant, use.config, where, match, advice)
        for variant in sorted(self.variants.values(), key=lambda variant: (_generality(variant), variant.name)):
            yield Ranked(variant.name, None, "heuristic: the narrowest architecture claim, then the name")

    def _tried_out(self, likeness: Mapping[str, float]) -> Iterator[Ranked]:
        """Those that were tried out on a problem like this one and may run it with the same config, fastest first."""
        problem, found = self.problem, self._tried.get(key_of(self.problem, likeness))
        for place, one in enumerate(found.timed if found is not None else ()):
            variant, config = self.variants.get(one.variant), one.config
            if variant is not None and not _passed_over(variant, problem, config):
                yield Ranked(one.variant, config, found.because(place), settled=True)  # type: ignore[union-attr]

    def _by_advice(self, match: Match, advice: Advice) -> Iterable[Use]:
        uses, names, libraries = self._moment.contending(match)
        return map(uses.__getitem__, advice.ranked(names, libraries))

    def places(self) -> Iterator[Ranked]:
        """The first place of each variant there is."""
        seen = set()
        for place in self.rank():
            if place.variant not in seen and place.variant in self.variants:
                seen.add(place.variant)
                yield place

    def pick(self) -> tuple[Ranked, Config, str] | None:
        """The first place whose variant may run, the config for it, and where that was said. Stops there."""
        return next(self.legal(), None)

    def legal(self) -> Iterator[tuple[Ranked, Config, str]]:
        """The places whose variants may run, each with the config for it, and where that was said."""
        for place in self.places():
            variant = self.variants[place.variant]
            first = variant.first_legal(self.problem, _order_of(variant, self.problem, place))
            if first is not None and not self._known_bad(variant):
                yield place, *_config_for(variant, self.problem, place, first)

    def reasons(self, variant: Variant) -> list[Reason]:
        """Declared reasons, known errata and quarantines together; empty where the variant may run."""
        return [*variant.reasons(self.problem), *self.known_bad(variant)]

    def all_reasons(self) -> dict[str, list[Reason]]:
        return {name: self.reasons(variant) for name, variant in self.variants.items()}

    def candidates(self) -> tuple[Candidate, ...]:
        """How every variant stands: legal ones by rank (counted anew among the legal), then the others."""
        legal: list[Candidate] = []
        illegal: list[Candidate] = []
        for place in self.places():
            found = self._candidate(place.variant, place.because)
            if place.match is not None:
                found = replace(found, nearest=_nearest(place.match, self.problem))
            if found.legal:
                legal.append(replace(found, rank=len(legal)))
            else:
                illegal.append(found)
        return (*legal, *illegal)

    def candidates_beside(self, picked: str) -> tuple[Candidate, ...]:
        """How every variant stands where one was asked for by name."""
        refused = tuple(self.variants[picked].config_refusals(self.problem))
        others = (self._candidate(name, "") for name in self.variants if name != picked)
        return Candidate(picked, (), 0, "", refused), *others

    def _candidate(self, name: str, because: str) -> Candidate:
        variant = self.variants[name]
        reasons = self.reasons(variant)
        refused = () if reasons else tuple(variant.config_refusals(self.problem))
        return Candidate(name, tuple(reasons), None, because, refused)

    def _known_bad(self, variant: Variant) -> bool:
        """Whether there is any such reason; nothing is known of most variants."""
        nothing = not self._held and (variant.op, variant.name) not in self.tables.errata_of and not interpreted_as()
        return not nothing and next(self.known_bad(variant), None) is not None

    def known_bad(self, variant: Variant) -> Iterator[Reason]:
        """What was found out after the declaration: errata and quarantines."""
        if interpreted_as() is not None and variant.design.dsl not in INTERPRETED and self.problem.target.arch != "cpu":
            yield Reason("interpreted", "dsl", variant.design.dsl, f"{', '.join(INTERPRETED)} without the GPU")
        yield from _in_force().errata_reasons(variant, self.problem, self.tables, self._facts)
        held = quarantine_reason(self._held, variant.name, self.problem)
        if held is not None:
            yield held


def decide(problem: Problem, scope: Scope = EMPTY) -> Decision:
    """Choose a variant and a config for a problem, launching nothing.

    Stops at the first variant that may run: how the others stand is found out when `Decision.candidates` is read.
    Raises IllegalVariant for a forced variant that may not run, NoLegalVariant where nothing may.
    """
    moment = Moment.now()
    moment.tables.check(problem.op)
    forced = scope.forced_for(problem.op) if scope.forced else None
    if forced is not None:
        return _decide_forced(Question(problem, moment, ()), moment, forced)
    question = Question(problem, moment, scope.preferred)
    picked = question.pick()
    if picked is None:
        raise NoLegalVariant(problem, question.all_reasons())
    place, config, because = picked
    passed_over: tuple[str, ...] = ()
    if place.variant not in scope.preferred:
        passed_over = tuple(name for name in scope.preferred if name in question.variants)
    return Decision(
        problem,
        place.variant,
        config,
        because,
        functools.partial(_candidates, problem, moment, scope.preferred),
        place.match.evidence if place.match is not None else None,
        fallback_from=passed_over,
        near=functools.partial(_nearest, place.match, problem) if place.match is not None else "",
    )


def moved(decision: Decision, problem: Problem) -> Decision:
    """The same decision about another problem, which is decided alike."""
    known = decision.problem

    def asked(how: Any) -> Any:
        if not isinstance(how, functools.partial):
            return how
        return functools.partial(how.func, *(problem if one is known else one for one in how.args))

    return replace(decision, problem=problem, standing=asked(decision.standing), near=asked(decision.near))


def advice_of(table: Table, rule: Rule, problem: Problem, likeness: Mapping[str, float] | None = None) -> Advice | None:
    """What the shapes behind a rule say of a problem, of this likeness if that is known; None where the rule has an
    order of its own."""
    if rule.nearest is None:
        return None
    neighbours: Neighbours | None = _measured().neighbours_of(table, rule)
    if neighbours is None:
        return None
    closer = neighbours.closer is not None
    return neighbours.ask(
        likeness or problem.likeness(),
        guess=guesses_of(problem) if closer else None,
        runs=runs_of(problem) if closer else None,
    )


def guesses_of(problem: Problem) -> Guess:
    """What each variant guesses of a problem; None where there is none of that name."""
    variants = catalog.get().variants

    def guess(name: str) -> Any:
        variant = variants.get(name)
        return variant.guess(problem) if variant is not None else None

    return guess


def runs_of(problem: Problem) -> Runs:
    """Whether the variant of a name may run a problem, by what it claims; not, where there is none of that name."""
    variants = catalog.get().variants

    def runs(name: str) -> bool:
        variant = variants.get(name)
        return variant is not None and variant.may_run(problem)

    return runs


def _nearest(match: Match, problem: Problem) -> str:
    missing = _measured().without_shapes(match.table, match.rule)
    if missing:
        return f"none: the rule {missing}"
    beside = _measured().read_beside(match.table)
    found = beside.nearest(match.rule, problem.facts()) if beside is not None else None
    advice = advice_of(match.table, match.rule, problem)
    said = ""
    if advice is not None:
        question = Question(problem, Moment.now(), ())
        may_run = [n for n in advice.lost if n in question.variants and not question.reasons(question.variants[n])]
        said = f"; {'near' if advice.expected is None else 'expected'} here {advice.text(may_run)}" if may_run else ""
        guess = guesses_of(problem) if advice.guessing else None
        guessed = [f"{name} {one:.3g}" for name in advice.guessing if guess and (one := guess(name)) is not None]
        said += f", by a closer look at what they guess: {', '.join(guessed)}" if guessed and said else ""
    return f"{found}{said}" if found is not None else "none: the rule was not measured"


def _candidates(problem: Problem, moment: Moment, preferred: tuple[str, ...]) -> tuple[Candidate, ...]:
    return Question(problem, moment, preferred).candidates()


def _candidates_beside(picked: str, problem: Problem, moment: Moment) -> tuple[Candidate, ...]:
    return Question(problem, moment, ()).candidates_beside(picked)


def all_reasons(variant: Variant, problem: Problem) -> list[Reason]:
    """Declared reasons, known errata and quarantines together; empty where the variant may run."""
    return Question(problem, Moment.now(), ()).reasons(variant)


def _decide_forced(question: Question, moment: Moment, forced: Forced) -> Decision:
    problem, variants = question.problem, question.variants
    variant = variants.get(forced.variant)
    if variant is None:
        raise catalog.get().unknown(forced.variant, problem.op)
    if forced.config is None:
        reasons = question.reasons(variant)
    else:
        reasons = [*refusals_of(variant, problem, dict(forced.config)), *question.known_bad(variant)]
    if reasons:
        raise IllegalVariant(variant.name, problem, reasons)
    because = "asked for by name"
    if forced.config is not None:
        config: Config = dict(forced.config)
        if undeclared(variant, problem, config):
            because = "asked for by name, with a config that it does not declare, but whose keys and types it knows"
            notices.notice(f"{variant.name} runs with a config that it does not declare: {config_text(config)}")
    else:
        place = next(place for place in question.rank() if place.variant == variant.name)
        first = variant.first_legal(problem, _order_of(variant, problem, place))
        assert first is not None, "it has no reasons against it"
        config, _ = _config_for(variant, problem, place, first)
    standing = functools.partial(_candidates_beside, variant.name, problem, moment)
    return Decision(problem, variant.name, config, because, standing)


def _generality(variant: Variant) -> int:
    """A kernel written for exactly this architecture is likelier to be fast than one for many: 0 is the narrowest."""
    claims = variant.requires.arch
    return 2 if "any" in claims else 1 if any(entry.endswith("+") for entry in claims) else 0


def refusals_of(variant: Variant, problem: Problem, config: Config) -> list[Reason]:
    """Why a variant may not run with a config that was asked for by name. Its rule sees only keys that it knows."""
    claims = variant.requires
    return variant.answer(
        problem,
        lambda: (
            reasons_against(claims, problem)
            or unfit(variant, problem, config)
            or config_reasons(claims, problem, config)
        ),
    )


def _config_for(variant: Variant, problem: Problem, place: Ranked, first: Config) -> tuple[Config, str]:
    """The table's config where it is declared and legal here, else the variant's first legal one; and why."""
    if place.config is None:
        return dict(first), place.because
    refused = _passed_over(variant, problem, place.config)
    if not refused:
        return dict(place.config), place.because
    why = "; ".join(map(str, refused))
    text = f"{place.because}: {variant.name} takes its own config for {problem.summary()}: {why}"
    notices.notice(text, cause=("own config", place.because, variant.name, problem.kind(), why))
    return dict(first), f"{place.because}; its config is passed over: {why}"


def _passed_over(variant: Variant, problem: Problem, config: Config) -> list[Reason]:
    """Why a config that somebody else names may not run."""
    return variant.answer(
        problem, lambda: undeclared(variant, problem, config) or config_reasons(variant.requires, problem, config)
    )


def _order_of(variant: Variant, problem: Problem, place: Ranked) -> Order | None:
    """The order in which measured shapes would try a variant's configs, where the table names none."""
    advice = place.advice
    if place.config is not None or advice is None:
        return None
    cost = variant.costs(problem)
    return functools.partial(advice.configs, variant.name, cost=cost)
