"""Sections of heads: as many as fit, and none at the end that would leave most SMs idle."""

import heapq

import pytest

from registry.toolbox.sections import section_of

ALL = range(9, 80)


@pytest.mark.parametrize(
    "heads, fitting, tiles, found",
    [
        (8, 0, 100, 1),
        (8, 16, 100, 8),
        (16, 8, 10, 8),
        (9, 8, 64, 9),  # one head would be left
        (21, 16, 16, 21),
        (24, 10, 4, 12),  # no size has enough at the end: the most
        (32, 5, 64, 7),  # two would be left of fives and of sixes, and are of tens
        (20, 8, 64, 8),  # four are left, whose tiles are enough
        (13, 8, 30, 13),
    ],
)
def test_a_remainder_is_shared_out_where_it_is_too_small(heads, fitting, tiles, found):
    section = section_of(heads, fitting, tiles, 132)
    assert section == found
    assert section <= max(2 * fitting, 1)


@pytest.mark.parametrize("fitting, tiles", [(8, 16), (16, 16), (4, 40), (12, 41), (40, 5)])
def test_blocks_of_triangles_end_together(fitting, tiles):
    """As hardware hands out blocks: the next one to the first SM that is free."""

    def span(heads, section):
        ends = [0.0] * 132
        for first in range(0, heads, section):
            for length in range(tiles, 0, -1):
                for _ in range(min(section, heads - first)):
                    heapq.heapreplace(ends, ends[0] + length)
        return max(ends) / max(sum(ends) / 132, tiles)

    found = [(span(heads, section_of(heads, fitting, tiles, 132)), span(heads, min(fitting, heads))) for heads in ALL]
    ours, plain = zip(*found, strict=True)
    assert max(ours) <= max(plain) and sum(ours) < sum(plain)
    assert sum(ours) / len(ours) < 1.15
