"""Which of a variant's configs is expected to be fastest on a problem: trees that ask about both tell it.

What they add up is the log time of a config beyond what its variant guesses (`Variant.cost`), if it guesses anything.
A config is told by its place in the order that its variant would try them in, by how many octaves above the shortest
its guess is, and by its values. So what was learnt of one config counts for those like it, on shapes where none of them
was measured.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from registry.contract.likeness import octaves
from registry.contract.noted import Noted, noting
from registry.tables.trees import OWN, Trees

Config = Mapping[str, Any]
ASKED = 8
"""Configs that the trees are asked about: those that the variant would try first."""
KNOWN = 1024
"""Configs whose values are kept; they go when there are more."""
_FIRST, _SECOND = operator.itemgetter(0), operator.itemgetter(1)
PLACE, GUESS = OWN + "place", OWN + "guess"


Cost = Callable[[Config], float | None]
"""What a variant guesses that a config takes, or None for no guess (`Variant.costs`)."""


def guessed(configs: Sequence[Config], cost: Cost) -> list[tuple[Config, float]] | None:
    """These configs, each with its guess. None where one of them has none: against it no other counts."""
    found = []
    for config in configs:
        guess = cost(config)
        if guess is None:
            return None
        found.append((config, guess))
    return found


def own_order(configs: Sequence[Config], cost: Cost | None) -> list[tuple[Config, float]]:
    """These configs as their variant alone would try them, each with its guess; ties as they were given. No log of a
    guess is taken: that of a noted size would hold for this size alone."""
    found = guessed(configs, cost) if cost is not None else None
    return _sorted(found) if found is not None else [(config, 1.0) for config in configs]


def _sorted(found: Sequence[tuple[Config, float]]) -> list[tuple[Config, float]]:
    return sorted(found, key=_SECOND)


def _standing(order: Sequence[tuple[Config, float]]) -> list[tuple[float, float]]:
    """Where each stands. Guesses count in steps, as sizes do: what is learnt of a noted one is between which edges it
    lies."""
    least = order[0][1] if order else 1.0
    return [(place, octaves(guess / least) if guess is not least else 0.0) for place, (_, guess) in enumerate(order)]


def coordinates_of(configs: Sequence[Config]) -> tuple[str, ...]:
    """What trees may ask about these configs: where they stand, their numbers, and which words they say."""
    numbers = {OWN + name for config in configs for name, value in config.items() if not isinstance(value, str)}
    words = {f"{OWN}{name}={value}" for config in configs for name, value in config.items() if isinstance(value, str)}
    return (PLACE, GUESS, *sorted(numbers), *sorted(words))


@dataclass(frozen=True)
class ConfigTrees:
    """The trees of one variant; raises ValueError where they do not ask as `coordinates_of` says."""

    trees: Trees
    order: str = field(default="", compare=False)
    """A digest of the configs that stood at the places which the trees know (tuning/config_trees.py). Where others do
    today, what was learnt of a place is of another config. Empty where nobody kept it."""
    _known: dict[Any, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Which leaves are left by what configs say that were asked about, and by where they stand: the same few, again and
    again."""

    def __post_init__(self) -> None:
        own = self.trees.coordinates[self.trees.shared :]
        if own[:2] != (PLACE, GUESS) or [name for name in own if "=" in name] != list(own[2 + len(self._numbers) :]):
            raise ValueError(f"coordinates of configs are not {PLACE}, {GUESS}, then numbers, then words")
        if len(self.trees.variants) != 1:
            raise ValueError("the trees of configs are not of one variant")

    @functools.cached_property
    def _numbers(self) -> list[str]:
        own = self.trees.coordinates[self.trees.shared + 2 :]
        return [name.removeprefix(OWN) for name in own if "=" not in name]

    @functools.cached_property
    def _words(self) -> list[tuple[str, str]]:
        own = self.trees.coordinates[self.trees.shared + 2 :]
        pairs = [name.removeprefix(OWN).partition("=") for name in own if "=" in name]
        return [(name, word) for name, _, word in pairs]

    def told(self, order: Sequence[tuple[Config, float]]) -> list[tuple[float, ...]]:
        """Where each of these configs lies, which stand in their variant's own order, in the coordinates of configs."""
        return [(*stands, *self._said(config)) for stands, (config, _) in zip(_standing(order), order, strict=True)]

    def _said(self, config: Config) -> tuple[float, ...]:
        """What a config says: its numbers, then which words."""
        numbers = [config.get(name, 0) for name in self._numbers]
        return (*numbers, *[config.get(name) == word for name, word in self._words])

    def totals(
        self, likeness: Mapping[str, float], order: Sequence[tuple[Config, float]], unseen: int | None = None
    ) -> list[float]:
        """What trees say of each of these configs."""
        leaves, known = self.trees.leaves(unseen), self._known if unseen is None else {}
        if len(known) >= KNOWN:
            known.clear()
        here, asking, left = leaves.left(self.trees.at(likeness)), noting(), []
        for stands, (config, _) in zip(_standing(order), order, strict=True):
            stood = known.get(stands)
            if stood is None:
                stood = known[stands] = leaves.left(stands, 1)
            if asking and Noted in map(type, config.values()):  # to look one up would fix it
                said = leaves.left_by_noted(self._said(config), 2)
            else:
                key = *config, *config.values()
                told = known.get(key)
                said = told if told is not None else known.setdefault(key, leaves.left(self._said(config), 2))
            left.append(here & stood & said)
        return leaves.totals(left)

    def in_order(
        self, likeness: Mapping[str, float], configs: Sequence[Config], cost: Cost | None, unseen: int | None = None
    ) -> list[Config]:
        """That which is expected to be fastest first; with `unseen`, the place of a measured shape, as if it were
        not."""
        return [config for _, config in self.expected(likeness, configs, cost, unseen)]

    def expected(
        self, likeness: Mapping[str, float], configs: Sequence[Config], cost: Cost | None, unseen: int | None = None
    ) -> list[tuple[float, Config]]:
        """The same, with what each is expected to take, in any unit; those that trees are not asked about, endless.
        Trees correct guesses: where a variant that guesses has none, its own order stands, all alike."""
        found = guessed(configs, cost) if cost is not None else [(config, 1.0) for config in configs]
        if found is None:
            return [(1.0, config) for config in configs]
        order = _sorted(found)
        asked = order[:ASKED]
        totals = self.totals(likeness, asked, unseen)
        expected = [(math.exp(total) * guess, config) for total, (config, guess) in zip(totals, asked, strict=True)]
        expected.sort(key=_FIRST)
        return expected + [(math.inf, config) for config, _ in order[ASKED:]]
