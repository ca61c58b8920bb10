"""legal -> rank -> pick. `explain` and the launch both go through `decide`, so they cannot disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from registry import notices
from registry.contract.capability import Config, Reason, config_reasons, reasons_against
from registry.contract.problem import Problem
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.dispatch.configs import undeclared, unfit
from registry.dispatch.decision import Candidate, Decision
from registry.dispatch.quarantine import quarantine
from registry.dispatch.scope import EMPTY, Forced, Scope
from registry.errors import IllegalVariant, NoLegalVariant, UnknownVariant


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
    picked: tuple[_Ranked, Config, str] | None = None
    candidates: dict[str, Candidate] = {}
    for place in order:
        name = place.variant
        if name in candidates or name not in variants:
            continue
        refused = () if reasons[name] else tuple(variants[name].config_refusals(problem))
        candidates[name] = Candidate(name, tuple(reasons[name]), None, place.source, refused)
        if picked is None and not reasons[name]:
            picked = place, *_config_for(variants[name], problem, place)
    if picked is None:
        raise NoLegalVariant(problem, reasons)
    place, config, source = picked
    passed_over = tuple(name for name in scope.preferred if name in variants and name != place.variant)
    passed_over = passed_over if place.variant not in scope.preferred else ()
    return Decision(
        problem, place.variant, config, source, _in_order(candidates), place.evidence, fallback_from=passed_over
    )


def all_reasons(variant: Variant, problem: Problem) -> list[Reason]:
    """Declared reasons, known errata and quarantines together; empty where the variant may run."""
    from registry.dispatch import in_force

    reasons = variant.reasons(problem)
    reasons.extend(in_force.errata_reasons(variant, problem))
    held = quarantine.reason(variant.name, problem)
    return [*reasons, held] if held else reasons


def _decide_forced(problem: Problem, variants: Mapping[str, Variant], forced: Forced) -> Decision:
    variant = variants.get(forced.variant)
    if variant is None:
        raise UnknownVariant(forced.variant, problem.op, sorted(variants))
    if forced.config is None:
        reasons = all_reasons(variant, problem)
    else:
        reasons = reasons_against(variant.requires, problem) or refusals_of(variant, problem, dict(forced.config))
    if reasons:
        raise IllegalVariant(variant.name, problem, reasons)
    if forced.config is not None:
        config: Config = dict(forced.config)
    else:
        ranked = [place for place in _rank(problem, variants, EMPTY) if place.variant == variant.name]
        config, _ = _config_for(variant, problem, ranked[0])
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
    from registry.dispatch import in_force

    order = [_Ranked(name, None, "preferred") for name in scope.preferred]
    for match in in_force.matches(problem):
        order.extend(_Ranked(use.variant, use.config, match.source, match.evidence) for use in match.use)
    heuristic = sorted(variants.values(), key=lambda variant: (_generality(variant), variant.name))
    order.extend(_Ranked(v.name, None, "heuristic: the narrowest architecture claim, then the name") for v in heuristic)
    return order


def _generality(variant: Variant) -> int:
    """A kernel written for exactly this architecture is likelier to be fast than one for many: 0 is the narrowest."""
    claims = variant.requires.arch
    return 2 if "any" in claims else 1 if any(entry.endswith("+") for entry in claims) else 0


def refusals_of(variant: Variant, problem: Problem, config: Config) -> list[Reason]:
    """Why a config that was asked for by name may not run; its keys are known before the variant's rule sees them."""
    return unfit(variant, problem, config) or config_reasons(variant.requires, problem, config)


def _config_for(variant: Variant, problem: Problem, place: _Ranked) -> tuple[Config, str]:
    """The table's config where it is declared and legal here, else the variant's first legal one; and the source."""
    if place.config is None:
        return dict(variant.legal_configs(problem)[0]), place.source
    refused = undeclared(variant, problem, place.config) or config_reasons(variant.requires, problem, place.config)
    if not refused:
        return dict(place.config), place.source
    why = "; ".join(map(str, refused))
    notices.notice(f"{place.source}: {variant.name} takes its own config for {problem.kind()}: {why}")
    return dict(variant.legal_configs(problem)[0]), f"{place.source}; its config is passed over: {why}"


def _in_order(candidates: Mapping[str, Candidate]) -> tuple[Candidate, ...]:
    """Legal ones by rank (counted anew among the legal), then the others."""
    legal = [c for c in candidates.values() if c.legal]
    ranked = [replace(c, rank=rank) for rank, c in enumerate(legal)]
    return (*ranked, *(c for c in candidates.values() if not c.legal))
