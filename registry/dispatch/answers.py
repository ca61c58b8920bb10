"""Answers that hold for some sizes and not for others, and when it pays to look for one more.

To note what is asked of sizes costs as much as several questions, and pays where sizes go on as they began: a cache
that grows. Sizes that nothing ties together share hardly an answer. So one is looked for where a question lies close to
the one before, or after as many in vain as it costs; and in the long run that costs no more than answers save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

MOST = 8
"""Answers known; the one that held longest ago goes when there are more."""
IDLE = 64
"""Questions in a row that none of them answered: then all go, for each is looked at each time."""
NEAR = 16
"""Sizes are close where each differs by less than one part in so many, or by one."""
BEGIN = 4
"""Answers that may be looked for before any has held."""
IN_VAIN = 1 / 32
"""What a question that none answered adds to what may be spent, of what it costs; one that was answered adds all."""

Sizes = Sequence[int]


class Answer(Protocol):
    def of(self, sizes: Any) -> Any:
        """What it is for these sizes; None where it does not hold."""


A = TypeVar("A", bound=Answer)


class Answers(Generic[A]):
    """Those to one kind of question, the one that held last first. `cost`: as many questions as one takes."""

    def __init__(self, cost: int) -> None:
        self._cost = cost
        self._credit: float = BEGIN * cost
        self._known: list[A] = []
        self._in_vain, self._since = 0, 0
        self._last: Sizes = ()

    def __len__(self) -> int:
        return len(self._known)

    def find(self, sizes: Sizes) -> Any:
        """What the first that holds gives; None where none does."""
        for known in self._known:
            found = known.of(sizes)
            if found is not None:
                if known is not self._known[0]:
                    self._known = [known, *(one for one in self._known if one is not known)]
                self._in_vain = 0
                self._earn(1)
                return found
        self._in_vain += 1
        if self._in_vain >= IDLE:
            self._known, self._in_vain = [], 0
        return None

    def wanted(self, sizes: Sizes) -> bool:
        """Whether one is to be looked for, now that none held for these sizes, which are told once. The last that may
        be is left for close ones."""
        self._earn(IN_VAIN)
        self._since += 1
        close, self._last = _close(sizes, self._last), sizes
        if not (close or self._since >= self._cost) or self._credit < (self._cost if close else 2 * self._cost):
            return False
        self._credit -= self._cost
        self._since = 0
        return True

    def _earn(self, questions: float) -> None:
        self._credit = min(self._credit + questions, 2 * BEGIN * self._cost)

    def add(self, answer: A) -> None:
        self._known = [answer, *self._known[: MOST - 1]]


def _close(sizes: Sizes, others: Sizes) -> bool:
    return len(sizes) == len(others) and all(
        one == other or NEAR * abs(one - other) <= max(one, NEAR) for one, other in zip(sizes, others, strict=True)
    )
