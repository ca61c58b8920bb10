"""What recorded timelines say of contestants, for a guided sweep: files of figures that `kreg profile --figures` adds to.

A warp group that waits does no work. So of two configs of a variant that were recorded on one shape, the one whose matrix
units and multiplying warps stand still longer is expected to take longer, on that shape and on shapes like it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry.errors import InvalidArgument, RegistryError
from registry.ops.parts.cases import Case
from registry.tuning.journal import contestant_key


@dataclass(frozen=True)
class Observed:
    """The figures of one recording."""

    case: Case
    variant: str
    config: Mapping[str, Any]
    busy: float
    """The share of the time in which a product of some role is in flight and, of the roles that multiply, one does not
    wait: a number in (0, 1]."""

    @property
    def key(self) -> str:
        return contestant_key(self.variant, self.config)


def read(path: Path) -> list[Observed]:
    """The recordings in a file. One that is damaged is an error that names it: a guess from half a file helps nobody."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = data["timelines"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise InvalidArgument(
            "--timelines", str(path), f"figures of kreg profile: {type(error).__name__}: {error}"
        ) from error
    found = []
    for number, row in enumerate(rows if isinstance(rows, list) else [rows]):
        try:
            found.append(_observed(row))
        except (ValueError, TypeError, LookupError, AttributeError, RegistryError) as error:
            what = f"{path}: timelines[{number}]: {type(error).__name__}: {error}"
            raise InvalidArgument("--timelines", what, "figures of kreg profile") from error
    return found


def _observed(row: Mapping[str, Any]) -> Observed:
    figures = row["figures"]
    return Observed(Case.parse(row["op"], row["shape"]), str(row["variant"]), dict(row["config"]), busy(figures))


def busy(figures: Mapping[str, Any]) -> float:
    """Of the figures of a timeline, as `kreg profile --json` prints them."""
    flying = figures["any_in_flight"]
    multiply = [one["stalled"] for one in figures["roles"] if one["in_flight"] is not None]
    share = float(flying if flying is not None else 1.0) * (1.0 - min(map(float, multiply), default=0.0))
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"shares between 0 and 1, not {share:g}")
    return max(share, 0.01)


def slower(recorded: Sequence[Observed]) -> list[float]:
    """By how much each is expected to be slower, in log time, than the busiest of its variant on the same shape."""
    most: dict[tuple[str, str, str], float] = {}
    for one in recorded:
        place = (one.variant, one.case.op, one.case.text)
        most[place] = max(most.get(place, 0.0), one.busy)
    return [math.log(most[one.variant, one.case.op, one.case.text] / one.busy) for one in recorded]


def of_op(recorded: Iterable[Observed], op: str) -> list[Observed]:
    return [one for one in recorded if one.case.op == op]
