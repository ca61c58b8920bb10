"""Heads whose tiles take turns, so that what they share stays in the L2 cache: how many make a section."""

from __future__ import annotations

FILLED = 0.75  # of a section, as much as a last one needs at most
ROUNDS = 1.5  # of tiles for all SMs: of so many, from the longest to the shortest, blocks end at about the same time


def section_of(heads: int, fitting: int, tiles: int, slots: int) -> int:
    """Heads of a section, of which `fitting` fit the cache. A head has `tiles` tiles, and `slots` of them run at once,
    or 0 where tiles are alike: then it does not matter how many heads remain.

    Sections come one after the other, each from its longest tiles to its shortest, and so the last one decides when
    the first and the last SM are done. Where what remains for it is too few for that (9 heads in sections of 8 took a
    third longer than the work, had it been shared), sections are larger, at most twice what fits, so that enough
    remains, or the most that can.
    """
    fitting = max(fitting, 1)
    enough = min(ROUNDS * slots / tiles, FILLED * fitting)
    if heads <= fitting or heads % fitting == 0 or heads % fitting >= enough:
        return min(fitting, heads)
    sizes = range(fitting, min(2 * fitting, heads) + 1)
    return next((size for size in sizes if (heads % size or size) >= enough), None) or max(
        sizes, key=lambda size: heads % size or size
    )
