"""Trees of several parts at once, fitted by as many processes as were asked for: the same trees, whatever the number.

    with helpers(processes):
        trees = fits(...)

Without, and where there is little to fit, they are fitted here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from registry.tables.leaves import Tree
from registry.toolbox.compile_pool import HIDE_GPU, Child, CompilePool
from registry.tuning.boosting import Extent, boosted

if TYPE_CHECKING:
    import torch

WORTH = 400_000
"""Rows times trees in all parts together, from which on a process may start for them, which takes some seconds."""
MOST = 12
"""Processes, if nobody says: parts are asked for in fives and tens."""
LONGEST = 3600.0
"""Seconds for one part, after which a helper is given up and its part fitted here."""

_at_work: ContextVar[CompilePool | None] = ContextVar("helpers", default=None)


class Part(NamedTuple):
    """What `boosted` is asked for: some rows of points and of what they tell, which parts share."""

    points: torch.Tensor
    told: torch.Tensor
    rows: torch.Tensor
    size: Extent
    seed: int
    group: torch.Tensor | None = None

    def trees(self) -> tuple[Tree, ...]:
        return boosted(self.points[self.rows], self.told[self.rows], self.size, self.seed, self.group)


@contextlib.contextmanager
def helpers(processes: int | None = None) -> Iterator[None]:
    """In this block parts are shared out, by default among a dozen cores."""
    count = processes or min(os.cpu_count() or 1, MOST)
    with CompilePool(lambda: Child(__name__, {}, HIDE_GPU), count, LONGEST) as pool:
        token = _at_work.set(pool)
        try:
            yield
        finally:
            _at_work.reset(token)


def boosted_parts(parts: Sequence[Part]) -> tuple[tuple[Tree, ...], ...]:
    """The trees of each part."""
    pool = _at_work.get()
    if pool is None or pool.count == 1 or sum(len(part.rows) * part.size.trees for part in parts) < WORTH:
        return tuple(part.trees() for part in parts)
    try:
        return _shared_out(parts, pool)
    except OSError:  # there is no room for what helpers are told
        return tuple(part.trees() for part in parts)


def _shared_out(parts: Sequence[Part], pool: CompilePool) -> tuple[tuple[Tree, ...], ...]:
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "parts"
        asked.write_bytes(pickle.dumps(list(parts)))  # what they share is in it once
        answers = [Path(folder) / str(number) for number in range(len(parts))]
        pool.submit(
            {path: {"parts": str(asked), "number": number, "to": str(path)} for number, path in enumerate(answers)}
        )
        return tuple(_trees(pool.result(path), path, part) for path, part in zip(answers, parts, strict=True))


def _trees(answer: dict[str, Any] | None, path: Path, part: Part) -> tuple[Tree, ...]:
    """Of a part; fitted here where a helper died over it, as for want of memory."""
    if answer is None or not answer["ok"]:
        return part.trees()
    found: tuple[Tree, ...] = pickle.loads(path.read_bytes())
    return found


def answerer() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A helper's side (see registry.toolbox.compile_pool)."""

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        if command:  # the hello has nothing in it
            parts: list[Part] = pickle.loads(Path(command["parts"]).read_bytes())
            Path(command["to"]).write_bytes(pickle.dumps(parts[command["number"]].trees()))
        return {"ok": True}

    return answer
