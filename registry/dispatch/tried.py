"""What `try_out` blocks found: which contenders were fastest on problems as near to each other as tables tell apart."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from registry.contract.capability import Config
from registry.contract.problem import Problem

Key = tuple[Any, ...]
MOST = 4096
"""Kept; the oldest go when there are more."""


@dataclass(frozen=True)
class Took:
    """One contender, and how long a launch took."""

    variant: str
    config: Config
    ms: float


@dataclass(frozen=True)
class TriedOut:
    """What was timed on one problem, the fastest first; the one chosen stays first while others are hardly faster."""

    problem: Problem
    timed: Sequence[Took]

    def because(self, place: int) -> str:
        """Why the contender at a place stands there."""
        one = self.timed[place]
        others = "; ".join(f"{o.variant} {1e3 * o.ms:.1f}" for at, o in enumerate(self.timed) if at != place)
        return f"tried out in this process: {1e3 * one.ms:.1f} us" + (f" ({others})" if others else "")


Held = Mapping[Key, TriedOut]


def key_of(problem: Problem, likeness: Mapping[str, float]) -> Key:
    """Equal for problems that are served alike: of one class, and in the same place among the measured shapes, where
    sizes count in steps. So what was found holds while a length grows a little."""
    return (*problem.kind(), problem.target.name, *likeness.values())


class Tried:
    """What was found, for the life of the process."""

    def __init__(self) -> None:
        self.held: Held = {}
        """Replaced, never changed, so that a decision can keep what it was made under."""

    def add(self, found: TriedOut) -> None:
        held = {**self.held, key_of(found.problem, found.problem.likeness()): found}
        self.held = dict(itertools.islice(held.items(), max(0, len(held) - MOST), None))

    def drop(self, variant: str) -> None:
        """Drop what a variant of this name took part in: another one has it from now on."""
        self.held = {key: one for key, one in self.held.items() if all(took.variant != variant for took in one.timed)}

    def forget(self, found: Sequence[TriedOut]) -> None:
        """Drop these, unless newer ones took their place."""
        self.held = {key: one for key, one in self.held.items() if not any(one is gone for gone in found)}


tried = Tried()
