"""Which contestants are worth measuring: a model of the measurements so far says what the next one could gain.

`registry.tuning.expectation` predicts the time of each contestant, as a multiple of the least time that the work and
the bytes could take. What it knows of a contestant: the variant and its source, its config's values, the shared
memory and registers that it declares to need, what its variant guesses of it or how early it lists it, what its tiles
make of the shape, what its recorded timeline says of the time in which its warps stand still, and, once it is
compiled, whether it keeps values in memory that no register was left for; of a shape: what its op says that it is
like, that least time, and the work for each byte. Within a shape that contestant comes next whose expected
improvement on the best so far is largest; a shape is done when no more is to be expected, or its share of the budget
is spent. What early shapes leave of theirs, later ones may use; and when all shapes have taught what they can, a part
of the budget that was kept back goes to those in which most is still expected.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from registry.contract.capability import config_reasons
from registry.contract.target import Target
from registry.dispatch.catalog import catalog
from registry.ops.known import op_named
from registry.ops.parts.cases import Case
from registry.ops.parts.tiling import product_tiling
from registry.tuning.contestants import Contestant, LineUp
from registry.tuning.fit import check_number
from registry.tuning.journal import CaseResults
from registry.tuning.observed import Observed, coordinates
from registry.tuning.taking_part import guess_of

if TYPE_CHECKING:
    import torch

FIRST_LOOK = 0.75
"""Of the share; the rest is for a second look at the shapes that are worth it."""
SCOUTS = 0.25
"""Of the second look: for variants on shapes unlike all those on which they were tried."""
SURVEYS = 4
"""How often, in the second look, it is looked up anew of every shape what is expected there."""
LINGER = 0.7
"""A shape is left for another where this part of what is expected there is not expected here: changing costs time."""
PATIENCE = 0.5
"""Of what is expected of what is being compiled: where less is, nothing is measured meanwhile."""
CHEAPEST = 10.0
"""Contestants left of the share beyond which more of them make none cheaper."""
LEAST_MS = 4e-3
"""What a launch takes however little it does."""
FARTHEST = 1.5
"""In log, that a contestant's tiles are taken to be from the mean of its shape."""
FAILED = math.log(2)
"""Log time that it is expected to cost that a variant failed which never worked: it is as likely to fail again."""
RATES = {"gbs": 4000.0, "tflops": 700.0}
"""Bytes and work over time, for the least time of a shape: only their ratio matters, the model learns the rest."""


