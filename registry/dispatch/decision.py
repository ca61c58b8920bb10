"""A Decision: what was picked for a problem, and how every other variant stands; as words and as plain data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.contract.capability import Config, Reason
from registry.contract.describe import config_text, problem_data, reason_data
from registry.contract.problem import Problem

NO_KERNEL = "(none)"
"""What stands in the place of a variant where an op answers by itself."""


def decision_text(decision: Decision) -> str:
    """What was picked, why, and how every other variant stands."""
    config = config_text(decision.config)
    lines = [
        decision.problem.summary(),
        f"picked {decision.variant}" + (f" ({config})" if config else ""),
        f"  because: {decision.because}",
    ]
    if decision.evidence:
        lines.append(f"  measured: {evidence_text(decision.evidence)}")
    if decision.nearest:
        lines.append(f"  nearest measured shape: {decision.nearest}")
    if decision.fallback_from:
        lines.append(f"  fallback: {', '.join(decision.fallback_from)} would have been preferred")
    for candidate in decision.candidates:
        if candidate.variant == decision.variant:
            lines.extend(f"  configs ruled out: {reason}" for reason in candidate.refused_configs)
            continue
        if candidate.legal:
            lines.append(
                f"  legal   {candidate.variant}" + (f" (rank {candidate.rank})" if candidate.rank is not None else "")
            )
            if candidate.nearest and candidate.because != decision.because:
                lines.append(f"            - by {candidate.because}; nearest measured shape: {candidate.nearest}")
            lines.extend(f"            - configs ruled out: {reason}" for reason in _few(candidate.refused_configs))
        else:
            lines.append(f"  illegal {candidate.variant}")
            lines.extend(f"            - {reason}" for reason in candidate.reasons)
    return "\n".join(lines)


def _few(reasons: Sequence[Reason], shown: int = 2) -> list[str]:
    """The first reasons, and how many more there are; `to_dict` holds them all."""
    more = len(reasons) - shown
    return [*map(str, reasons[:shown]), *([f"and {more} more reasons"] if more > 0 else [])]


def evidence_text(evidence: Mapping[str, Any]) -> str:
    """The measurement behind a table row in one line. Means over many cases say nothing of the one asked about."""
    means = ("tflops", "runner_up") if evidence.get("cases", 1) > 1 else ()
    shown = {name: value for name, value in evidence.items() if name not in (*means, "also")}
    if also := evidence.get("also"):
        shown["run"] = " and ".join([shown["run"], *also])
    text = ", ".join(f"{name} {value}" for name, value in shown.items() if not isinstance(value, Mapping))
    runner_up = shown.get("runner_up")
    if runner_up:
        text += f"; runner-up {runner_up.get('variant')} {runner_up.get('tflops', '')}".rstrip()
    return text


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    return {
        "variant": candidate.variant,
        "legal": candidate.legal,
        "rank": candidate.rank,
        "because": candidate.because or None,
        "reasons": [reason_data(reason) for reason in candidate.reasons],
        "refused_configs": [reason_data(reason) for reason in candidate.refused_configs],
        "nearest": candidate.nearest or None,
    }


def decision_data(decision: Decision) -> dict[str, Any]:
    """The whole decision as plain data."""
    return {
        "problem": problem_data(decision.problem),
        "picked": decision.variant,
        "config": dict(decision.config),
        "because": decision.because,
        "evidence": dict(decision.evidence) if decision.evidence else None,
        "nearest": decision.nearest or None,
        "fallback_from": list(decision.fallback_from),
        "candidates": [candidate_data(candidate) for candidate in decision.candidates],
    }


@dataclass(frozen=True)
class Candidate:
    """One variant's standing in a decision: its reasons if it is illegal, else its rank and where that came from."""

    variant: str
    reasons: tuple[Reason, ...] = ()
    rank: int | None = None
    because: str = ""
    refused_configs: tuple[Reason, ...] = ()
    """Why some configs of a legal variant are ruled out here: what stands between it and its fastest form."""
    nearest: str = ""
    """How far the nearest measured shape of the rule is that ranks it, or that there is none; empty without a rule."""

    @property
    def legal(self) -> bool:
        return not self.reasons


@dataclass(frozen=True)
class Decision:
    """What was picked for a problem, with which config, from which table row, and how every other variant stands."""

    problem: Problem
    variant: str
    config: Config
    because: str
    standing: tuple[Candidate, ...] | Callable[[], tuple[Candidate, ...]] = field(compare=False, repr=False)
    """`candidates`, or what finds them: a launch needs none of them."""
    evidence: Mapping[str, Any] | None = field(default=None, compare=False)
    fallback_from: tuple[str, ...] = ()
    """Preferred names, where none of them is legal here. To come to a later one of several is no fallback."""
    near: str | Callable[[], str] = field(default="", compare=False, repr=False)
    """`nearest`, or what finds it."""

    @functools.cached_property
    def nearest(self) -> str:
        """How far the nearest measured shape behind the table's rule is, or that it has none; empty where no rule
        picked."""
        return self.near if isinstance(self.near, str) else self.near()

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """How every variant stands, under the variants, tables and quarantines that the decision was made under."""
        return self.standing if isinstance(self.standing, tuple) else self.standing()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "standing": self.candidates, "near": self.nearest}

    def __str__(self) -> str:
        return decision_text(self)

    def to_dict(self) -> dict[str, Any]:
        """The decision as plain data, for JSON."""
        return decision_data(self)
