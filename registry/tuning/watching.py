"""Who is told how a sweep goes, while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from registry.tuning.contestants import LineUp


class Watcher:
    """Told how the sweep goes, and does nothing about it; the command line draws it."""

    def begin(self, planned: Sequence[LineUp], steps: int) -> None: ...
    def step(self, text: str) -> None: ...
    def resize(self, steps: int) -> None: ...
    def note(self, text: str) -> None: ...
