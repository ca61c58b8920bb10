"""What contestants of some shapes are expected to take, from what was measured so far: a Gaussian process.

Two contestants have in common what their shapes share (all of it on one shape, and the more the more alike two are),
what their variant does on all shapes, on shapes like these and on this one, the same for configs as alike as theirs,
and how steeply time rises with what their tiles make of the shape. How much each of these counts, and how far each fact
of a shape or value of a config sets things apart, is learnt from the measurements themselves as they come (the
likeliest, given what is usual). Where measurements on a shape, or on those like it, were further off than they should
have been, the next are held to be as unsure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from registry.contract.likeness import is_size

NEAR = 300
"""Measurements that a prediction looks back at: those on the most alike shapes."""
LEARNT_FROM = 300
"""Measurements that the weights are learnt from, those of whole shapes drawn at random."""
FIRST, AGAIN = 200, 1.5
"""Weights are learnt when there are so many measurements (in fewer there is too much chance), and again whenever there
are so many times more."""
STEPS, RATE = 40, 0.1
HOPELESS = 1.2
"""Log time behind the best of a shape beyond which it does not matter how slow a contestant is."""

USUAL = {
    "shape": 0.8,
    "this shape": 0.0075,
    "variant": 0.006,
    "variant, shape": 0.06,
    "variant, this shape": 0.002,
    "config": 0.004,
    "config, shape": 0.04,
    "config, this shape": 0.0055,
    "slope": 0.045,
    "slope, shape": 0.005,
    "noise": 0.0012,
}
"""Variances of log time, before anything is known; of slopes, for each unit of what they are over. The likeliest, with
the weights below, for full measurements of 30 shapes, three times of each of four ops."""
SIZE, NAME, VALUE, WORD = 0.0155, 0.086, 0.53, 0.41
"""Weights of a squared octave of a shape's size, of a name that differs, of a config's octave, of its words."""
SPREAD = 1.0
"""How far from usual, in log, a weight usually is."""
CALM, OWN, MOST = 2.0, 3.0, 6.0
"""Of surprises: how many measurements without any are taken for granted, for how many one on the same shape counts, and
how many deviations the largest is taken for."""


@dataclass
class Features:
    """Facts as numbers to be far apart in, and names to differ in."""

    sizes: torch.Tensor
    names: torch.Tensor

    @classmethod
    def of(cls, facts: Sequence[Mapping[str, Any]]) -> Features:
        names = sorted({name for one in facts for name in one})
        sizes = [name for name in names if any(is_size(one.get(name)) for one in facts)]
        others = [name for name in names if name not in sizes]
        octaves = [[_octave(one.get(name)) for name in sizes] for one in facts]
        codes: dict[tuple[str, str], int] = {}
        named = [[codes.setdefault((name, str(one.get(name))), len(codes)) for name in others] for one in facts]
        found = cls(
            torch.tensor(octaves, dtype=torch.float64).reshape(len(facts), len(sizes)),
            torch.tensor(named, dtype=torch.long).reshape(len(facts), len(others)),
        )
        return found.varying()

    def distinct(self) -> tuple[Features, torch.Tensor]:
        """Every row once, and which of them each was."""
        every = torch.cat([self.sizes, self.names.double()], 1)
        if not every.numel():  # there is none, or they are all the same
            return Features(self.sizes[:1], self.names[:1]), torch.zeros(len(every), dtype=torch.long)
        rows, which = every.unique(dim=0, return_inverse=True)
        wide = self.sizes.shape[1]
        return Features(rows[:, :wide], rows[:, wide:].long()), which

    def varying(self) -> Features:
        """Without what is the same for all."""
        if not len(self.sizes):
            return self
        return Features(
            self.sizes[:, (self.sizes != self.sizes[0]).any(0)], self.names[:, (self.names != self.names[0]).any(0)]
        )

    def distance(
        self, one: torch.Tensor, other: torch.Tensor, sizes: torch.Tensor, names: torch.Tensor
    ) -> torch.Tensor:
        """Squared distances, all pairs, by a weight for each size and name."""
        root = sizes.sqrt()
        a, b = self.sizes[one] * root, self.sizes[other] * root
        squared = (a.square().sum(-1)[:, None] + b.square().sum(-1)[None] - 2 * a @ b.T).clamp_min(0.0)
        for column, weight in enumerate(names):
            a_name, b_name = self.names[one, column], self.names[other, column]
            squared = squared + weight * (a_name[:, None] != b_name[None])
        return squared


class Expectation:
    """Tells mean and deviation of rows: row r is a contestant of variant `variant[r]` on shape `place[r]`."""

    def __init__(
        self,
        shapes: Features,
        configs: Features,
        variant: torch.Tensor,
        place: torch.Tensor,
        offset: torch.Tensor,
        along: torch.Tensor,
    ) -> None:
        self.shapes, self.variant, self.place = shapes, variant, place
        self.along = along
        """Columns of what log time is likely to rise along with, by slopes that shapes have in common."""
        self.configs, self.config = configs.distinct()
        """Each config once, and by row which."""
        self.offset = offset
        """What is expected of each row before anything was measured."""
        self.told = torch.full((len(place),), math.nan, dtype=torch.float64)
        """Log time over the floor, less the offset, of what was measured."""
        self.usual = torch.tensor([math.log(value) for value in USUAL.values()], dtype=torch.float64)
        scales = ((shapes.sizes, SIZE), (shapes.names, NAME), (configs.sizes, VALUE), (configs.names, WORD))
        parts = [torch.full((held.shape[1],), math.log(weight), dtype=torch.float64) for held, weight in scales]
        self.sections = [len(USUAL), *(len(part) for part in parts)]
        self.usual = torch.cat([self.usual, *parts])
        self.learnt = self.count = 0
        self._looked: tuple[Any, tuple[torch.Tensor, ...]] | None = None
        self.asked: dict[int, tuple[float, float]] = {}
        """By row, the mean and deviation expected when it was asked for."""
        self.surprises: list[tuple[int, float]] = []
        """By place, the square of how many deviations off a measurement was."""
        self.draw = torch.Generator().manual_seed(0)
        self._set_weights(self.usual)

    def alike(self, places: Sequence[int], others: Sequence[int]) -> torch.Tensor:
        """Of each place, how alike it is to the one of the others that it is most alike to, from 0 to 1."""
        if not others:
            return torch.zeros(len(places), dtype=torch.float64)
        return self._shapes_alike[list(places)][:, list(others)].amax(1)

    def knows(self, row: int) -> bool:
        return not math.isnan(self.told[row])

    def ask(self, place: int, row: int) -> None:
        """A row is about to be measured: what is expected of it will be compared with what it is."""
        mean, deviation = self.predict(place, torch.tensor([row]))
        self.asked[row] = float(mean[0]), float(deviation[0])

    def tell(self, row: int, value: float) -> None:
        """What was measured of a row."""
        self.told[row] = value - self.offset[row]
        self.count += 1
        if row in self.asked:
            mean, deviation = self.asked[row]
            off = min(abs(value - mean) / deviation, MOST)
            self.surprises.append((int(self.place[row]), off**2))

    def put_off(self, row: int, by: float) -> bool:
        """Expect so much more of the variant of a row, where nothing is known of it. Whether that is so."""
        own = self.variant == self.variant[row]
        if self.told[own].isnan().all():
            self.offset[own] += by
            return True
        return False

    def gains(self, place: int, rows: Sequence[int]) -> torch.Tensor:
        """Of rows on one shape, the expected improvement on the best that is known there; none where nothing is."""
        mean, deviation = self.predict(place, torch.tensor(rows))
        here = ((self.place == place) & ~self.told.isnan()).nonzero()[:, 0]
        if not len(here):
            return torch.zeros(len(rows), dtype=torch.float64)
        best = (self.told[here] + self.offset[here]).min()
        deviation = deviation * self._unsure(place)
        normal = torch.distributions.Normal(0.0, 1.0)
        ahead = (best - mean) / deviation
        found: torch.Tensor = deviation * (ahead * normal.cdf(ahead) + normal.log_prob(ahead).exp())
        return found

    def _unsure(self, place: int) -> float:
        """By how much what happened here and on shapes like this was further off than was expected."""
        if not self.surprises:
            return 1.0
        places = torch.tensor([other for other, _ in self.surprises])
        squares = torch.tensor([square for _, square in self.surprises], dtype=torch.float64)
        alike = self._shapes_alike[place][places]
        counts = alike**4 + OWN * (places == place)
        return float(((CALM + (counts * squares).sum()) / (CALM + counts.sum())).sqrt())

    def predict(self, place: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the log time over the floor, of rows on one shape."""
        known, factor, solved, centre = self._looking_back(place)
        v = self._variances
        prior = v[:-3].sum() + (v[-3] + v[-2]) * self.along[rows].square().sum(-1)
        if not len(known):
            return self.offset[rows], prior.sqrt()
        across = self._from_tables(rows, known)
        mean = centre + self.offset[rows] + across @ solved
        known_part = torch.linalg.solve_triangular(factor, across.T, upper=False).square().sum(0)
        return mean, (prior - known_part).clamp_min(1e-9).sqrt()

    def _looking_back(self, place: int) -> tuple[torch.Tensor, ...]:
        """The measurements that matter most on a shape, kept until there is another."""
        state = (place, self.count, self.learnt)
        if self._looked is None or self._looked[0] != state:
            known = self._known()
            nearness = self._shapes_alike[place][self.place[known]] + (self.place[known] == place)
            known = known[nearness.argsort(descending=True, stable=True)[:NEAR]]
            values = self._values(known)
            centre = values.mean()
            among = self._from_tables(known, known)
            among.diagonal().add_(self._variances[-1] + 1e-8)
            factor = torch.linalg.cholesky(among)
            solved = torch.cholesky_solve((values - centre)[:, None], factor)[:, 0]
            self._looked = state, (known, factor, solved, centre)
        return self._looked[1]

    def learn(self) -> None:
        """Make the weights likelier, where there is enough more to learn from than the last time."""
        known = self._known()
        if len(known) < max(FIRST, AGAIN * self.learnt):
            return
        self.learnt = len(known)
        rows = self._drawn(known)
        values = self._values(rows)
        values = values - values.mean()

        def unlikely(weights: torch.Tensor) -> torch.Tensor:
            factor = self._factor(rows, weights)
            solved = torch.linalg.solve_triangular(factor, values[:, None], upper=False)
            usual = ((weights - self.usual) / SPREAD).square().sum() / 2
            found: torch.Tensor = solved.square().sum() / 2 + factor.diagonal().log().sum() + usual
            return found

        with contextlib.suppress(RuntimeError):  # of a matrix that is not definite
            self._set_weights(lessened(unlikely, self.weights))

    def _set_weights(self, weights: torch.Tensor) -> None:
        """From now on: and how alike all shapes and all configs are by them."""
        self.weights = weights
        self._variances, _, _, values, words = self._split(weights)
        every = torch.arange(len(self.shapes.sizes))
        self._shapes_alike = self._alike(every, every, weights)
        every = torch.arange(len(self.configs.sizes))
        self._configs_alike = likeness(self.configs.distance(every, every, values, words))

    def _from_tables(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        alike = self._shapes_alike[self.place[one]][:, self.place[other]]
        return self._joined(
            one, other, alike, self._configs_alike[self.config[one]][:, self.config[other]], self._variances
        )

    def _known(self) -> torch.Tensor:
        return (~self.told.isnan()).nonzero()[:, 0]

    def _values(self, rows: torch.Tensor) -> torch.Tensor:
        """What is known of rows, but of the hopeless only that they are."""
        values = self.told[rows] + self.offset[rows]
        best = torch.full((int(self.place.max()) + 1,), math.inf, dtype=torch.float64)
        best = best.scatter_reduce(0, self.place[rows], values, "amin")
        return torch.minimum(values, best[self.place[rows]] + HOPELESS) - self.offset[rows]

    def _drawn(self, known: torch.Tensor) -> torch.Tensor:
        places = self.place[known].unique()
        places = places[torch.randperm(len(places), generator=self.draw)]
        order = torch.empty(int(self.place.max()) + 1, dtype=torch.long)
        order[places] = torch.arange(len(places))
        return known[order[self.place[known]].argsort(stable=True)[:LEARNT_FROM]]

    def _split(self, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(weights.exp().split(self.sections))

    def _alike(self, one: torch.Tensor, other: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        _, sizes, names, *_ = self._split(weights)
        return likeness(self.shapes.distance(one, other, sizes, names))

    def _factor(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        variances, _, _, values, words = self._split(weights)
        places, where = self.place[rows].unique(return_inverse=True)
        configs, which = self.config[rows].unique(return_inverse=True)
        alike = self._alike(places, places, weights)[where][:, where]
        same = likeness(self.configs.distance(configs, configs, values, words))[which][:, which]
        among = self._joined(rows, rows, alike, same, variances)
        among = among + (variances[-1] + 1e-8) * torch.eye(len(rows), dtype=torch.float64)
        factor: torch.Tensor = torch.linalg.cholesky(among)
        return factor

    def _joined(
        self, one: torch.Tensor, other: torch.Tensor, alike: torch.Tensor, configs: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """The covariance of rows, from how alike their shapes and their configs are."""
        here = self.place[one][:, None] == self.place[other][None]
        same = self.variant[one][:, None] == self.variant[other][None]
        of_variant = v[2] + v[3] * alike + v[4] * here + configs * (v[5] + v[6] * alike + v[7] * here)
        rising = (self.along[one] @ self.along[other].T) * (v[8] + v[9] * alike)
        return v[0] * alike + v[1] * here + rising + same * of_variant


def likeness(squared: torch.Tensor) -> torch.Tensor:
    """From squared distances: 1 at none."""
    return (-0.5 * squared).exp()


def lessened(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Where a function is less, by Adam's method; torch.optim takes seconds to import."""
    at, mean, square = at.clone().requires_grad_(), torch.zeros_like(at), torch.zeros_like(at)
    for step in range(1, STEPS + 1):
        (slope,) = torch.autograd.grad(function(at), at)
        mean, square = mean.lerp(slope, 1 - 0.9), square.lerp(slope.square(), 1 - 0.999)
        change = mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)
        at = (at.detach() - RATE * change).requires_grad_()
    return at.detach()


def _octave(value: Any) -> float:
    return math.log2(max(value, 0.5)) if is_size(value) else -1.0
