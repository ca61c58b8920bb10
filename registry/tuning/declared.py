"""Configs of a table, held against the declared ones before anything is called: what lint and doctor say of them.

A decision holds a table's config against what its variant declares for that very problem (dispatch.configs). Where the
declared configs are a function of the problem, lint asks for those of the problems in the op's grids, and some drawn.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from registry.contract.capability import Config, Reason
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch.catalog import PluginFailed, catalog, contained
from registry.dispatch.configs import against, misfits
from registry.errors import InvalidArgument
from registry.ops.known import op_named
from registry.ops.op import Op
from registry.tables import Rule, Table, Use
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
