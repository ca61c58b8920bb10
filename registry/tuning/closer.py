"""A closer look (tables/closer.py), fitted: trees that ask what variants guess, where those help."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from registry.dispatch.select import guesses_of
from registry.tables.closer import Closer, close, coordinates_of, told
from registry.tables.nearest import CAP, Config
from registry.tables.shapes import Shape
from registry.tables.trees import Trees
from registry.tuning.trees import fitted_trees
from registry.tuning.weights import lost_of


def closer_look(
    trees: Trees,
    coordinates: Sequence[str],
    contestants: Sequence[tuple[str, Config]],
    shapes: Sequence[Shape],
    problems: Sequence[Any],
) -> Closer | None:
    """None where less than two variants guess, or shapes left out in turn lose no less with it."""
    guesses = [guesses_of(problem) for problem in problems]
    names = [name for name in trees.variants if len({guess(name) for guess in guesses} - {None}) > 1]
    if len(names) < 2:
        return None
    seen = [
        dataclasses.replace(shape, point=(*shape.point, *told(names, guess)))
        for shape, guess in zip(shapes, guesses, strict=True)
    ]
    fitted = fitted_trees((*coordinates, *coordinates_of(names)), contestants, seen, {})
    if fitted is None:
        return None
    found = Closer(fitted)
    plain, looked = _lost(trees, None, contestants, shapes, seen), _lost(trees, found, contestants, shapes, seen)
    return found if looked < plain else None


def _lost(
    trees: Trees,
    closer: Closer | None,
    contestants: Sequence[tuple[str, Config]],
    shapes: Sequence[Shape],
    seen: Sequence[Shape],
) -> float:
    """What the variants lose that are chosen for shapes by parts that have not seen them, added up."""
    names, lost = lost_of(contestants, shapes)
    ran = [{name: one for name, one in zip(names, row, strict=True) if not math.isnan(one)} for row in lost.tolist()]
    whole = 0.0
    for place, took in enumerate(ran):
        expected = trees.lost(shapes[place].point, place)
        if closer is not None and close(expected, took.__contains__):
            expected = closer.trees.lost(seen[place].point, place)
        legal = [name for name in took if name in expected]
        if legal:
            chosen = min(legal, key=expected.__getitem__)
            whole += min(took[chosen] - min(took.values()), CAP)
    return whole
