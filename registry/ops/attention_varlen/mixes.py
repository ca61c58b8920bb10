"""How long the sequences of a made-up batch are: each mix is a rule, with nothing random in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

SPREAD = 1.0
"""Standard deviation of the logarithms of lengths; real prompts have about as much."""


def uniform(count: int, longest: int) -> list[int]:
    """All as long."""
    return [longest] * count


def lognormal(count: int, longest: int) -> list[int]:
    """As the lengths of prompts are: many short ones, a few long ones; the longest is as given, and comes first."""
    at = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)][::-1]
    lengths = [max(1, round(longest * math.exp(SPREAD * (z - at[0])))) for z in at]
    step = next(s for s in range(max(2, count // 3), count + 2) if math.gcd(s, count) == 1) if count > 1 else 1
    return [lengths[i * step % count] for i in range(count)]


def one_long(count: int, longest: int) -> list[int]:
    """One long sequence among many of a 32nd of its length."""
    return [longest, *[max(1, longest // 32)] * (count - 1)]


MIXES: dict[str, Callable[[int, int], list[int]]] = {"uniform": uniform, "lognormal": lognormal, "one": one_long}


def adding_up(total: int, count: int, longest: int) -> list[int]:
    """The longest as given, the others as even as they can be, with this sum: lengths that a recorded call may have
    had, of which its host knew no more."""
    first = min(longest, total)
    rest, others = total - first, max(count - 1, 0)
    return [first, *(rest * (i + 1) // others - rest * i // others for i in range(others))][:count]


def lengths_of(count: int, longest: int, mix: str, total: int | None) -> list[int]:
    """The lengths of a batch: by their mix, or by their sum where that is known."""
    if total is not None and total != sum(uniform(count, longest)):
        return adding_up(total, count, longest)
    return MIXES[mix](count, longest)
