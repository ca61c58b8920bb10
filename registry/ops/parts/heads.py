"""What dense and packed attention say alike of their head dims: how v's is judged, what a pair costs, and
what tiles hold."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

from registry.contract.capability import RULES, Reason, Requires, Rule
from registry.contract.meeting import as_range, asked_by
from registry.contract.problem import Query


def _head_dims(requires: Requires, rule: Rule, name: str, how: Query) -> Callable[[Any], bool]:
    return as_range(requires, rule, name, how) if requires.claim("head_dim_v") is not None else _of_one_head_dim


def _of_one_head_dim(problem: Any) -> bool:
    return bool(problem.head_dim_v == problem.head_dim)


@asked_by(_head_dims)
def as_head_dim(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    """The head dim of v must be q's unless a range for it is claimed."""
    if requires.claim("head_dim_v") is not None:
        yield from RULES["range"](requires, problem, name, how)
    elif problem.head_dim_v != problem.head_dim:
        yield Reason("range", name, problem.head_dim_v, f"{problem.head_dim} (as head_dim)")


MOST_SOFTCAP = 1000.0
"""Kernels make tanh of rounded exponentials: scores are off by 1e-7 of the softcap, however small they are."""


def _softcaps(requires: Requires, rule: Rule, name: str, how: Query) -> Callable[[Any], bool]:
    most = (math.inf if requires.claim("any_softcap") else MOST_SOFTCAP) if requires.claim("softcap") else 0.0
    return functools.partial(_bends_up_to, most)


def _bends_up_to(most: float, problem: Any) -> bool:
    return bool(problem.softcap <= most)


@asked_by(_softcaps)
def as_softcap(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    """A softcap far above all scores bends none, but a kernel's own rounding shows, unless it claims another tanh."""
    if problem.softcap and not requires.claim("softcap"):
        yield Reason("unclaimed", name, problem.softcap, "off")
    elif problem.softcap > MOST_SOFTCAP and not requires.claim("any_softcap"):
        yield Reason(
            "range", name, problem.softcap, f"up to {MOST_SOFTCAP}", "softcap=0.0 where scores are not to bend"
        )


def flops_of_pairs(pairs: int, d: int, dv: int, backward: bool) -> int:
    """Floating-point operations of the matrix products of so many visible pairs; the backward has five for two."""
    return 2 * pairs * (3 * d + 2 * dv if backward else d + dv)


def tile_width(dim: int) -> int:
    """Columns that tiles of most kernels have for a head dim."""
    return 64 if dim <= 64 else 128 if dim <= 128 else 256
