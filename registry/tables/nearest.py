"""What measured shapes say of a problem: how a rule with `nearest` ranks, and picks configs.

A measured shape is a point in the coordinates of its op (`Problem.likeness`), each times its weight in the rule, with
what every contestant lost there to the fastest. What a variant is expected to lose is told by trees that were fitted to
all shapes (tables/trees.py); where a rule has none, it is what the variant lost on the nearest, the nearer the more it
counts. Configs are told in the same two ways (tables/config_order.py). What compiles here is put before a library's
kernel only where a measured shape is near, or where that is expected to lose much.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from registry import garbage
from registry.contract.noted import noting
from registry.contract.once import once
from registry.tables.closer import Closer, Guess, Runs, close
from registry.tables.config_order import ConfigTrees, Cost, guessed
from registry.tables.same import Same
from registry.tables.search import Point, Tree, nearest, reaches, tree_of
from registry.tables.shapes import Shape, Shapes
from registry.tables.trees import Trees, picker

Config = Mapping[str, Any]
Key = frozenset[tuple[str, Any]]
"""A config, as what it is found by."""

COUNT = 8
"""Shapes that are asked."""
REACH = 2.0
"""A kernel that is compiled here goes before a library's where the nearest measured shape is nearer than this."""
TRUST = 0.25
"""Log time that a library's may be expected to lose and yet goes first where no shape is near. Left out in turn,
attentions lose 1.54% in the mean with it and 3.63 without (decoding of 32 bits, where torch's kernel takes 57 times as
long), products 2.99 and 4.13."""
LITTLE = 0.01
"""Log time that a kernel compiled here has to gain to go before a library's: who is chosen for less loses as often. Of
1,407 drawn products of an H200 1.84% is lost with it (25 are more than 5% slower than the library's kernel), 1.97% with
twice as much (21), 1.80% without any (33); of 3,300 shapes of other ops and kinds 1.75, and 1.74 with twice as much."""
CAP = 0.7
"""Most that one shape holds against a variant, in log time: what is twice as slow is bad enough."""
UNKNOWN = 0.75
"""What a variant is expected to lose that was measured on none of the nearest shapes: more than any that was."""
NEVER = 10.0
"""What a contestant loses that gave a wrong result, hung or crashed there."""
OTHER = 0.03
"""What a config is expected to lose to others of its variant where it was not measured itself."""
ANSWERS = 4096
"""Answers kept; they go when there are more."""


class _Known(NamedTuple):
    """What one measured shape says of one variant."""

    lost: float
    """What it loses on shapes like this one."""
    here: float
    """On this very shape, by its fastest config."""
    configs: dict[Key, float]
    """What each that was measured lost beyond its guess."""
    others: float
    """What those lose that were not."""
    fastest: Key | None
    """The config that lost least, unless all failed there."""


