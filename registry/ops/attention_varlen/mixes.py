"""How long the sequences of a made-up batch are: each mix is a rule, with nothing random in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

from registry.errors import InvalidArgument

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

MOST = 1 << 20
"""Sequences of a batch whose lengths are worked out one by one."""


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


def batch_of(
    sizes: tuple[int, int, int], mix: str, t: int | None = None, tk: int | None = None
) -> tuple[list[int], list[int]]:
    """(queries, keys) of each sequence; `sizes` are how many there are, and the longest's."""
    count, queries, keys = sizes
    if mix not in MIXES:
        raise InvalidArgument("mix", repr(mix), ", ".join(MIXES))
    if count > MOST:
        raise InvalidArgument("b", count, f"1..{MOST} with mix={mix}")
    each = lengths_of(count, keys, mix, tk)
    if t is not None or mix == "uniform":
        return lengths_of(count, queries, "uniform", t), each
    return [max(1, queries * n // keys) for n in each], each


def totals(
    sizes: tuple[int, int, int], mix: str, page: int, t: int | None = None, tk: int | None = None
) -> tuple[int, int, int]:
    """(rows of q, rows of packed k, pages) of such a batch."""
    count, queries, keys = sizes
    if mix == "uniform":
        t, tk = count * queries if t is None else t, count * keys if tk is None else tk
        return t, tk, count * -(-keys // max(page, 1))
    own, each = batch_of(sizes, mix, t, tk)
    return sum(own), sum(each), sum(-(-n // max(page, 1)) for n in each)