@dataclass(frozen=True)
class Guidance:
    """How much is measured, and what is known before."""

    share: float = 0.33
    """Of the contestants, on average over shapes."""
    tolerance: float = 0.002
    """No more is measured on a shape where the expected improvement, in log time, is below this; see `elastic`."""
    elastic: float = 3.0
    """So many contestants beyond the share make the next one e times as dear. A shape unlike all others may be worth
    them, and the share holds in the long run."""
    later: float = 0.05
    """Log time that each place further down its variant's own list is expected to cost, where that guesses nothing."""
    rounds: float = 0.4
    """How much of the time that whole rounds of tiles take beyond the work itself is expected to be seen."""
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
    """Chooses among the contestants of some shapes, which it is told of beforehand, in whatever order."""

    def __init__(self, plans: Sequence[LineUp], guidance: Guidance | None = None) -> None:
        import torch

        from registry.tuning.expectation import Expectation, Features

        self.guidance = guidance or Guidance()
        learnt = [case for case in self.guidance.learnt if case.timed]
        plans = [*plans, *(of_results(case, plans[0].problem.target) for case in learnt if plans)]
        self.rows = [(place, one) for place, planned in enumerate(plans) for one in planned.contestants]
        self.first_row = dict(_first_rows(plans))
        self._floor = [_floor(planned) for planned in plans]
        seen = coordinates(self.guidance.observed)
        names: dict[str, int] = {}
        along = _along(plans)
        self.expected = Expectation(
            Features.of([_facts(planned) for planned in plans]),
            Features.of([_told_of(plans[place], one, seen) for place, one in self.rows]),
            torch.tensor([names.setdefault(one.variant, len(names)) for _, one in self.rows], dtype=torch.long),
            torch.tensor([place for place, _ in self.rows], dtype=torch.long),
            _guesses(plans, self.guidance.later) + self.guidance.rounds * along[:, 0],
            along,
        )
        """Of log time over the floor."""
        self._gone: set[int] = set()
        self.ready: Callable[[int, Contestant], bool] = lambda place, one: True
        """Whether a contestant of a shape could be measured now."""
        self.waits: dict[int, Contestant] = {}
        """By shape, what was asked for and is still being compiled: whoever measures says so here."""
        self._allowed = 0.0
        shares = [self.guidance.share * len(planned.contestants) for planned in plans[: len(plans) - len(learnt)]]
        self._left = sum(shares)
        """Of the share of all shapes: beyond it, no more than one contestant of each is measured."""
        self._counts = Counter(one.variant for planned in plans[: len(shares)] for one in planned.contestants)
        """Of contestants, but of the variants of which one failed and none had worked: those have no share."""
        self._due = {place: max(FIRST_LOOK * share, 1.0) for place, share in enumerate(shares)}
        """What shapes that nobody has looked at yet are to have of it."""
        self._begun: set[int] = set()
        self._kept: dict[int, float] = {}
        """What shapes that are being looked at have left of their own share: no other may use it yet."""
        self._wanted: int | None = None
        self._again, self._elsewhere = False, 0.0
        """Whether this is the second look, and what a shape must promise then to be asked about further."""
        self._recall(len(shares), learnt)

    def tell(self, place: int, key: str, ms: float | None) -> None:
        """What a contestant of shape `place` took; None where it failed."""
        row = self._row(place, key)
        if row is None:
            return
        self._begin(place)
        self._gone.add(row)
        self._allowed -= 1
        self._left -= 1
        self._kept[place] = max(self._kept.get(place, 0.0) - 1, 0.0)
        if ms is not None:
            self.expected.tell(row, math.log(ms) - self._floor[place])
        elif self.expected.put_off(row, FAILED):
            self._left -= self.guidance.share * self._counts.pop(self.rows[row][1].variant, 0)

    def compiled(self, place: int, key: str, figures: Mapping[str, Any]) -> None:
        """What the compiler said of a contestant of shape `place`, before it is measured."""
        row = self._row(place, key)
        if row is not None and not self.expected.knows(row) and figures.get("stack"):
            self.expected.offset[row] += self.guidance.spilled

    def _recall(self, place: int, learnt: Sequence[CaseResults]) -> None:
        for number, case in enumerate(learnt if self.rows else (), place):
            for row in range(*self.first_row[number]):
                ms = case.timed[self.rows[row][1].key].ms
                self.expected.tell(row, math.log(ms) - self._floor[number])

    def next(self, place: int) -> Contestant | None:
        """The contestant of shape `place` to measure now; None where the shape is done, for now or for good."""
        self._begin(place)
        if self._again and self._allowed < 1:
            return None
        if self._wanted is not None:
            row, known = self._wanted, self._wanted in self._gone
            if not known:
                self.expected.ask(place, row)
            return None if known else self.rows[row][1]
        rest = self._rest(place)
        if not rest:
            self._kept.pop(place, None)
            return None
        if not any(map(self.expected.knows, range(*self.first_row[place]))):
            row = self._ordered(place, rest)[0]
        else:
            if self._left - sum(self._due.values()) - self._kept_elsewhere(place) < 1:
                return None
            gain, row = self._most(place, rest)
            least = self._elsewhere if self._again else self._price(place)
            if gain < least:
                self._kept.pop(place, None)
                return None
            if not self.ready(place, self.rows[row][1]):
                there = [other for other in rest if self.ready(place, self.rows[other][1])]
                instead = self._most(place, there) if there else (0.0, row)
                row = instead[1] if instead[0] >= max(least, PATIENCE * gain) else row
        self.expected.ask(place, row)
        return self.rows[row][1]

    def worth_another_look(self) -> Iterator[int | None]:
        """Once all shapes were looked at: that in which most is expected now, to be asked about again, and so on until
        the share is spent. What is expected of the others is looked up anew when it would be their turn, and of all
        from time to time. None: nothing as good can be measured before one of `waits` is compiled."""
        self._again = True
        self._kept.clear()
        sizes = {place: high - low for place, (low, high) in self.first_row.items() if place in self._begun}
        self._allowed = min(self._allowed + (1 - FIRST_LOOK) * self.guidance.share * sum(sizes.values()), self._left)
        yield from self._scout(list(sizes))
        each = max(self._allowed / SURVEYS, 1.0)
        while self._allowed >= 1:
            self.expected.learn()
            gains = [(-self._gain(place), place) for place in sizes if self._rest(place)]
            heapq.heapify(gains)
            until = self._allowed - each
            self.waits.clear()
            waiting: list[tuple[float, int]] = []
            while (gains or waiting) and self._allowed >= 1 and self._allowed > until:
                if waiting and (not gains or gains[0][0] > PATIENCE * waiting[0][0]):
                    yield None
                    gains, waiting = gains + waiting, []
                    heapq.heapify(gains)
                    self.waits.clear()  # what is wanted there is asked anew
                _, place = heapq.heappop(gains)
                gain, next_best = self._gain(place), -gains[0][0] if gains else 0.0
                if gain >= next_best:
                    self._elsewhere, before = LINGER * next_best, self._allowed
                    yield place
                    if self._allowed == before:
                        if place in self.waits:
                            waiting.append((-gain, place))
                        continue  # nobody asked
                    gain = self._gain(place)
                if self._rest(place):
                    heapq.heappush(gains, (-gain, place))
            if self._allowed > until:  # nothing is left to ask for
                return

    def _scout(self, places: Sequence[int]) -> Iterator[int | None]:
        """First where a variant was tried neither on a shape nor on any like it: what one shape, done early, was given
        up on may be the fastest on all of them, and no shape by itself would promise enough to find out."""
        scouts = self._scouts(places, self._allowed - max(self._allowed * (1 - SCOUTS), 1.0))
        while scouts:
            for row in scouts:
                self._wanted = row
                yield self.rows[row][0]
            self._wanted = None
            scouts = [row for row in scouts if self.waits.get(self.rows[row][0]) == self.rows[row][1]]
            if scouts:
                yield None

    def _scouts(self, places: Sequence[int], count: float) -> list[int]:
        rest = [row for place in places for row in self._rest(place)]
        variants, found = self.expected.variant.tolist(), list[int]()
        while len(found) < count:
            unlike: list[tuple[float, int, int]] = []
            for variant in sorted({variants[row] for row in rest}):
                asked = {self.rows[row][0] for row in (*self._gone, *found) if variants[row] == variant}
                own = sorted({self.rows[row][0] for row in rest if variants[row] == variant} - asked)
                near = self.expected.alike(own, sorted(asked))
                unlike += [(float(near.min()), own[int(near.argmin())], variant)] if own else []
            if not unlike:
                break
            _, place, variant = min(unlike)
            rows = [row for row in self._rest(place) if variants[row] == variant]
            found.append(self._ordered(place, rows)[0])
        return found

    def _gain(self, place: int) -> float:
        rest = self._rest(place)
        return self._most(place, rest)[0] if rest else 0.0

    def _most(self, place: int, rest: Sequence[int]) -> tuple[float, int]:
        """The largest expected improvement on the best so far, in log time, and whose."""
        gains = self.expected.gains(place, rest)
        return float(gains.max()), rest[int(gains.argmax())]

    def _rest(self, place: int) -> list[int]:
        return [row for row in range(*self.first_row[place]) if row not in self._gone]

    def _ordered(self, place: int, rest: Sequence[int]) -> list[int]:
        """Those that are expected to be fast first."""
        import torch

        mean, _ = self.expected.predict(place, torch.tensor(rest))
        return [rest[int(i)] for i in mean.argsort(stable=True)]

    def _price(self, place: int) -> float:
        """What a measurement must promise, in log time: more the further the sweep is beyond its share, less before."""
        allowed = self._allowed - self._kept_elsewhere(place)
        beyond = max(-CHEAPEST, 1 - allowed) / self.guidance.elastic
        return self.guidance.tolerance * math.exp(min(beyond, 50.0))

    def _kept_elsewhere(self, place: int) -> float:
        return sum(left for other, left in self._kept.items() if other != place)

    def _begin(self, place: int) -> None:
        if place not in self._begun:
            self._begun.add(place)
            self._due.pop(place)
            low, high = self.first_row[place]
            self._kept[place] = FIRST_LOOK * self.guidance.share * (high - low)
            self._allowed += self._kept[place]
            self.expected.learn()

    def _row(self, place: int, key: str) -> int | None:
        low, high = self.first_row[place]
        return next((row for row in range(low, high) if self.rows[row][1].key == key), None)


