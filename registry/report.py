"""Decisions as text and as data. The command line adds colour; the words are these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from registry.capability import Reason

if TYPE_CHECKING:
    from registry.dispatch import Candidate, Decision
    from registry.problem import Problem


def config_text(config: Mapping[str, Any]) -> str:
    """A config in one line; empty for the empty one."""
    return ", ".join(f"{name}={value}" for name, value in config.items())


def decision_text(decision: Decision) -> str:
    """What was picked, why, and how every other variant stands."""
    config = config_text(decision.config)
    lines = [
        decision.problem.summary(),
        f"picked {decision.variant}" + (f" ({config})" if config else ""),
        f"  because: {decision.source}",
    ]
    if decision.evidence:
        lines.append(f"  measured: {evidence_text(decision.evidence)}")
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
        else:
            lines.append(f"  illegal {candidate.variant}")
            lines.extend(f"            - {reason}" for reason in candidate.reasons)
    return "\n".join(lines)


def evidence_text(evidence: Mapping[str, Any]) -> str:
    """The measurement behind a table row in one line."""
    text = ", ".join(f"{name} {value}" for name, value in evidence.items() if not isinstance(value, Mapping))
    runner_up = evidence.get("runner_up")
    if runner_up:
        text += f"; runner-up {runner_up.get('variant')} {runner_up.get('tflops', '')}".rstrip()
    return text


def reason_data(reason: Reason) -> dict[str, Any]:
    return {
        "code": reason.code,
        "field": reason.field,
        "operand": reason.operand,
        "got": plain_data(reason.got),
        "allowed": plain_data(reason.allowed),
        "fix": reason.fix,
    }


def candidate_data(candidate: Candidate) -> dict[str, Any]:
    return {
        "variant": candidate.variant,
        "legal": candidate.legal,
        "rank": candidate.rank,
        "source": candidate.source or None,
        "reasons": [reason_data(reason) for reason in candidate.reasons],
        "refused_configs": [reason_data(reason) for reason in candidate.refused_configs],
    }


def problem_data(problem: Problem) -> dict[str, Any]:
    target = problem.target
    return {
        "op": problem.op,
        **{name: plain_data(value) for name, value in problem.facts().items()},
        "target": {"arch": target.arch, "name": target.name, "sm_count": target.sm_count},
    }


def decision_data(decision: Decision) -> dict[str, Any]:
    """The whole decision as plain data."""
    return {
        "problem": problem_data(decision.problem),
        "picked": decision.variant,
        "config": dict(decision.config),
        "source": decision.source,
        "evidence": dict(decision.evidence) if decision.evidence else None,
        "fallback_from": list(decision.fallback_from),
        "candidates": [candidate_data(candidate) for candidate in decision.candidates],
    }


def plain_data(value: Any) -> Any:
    """Anything as JSON can hold it."""
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    return str(value)
