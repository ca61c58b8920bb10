"""Trees that tell which config of a variant is fastest (tables/config_order.py), fitted to what was timed of them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from registry.tables.config_order import ASKED, Config, ConfigTrees, Cost, coordinates_of, own_order
from registry.tables.trees import Trees
from registry.tuning.boosting import PARTS, Extent
from registry.tuning.helpers import Part, boosted_parts

MOST_OF = 0.5
"""The share of what pooled trees have seen from which on a kind takes them without trees of its own beside them. Most
of what products of several kinds were timed on are single ones of 16 bits: 1,385 drawn ones lose 0.95% by the configs
of pooled trees, 1.05 by those of their own."""
LEAST = 50
"""Shapes on which several configs of a variant were timed, below which the nearest decide."""
EXTENTS = {
    0: Extent(trees=24, leaves=128, rate=0.3, columns=0.7),
    5000: Extent(trees=40, leaves=512, rate=0.2, columns=0.7),
}
"""By the fewest shapes that a variant was timed on. Asked about shapes left out, smaller ones (12 trees of 64 leaves,
of 128 from 2,000 shapes on, 24 from 3,000, each of all coordinates) had lost more: variants with 7,755, 2,804, 2,681,
2,329, 1,176 and 1,097 shapes 2.7% for 2.4, 1.2 for 1.0, 0.8 for 0.7, 2.2 for 2.0, 2.1 for 2.0 and 2.7 for 2.3; of one
with 1,318 2.4 for 2.5. Of one with 11,211, 36 trees of 256 leaves lose 3.0% where it has no pipeline and 1.6 where it
has, these 2.5 and 1.4 (a product is decided in 252 us, not 241), 60 of 1,024 at a rate of 0.15 2.6 and 1.3. A half more
trees find 0.1% more here and there, and take as much longer. A guess that they could correct (`Variant.cost`) has it
lose 0.3% less, but a decision takes 60 us longer: its answers are no longer those of all problems that lie in the same
place."""
MANY = 2000
"""Shapes, from which on a variant that guesses has the following."""
GUESSED = Extent(trees=12, leaves=256, rate=0.4, columns=1.0)
"""Where a variant guesses costs its configs are asked about anew for each problem, which 24 trees would have take 25 us
longer (a variant with 3,563 shapes loses 0.33% with these, 0.33 to 0.37 with those and with more and larger ones; one
with 2,437 1.26, and 1.27 with 24)."""
BEHIND = 1.0
"""Log time that a config is taken to lose which gave a wrong result, hung or crashed."""
NEAR = (math.inf, 0.5)
"""Log time behind the best up to which trees tell how slow a config is: beyond it, slow is slow. Of each variant those
trees are kept that lose less on shapes left out in turn: four variants lose 2.5% with the second, not 3.1, 2.2 (2.4),
0.6 (0.8) and 3.4 (3.6), but one 2.2 (2.1)."""


@dataclass(frozen=True)
class Timed:
    """The configs of one variant on one shape."""

    likeness: Mapping[str, float]
    configs: Sequence[Config]
    """All that it declares there."""
    cost: Cost | None
    """What it guesses of each, if anything."""
    ms: Mapping[int, float]
    """Of those that were timed, by their place; infinite where a config failed."""

    def order(self, trees: ConfigTrees, unseen: int | None) -> list[int]:
        """The places of those that were timed, that first which trees put first."""
        places = {id(config): at for at, config in enumerate(self.configs)}
        ordered = trees.in_order(self.likeness, self.configs, self.cost, unseen)
        return [at for config in ordered if (at := places[id(config)]) in self.ms]


@dataclass(frozen=True)
class Pooled:
    """Trees of one variant that have seen shapes of several kinds."""

    trees: ConfigTrees
    shapes: int


def fitted_config_trees(
    coordinates: Sequence[str],
    shapes: Sequence[Mapping[str, Timed]],
    pooled: Mapping[str, Pooled] | None = None,
    stay: Mapping[str, ConfigTrees] | None = None,
) -> dict[str, ConfigTrees]:
    """By variant; of `shapes` each has what was timed of variants with several configs. Those that are `pooled` are
    kept where they lose less on shapes left out, or where most of what they have seen are these shapes. Those that
    `stay` are not fitted again."""
    pooled, stay, found = pooled or {}, stay or {}, {}
    for name, own in _by_variant(shapes).items():
        if name in stay:
            found[name] = stay[name]
        elif name in pooled and len(own) > MOST_OF * pooled[name].shapes:
            found[name] = pooled[name].trees
        elif len(own) >= LEAST:
            fitted = _fitted(name, tuple(coordinates), own)
            fitted += [pooled[name].trees] if name in pooled else []
            found[name] = min(fitted, key=lambda trees: _lost_left_out(trees, own))
    return found


def pooled_config_trees(
    kinds: Sequence[tuple[Sequence[str], Sequence[Mapping[str, Timed]]]], asked: Collection[str] | None = None
) -> dict[str, Pooled]:
    """Trees of variants that were timed on shapes of several kinds: of each its coordinates and its shapes. Each part
    of such trees has seen of a kind what the same part of that kind's own trees would have. `asked`: of those alone."""
    coordinates = tuple(dict.fromkeys(name for names, _ in kinds for name in names))
    each = [_by_variant(shapes) for _, shapes in kinds]
    found = {}
    names = {name for own in each for name in own}
    for name in sorted(names if asked is None else names & set(asked)):
        several = [own[name] for own in each if len(own.get(name, ())) >= LEAST]
        if len(several) > 1:
            pairs = enumerate((place, timed) for own in several for place, timed in own.items())
            every = {PARTS * number + place % PARTS: timed for number, (place, timed) in pairs}
            fitted = _fitted(name, coordinates, every)
            found[name] = Pooled(min(fitted, key=lambda trees: _lost_left_out(trees, every)), len(every))
    return found


