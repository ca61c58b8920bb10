"""What a kernel is tried with: of each feature its plain value, which cases change, and the others that are drawn.

    FEATURES = {"d": [16, 24, 32], "causal": [False, True], "hq hk": [(4, 2), (3, 3)]}

The first value is the plain one. Names in one key take their values together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Features = Mapping[str, Sequence[Any]]


def plain(features: Features) -> dict[str, Any]:
    """Each feature as it is where a case says nothing of it."""
    return _case(features, lambda values: values[0])


def drawn(features: Features, count: int, seed: int) -> list[dict[str, Any]]:
    """Cases drawn from all features at once, the same on every run."""
    draw = random.Random(seed)
    return [_case({name: v for name, v in features.items() if len(v) > 1}, draw.choice) for _ in range(count)]


def tried(cases: Sequence[dict[str, Any]]) -> Callable[[Any], Any]:
    """For a test of `changes`, in whose kernels exponentials may overflow."""
    each = pytest.mark.parametrize("changes", cases, ids=lambda case: "-".join(map(str, case.values())))
    return lambda test: each(pytest.mark.filterwarnings("ignore::RuntimeWarning")(test))


def _case(features: Features, chosen: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for names, values in features.items():
        value = chosen(values)
        found |= zip(names.split(), value, strict=True) if " " in names else {names: value}
    return found
