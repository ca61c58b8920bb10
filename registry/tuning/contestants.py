"""Who takes part: every legal variant with every legal config, found before anything is compiled."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.dispatch.fingerprint import fingerprint_of
from registry.dispatch.in_force import errata_reasons
from registry.ops.known import op_named
from registry.ops.parts.cases import Case, digest
from registry.tuning.journal import contestant_key
from registry.tuning.machine import target_data


@dataclass(frozen=True)
class Contestant:
    """A variant with one of its configs."""

    variant: str
    config: dict[str, Any]
    first: bool
    """Whether it is what the variant runs where no table names a config."""
    fingerprint: str

    @property
    def key(self) -> str:
        return contestant_key(self.variant, self.config)

    def __str__(self) -> str:
        words = ",".join(f"{name}={value}" for name, value in self.config.items())
        return f"{self.variant}({words})" if words else self.variant


@dataclass(frozen=True)
class LineUp:
    """One case with its contestants, and why the others may not run."""

    case: Case
    problem: Any
    flops: float
    contestants: tuple[Contestant, ...]
    illegal: dict[str, str]
    pruned: int = 0
    """Configs that their declared shared memory, registers or rule ruled out."""

    @property
    def key(self) -> str:
        return digest([self.case.op, self.case.text])


@dataclass
class Selection:
    """Which variants and how many configs of each to measure."""

    only: Sequence[str] = ()
    """Names or patterns; empty: all."""
    skip: Sequence[str] = ()
    max_configs: int | None = None

    def wants(self, name: str) -> bool:
        matches = lambda patterns: any(fnmatch.fnmatch(name, pattern) for pattern in patterns)  # noqa: E731
        return (not self.only or matches(self.only)) and not matches(self.skip)


def line_up(case: Case, target: Target, selection: Selection | None = None, mode: str = "events") -> LineUp:
    """The contestants of a case on a target, to be timed in this mode; compiles and launches nothing."""

    selection = selection or Selection()
    problem = case.problem(target)
    op = op_named(case.op)
    found: list[Contestant] = []
    illegal: dict[str, str] = {}
    pruned = 0
    if (decision := op.trivial(problem)) is not None:  # there is nothing to launch, and formulas divide by sizes
        return LineUp(case, problem, 0.0, (), {decision.variant: decision.because})
    for name, variant in catalog.get().of(case.op).items():
        if not selection.wants(name):
            continue
        reasons = errata_reasons(variant, problem) or variant.reasons(problem)
        if reasons:
            illegal[name] = "; ".join(map(str, reasons))[:300]
            if all(reason.code == "resources" for reason in reasons):
                pruned += len(variant.configs_for(problem))
            continue
        if mode == "graph" and variant.may_wait(problem):
            illegal[name] = "it waits for the device, which no graph can capture"
            continue
        declared = variant.configs_for(problem)
        legal = variant.legal_configs(problem)
        pruned += len(declared) - len(legal)
        fingerprint = fingerprint_of(variant)
        configs = _once([dict(config) for config in legal])[: selection.max_configs]
        found += [Contestant(name, config, index == 0, fingerprint) for index, config in enumerate(configs)]
    return LineUp(case, problem, op.flops(problem), tuple(found), illegal, pruned)


def compile_commands(plans: Sequence[LineUp], target: Target, figures: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """A worker's command for every contestant that names its builds, by case and contestant."""
    variants, goal = catalog.get().variants, target_data(target)
    return {
        (planned.key, one.key): {
            "do": "compile",
            "case": planned.case.data(),
            "variant": one.variant,
            "config": one.config,
            "target": goal,
            "figures": figures,
        }
        for planned in plans
        for one in planned.contestants
        if variants[one.variant].builds is not None and target.arch != "cpu"
    }


def _once(configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({digest(config): config for config in configs}.values())
