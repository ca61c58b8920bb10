"""Configs of a table, held against the declared ones before anything is called: what lint and doctor say of them.

A decision holds a table's config against what its variant declares for that very problem (dispatch.configs). Where the
declared configs are a function of the problem, lint asks for those of the problems in the op's grids, and some drawn.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from registry.contract.capability import Config, Reason
from registry.contract.describe import config_text
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch import in_force
from registry.dispatch.catalog import catalog
from registry.dispatch.configs import against, misfits
from registry.dispatch.discovery import PluginFailed, contained
from registry.dispatch.select import advice_of
from registry.errors import InvalidArgument
from registry.ops.known import op_named
from registry.ops.op import Op
from registry.tables import Match, Rule, Table, Use
from registry.tables.lint import Severity

DRAWN = 40
"""Random problems that are asked about besides the grids."""


class DeclaredConfigs:
    """Answers for one run of lint, so that each variant is asked about a problem once."""

    def __init__(self) -> None:
        self._declared: dict[tuple[str, Target], list[list[Config]]] = {}
        self._by_rules: dict[tuple[str, int, str], tuple[dict[str, Config], dict[str, Config]]] = {}

    def complaint(self, table: Table, rule: Rule, use: Use) -> tuple[Severity, str] | None:
        """What is wrong with a row's config; None where it is declared, or where a declaration does not answer."""
        variant = catalog.get().variants[use.variant]
        if use.config is None or variant.op != table.op:
            return None
        try:
            with contained():
                return self._complaint(table, rule, use.config, variant)
        except PluginFailed:
            return None  # told of where the variant is asked about a problem

    def _complaint(self, table: Table, rule: Rule, config: Config, variant: Variant) -> tuple[Severity, str] | None:
        if not callable(variant.configs):
            found = against(variant.configs, config)
            return ("error", _said(found)) if found else None
        here, everywhere = self._by_rule(table, rule, variant)
        if _spelled(config) in here:
            return None
        if misfits([*everywhere.values()], config):
            return "error", _said(misfits([*everywhere.values()], config))
        where = "that this row takes" if here else "of the op's grids"
        found = against([*(here or everywhere).values()], config)
        return ("warning", f"for no problem {where}: {_said(found)}") if found else None

    def _by_rule(self, table: Table, rule: Rule, variant: Variant) -> tuple[dict[str, Config], dict[str, Config]]:
        """What a variant declares for problems that a row takes, and for any."""
        key = (table.file, rule.index, variant.name)
        found = self._by_rules.get(key)
        if found is None:
            target = _target(table, variant)
            asked = _asked(op_named(table.op), target)
            declared = self._of(variant, target, [problem for problem, _ in asked])
            taken = [rule.matches({**facts, "arch": target.arch}) for _, facts in asked]
            here = [config for takes, configs in zip(taken, declared, strict=True) if takes for config in configs]
            found = self._by_rules[key] = _once(here), _once(config for configs in declared for config in configs)
        return found

    def _of(self, variant: Variant, target: Target, problems: list[Problem]) -> list[list[Config]]:
        found = self._declared.get((variant.name, target))
        if found is None:
            found = self._declared[variant.name, target] = [variant.configs_for(problem) for problem in problems]
        return found


def gone_nearby(problem: Problem, names: Collection[str]) -> list[str]:
    """What is to be said of the measured shapes nearest to a problem: who of these variants ran there by configs that
    it declares for no problem any more, so that nothing is passed on by what they took."""
    found, declared, target = [], DeclaredConfigs(), problem.target
    for match in in_force.tables().match(problem.op, problem.facts(), target.arch, target.name):
        advice = advice_of(match.table, match.rule, problem)
        if advice is None:
            continue
        for name in sorted(names):
            keys = {key for said in advice.said if name in said for key in said[name].configs}
            configs = [c for one, c in advice.asked.contestants if one == name and frozenset(c.items()) in keys]
            gone = [config for config in configs if _is_gone(declared, match, name, config, problem)]
            if gone:
                found.append(
                    f"{match.where}: of {len(configs)} configs that {name} was measured with nearby it declares "
                    f"{len(gone)} no more, such as {config_text(gone[0])}; kreg tables lint says why"
                )
    return found


def _is_gone(declared: DeclaredConfigs, match: Match, name: str, config: Config, problem: Problem) -> bool:
    """Whether lint would say so. It asks about many problems, so those that this very one is like are passed over."""
    variant = catalog.get().variants[name]
    if callable(variant.configs) and not misfits(variant.configs_for(problem), config):
        return False
    complaint = declared.complaint(match.table, match.rule, Use(name, config, match.rule.line))
    return complaint is not None and complaint[0] == "error"


@functools.lru_cache(maxsize=16)
def _asked(op: Op, target: Target) -> list[tuple[Problem, Mapping[str, Any]]]:
    """The problems that are asked about, with their facts: the same in every run of lint."""
    chance = random.Random(0)
    cases = [case for grid in op.tuning.grids.values() for case in grid(op.name)]
    cases += [draw(chance) for draw in op.tuning.draws.values() for _ in range(DRAWN)]
    problems = [case.problem(target) for case in dict.fromkeys(cases)]
    return [(problem, problem.facts()) for problem in problems]


def _once(configs: Iterable[Config]) -> dict[str, Config]:
    """Each config once, by how it is spelled."""
    return {_spelled(config): config for config in configs}


def _spelled(config: Config) -> str:
    """True is not 1, and a value may be of any kind."""
    return repr(sorted(config.items()))


def _target(table: Table, variant: Variant) -> Target:
    """The table's device or architecture; where it is for any, the one that the variant is for."""
    for name in (table.device, table.arch, *variant.requires.arch):
        with contextlib.suppress(InvalidArgument):
            if name and name != "any":
                return Target.named(name.rstrip("+"))
    return Target.named("cpu")


def _said(reasons: Sequence[Reason]) -> str:
    return "; ".join(map(str, reasons))
