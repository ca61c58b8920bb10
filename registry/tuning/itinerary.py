"""Where a guided sweep goes next: to a shape of which the compilers have what the guide asks for, rather than wait.

All contestants are queued for the compilers, as in a full sweep, so that none stands idle; what the guide asks for goes
first, of as many shapes at once as there are compilers. So a guided sweep waits for them no longer than a full one, and
ends with much never compiled. (To queue what it is likely to ask for next, by its expectations, made it no faster.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from registry.tuning.contestants import Contestant, LineUp
from registry.tuning.guided import Guidance, Guide
from registry.tuning.journal import Results

if TYPE_CHECKING:
    from registry.toolbox.compile_pool import CompilePool

AHEAD = 3
"""At least so many shapes are gone to and fro between; with more compilers, one for each."""


class Itinerary:
    """Visits shapes, at first in about their order, until the guide asks for nothing more of any."""

    def __init__(
        self,
        guide: Guide,
        plans: Sequence[LineUp],
        pool: CompilePool,
        time_left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.guide, self.plans, self.pool, self.time_left = guide, plans, pool, time_left
        self.window = max(AHEAD, pool.count)
        self.waits: dict[int, Contestant] = guide.waits
        """By shape, what the compilers have to give before it is worth a visit."""
        guide.ready = lambda place, one: pool.ready(self._key(place, one))
        self._place = {planned.key: place for place, planned in enumerate(plans)}
        self.first_look = True

    def visits(self) -> Iterator[Visit]:
        """To shapes, to some of them again and again. What a visit asks for is there; it may end with more to come."""
        left = list(range(len(self.plans)))
        while left and self.time_left() > 0:
            window = left[: self.window]
            place = next((place for place in window if self._ready(place)), None)
            if place is None:
                self._pause(window)
                continue
            one = self.next(place)
            if place not in self.waits:
                yield Visit(self, place, one)
            if place not in self.waits:
                left.remove(place)
        self.first_look = False
        for again in self.guide.worth_another_look():
            if self.time_left() <= 0:
                break
            if again is None:
                self._pause(list(self.waits))
            elif (one := self.next(again)) is not None:
                yield Visit(self, again, one)

    def next(self, place: int) -> Contestant | None:
        """What to measure now; None where the guide wants no more of this shape, or has to wait for it (`waits`)."""
        self._hear()
        self.waits.pop(place, None)
        one = self.guide.next(place)
        if one is not None and not self.pool.ready(self._key(place, one)):
            self.pool.first([self._key(place, one)])
            self.waits[place] = one
            return None
        return one

    def _ready(self, place: int) -> bool:
        one = self.waits.get(place)
        return one is None or self.pool.ready(self._key(place, one))

    def _pause(self, places: Sequence[int]) -> None:
        self.pool.wait([self._key(place, self.waits[place]) for place in places], self.time_left())

    def _hear(self) -> None:
        """What the compilers have said by now."""
        for (case, key), answer in self.pool.news().items():
            self.guide.compiled(self._place[case], key, answer)

    def _key(self, place: int, one: Contestant) -> tuple[str, str]:
        return self.plans[place].key, one.key


@dataclass
class Visit:
    """One stay at a shape."""

    itinerary: Itinerary
    place: int
    coming: Contestant | None
    """What to begin with."""

    def next(self) -> Contestant | None:
        one, self.coming = self.coming, None
        return one or self.itinerary.next(self.place)

    def tell(self, one: Contestant, ms: float | None) -> None:
        self.itinerary.guide.tell(self.place, one.key, ms)

    @property
    def waits(self) -> bool:
        """Whether the shape is left half done, for the compilers are: not in the second look, which may not return."""
        return self.itinerary.first_look and self.place in self.itinerary.waits


def guide_for(plans: Sequence[LineUp], guidance: Guidance, held: Results) -> Guide:
    """A guide that knows what an earlier run has measured of these shapes already."""
    import torch

    torch.set_num_threads(1)  # small matrices: threads that wait beside busy compilers take far longer
    guide = Guide(plans, guidance)
    for place, planned in enumerate(plans):
        known = held.cases.get(planned.key)
        for one in planned.contestants:
            entry = known.entries.get(one.key) if known is not None else None
            if entry is not None and entry.timed and entry.fingerprint == one.fingerprint:
                guide.tell(place, one.key, entry.ms)
    return guide