def _by_variant(shapes: Sequence[Mapping[str, Timed]]) -> dict[str, dict[int, Timed]]:
    """What was timed of each variant, by the place of the shape."""
    names = sorted({name for timed in shapes for name in timed})
    return {name: {place: timed[name] for place, timed in enumerate(shapes) if name in timed} for name in names}


def order_digest(orders: Iterable[Sequence[tuple[Config, float]]]) -> str:
    """12 hex digits over what trees know a variant's configs by beside their values: which ones it would try first on
    some problems, each in its place."""
    found = hashlib.sha256()
    for order in orders:
        found.update(json.dumps([dict(config) for config, _ in order[:ASKED]], sort_keys=True).encode())
    return found.hexdigest()[:12]


def _lost_left_out(trees: ConfigTrees, shapes: Mapping[int, Timed]) -> float:
    """The sum over shapes of what the picks of those parts that have not seen them lose, of each at most its time."""
    lost = 0.0
    for place, timed in shapes.items():
        lost += min(timed.ms[timed.order(trees, place)[0]] / min(timed.ms.values()) - 1, 1.0)
    return lost


def _fitted(name: str, coordinates: tuple[str, ...], shapes: Mapping[int, Timed]) -> list[ConfigTrees]:
    """Trees for each of `NEAR`."""
    import torch

    own = coordinates_of([config for timed in shapes.values() for config in timed.configs])
    untold = ConfigTrees(Trees((*coordinates, *own), (name,), ()))
    points, least, lost, guessed, shape_of = [], [], [], [], []
    for place, timed in shapes.items():
        order = own_order(timed.configs, timed.cost)[:ASKED]
        places = {id(config): at for at, config in enumerate(timed.configs)}
        fastest = math.log(min(timed.ms.values()))
        here = untold.trees.at(timed.likeness)
        for told, (config, guess) in zip(untold.told(order), order, strict=True):
            if (at := places[id(config)]) in timed.ms:
                took = timed.ms[at]
                points.append(here + told)
                least.append(fastest)
                lost.append(math.log(took) - fastest if math.isfinite(took) else BEHIND)
                guessed.append(math.log(guess))
                shape_of.append(place)
    rows, whose = torch.tensor(points).double(), torch.tensor(shape_of)
    extent = EXTENTS[max(fewest for fewest in EXTENTS if fewest <= len(shapes))]
    if len(shapes) >= MANY and any(timed.cost is not None for timed in shapes.values()):
        extent = GUESSED
    parts = []
    for near in NEAR:
        held = [near * math.tanh(one / near) if math.isfinite(near) else one for one in lost]
        told_by = [fast + one - guess for fast, one, guess in zip(least, held, guessed, strict=True)]
        wanted = torch.tensor(told_by).double()[:, None]
        for seed in range(PARTS + 1):
            seen = (whose % PARTS != seed - 1).nonzero()[:, 0]
            group = whose[seen].unique(return_inverse=True)[1]
            parts.append(Part(rows, wanted, seen, extent, seed, group))
    trees = boosted_parts(parts)
    each = [trees[first : first + PARTS + 1] for first in range(0, len(trees), PARTS + 1)]
    return [ConfigTrees(Trees(untold.trees.coordinates, (name,), found)) for found in each]