@dataclass(eq=False)
class Advice:
    """What the measured shapes of a rule say of one problem. What nobody asks of it is not looked for."""

    asked: Neighbours
    without: int | None = None
    """The place of a shape that must not answer."""
    expected: Mapping[str, float] | None = None
    """What trees expect each variant to lose, where the rule has any; by a closer look, where that was taken."""
    likeness: Mapping[str, float] = field(default_factory=dict)
    """Of the problem: what trees for configs ask about."""
    guessing: tuple[str, ...] = ()
    """The variants whose guesses a closer look asked for."""
    _orders: dict[str, tuple[Sequence[Config], Sequence[Config]]] = field(default_factory=dict, init=False)
    """Of variants that guess no cost: the configs that were asked about last, for a problem that lies here, too, and
    what was answered."""
    _ranked: dict[Any, list[str]] = field(default_factory=dict, init=False)
    """What was answered of variants."""

    @once
    def here(self) -> Point:
        """Where the problem lies among the shapes."""
        return self.asked.place(self.likeness)

    @once
    def _found(self) -> list[tuple[float, int]]:
        return self.asked.found(self.here, COUNT, self.without)

    @once
    def near(self) -> tuple[tuple[float, float, Shape], ...]:
        """(distance, weight, shape), nearest first."""
        shapes = self.asked.shapes
        return tuple([(d, math.exp(-d * d) + 1e-4 / (1 + d * d), shapes[place]) for d, place in self._found])

    @once
    def said(self) -> Sequence[Mapping[str, _Known]]:
        """What each of these shapes says, by variant."""
        return [self.asked.known(place) for _, place in self._found]

    @once
    def _same(self) -> int | None:
        """The place of the shape that counts as this problem, where one does: in all coordinates, those too that weigh
        nothing between different sizes (the number of bits, say)."""
        return self.asked.same.place_of(self.likeness, self.without)

    @property
    def distance(self) -> float:
        """How far the nearest shape is."""
        return next((d for d, _ in self.asked.found(self.here, 1, self.without)), math.inf)

    @property
    def far(self) -> bool:
        """Whether no shape is near."""
        if self.expected is None:
            return not self._found or self._found[0][0] >= REACH
        if self.without is not None:
            return not self.asked.found(self.here, 1, self.without, REACH)
        return not self.asked.reaches(self.here)

    @once
    def lost(self) -> Mapping[str, float]:
        """What each variant is expected to lose, in log time."""
        expected = self._lost_nearby if self.expected is None else self.expected
        said = {name: one.here for name, one in self.asked.known(self._same).items()} if self._same is not None else {}
        if len(said) > 1:  # (who ran alone is held against none)
            # What was not measured there, a newer variant say, is held against the best of those that were.
            best = expected.get(min(said, key=said.__getitem__), 0.0)
            return {**expected, **{name: best + lost for name, lost in said.items()}}
        if self.expected is None:
            return expected
        failed = {name for name in self.asked.failing if self._lost_nearby.get(name, 0.0) > CAP}
        return {**self.expected, **{name: self._lost_nearby[name] for name in failed}} if failed else self.expected

    @once
    def _lost_nearby(self) -> Mapping[str, float]:
        """On the nearest shapes, by those that ran on one of them beside others: what ran alone is held against none,
        so that a shape of another kind says nothing of who is faster."""
        sums: dict[str, float] = {}
        weights: dict[str, float] = {}
        for (_, weight, _), said in zip(self.near, self.said, strict=True):
            for name, known in said.items() if len(said) > 1 else ():
                sums[name] = sums.get(name, 0.0) + weight * known.lost
                weights[name] = weights.get(name, 0.0) + weight
        return {name: lost / weights[name] for name, lost in sums.items()}

    def __str__(self) -> str:
        return self.text(self.lost)

    def text(self, names: Collection[str]) -> str:
        """What these variants are expected to lose to the best of them."""
        each = sorted((lost, name) for name, lost in self.lost.items() if name in names)
        return ", ".join(f"{name} loses {100 * math.expm1(lost - each[0][0]):.1f}%" for lost, name in each)

    def ranked(self, names: Sequence[str], libraries: Collection[str]) -> list[str]:
        """These variants, that which is expected to lose least first; a library's where others are expected to gain
        little, which is no more than that: on a shape that was measured itself it is known. Ties stay in the order
        given."""
        asked = tuple(names), tuple(libraries)
        ranked = self._ranked.get(asked)
        if ranked is None:
            lost, little = self.lost, LITTLE if self.expected is not None and self._same is None else 0.0
            expected = {name: lost.get(name, UNKNOWN) + little for name in names}
            theirs = [name for name in libraries if name in expected]
            for name in theirs:
                expected[name] = lost.get(name, UNKNOWN)
            ranked = sorted(names, key=expected.__getitem__)
            trusted = [name for name in theirs if expected[name] - expected[ranked[0]] < TRUST]
            # Whether a shape is near is asked where it would change anything.
            if trusted and {*ranked[: len(trusted)]} != {*trusted} and self.far:
                ranked.sort(key=lambda name: name not in trusted)
            self._ranked[asked] = ranked
        return [*ranked]

    def configs(self, variant: str, configs: Sequence[Config], cost: Cost | None) -> Sequence[Config]:
        """These configs, that which is expected to be fastest first; ties stay in the order given. Where no trees tell,
        the nearest do; then a variant that guesses no cost keeps its order: its configs may mean another thing on each
        shape (a number of splits). What was fastest on a shape that counts as this problem is first, whatever else is
        told."""
        if len(configs) < 2:
            return configs
        trees = self.asked.config_trees.get(variant)
        if trees is None:
            return self._known_first(variant, configs if cost is None else self._nearby(variant, configs, cost))
        if cost is not None:
            return self._by_trees(variant, trees, configs, cost)
        asked, found = self._orders.get(variant, ((), ()))
        if asked != configs:
            found = self._by_trees(variant, trees, configs, None)
            if not noting():  # others would be given noted sizes
                self._orders[variant] = configs, found
        return found

    @property
    def measured(self) -> bool:
        """Whether the problem counts as one that was measured itself."""
        return self._same is not None

    def behind(self, variant: str, configs: Sequence[Config], cost: Cost | None) -> list[tuple[float, Config]]:
        """These configs in the same order, each with the log time that it is expected to lose to the first."""
        trees = self.asked.config_trees.get(variant)
        if trees is None or len(configs) < 2:
            return [(place * OTHER, config) for place, config in enumerate(self.configs(variant, configs, cost))]
        expected = trees.expected(self.likeness, configs, cost)
        return [(math.log(took / expected[0][0]), config) for took, config in expected]

    def _by_trees(
        self, variant: str, trees: ConfigTrees, configs: Sequence[Config], cost: Cost | None
    ) -> Sequence[Config]:
        return self._known_first(variant, trees.in_order(self.likeness, configs, cost, self.without))

    def _known_first(self, variant: str, configs: Sequence[Config]) -> Sequence[Config]:
        known = self.asked.known(self._same).get(variant) if self._same is not None else None
        if known is None or known.fastest is None:
            return configs
        return sorted(configs, key=lambda config: _key(config) != known.fastest)

    def _nearby(self, variant: str, configs: Sequence[Config], cost: Cost) -> Sequence[Config]:
        pairs = zip(self.near, self.said, strict=True)
        measured = [(near[1], said[variant]) for near, said in pairs if variant in said]
        guesses = guessed(configs, cost) if measured else None
        if guesses is None:
            return configs
        whole = sum(weight for weight, _ in measured)

        def expected(pair: tuple[Config, float]) -> float:
            off, key = 0.0, _key(pair[0])
            for weight, known in measured:
                off += weight * known.configs.get(key, known.others)
            return math.exp(off / whole) * pair[1]  # no log of a guess: that of a noted size is noted

        return [config for config, _ in sorted(guesses, key=expected)]


