"""Which contestants are worth measuring: a model of the measurements so far says what the next one could gain.

A Gaussian process over shapes and configs predicts the time of each contestant, as a multiple of the least time that
the work and the bytes could take. What it knows of a contestant: the variant, its config's values, the shared memory
and registers that it declares to need, how early its variant lists it, what its recorded timeline says of the time in
which its warps stand still, and, once it is compiled, whether it keeps values in memory that no register was left for;
of a shape: its facts. Within a shape that
contestant comes next whose expected improvement on the best so far is largest; a shape is done when no more is to be
expected, or its share of the budget is spent. What early shapes leave of theirs, later ones may use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from registry.contract.capability import config_reasons
from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.tuning.contestants import Contestant, LineUp
from registry.tuning.fit import check_number
from registry.tuning.journal import CaseResults
from registry.tuning.observed import Observed, coordinates

if TYPE_CHECKING:
    import torch

    from registry.toolbox.compile_pool import CompilePool

AHEAD = 3
"""Shapes whose likely contestants are compiled while others are measured."""
CHEAPEST = 10.0
"""Contestants left of the share beyond which more of them make none cheaper."""
NEAR = 250
"""Measurements that a prediction looks back at: those on the most alike shapes."""
LEAST_MS = 4e-3
"""What a launch takes however little it does."""
RATES = {"gbs": 4000.0, "tflops": 700.0}
"""Bytes and work over time, for the least time of a shape: only their ratio matters, the model learns the rest."""


@dataclass(frozen=True)
class Guidance:
    """How much is measured, and how alike things are. The latter were chosen on sweeps of an H200."""

    share: float = 0.33
    """Of the contestants, on average over shapes."""
    tolerance: float = 0.002
    """No more is measured on a shape where the expected improvement, in log time, is below this; see `elastic`."""
    elastic: float = 3.0
    """So many contestants beyond the share make the next one e times as dear. A shape unlike all others may be worth
    them, and the share holds in the long run."""
    size: float = 8.0
    """Octaves of a size over which shapes resemble each other."""
    flag: float = 1.5
    """How much one differing flag or name sets shapes apart: larger is less."""
    config: float = 2.0
    """Octaves of a config's value over which configs resemble each other."""
    later: float = 0.05
    """Log time that each place further down its variant's own list is expected to cost."""
    shape_variance: float = 1.0
    variant_variance: float = 0.1
    config_variance: float = 0.02
    noise: float = 4e-4
    learnt: tuple[CaseResults, ...] = ()
    """Earlier measurements of the op, on whatever shapes, of a device like this one."""
    observed: tuple[Observed, ...] = ()
    """Recorded timelines."""
    spilled: float = 0.1
    """Log time that it is expected to cost to have too few registers."""

    def __post_init__(self) -> None:
        check_number("share", self.share, 0.01, 1)
        check_number("tolerance", self.tolerance, 0, 10)


