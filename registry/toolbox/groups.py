"""Groups of rows whose ends lie on the device, for Triton: offsets that can be believed.

A kernel that goes by offsets reads and writes where they say. `group_ends` takes them as they should be: none beyond
the rows that there are, none before the one before it. Both are vectors over all groups, and what comes after the last
group ends with it, so that a reduction over one finds the group of a row or of a tile::

    ends = group_ends(offs_ptr, rows, groups, ENTRIES)
    tiles = tl.cumsum(tl.cdiv(ends - group_starts(offs_ptr, rows, groups, ENTRIES), BLOCK), 0)
    group = tl.sum((tiles <= tile).to(tl.int32), 0)
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

__all__ = ["complain_of_offsets", "group_ends", "group_starts"]


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def group_ends(offs_ptr, rows, groups, ENTRIES: tl.constexpr):
    """Where each group ends; ENTRIES is a power of two above their number."""
    at = tl.arange(0, ENTRIES)
    given = tl.load(offs_ptr + at, mask=at < groups, other=0)
    return tl.associative_scan(tl.minimum(tl.maximum(given, 0), rows), 0, _larger)


@triton.jit
def group_starts(offs_ptr, rows, groups, ENTRIES: tl.constexpr):
    """Where each group starts."""
    at = tl.arange(0, ENTRIES)
    given = tl.load(offs_ptr + at - 1, mask=(at > 0) & (at <= groups), other=0)
    return tl.associative_scan(tl.minimum(tl.maximum(given, 0), rows), 0, _larger)


@triton.jit
def complain_of_offsets(word_ptr, bit, offs_ptr, rows, groups, ENTRIES: tl.constexpr):
    """Leaves the bit in a registry.toolbox.complaints word if offsets are not what `group_ends` makes of them."""
    at = tl.arange(0, ENTRIES)
    given = tl.load(offs_ptr + at, mask=at < groups, other=0)
    wrong = (at < groups) & (given != group_ends(offs_ptr, rows, groups, ENTRIES))
    if tl.max(wrong.to(tl.int32), 0) != 0:
        tl.atomic_or(word_ptr, bit)
