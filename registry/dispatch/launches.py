"""Launches of calls that differ in sizes alone, of variants whose `prepare` says how (`of_any_size`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from registry.contract.noted import Following, Notes
from registry.contract.problem import Problem
from registry.dispatch.plan import device_of, finishing
from registry.signals import interrupts

if TYPE_CHECKING:
    from registry.toolbox.resized import Resizing

MOST = 8
"""Launches known for one decision, of different conditions; the oldest goes when there are more."""
AFTER = frozenset(1 << power for power in range(1, 20))
"""How many launches were bound in full when one more is looked for: it costs a few of these."""

Sizes = tuple[int, ...]


OfAnySize = Callable[[Problem, Problem], "Resizing | None"]
"""(a problem of noted sizes, the same with plain ones) -> how its launches follow from the sizes."""


class Launches:
    """Those of one variant, config and kind of Problem."""

    def __init__(self, of_any_size: OfAnySize, problem_of: Callable[[Any], Problem], unclaimed: list[str]) -> None:
        self._of_any_size, self._problem_of, self._unclaimed = of_any_size, problem_of, unclaimed
        self._known: list[_Known] = []
        self._in_full = 0

    def learn(self, sizes: Sizes) -> None:
        """From these sizes."""
        notes = Notes()
        try:
            with notes:
                noted = self._problem_of(tuple(notes.sizes(sizes)))
                found = self._of_any_size(noted, self._problem_of(sizes))
            if found is None:
                return
            following = notes.following(sizes, found.numbers)
            if following.of(sizes) is not None:
                self._known = [_Known(found, following, self._unclaimed), *self._known[: MOST - 1]]
        except Exception as error:  # of code that takes integers alone: its launches are bound one by one
            if interrupts(error):
                raise
            return

    def of(self, sizes: Sizes, in_full: Callable[[], Any]) -> Resized | None:
        """The launch of these sizes; None where each part of it has to be found anew, which `in_full` does."""
        for known in self._known:
            numbers = known.following.of(sizes)
            if numbers is not None:
                if known is not self._known[0]:
                    self._known = [known, *(one for one in self._known if one is not known)]
                return Resized(known, numbers, in_full)
        self._in_full += 1
        if self._in_full in AFTER:
            self.learn(sizes)
        return None


class _Known:
    def __init__(self, resizing: Resizing, following: Following, unclaimed: list[str]) -> None:
        self.resizing, self.following, self._unclaimed = resizing, following, unclaimed
        self._finish: Callable[[Any], Any] | None = None

    def launch(self, tensor: Any, numbers: Any, in_full: Callable[[], Any]) -> Any:
        resizing = self.resizing
        if resizing.reference is None:
            with device_of(tensor):
                reference = resizing.bind()
            self._finish = finishing(reference, self._unclaimed)
        launch = resizing.resized(numbers, in_full)
        return launch if self._finish is None else self._finish(launch)


class Resized:
    """A launch that is made of another when it is first called."""

    __slots__ = ("_in_full", "_known", "_numbers", "prepared")

    def __init__(self, known: _Known, numbers: Any, in_full: Callable[[], Any]) -> None:
        self._known, self._numbers, self._in_full = known, numbers, in_full
        self.prepared: Any = None

    def __call__(self, *tensors: Any, **given: Any) -> Any:
        if self.prepared is None:
            self.prepared = self._known.launch(tensors[0], self._numbers, self._in_full)
        return self.prepared(*tensors, **given)
