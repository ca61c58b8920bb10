"""Configs that come from outside of a variant (a table, `use`), held against those that it declares for a problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from registry.contract.capability import Config, Reason
from registry.contract.describe import config_text
from registry.contract.likeness import is_size
from registry.contract.problem import Problem
from registry.contract.variant import Variant
from registry.notices import clip

SHOWN = 6
"""Values or configs that a refusal names."""
WIDEST = 300
"""Characters of a config that a refusal quotes."""


def undeclared(variant: Variant, problem: Problem, config: Config) -> list[Reason]:
    """Why a table may not name this config: the variant does not declare it for this problem. Empty where it does."""
    return against(variant.configs_for(problem), config)


def against(declared: Sequence[Config], config: Config) -> list[Reason]:
    """Why a config is none of those declared. Empty where it is one."""
    if any(_same(config, one) for one in declared):
        return []
    return misfits(declared, config) or [
        Reason("config", "config", clip(config_text(config), WIDEST) or "{}", _shown(declared))
    ]


def unfit(variant: Variant, problem: Problem, config: Config) -> list[Reason]:
    """Why nobody may ask for this config, not even by name.

    Beyond the declared ones a variant takes only what its own checks (rule, budgets) can judge: the keys of a declared
    config, with values of the same types and above zero where all declared ones are.
    """
    declared = variant.configs_for(problem)
    if any(_same(config, one) for one in declared):
        return []
    if found := misfits(declared, config):
        return found
    claims = variant.requires
    if claims.rule is None and claims.shared_memory is None and claims.registers is None:
        return [Reason("config", "config", clip(config_text(config), WIDEST), _shown(declared))]
    return []


def _same(config: Config, declared: Config) -> bool:
    """Equal, types included: True is not 1."""
    return dict(config) == dict(declared) and all(type(config[name]) is type(declared[name]) for name in declared)


def misfits(declared: Sequence[Config], config: Config) -> list[Reason]:
    """Keys and values that no declared config has the like of."""
    found = []
    alike = [one for one in declared if one.keys() == config.keys()]
    if not alike:
        names = " or ".join(dict.fromkeys("{" + ", ".join(sorted(one)) + "}" for one in declared[: 4 * SHOWN]))
        given = clip("{" + ", ".join(sorted(map(str, config))) + "}", WIDEST)
        return [Reason("config", "config keys", given, names or "none")]
    for name, value in config.items():
        known = [one[name] for one in alike]
        if type(value) not in set(map(type, known)) or (is_size(value) and value <= 0 < min(known)):
            values = ", ".join(map(repr, list(dict.fromkeys(known))[:SHOWN]))
            found.append(Reason("config", f"config {name}", clip(repr(value), WIDEST), f"such as {values}"))
    return found


def _shown(declared: Sequence[Mapping[str, Any]]) -> str:
    """The declared configs, the first few of many."""
    more = f" and {len(declared) - SHOWN} more" if len(declared) > SHOWN else ""
    return " or ".join(f"({config_text(one)})" for one in declared[:SHOWN]) + more
