"""Ranges of K for few tiles: a pair of CTAs adds up one for its tiles, in float32, and a second kernel adds those up.

The sums of a range lie as the tiles do, rows and columns made up to whole pairs of tiles either way: nothing is masked.
With SWAP that is the transpose of C. Nobody waits for another CTA, and the order of adding is always the same.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.toolbox.wgmma import four_of, lanes


@gluon.jit
def part_of(item, high, wide, blocks, ways, SPLIT: gl.constexpr):
    """A piece of work: (pair of tiles, its first block of K, how many, the number of the range)."""
    if SPLIT:
        part = item // (high * wide)
        first = part * blocks // ways
        return item - part * (high * wide), first, (part + 1) * blocks // ways - first, part
    else:
        return item, 0, blocks, 0


@gluon.constexpr_function
def _put_asm(eight):
    """Two columns of two rows."""
    return f"""{{
        st.global.v2.f32 [$1 + {32 * eight}], {{$3, $4}};
        st.global.v2.f32 [$2 + {32 * eight}], {{$5, $6}};
        mov.b32 $0, 0;
    }}"""


@gluon.jit
def put(acc, row, column, part, sums, cfg: gl.constexpr):
    """One consumer's accumulators, whose corner is at (row, column), to the sums of this range."""
    ptr, pitch, plane = sums
    UNITS: gl.constexpr = cfg.UNITS
    EIGHTS: gl.constexpr = cfg.WIDTH // 8
    thread = lanes()
    down = row + thread // 32 * 16 + thread % 32 // 4
    at = ptr + part.to(gl.int64) * plane + down * pitch + column + thread % 4 * 2
    for unit in gl.static_range(UNITS):
        here = at + unit * 64 * pitch
        addresses = (here.to(gl.int64), (here + 8 * pitch).to(gl.int64))
        for j in gl.static_range(EIGHTS):
            gl.inline_asm_elementwise(
                _put_asm(j),
                "=r,l,l,f,f,f,f",
                addresses + four_of(acc, unit * EIGHTS + j),
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )


ROWS, COLUMNS = tl.constexpr(16), tl.constexpr(32)
"""Of the factors' product, in a program of `add_parts`; a plane has whole ones of them."""
MOST_AT_ONCE = 8


@triton.jit(do_not_specialize=["m", "eights", "ways"])
def add_parts(
    sums_ptr, c_ptr, m, eights, ways, pitch, plane, SWAP: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr
):
    """C, which has 8 * eights columns, out of the sums of all ranges, so many of which are loaded at once."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = 8 * eights
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = sums_ptr + rows[:, None] * pitch + columns[None, :]
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    numbers = tl.arange(0, AT_ONCE)[:, None, None]
    for first in range(0, ways, AT_ONCE):
        there = first + numbers < ways
        found += tl.sum(tl.load(at[None, :, :] + numbers * plane, mask=there, other=0.0), 0)
        at += AT_ONCE * plane
    if SWAP:
        seen = (rows < n)[:, None] & (columns < m)[None, :]
        c = c_ptr + columns.to(tl.int64)[None, :] * n + rows[:, None]
    else:
        seen = (rows < m)[:, None] & (columns < n)[None, :]
        c = c_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(c, found.to(c_ptr.dtype.element_ty), mask=seen)
