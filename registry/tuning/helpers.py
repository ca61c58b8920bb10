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
    """What `boosted` is asked for."""

    points: torch.Tensor
    told: torch.Tensor
    size: Extent
    seed: int
    group: torch.Tensor | None = None


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
    if pool is None or pool.count == 1 or sum(len(part.points) * part.size.trees for part in parts) < WORTH:
        return tuple(boosted(*part) for part in parts)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            file.write_bytes(pickle.dumps(part))
        pool.submit({file: {"part": str(file)} for file in files})
        return tuple(_trees(pool.result(file), file, part) for file, part in zip(files, parts, strict=True))


def _trees(answer: dict[str, Any] | None, file: Path, part: Part) -> tuple[Tree, ...]:
    """Of a part; fitted here where a helper died over it, as for want of memory."""
    if answer is None or not answer["ok"]:
        return boosted(*part)
    found: tuple[Tree, ...] = pickle.loads(file.read_bytes())
    return found


def answerer() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A helper's side (see registry.toolbox.compile_pool): the file that held a part holds its trees then."""

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        if command:  # the hello has nothing in it
            file = Path(command["part"])
            file.write_bytes(pickle.dumps(boosted(*pickle.loads(file.read_bytes()))))
        return {"ok": True}

    return answer
