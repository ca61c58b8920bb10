"""Which of many builds to compile, where they differ in several ways at once and all of them would take minutes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import pytest

Row = tuple[Any, Mapping[str, Any]]
"""A problem, and a config for it."""


def covering(
    rows: Iterable[Any], *traits: Callable[[Any], Iterable[Hashable]], always: Iterable[Any] = ()
) -> list[Any]:
    """Of the rows `always`, and as few more as greed finds, so that each value of each trait that any row has is there.

    Among rows that add as much the first one is taken. A trait of several things at once is covered as one:
    `lambda row: [(row.tile, row.head_dim)]`.
    """
    values = [(row, {(i, value) for i, trait in enumerate(traits) for value in trait(row)}) for row in (*always, *rows)]
    chosen = values[: len(list(always))]
    missing = set().union(*(has for _, has in values)).difference(*(has for _, has in chosen))
    while missing:
        chosen.append(max(values, key=lambda one: len(one[1] & missing)))
        missing -= chosen[-1][1]
    return [row for row, _ in chosen]


def covering_builds(rows: Iterable[Row], always: Iterable[Row], tile: Iterable[str]) -> list[Row]:
    """The rows `always`; each tile (the config's values of these names) at each head dimension, with a causal mask
    where it runs with one, for that takes all that no mask takes, and more; and each two values of one config.
    """

    def tiles(row: Row) -> Iterable[Hashable]:
        problem, config = row
        found = (problem.head_dim, *(config.get(name) for name in tile))
        return [found, ("causal", found)] if problem.causal else [found]

    def pairs(row: Row) -> Iterable[Hashable]:
        return itertools.combinations(row[1].items(), 2)

    return covering(sorted(rows, key=lambda row: not row[0].causal), tiles, pairs, always=list(always))


def all_of(problems: Iterable[Any], configs: Callable[[Any], Iterable[Any]]) -> list[Row]:
    """Each problem with each of its configs."""
    return [(problem, config) for problem in problems for config in configs(problem)]


def first_of(variant: Any) -> Callable[[Any], list[Any]]:
    """For `all_of`: the config that a variant puts first."""
    return lambda problem: variant.legal_configs(problem)[:1]


def named(rows: Iterable[Row]) -> list[Any]:
    """The builds of attentions as parameters of a test, by what makes them different."""
    found = []
    for p, config in rows:
        length = f"-s{p.seqlen_q}" if hasattr(p, "seqlen_q") else ""
        name = f"d{p.head_dim}-{p.head_dim_v}{length}-{'causal' if p.causal else 'full'}-w{p.window}-c{p.softcap}"
        found.append(pytest.param(p, config, id="-".join([name, *map(str, config.values())])))
    return found


def configs_are_there_and_differ(variant: Any, problem: Any) -> None:
    """What every claimed problem has."""
    configs = [tuple(sorted(config.items())) for config in variant.configs_for(problem)]
    assert len(set(configs)) == len(configs)
    assert variant.legal_configs(problem)
