"""Trees that tell what variants lose on a problem (tables/trees.py), fitted to measured shapes.

They tell the differences between the variants of a shape; how fast the shape is at all cancels out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from registry.tables.nearest import CAP, NEVER, Config
from registry.tables.shapes import Shape
from registry.tables.trees import Trees
from registry.tuning.boosting import PARTS, Extent
from registry.tuning.helpers import Part, boosted_parts

if TYPE_CHECKING:
    import torch

LEAST = 250
"""Shapes, below which the nearest decide; from here on trees do where they lose less on shapes that they have not seen.
790 grouped products lost 1.2% by the choice of trees and 0.7% by that of the nearest, 1,711 gradients 1.4 and 2.1%."""
KNOWN = 25
"""Shapes that a variant ran on, for trees to tell of it on others; what ran on fewer comes last. With 50, which
one for few rows did not reach, 397 products of 32 bits lost 9.4%; with 25, and with 12, 5.0."""
RARE, AGAIN = 0.25, 4
"""Shapes on which a variant ran that ran on a smaller share of all, a new one, count so many times: they alone tell how
it does beside the others. Of 11,501 products three such variants ran on 11, 15 and 16%: on 701 drawn ones the choice of
variants loses 1.03 to 1.23% in four fits, and 1.28 (the mean of three) with a share of 0.1; without the memory as a
coordinate 1.15 and 1.17; of packed and paged batches and of prompts it is the same but for chance. Two new variants on
233 of 4,184 products, asked of the others: 3.7% lost, not 4.0%."""
CONTESTED = 0.26
"""But for those on which it took more or less than the best of the others by more than that log time, or ran alone, as
a kernel for wider heads than others take: 3,052 gradients lose 0.61%, not 0.68, 3,903 attentions 0.97, not 1.04."""
EXTENTS = (
    (1400, Extent(trees=256, leaves=8, rate=0.08, rows=0.7, columns=0.5)),
    (4000, Extent(trees=128, leaves=32, rate=0.1, rows=0.6, columns=0.5)),
    (8000, Extent(trees=64, leaves=64, rate=0.12, rows=0.6, columns=0.6)),
    (10**9, Extent(trees=64, leaves=128, rate=0.15)),
)
"""(fewer shapes than that, the trees for so many). Against 32 trees of 64 leaves for all, the choice of these loses: of
792 packed and paged batches 1.8%, not 2.9, of 814 grouped products 0.91, not 1.06, of 6,571 products 1.75, not 1.92. Of
3,192 attentions 1.24, not 1.31 (means of two and three draws of rows). Fewer than 1,400 had 64 trees of 16 leaves at
a rate of 0.12 then; with those of now 590 batched products lose 7.3%, not 8.1, 250 deterministic gradients 1.5, not 1.8
(nine others lie between: more and smaller ones are better, but by as much as chance is). 2,781 packed and paged
batches lose 2.62% with 128 of 32 leaves, 2.81 with 64 of 64; 2.46 with 256 of 32, but then a decision takes 25 us more,
of 215. 4,241 attentions lose 1.50 to 1.60 with such, 1.49 with 64 of 64. 3,789 packed and paged batches, by drawn ones,
2.1 with either, the configs chosen by the same trees. 5,281 attentions lose 1.46% of shapes left out with 64 of 64,
1.50 with 48 of 128 at a rate of 0.2, 1.33 with 96 of 64 at 0.1; 298 drawn ones 0.7, 0.9 and 1.0, which is chance for
the most part: one shape makes 0.2 of the last. 64 of 128 at 0.15 for 11,501 products: three fits lost 0.08% less on 701
drawn ones than 48 at 0.2, a fourth 0.1% more; for 16,423 2.41% of shapes left out and 1.9 of 846 drawn ones, not 2.47
and 2.2. Sums of what several such fits say lose as much as one of them: what is lost is not for chance in a fit."""

AHEAD = 0.85
"""The share of what trees lose below which the nearest must stay to decide in their place: their weights were found on
the very shapes that are asked about. 470 products of 8 bits lost 4.33% by the nearest and 4.34 by trees, 59 drawn ones
7.3 and 2.5."""
CHANCES = 3
"""Fits of few shapes that differ by chance, of which the one is kept that loses least on shapes that it has not seen.
482 packed gradients lost 3.0, 2.5 and 2.3% by three such, 2.5 by the nearest, which the first alone let decide: 245
drawn ones lose 1.4% by those, and 0.8 by either of the others."""


def fitted_trees(
    coordinates: Sequence[str],
    contestants: Sequence[tuple[str, Config]],
    shapes: Sequence[Shape],
    weights: Mapping[str, float],
) -> Trees | None:
    """None where there are too few shapes, nothing to choose, or the nearest by these weights choose clearly better."""
    import torch

    from registry.tuning.weights import lost_of

    names, lost = lost_of(contestants, shapes)
    often = [at for at in range(len(names)) if int((~lost[:, at].isnan()).sum()) >= KNOWN]
    names, lost = [names[at] for at in often], lost[:, often]
    if len(shapes) < LEAST or len(names) < 2:
        return None
    held = torch.where(lost < NEVER, lost.clamp(max=CAP), torch.nan).double()
    points = torch.tensor([shape.point for shape in shapes], dtype=torch.float64)
    place = torch.arange(len(shapes))
    telling = _telling(held)
    seen = [place, *(place[place % PARTS != part] for part in range(PARTS))]
    seen = [torch.cat([rows, *[rows[telling[rows]]] * (AGAIN - 1)]) for rows in seen]
    extent = next(extent for fewer, extent in EXTENTS if len(shapes) < fewer)
    lost_by: dict[float, Trees] = {}
    for chance in range(CHANCES if extent is EXTENTS[0][1] else 1):
        first = chance * len(seen)
        parts = [Part(points, held, rows, extent, seed) for seed, rows in enumerate(seen, first)]
        trees = Trees(tuple(coordinates), tuple(names), boosted_parts(parts))
        lost_by.setdefault(_lost_unseen(trees, points, held), trees)
    least = min(lost_by)
    return lost_by[least] if AHEAD * least <= _lost_nearby(tuple(coordinates), points, held, weights) else None


def _telling(lost: torch.Tensor) -> torch.Tensor:
    """Shapes that alone tell how a new variant does beside the others."""
    import torch

    ran = ~lost.isnan()
    rare = ran.double().mean(0) < RARE
    took = torch.where(ran, lost, torch.inf)
    if not rare.any() or rare.all():
        return ran[:, rare].any(1)
    behind = took[:, rare].min(1).values - took[:, ~rare].min(1).values
    return behind.abs() <= CONTESTED  # inf or NaN where one of them did not run


def _lost_unseen(trees: Trees, points: torch.Tensor, lost: torch.Tensor) -> float:
    """What is lost by what trees pick that have not seen the shape, in the mean."""
    import torch

    from registry.tuning.weights import regret_of_picks

    ran = ~lost.isnan().all(1)
    told = [trees.sums(point, unseen) for unseen, point in enumerate(points.tolist())]
    return regret_of_picks(torch.tensor(told).double()[ran], lost[ran])


def _lost_nearby(
    coordinates: Sequence[str], points: torch.Tensor, lost: torch.Tensor, weights: Mapping[str, float]
) -> float:
    """The same by the nearest shapes of those that such trees have seen."""
    import torch

    from registry.tuning.weights import regret_nearby

    ran = ~lost.isnan().all(1)
    scale = torch.tensor([weights.get(name, 0.0) for name in coordinates])
    return regret_nearby((points * scale)[ran], lost[ran], len(points), PARTS)
