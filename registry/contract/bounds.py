"""The range in which each integer must lie, from the comparisons that it took part in."""

from __future__ import annotations

import math
from collections.abc import Iterable

COMPARED: dict[str, tuple[tuple[bool | None, bool | None], tuple[bool | None, bool | None]]] = {
    "{} < {}": ((True, None), (None, False)),
    "{} <= {}": ((False, None), (None, True)),
    "{} > {}": ((None, True), (False, None)),
    "{} >= {}": ((None, False), (True, None)),
}
"""Whether a size is below a number and whether above it, strictly so, where this is met; and where it is not."""


def bounds_of(compared: Iterable[tuple[int, str, float, bool]]) -> tuple[list[int], list[float], list[float]]:
    """From comparisons (place of a size, form, number, whether it is met): the places, and the least and the largest
    size that is left for each."""
    lows: dict[int, float] = {}
    highs: dict[int, float] = {}
    for place, form, number, met in compared:
        below, above = COMPARED[form][not met]
        if above is not None and -math.inf < number < math.inf:
            low = math.floor(number) + 1 if above else math.ceil(number)
            lows[place] = max(lows.get(place, low), low)
        if below is not None and -math.inf < number < math.inf:
            high = math.ceil(number) - 1 if below else math.floor(number)
            highs[place] = min(highs.get(place, high), high)
    places = [*{**lows, **highs}]
    return places, [lows.get(at, -math.inf) for at in places], [highs.get(at, math.inf) for at in places]