def of_results(case: CaseResults, target: Target) -> LineUp:
    """A measured shape as a line-up of what was timed there."""
    asked = Case.from_data(case.shape)
    entries = tuple(Contestant(e.variant, e.config, e.first, e.fingerprint) for e in case.timed.values())
    return LineUp(asked, asked.problem(target), case.flops, entries, case.illegal)


def _floor(planned: LineUp) -> float:
    """The log of the least milliseconds that work and bytes could take."""
    moved = op_named(planned.case.op).bytes_moved(planned.problem)
    least = max(planned.flops / RATES["tflops"] / 1e9, moved / RATES["gbs"] / 1e6, LEAST_MS)
    return math.log(least)


def _work_per_byte(planned: LineUp) -> float:
    moved = op_named(planned.case.op).bytes_moved(planned.problem)
    return max(planned.flops, 1.0) / max(moved, 1.0)


def _facts(planned: LineUp) -> dict[str, Any]:
    """What makes shapes alike in their op, and in every op; and what of them is in the data, so that no problem knows
    it, such as how long the groups of a product are."""
    likeness = {name: 2.0**place for name, place in planned.problem.likeness().items()}
    known, shape, fields = planned.problem.facts(), _shape(planned), op_named(planned.case.op).tuning.fields
    data = {name: str(shape.get(name)) for name, field in fields.items() if field not in known}
    return {**likeness, **data, "least time": 1e3 * math.exp(_floor(planned)), "work per byte": _work_per_byte(planned)}


