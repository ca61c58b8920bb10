"""Ranges of K for a last round over the chip that tiles do not fill, be it the only one: a pair of CTAs adds up one for
its tiles, in float32, and a second kernel adds those up.

Pairs of tiles are numbered; the first `whole` of them have no ranges. The sums of a range of the others lie one pair
after the other, whole tiles of them: nothing is masked. With SWAP they are of the transpose of C. Nobody waits for
another CTA, and the order of adding is always the same.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.toolbox.arithmetic import activate
from registry.toolbox.wgmma import four_of, lanes


@gluon.jit
def items_of(sizes, SPLIT: gl.constexpr):
    """How many pieces of work there are."""
    high, wide, _, whole, ways = sizes
    return whole + (high * wide - whole) * ways if SPLIT else high * wide


@gluon.jit
def part_of(item, sizes, SPLIT: gl.constexpr):
    """A piece of work: (pair of tiles, its first block of K, how many, the number of the range, or -1)."""
    high, wide, blocks, whole, ways = sizes
    if SPLIT:
        count = high * wide - whole
        part = gl.maximum(item - whole, 0) // count
        first = part * blocks // ways
        last = (part + 1) * blocks // ways
        ranged = item >= whole
        pair = gl.where(ranged, item - part * count, item)
        return pair, first, gl.where(ranged, last - first, blocks), gl.where(ranged, part, -1)
    else:
        return item, 0, blocks, 0


@gluon.jit
def place_of(pair, part, sizes):
    """Of the sums of a range, counted in pairs of tiles."""
    high, wide, _, whole, _ = sizes
    return part * (high * wide - whole) + pair - whole


@triton.jit
def corner_of(pair, high, wide, together):
    """Which pair of tiles it is, (from above, from the left) of high x wide: they run in groups of so many rows of
    pairs `together`, column by column."""
    group = pair // (together * wide)
    rest = pair - group * (together * wide)
    rows = tl.minimum(high - group * together, together)
    column = rest // rows
    return group * together + rest - column * rows, column


@gluon.constexpr_function
def _put_asm(eight):
    """Two columns of two rows."""
    return f"""{{
        st.global.v2.f32 [$1 + {32 * eight}], {{$3, $4}};
        st.global.v2.f32 [$2 + {32 * eight}], {{$5, $6}};
        mov.b32 $0, 0;
    }}"""


@gluon.jit
def put(acc, row, column, place, sums_ptr, cfg: gl.constexpr):
    """One consumer's accumulators, whose corner is at (row, column) of a pair of tiles, to the sums at this place."""
    PITCH: gl.constexpr = cfg.WIDTH * (2 if cfg.PAIR == 1 else 1)
    AREA: gl.constexpr = 2 * cfg.HIGH * cfg.WIDTH
    UNITS: gl.constexpr = cfg.UNITS
    EIGHTS: gl.constexpr = cfg.WIDTH // 8
    thread = lanes()
    down = row + thread // 32 * 16 + thread % 32 // 4
    at = sums_ptr + place.to(gl.int64) * AREA + down * PITCH + column + thread % 4 * 2
    for unit in gl.static_range(UNITS):
        here = at + unit * 64 * PITCH
        addresses = (here.to(gl.int64), (here + 8 * PITCH).to(gl.int64))
        for j in gl.static_range(EIGHTS):
            gl.inline_asm_elementwise(
                _put_asm(j),
                "=r,l,l,f,f,f,f",
                addresses + four_of(acc, unit * EIGHTS + j),
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )


ROWS, COLUMNS = tl.constexpr(32), tl.constexpr(16)
"""Of a pair of tiles, in a program of `add_parts`; it has whole ones of them."""
MOST_AT_ONCE = 16


@triton.jit(do_not_specialize=["m", "eights", "high", "wide", "together", "whole", "ways", "tall", "broad"])
def add_parts(
    sums_ptr,
    c_ptr,
    bias_ptr,
    m,
    eights,
    high,
    wide,
    together,
    whole,
    ways,
    tall,
    broad,
    SWAP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
    BIAS: tl.constexpr,
    ACT: tl.constexpr,
):
    """C, which has 8 * eights columns, out of the sums of all ranges of pairs of tiles, tall x broad, so many of which
    are loaded at once, with bias and activation."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    n = 8 * eights
    pair = tl.program_id(1)
    row, column = corner_of(whole + pair, high, wide, together)
    down = tl.program_id(0) // (broad // COLUMNS) * ROWS + tl.arange(0, ROWS)[:, None]
    across = tl.program_id(0) % (broad // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    area = (tall * broad).to(tl.int64)
    step = (high * wide - whole) * area
    at = sums_ptr + pair * area + down * broad + across
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, ways, AT_ONCE):
        for number in tl.static_range(AT_ONCE):
            found += tl.load(at + number * step, mask=first + number < ways, other=0.0)
        at += AT_ONCE * step
    rows, columns = row * tall + down, column * broad + across
    if SWAP:
        rows, columns = columns, rows
    seen = (rows < m) & (columns < n)
    c = c_ptr + rows.to(tl.int64) * n + columns
    if BIAS:
        found += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
    found = activate(found, ACT)
    tl.store(c, found.to(c_ptr.dtype.element_ty), mask=seen)