@dataclass(eq=False)
class Neighbours:
    """The measured shapes of one rule, ready to be asked about problems."""

    names: tuple[str, ...]
    """Of the coordinates."""
    weights: Mapping[str, float]
    contestants: Sequence[tuple[str, Config]]
    shapes: Sequence[Shape]
    trees: Trees | None = None
    """What ranks the variants, where the rule has them; else the nearest do."""
    config_trees: Mapping[str, ConfigTrees] = field(default_factory=dict)
    """By variant, what ranks its configs; else the nearest do."""
    closer: Closer | None = None
    """What ranks variants that are expected to take about as long."""
    _known: dict[int, dict[str, _Known]] = field(init=False, default_factory=dict)
    """By the place of a shape, once it was near."""
    _answers: dict[Any, Advice] = field(init=False, default_factory=dict)
    """Sizes count in steps, so that many a new problem lies where another did."""

    def __post_init__(self) -> None:
        self._used = [name for name in self.names if self.weights.get(name)]
        self._scale = [float(self.weights[name]) for name in self._used]
        every = [one.trees for one in self.config_trees.values()] + ([self.trees] if self.trees is not None else [])
        told = {*self.names, *(name for trees in every for name in trees.coordinates[: trees.shared])}
        self._nothing = dict.fromkeys(sorted(told), 0.0)
        self._picked, self._key = picker(self._used), operator.itemgetter(*self._nothing)
        self._rows = Shapes.of(self.shapes)

    @functools.cached_property
    def _tree(self) -> Tree:
        pairs = [(weight, self.names.index(name)) for weight, name in zip(self._scale, self._used, strict=True)]
        return tree_of([tuple([w * point[place] for w, place in pairs]) for point in self._rows.points])

    @garbage.none_looked_for()
    def ready(self) -> Neighbours:
        """Itself, with what finds leaves and shapes built: else the first problem of each variant would wait for it.
        Raises ValueError for trees that are none."""
        closer = [self.closer.trees] if self.closer is not None else []
        for trees in (self.trees, *closer, *(one.trees for one in self.config_trees.values())):
            if trees is not None:
                trees.leaves()
        self._tree, self.same  # noqa: B018 - built when they are first asked for
        return self

    def ask(
        self,
        likeness: Mapping[str, float],
        without: int | None = None,
        guess: Guess | None = None,
        runs: Runs | None = None,
    ) -> Advice | None:
        """What the shapes say of a problem of which variants guess so much and that these run, leaving out the shape at
        one place; None where there are none."""
        if not self.shapes:
            return None
        try:
            key = self._key(likeness)
        except KeyError:  # what is not there is found so once, not by each that looks for it
            likeness = {**self._nothing, **likeness}
            key = self._key(likeness)
        key = key if without is None else None
        found = self._answers.get(key)
        if found is None:
            found = self._kept(key, Advice(self, without, self._expected(likeness, without), likeness))
        if self.closer is None or guess is None or found.expected is None or found.measured:
            return found
        if not close(found.expected, runs):
            return found
        at = self.closer.at(likeness, guess)
        key = (key, at) if without is None else None
        closer = self._answers.get(key)
        if closer is None:
            expected = {**found.expected, **self.closer.trees.lost(at, without)}
            closer = self._kept(key, Advice(self, without, expected, likeness, self.closer.names))
        return closer

    def _kept(self, key: Any, answer: Advice) -> Advice:
        """Kept for others that lie here and, where it was asked, guess as much; not what leaves a shape out."""
        if key is not None:
            if len(self._answers) >= ANSWERS:
                self._answers = {}
            self._answers[key] = answer
        return answer

    def _expected(self, likeness: Mapping[str, float], without: int | None = None) -> Mapping[str, float] | None:
        return self.trees.lost(self.trees.at(likeness), without) if self.trees is not None else None

    @functools.cached_property
    def failing(self) -> frozenset[str]:
        """Variants that gave a wrong result, hung or crashed on one of the shapes."""
        return frozenset(self.contestants[one][0] for one in self._rows.losers(NEVER))

    def place(self, likeness: Mapping[str, float]) -> Point:
        """Where a problem lies among the shapes: in the coordinates that count, by how much they do."""
        return tuple(map(operator.mul, self._scale, self._picked(likeness)))

    @functools.cached_property
    def same(self) -> Same:
        """What finds the shape that counts as a problem."""
        return Same(self.names, self._rows)

    def reaches(self, here: Point) -> bool:
        """Whether any shape is near."""
        return reaches(self._tree, here, REACH)

    def found(self, here: Point, count: int, without: int | None, within: float = math.inf) -> list[tuple[float, int]]:
        """(distance, place) of so many shapes that are no farther than this, nearest first."""
        if without is None:
            return nearest(self._tree, here, count, within)
        found = nearest(self._tree, here, count + 1, within)
        return [(d, place) for d, place in found if place != without][:count]

    def known(self, place: int) -> dict[str, _Known]:
        """What one of the shapes says, by variant."""
        found = self._known.get(place)
        if found is None:
            found = {}
            least: dict[str, float] = {}
            for result in self.shapes[place].results:
                (name, config), lost = self.contestants[result.contestant], result.lost
                best, here, configs, others, fastest = found.get(name, (math.inf, math.inf, {}, OTHER, None))
                held = lost if lost >= NEVER else min(lost, CAP)
                here = min(held, here)
                if not result.here:
                    best, configs[_key(config)] = min(held, best), lost - result.guess
                    others = sum(configs.values()) / len(configs) + OTHER
                if lost < least.get(name, NEVER):
                    least[name], fastest = lost, _key(config)
                found[name] = _Known(best, here, configs, others, fastest)
            self._known[place] = found
        return found


def _key(config: Config) -> Key:
    return frozenset(config.items())
