"""The weights of coordinates under which the nearest measured shapes tell what is fastest: found by leaving one out.

Searches that change a weight or two at a time and keep what serves the shapes better: several, since each ends where no
small change helps, and they always take the same paths.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from registry.tables.nearest import CAP, COUNT, NEVER, UNKNOWN, Config
from registry.tables.shapes import Shape

if TYPE_CHECKING:
    import torch

START = 0.35
"""Of each coordinate: two octaves of difference in three of them make shapes rather unlike each other."""
LEAST = 64
"""Shapes, below which a search would learn them by heart."""
SAME = 1.0
"""Of a coordinate in which all shapes are the same: what differs in it was not measured, and is far."""
STEPS = 1500
SEARCHES = 4
ASKED = 500
"""Shapes that a search leaves out one at a time, where there are more; all others speak for them."""
WORST = 0.05
"""The share of the shapes served worst that counts once more."""
FACTORS = (0.0, 0.5, 0.7, 1.4, 2.0)
RETURNS = (0.1, 0.3, 0.7)
"""What a weight of 0 may become."""
EACH = 1e-4
"""What a coordinate must save to be asked about at all, in log time a shape."""


def found_weights(
    coordinates: Sequence[str], contestants: Sequence[tuple[str, Config]], shapes: Sequence[Shape]
) -> dict[str, float]:
    """The weight of each coordinate that has one. Few shapes tell nothing: they weigh all alike."""
    import torch

    points = torch.tensor([shape.point for shape in shapes], dtype=torch.float32)
    varying = [place for place in range(len(coordinates)) if len(points[:, place].unique()) > 1]
    same = {name: SAME for place, name in enumerate(coordinates) if place not in varying}
    coordinates, points = [coordinates[place] for place in varying], points[:, varying]
    if len(shapes) < LEAST or not varying:
        return dict.fromkeys(coordinates, START) | same
    _, lost = lost_of(contestants, shapes)
    weights = min((_searched(points, lost, seed) for seed in range(SEARCHES)), key=lambda pair: pair[0])[1]
    found = {name: round(float(w), 3) for name, w in zip(coordinates, weights, strict=True)}
    return {name: weight for name, weight in found.items() if weight} | same


def _searched(points: torch.Tensor, lost: torch.Tensor, seed: int) -> tuple[float, torch.Tensor]:
    """(what shapes lose, weights)."""
    import torch

    chance = random.Random(seed)
    weights = torch.full((points.shape[1],), START)
    least = regret_nearby(points * weights, lost) + EACH * len(weights)
    for _ in range(STEPS):
        tried = weights.clone()
        for _ in range(chance.choice((1, 1, 2))):
            place = chance.randrange(len(weights))
            now = float(tried[place])
            tried[place] = now * chance.choice(FACTORS) if now else chance.choice(RETURNS)
        cost = regret_nearby(points * tried, lost) + EACH * int(tried.count_nonzero())
        if cost < least:
            least, weights = cost, tried
    return least, weights


def lost_of(contestants: Sequence[tuple[str, Config]], shapes: Sequence[Shape]) -> tuple[list[str], torch.Tensor]:
    """The variants, and what the best config of each lost on each shape; NaN where it was not measured."""
    import torch

    names = sorted({name for name, _ in contestants})
    found = torch.full((len(shapes), len(names)), float("nan"))
    for row, shape in enumerate(shapes):
        for result in shape.results:
            column = names.index(contestants[result.contestant][0])
            if not result.here and not found[row, column] <= result.lost:
                found[row, column] = result.lost
    return names, found


def regret_nearby(points: torch.Tensor, lost: torch.Tensor, most: int = ASKED, parts: int | None = None) -> float:
    """What shapes lose where the nearest of the others pick for them: about so many of the shapes. With `parts`, of
    those in other parts, so that as many are kept from the answer as from trees that have not seen a part."""
    import torch

    place = torch.arange(len(points))
    rows, part = place[:: -(-len(points) // most)], place if parts is None else place % parts
    away = torch.cdist(points[rows], points, compute_mode="use_mm_for_euclid_dist").square()
    away[part[rows][:, None] == part] = float("inf")
    near, who = away.topk(COUNT, largest=False)
    weight = ((-near).exp() + 1e-4 / (1 + near))[:, :, None]
    theirs = lost[who]
    known = ~theirs.isnan()
    known &= known.sum(2, keepdim=True) > 1  # what ran alone is held against none
    held = torch.where(theirs < NEVER, theirs.clamp(max=CAP), theirs).nan_to_num(0.0)
    sums, whole = (weight * held * known).sum(1), (weight * known).sum(1)
    return regret_of_picks(torch.where(whole > 0, sums / whole.clamp_min(1e-30), UNKNOWN), lost[rows])


def regret_of_picks(expected: torch.Tensor, own: torch.Tensor) -> float:
    """What is lost, to the best of the variants that are known there, where that runs which is expected to lose least:
    the mean, and the worst once more."""
    import torch

    own = own - own.nan_to_num(float("inf")).min(1, keepdim=True).values
    expected = torch.where(own.isnan(), float("inf"), expected)
    picked = own.gather(1, expected.argmin(1, keepdim=True))[:, 0].clamp(max=CAP).expm1()
    worst = max(1, int(WORST * len(picked)))
    return float(picked.mean() + 0.1 * picked.topk(worst).values.mean())
