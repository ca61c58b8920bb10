"""The named grids of shapes, as each op's folder lists them.

A sweep takes its cases in order, and a budget may end it anywhere: the grids that matter most come first, and every
beginning of a grid is a fair sample of it.
"""

from __future__ import annotations

from pathlib import Path

from registry.errors import InvalidArgument
from registry.ops.known import op_named
from registry.ops.parts.cases import Case, from_file, spread, unique
from registry.ops.parts.draws import drawn

TRIAL = ("tiny", "quick")
"""Grids that every op has, which "all" leaves out."""
MOST_DRAWN = 10_000


def names(op: str) -> list[str]:
    return list(op_named(op).tuning.grids)


def random_grid(op: str, name: str) -> list[Case]:
    """The shapes of "KIND:SEED:COUNT": no grid holds them, and none was ever looked at before a table was fitted."""
    draws = op_named(op).tuning.draws
    kind, *words = name.split(":")
    whole = len(words) == 2 and all(word.isdecimal() and len(word) < 10 for word in words)
    if kind not in draws or not whole or not 0 < int(words[1]) <= MOST_DRAWN:
        allowed = f"{_drawn(op)}, two whole numbers, COUNT of 1 to {MOST_DRAWN}"
        raise InvalidArgument("grid", repr(name), allowed if draws else f"grids of {op}, which draws no shapes")
    return drawn(draws[kind], *map(int, words))


def _drawn(op: str) -> str:
    return " or ".join(f"{kind}:SEED:COUNT" for kind in op_named(op).tuning.draws)


def grid(op: str, name: str) -> list[Case]:
    """The cases of a grid, or of several: "paper18+gqa"; "all" is everything but the trial grids."""
    every = [n for n in names(op) if n not in TRIAL]
    found: list[Case] = []
    for one in (n for part in name.split("+") for n in (every if part == "all" else [part])):
        if ":" in one:
            found += random_grid(op, one)
            continue
        if one not in names(op):
            known = ", ".join([*names(op), "all", *filter(None, [_drawn(op)])])
            raise InvalidArgument("grid", repr(one), f"{known} for {op}, joined by +")
        found += spread(op_named(op).tuning.grids[one](op))
    return unique(found)


def select(
    op: str, *, grid_name: str | None = None, shapes: Path | None = None, recorded: Path | None = None
) -> list[Case]:
    """The cases that the command line asks for; without any, the quick grid."""
    found: list[Case] = []
    for path in (shapes, recorded):
        if path is not None:
            held = from_file(op, path)
            if not held:
                raise InvalidArgument("shapes", str(path), f"a file with at least one shape of {op}")
            found += held
    if grid_name is not None or not found:
        found += grid(op, "quick" if grid_name is None else grid_name)
    return unique(found)
