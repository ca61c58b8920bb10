"""legal -> rank -> pick. `explain` and the launch both go through `decide`, so they cannot disagree."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from registry import notices
from registry.capability import Config, Reason, config_reasons, reasons_against
from registry.discovery import catalog
from registry.errors import IllegalVariant, KernelDoesNotFit, NoLegalVariant, UnknownVariant
from registry.problem import Problem
from registry.scope import EMPTY, Forced, Scope
from registry.variant import Variant


@dataclass(frozen=True)
class Candidate:
    """One variant's standing in a decision: its reasons if it is illegal, else its rank and where that came from."""

    variant: str
    reasons: tuple[Reason, ...] = ()
    rank: int | None = None
    source: str = ""
    refused_configs: tuple[Reason, ...] = ()
    """Why some configs of a legal variant are ruled out here: what stands between it and its fastest form."""

    @property
    def legal(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Decision:
    """What was picked for a problem, with which config, from which table row, and how every other variant stands."""

    problem: Problem
    variant: str
    config: Config
    source: str
    candidates: tuple[Candidate, ...]
    evidence: Mapping[str, Any] | None = field(default=None, compare=False)
    fallback_from: tuple[str, ...] = ()
    """Preferred names that were passed over because they are illegal here."""

    def __str__(self) -> str:
        from registry.report import decision_text

        return decision_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain data, for JSON."""
        from registry.report import decision_data

        return decision_data(self)


@dataclass(frozen=True)
class _Ranked:
    """A place in the order: a variant, the config the table wants for it, and where that was said."""

    variant: str
    config: Config | None
    source: str
    evidence: Mapping[str, Any] | None = None


def decide(problem: Problem, scope: Scope = EMPTY) -> Decision:
    """Choose a variant and a config for a problem, launching nothing.

    Raises IllegalVariant for a forced variant that may not run, NoLegalVariant where nothing may.
    """
    variants = catalog.get().of(problem.op)
    forced = scope.forced_for(problem.op)
    if forced is not None:
        return _decide_forced(problem, variants, forced)
    reasons = {name: all_reasons(variant, problem) for name, variant in variants.items()}
    order = _rank(problem, variants, scope)
    picked: tuple[_Ranked, Config] | None = None
    candidates: dict[str, Candidate] = {}
    for place in order:
        name = place.variant
        if name in candidates or name not in variants:
            continue
        refused = () if reasons[name] else tuple(variants[name].config_refusals(problem))
        candidates[name] = Candidate(name, tuple(reasons[name]), None, place.source, refused)
        if picked is None and not reasons[name]:
            picked = place, _config_for(variants[name], problem, place)
    if picked is None:
        raise NoLegalVariant(problem, reasons)
    place, config = picked
    passed_over = tuple(name for name in scope.preferred if name in variants and name != place.variant)
    passed_over = passed_over if place.variant not in scope.preferred else ()
    return Decision(
        problem, place.variant, config, place.source, _in_order(candidates), place.evidence, fallback_from=passed_over
    )


def all_reasons(variant: Variant, problem: Problem) -> list[Reason]:
    """Declared reasons, known errata and quarantines together; empty where the variant may run."""
    from registry import ranking

    reasons = variant.reasons(problem)
    reasons.extend(ranking.errata_reasons(variant, problem))
    held = quarantine.reason(variant.name, problem)
    return [*reasons, held] if held else reasons


def _decide_forced(problem: Problem, variants: Mapping[str, Variant], forced: Forced) -> Decision:
    variant = variants.get(forced.variant)
    if variant is None:
        raise UnknownVariant(forced.variant, problem.op, sorted(variants))
    if forced.config is None:
        reasons = all_reasons(variant, problem)
    else:
        reasons = reasons_against(variant.requires, problem) or config_reasons(
            variant.requires, problem, dict(forced.config)
        )
    if reasons:
        raise IllegalVariant(variant.name, problem, reasons)
    if forced.config is not None:
        config: Config = dict(forced.config)
    else:
        ranked = [place for place in _rank(problem, variants, EMPTY) if place.variant == variant.name]
        config = _config_for(variant, problem, ranked[0])
    others = tuple(
        Candidate(name, tuple(all_reasons(other, problem))) for name, other in variants.items() if name != variant.name
    )
    return Decision(
        problem,
        variant.name,
        config,
        "asked for by name",
        (Candidate(variant.name, (), 0, "", tuple(variant.config_refusals(problem))), *others),
    )


def _rank(problem: Problem, variants: Mapping[str, Variant], scope: Scope) -> list[_Ranked]:
    """Every variant, best first: preferences, then table rules from the highest layer down, then heuristics."""
    from registry import ranking

    order = [_Ranked(name, None, "preferred") for name in scope.preferred]
    for match in ranking.matches(problem):
        order.extend(_Ranked(use.variant, use.config, match.source, match.evidence) for use in match.use)
    heuristic = sorted(variants.values(), key=lambda variant: (_generality(variant), variant.name))
    order.extend(_Ranked(v.name, None, "heuristic: the narrowest architecture claim, then the name") for v in heuristic)
    return order


def _generality(variant: Variant) -> int:
    """A kernel written for exactly this architecture is likelier to be fast than one for many: 0 is the narrowest."""
    claims = variant.requires.arch
    return 2 if "any" in claims else 1 if any(entry.endswith("+") for entry in claims) else 0


def _config_for(variant: Variant, problem: Problem, place: _Ranked) -> Config:
    """The table's config where it is legal here, else the variant's own first legal one."""
    if place.config is not None:
        if not config_reasons(variant.requires, problem, place.config):
            return dict(place.config)
        notices.notice(f"{place.source}: config {dict(place.config)} of {variant.name} is illegal for {problem.kind()}")
    return dict(variant.legal_configs(problem)[0])


def _in_order(candidates: Mapping[str, Candidate]) -> tuple[Candidate, ...]:
    """Legal ones by rank (counted anew among the legal), then the others."""
    legal = [c for c in candidates.values() if c.legal]
    ranked = [replace(c, rank=rank) for rank, c in enumerate(legal)]
    return (*ranked, *(c for c in candidates.values() if not c.legal))


# --- quarantine ---------------------------------------------------------------------------------------------------


class Quarantine:
    """Variants whose kernel failed to compile or to fit, by problem class. Kept for the life of the process."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, Hashable], str] = {}

    def add(self, variant: str, problem: Problem, error: BaseException) -> None:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        self._held[variant, problem.kind()] = text
        notices.notice(f"{variant} is quarantined for {problem.summary()}: {text}")

    def reason(self, variant: str, problem: Problem) -> Reason | None:
        text = self._held.get((variant, problem.kind())) if self._held else None
        return Reason("quarantine", "compiles", text, "a kernel that compiles and fits") if text else None

    def items(self) -> list[tuple[str, Hashable, str]]:
        return [(variant, kind, text) for (variant, kind), text in self._held.items()]

    def clear(self) -> None:
        self._held.clear()


quarantine = Quarantine()


@functools.cache
def compile_failures() -> tuple[type[BaseException], ...]:
    """The errors that mean 'did not compile or fit, nothing was launched'. Triton is only asked if it is loaded."""
    found: list[type[BaseException]] = [KernelDoesNotFit]
    try:
        from triton.compiler.errors import CompilationError
        from triton.runtime.errors import OutOfResources, PTXASError
    except ImportError:
        return tuple(found)
    return (*found, CompilationError, OutOfResources, PTXASError)


def did_not_compile(error: BaseException) -> bool:
    """Whether an error means that a kernel did not compile or fit, so that nothing was launched.

    A pass of Triton's compiler that fails raises a plain RuntimeError, which only its text tells from others.
    """
    return isinstance(error, compile_failures()) or (
        isinstance(error, RuntimeError) and str(error).startswith("PassManager::run failed")
    )
