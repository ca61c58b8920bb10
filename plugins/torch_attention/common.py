"""What several of these kernels claim alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from registry import Reason

HALVES = ("float16", "bfloat16")
ANY_ORDER = ("bhsd", "bshd", "strided")
UNLIMITED = -1


def blind_rows(problem: Any) -> bool:
    """Whether some query may see no key: only where a mask cuts the right side and queries outnumber keys."""
    cut_right = problem.causal or (problem.window is not None and problem.window[1] != UNLIMITED)
    return bool(cut_right and problem.seqlen_q > problem.seqlen_k)


def no_blind_rows(problem: Any, config: Any) -> Iterator[Reason]:
    if blind_rows(problem):
        yield Reason(
            "semantics", "seqlen_q", problem.seqlen_q, f"<= seqlen_k ({problem.seqlen_k}): no rows without keys"
        )
