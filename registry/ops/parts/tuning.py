"""What the tuner asks of an op: how its shapes are spelled, made and judged, and which are worth measuring."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from registry.ops.parts.cases import Case
from registry.ops.parts.tiling import Products
from registry.ops.parts.workload import Workload

PLAIN: Mapping[str, Any] = {"dtype": "bfloat16", "ieee": False, "deterministic": False}
"""Defaults that every op shares."""


def fields(words: str) -> dict[str, str]:
    """`Tuning.fields` of words that are fields themselves, and of others with theirs: "m n b=batch spread="."""
    return {word: field if given else word for word, given, field in (one.partition("=") for one in words.split())}


@dataclass(frozen=True)
class Tuning:
    """An op's folder has one for each of its ops in tuning.py, by name in `BY_OP`."""

    fields: Mapping[str, str]
    """Each word of a shape, and the Problem field that it sets; "" for one that changes values alone, which no host
    sees, and so no Problem has."""
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """What each word means where a shape leaves it out; may depend on the others."""
    workload: type[Workload]
    grids: Mapping[str, Callable[[str], list[Case]]]
    """Named grids of shapes as functions of the op's name, in the order in which "all" measures them. Every op has
    "quick" (a few minutes' worth) and "tiny" (shapes that a CPU finishes at once), which "all" leaves out."""
    draws: Mapping[str, Callable[[random.Random], Case]] = field(default_factory=dict)
    """One random shape that no grid holds, by the kind of shapes: what a table is judged by, as the grid
    "KIND:SEED:COUNT". The kind "random" is what is mostly asked; where an op has any, it comes first."""
    of_a_model: Callable[[Case], bool] = lambda case: True
    """Whether a drawn shape is one of a published model, where others are drawn beside those."""
    order: tuple[str, ...] = ()
    """Facts by which a report sorts its shapes, behind `panels`; others follow."""
    leading: tuple[str, ...] = ()
    """Sizes that people know a shape by: what lies beside a table lists its shapes by them, `--refine` goes half way
    between them."""
    as_measured: tuple[str, ...] = ()
    """Facts that a table speaks about only as they were measured: a batch of products is another problem than one."""
    apart: tuple[Mapping[str, Any], ...] = ()
    """Kinds of problems, as conditions, that a table has rules of their own for; what is met by several is of the
    first."""
    over: str = ""
    """The fact that a report shows speed over; by default the first of `leading`."""
    panels: tuple[str, ...] = ()
    """Facts of which each combination gets a panel of its own there."""
    products: Callable[[Any, Mapping[str, Any]], Products] | None = None
    """The matrix products that a problem is made of, given the shape too: it may say what no problem knows."""
