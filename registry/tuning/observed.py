"""What recorded timelines say of contestants, for a guided sweep: files that `kreg profile --figures` adds to.

How long the matrix units and the warps of each role stand still does not rank configs by itself: a config may keep more
products in flight and yet be slower. But configs that stand still alike are limited by the same thing, and so change
alike from shape to shape: these shares are coordinates of a config, beside its values and what it needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import InvalidArgument
from registry.tuning.journal import contestant_key

OCTAVES = 4.0
"""A share of the whole time sets configs as far apart as so many octaves of one of their values."""


NAMES = ("in flight", "stalled", "others stalled")


@dataclass(frozen=True)
class Observed:
    """The figures of one recording."""

    variant: str
    config: Mapping[str, Any]
    shares: Mapping[str, float]
    """By name, what part of the time: numbers from 0 to 1."""

    @property
    def key(self) -> str:
        return contestant_key(self.variant, self.config)


def rows(path: Path, option: str = "--timelines") -> list[dict[str, Any]]:
    """The recordings in a file, as they were written. One that is damaged is an error that names it, and the option
    that named the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["timelines"]
        for row in found:
            _observed(row)
        return list(found)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        what = f"{path}: {type(error).__name__}: {error}"
        raise InvalidArgument(option, what, "what kreg profile --figures wrote") from error


def read(path: Path) -> list[Observed]:
    """What the recordings in a file say."""
    return [_observed(row) for row in rows(path)]


PARTS = ("role", "stalled", "in_flight", "covered", "spans")
"""Of a role."""


def _observed(row: Mapping[str, Any]) -> Observed:
    if (
        missing := {part for one in row["figures"]["roles"] for part in PARTS if part not in one}
        | {"shape"} - row.keys()
    ):
        raise LookupError(", ".join(sorted(missing)))
    shares = shares_of(row["figures"])
    if not all(0.0 <= share <= 1.0 for share in shares.values()):
        raise ValueError(f"shares from 0 to 1, not {shares}")
    return Observed(str(row["variant"]), dict(row["config"]), shares)


def shares_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Of the figures of a timeline, as `kreg profile --json` prints them: roles that multiply, and the others."""
    multiply = [one["stalled"] for one in figures["roles"] if one["in_flight"] is not None]
    others = [one["stalled"] for one in figures["roles"] if one["in_flight"] is None]
    found = {"in flight": figures["any_in_flight"], "stalled": _mean(multiply), "others stalled": _mean(others)}
    return {name: float(share) for name, share in found.items() if share is not None}


def coordinates(recorded: Sequence[Observed]) -> dict[str, dict[str, float]]:
    """By a contestant's key, and by a variant's name for its configs that nobody recorded: the means of the shares, as
    sizes whose octaves are the distances."""
    grouped: dict[str, list[Observed]] = {}
    for one in recorded:
        grouped.setdefault(one.key, []).append(one)
        grouped.setdefault(one.variant, []).append(one)
    found: dict[str, dict[str, float]] = {}
    for key, held in grouped.items():
        by_name = {name: [one.shares[name] for one in held if name in one.shares] for name in NAMES}
        means = {name: _mean(shares) for name, shares in by_name.items()}
        found[key] = {f"timeline {name}": 2 ** (OCTAVES * mean) for name, mean in means.items() if mean is not None}
    return found


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