class Guide:
    """Chooses among the contestants of some shapes, which it is told of beforehand, in their order."""

    def __init__(self, plans: Sequence[LineUp], guidance: Guidance | None = None) -> None:
        import torch

        self.guidance = guidance or Guidance()
        learnt = [case for case in self.guidance.learnt if case.timed]
        plans = [*plans, *(of_results(case, plans[0].problem.target) for case in learnt if plans)]
        self.rows = [(place, one) for place, planned in enumerate(plans) for one in planned.contestants]
        self.first_row = dict(_first_rows(plans))
        self._floor = [_floor(planned) for planned in plans]
        self._shapes = _Features([dict(planned.problem.facts()) for planned in plans])
        seen = coordinates(self.guidance.observed)
        self._configs = _Features([_told_of(plans[place], one, seen) for place, one in self.rows])
        names: dict[str, int] = {}
        self._variant = torch.tensor([names.setdefault(one.variant, len(names)) for _, one in self.rows])
        self._place = torch.tensor([place for place, _ in self.rows])
        self._offset = self.guidance.later * _ranks(plans)
        self._told = torch.full((len(self.rows),), math.nan, dtype=torch.float64)
        """Log time over the floor, less the offset, of what was measured."""
        self._gone: set[int] = set()
        self.compiling: set[tuple[int, str]] = set()
        """Contestants, by shape and key, of which the compiler has said nothing yet."""
        self._allowed = 0.0
        self._begun: set[int] = set()
        self._recall(len(plans) - len(learnt), learnt)

    def tell(self, place: int, key: str, ms: float | None) -> None:
        """What a contestant of shape `place` took; None where it failed."""
        row = self._row(place, key)
        if row is None:
            return
        self._begin(place)
        self._gone.add(row)
        self._allowed -= 1
        if ms is not None:
            self._told[row] = math.log(ms) - self._floor[place] - self._offset[row]

    def compiled(self, place: int, key: str, figures: Mapping[str, Any]) -> None:
        """What the compiler said of a contestant of shape `place`, before it is measured."""
        row = self._row(place, key)
        if row is not None and math.isnan(self._told[row]) and figures.get("stack"):
            self._offset[row] += self.guidance.spilled

    def _recall(self, place: int, learnt: Sequence[CaseResults]) -> None:
        for number, case in enumerate(learnt if self.rows else (), place):
            for row in range(*self.first_row[number]):
                ms = case.timed[self.rows[row][1].key].ms
                self._told[row] = math.log(ms) - self._floor[number] - self._offset[row]

    def next(self, place: int) -> Contestant | None:
        """The contestant of shape `place` to measure now; None where the shape is done."""
        import torch

        self._begin(place)
        low, high = self.first_row[place]
        rest = torch.tensor([row for row in range(low, high) if row not in self._gone], dtype=torch.long)
        measured = [row for row in range(low, high) if not math.isnan(self._told[row])]
        if not len(rest):
            return None
        mean, deviation = self._predict(place, rest)
        if not measured:
            return self.rows[int(rest[(mean - deviation / 2).argmin()])][1]
        best = (self._told[measured] + self._offset[measured]).min()
        normal = torch.distributions.Normal(0.0, 1.0)
        ahead = (best - mean) / deviation
        gain = deviation * (ahead * normal.cdf(ahead) + normal.log_prob(ahead).exp())
        return self.rows[int(rest[gain.argmax()])][1] if float(gain.max()) >= self._price() else None

    def _price(self) -> float:
        """What a measurement must promise, in log time: more the further the sweep is beyond its share, less before."""
        beyond = max(-CHEAPEST, 1 - self._allowed) / self.guidance.elastic
        return self.guidance.tolerance * math.exp(min(beyond, 50.0))

    def likely(self, place: int, count: int) -> list[Contestant]:
        """Those that would be asked for first as things stand, to be compiled meanwhile."""
        import torch

        low, high = self.first_row[place]
        rest = torch.tensor([row for row in range(low, high) if row not in self._gone], dtype=torch.long)
        if not len(rest):
            return []
        mean, deviation = self._predict(place, rest)
        return [self.rows[int(rest[i])][1] for i in (mean - deviation / 2).argsort()[:count]]

    def _begin(self, place: int) -> None:
        if place not in self._begun:
            self._begun.add(place)
            low, high = self.first_row[place]
            self._allowed += self.guidance.share * (high - low)

    def _row(self, place: int, key: str) -> int | None:
        low, high = self.first_row[place]
        return next((row for row in range(low, high) if self.rows[row][1].key == key), None)

    def _predict(self, place: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the log time over the floor."""
        import torch

        g = self.guidance
        known = (~self._told.isnan()).nonzero()[:, 0]
        prior = g.shape_variance + g.variant_variance + g.config_variance
        if not len(known):
            return self._offset[rows], torch.full((len(rows),), prior**0.5, dtype=torch.float64)
        alike = self._alike(torch.tensor([place]), self._place[known])[0]
        known = known[alike.argsort(descending=True)[:NEAR]]
        values = self._told[known]
        among = self._covariance(known, known) + g.noise * torch.eye(len(known), dtype=torch.float64)
        factor = torch.linalg.cholesky(among)
        across = self._covariance(rows, known)
        centre = values.mean()
        mean = centre + self._offset[rows] + (across @ torch.cholesky_solve((values - centre)[:, None], factor))[:, 0]
        known_part = torch.linalg.solve_triangular(factor, across.T, upper=False).square().sum(0)
        return mean, (prior - known_part).clamp_min(1e-9).sqrt()

    def _alike(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        g = self.guidance
        return (-0.5 * self._shapes.distance(one, other, 1 / g.size**2, 1 / g.flag**2)).exp()

    def _covariance(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        g = self.guidance
        same = (self._variant[one][:, None] == self._variant[other][None]).double()
        configs = (-0.5 / g.config**2 * self._configs.distance(one, other, 1.0, 1.0)).exp()
        beside = g.shape_variance + same * (g.variant_variance + g.config_variance * configs)
        return self._alike(self._place[one], self._place[other]) * beside


@dataclass
class Chooser:
    """A guide, asked about one shape; what it is likely to ask for next is compiled meanwhile."""

    guide: Guide
    place: int
    plans: Sequence[LineUp]
    commands: Mapping[tuple[str, str], dict[str, Any]]
    pool: CompilePool

    def next(self) -> Contestant | None:
        for place in range(self.place, min(self.place + AHEAD, len(self.plans))):
            likely = self.guide.likely(place, max(2, len(self.plans[place].contestants) // 3))
            self._compile(place, likely)
        self._hear()
        one = self.guide.next(self.place)
        if one is not None:
            self._compile(self.place, [one])
        return one

    def tell(self, one: Contestant, ms: float | None) -> None:
        self.guide.tell(self.place, one.key, ms)

    def _compile(self, place: int, wanted: Sequence[Contestant]) -> None:
        keys = [(self.plans[place].key, one.key) for one in wanted]
        fresh = [key for key in keys if key in self.commands and not self.pool.has(key)]
        self.guide.compiling |= {(place, key) for _, key in fresh}
        self.pool.submit({key: self.commands[key] for key in fresh})

    def _hear(self) -> None:
        """What the compiler has said by now."""
        for place, key in sorted(self.guide.compiling):
            answer = self.pool.result((self.plans[place].key, key), 0.0)
            if answer is not None:
                self.guide.compiling.remove((place, key))
                self.guide.compiled(place, key, answer)


class _Features:
    """Facts as numbers to be far apart in, and names to differ in."""

    def __init__(self, facts: Sequence[Mapping[str, Any]]) -> None:
        import torch

        names = sorted({name for one in facts for name in one})
        sizes = [name for name in names if any(_is_size(one.get(name)) for one in facts)]
        others = [name for name in names if name not in sizes]
        octaves = [[_octave(one.get(name)) for name in sizes] for one in facts]
        codes: dict[tuple[str, str], int] = {}
        named = [[codes.setdefault((name, str(one.get(name))), len(codes)) for name in others] for one in facts]
        self.sizes = torch.tensor(octaves, dtype=torch.float64).reshape(len(facts), len(sizes))
        self.names = torch.tensor(named, dtype=torch.long).reshape(len(facts), len(others))

    def distance(self, one: torch.Tensor, other: torch.Tensor, of_sizes: float, of_names: float) -> torch.Tensor:
        """Squared distances, all pairs."""
        sizes = (self.sizes[one][:, None] - self.sizes[other][None]).square().sum(-1)
        return of_sizes * sizes + of_names * (self.names[one][:, None] != self.names[other][None]).sum(-1)


def of_results(case: CaseResults, target: Target) -> LineUp:
    """A measured shape as a line-up of what was timed there."""
    asked = Case.from_data(case.shape)
    entries = tuple(Contestant(e.variant, e.config, e.first, e.fingerprint) for e in case.timed.values())
    return LineUp(asked, asked.problem(target), case.flops, entries, case.illegal)


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _octave(value: Any) -> float:
    return math.log2(max(value, 0.5)) if _is_size(value) else -1.0


def _floor(planned: LineUp) -> float:
    """The log of the least milliseconds that work and bytes could take."""
    moved = op_named(planned.case.op).bytes_moved(planned.problem)
    least = max(planned.flops / RATES["tflops"] / 1e9, moved / RATES["gbs"] / 1e6, LEAST_MS)
    return math.log(least)


def _told_of(planned: LineUp, one: Contestant, seen: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """What is known of a contestant before it was compiled; `seen` is what timelines say (observed.coordinates)."""
    told: dict[str, Any] = {**one.config, **seen.get(one.key, seen.get(one.variant, {}))}
    variant = catalog.get().variants.get(one.variant)
    if variant is not None and not config_reasons(variant.requires, planned.problem, one.config):
        for name in ("shared_memory", "registers"):
            budget = getattr(variant.requires, name)
            if budget is not None:
                told[f"needs {name}"] = budget(planned.problem, one.config)
    return told


def _ranks(plans: Sequence[LineUp]) -> torch.Tensor:
    """The place of each contestant in its variant's own list, counted up to 4."""
    import torch

    ranks: list[float] = []
    for planned in plans:
        seen: dict[str, int] = {}
        for one in planned.contestants:
            ranks.append(float(min(4, seen.setdefault(one.variant, 0))))
            seen[one.variant] += 1
    return torch.tensor(ranks, dtype=torch.float64)


def _first_rows(plans: Sequence[LineUp]) -> list[tuple[int, tuple[int, int]]]:
    found, row = [], 0
    for place, planned in enumerate(plans):
        found.append((place, (row, row + len(planned.contestants))))
        row += len(planned.contestants)
    return found