def _shape(planned: LineUp) -> dict[str, Any]:
    """With what goes without saying."""
    shape = dict(planned.case.shape)
    return {**op_named(planned.case.op).tuning.defaults(shape), **shape}


def _told_of(planned: LineUp, one: Contestant, seen: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """What is known of a contestant before it was compiled; `seen` is what timelines say (observed.coordinates)."""
    source = {f"source of {one.variant}": one.fingerprint}
    told: dict[str, Any] = {**one.config, **source, **seen.get(one.key, seen.get(one.variant, {}))}
    variant = catalog.get().variants.get(one.variant)
    if variant is not None and not config_reasons(variant.requires, planned.problem, one.config):
        for name in ("shared_memory", "registers"):
            budget = getattr(variant.requires, name)
            if budget is not None:
                told[f"needs {name}"] = budget(planned.problem, one.config)
    return told


def _guesses(plans: Sequence[LineUp], later: float) -> torch.Tensor:
    """Of each contestant, in log time against the others of its variant on that shape: what its variant guesses, or,
    where that guesses nothing, its place in the variant's own list, counted up to 4."""
    import torch

    found: list[torch.Tensor] = [torch.zeros(0, dtype=torch.float64)]
    for planned in plans:
        of_variant: dict[str, list[int]] = {}
        for place, one in enumerate(planned.contestants):
            of_variant.setdefault(one.variant, []).append(place)
        here = torch.zeros(len(planned.contestants), dtype=torch.float64)
        for places in of_variant.values():
            told = [guess_of(planned.contestants[place], planned.problem) for place in places]
            guesses = torch.tensor(told, dtype=torch.float64)
            ranks = torch.arange(len(places), dtype=torch.float64).clamp_max(4)
            here[places] = guesses - guesses.mean() if len(set(told)) > 1 else later * ranks
        found.append(here)
    return torch.cat(found)


def _along(plans: Sequence[LineUp]) -> torch.Tensor:
    """Of each contestant what its tiles make of its shape, against the mean of those on that shape that say so."""
    import torch

    parts = []
    for planned in plans:
        products_of = op_named(planned.case.op).tuning.products
        products = products_of(planned.problem, _shape(planned)) if products_of else {}
        target = planned.problem.target
        found = [product_tiling(target, products, one.config) if products else None for one in planned.contestants]
        numbers = torch.tensor([one or (math.nan, math.nan) for one in found], dtype=torch.float64).reshape(-1, 2)
        parts.append((numbers - numbers.nanmean(0)).clamp(-FARTHEST, FARTHEST).nan_to_num(0.0))
    return torch.cat([torch.zeros(0, 2, dtype=torch.float64), *parts])


def _first_rows(plans: Sequence[LineUp]) -> list[tuple[int, tuple[int, int]]]:
    found, row = [], 0
    for place, planned in enumerate(plans):
        found.append((place, (row, row + len(planned.contestants))))
        row += len(planned.contestants)
    return found
