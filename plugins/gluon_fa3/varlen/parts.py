"""Rows whose keys are shared out among tiles: each leaves a part of O, and a kernel after them adds the parts up.

A part is float32, already divided by its sum of weights, its columns those of O's tile and behind them the sum's
logarithm in powers of two: [head, row of parts, columns + PADDING], where share_list.py says which rows are whose.
Shares are of a tile's blocks of keys, as equal as they can be; one for which none is left has a block behind the last
key, all of it masked, and so adds nothing.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3 import traits
from registry.plugins.gluon_fa3.places import sums_of
from registry.plugins.gluon_fa3.products import value_part
from registry.plugins.gluon_fa3.varlen.share_list import TOKEN_WORDS
from registry.plugins.gluon_fa3.varlen.tile_list import WORDS

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(traits.ROWS)
_PADDING = gl.constexpr(traits.PADDING)


@gluon.jit
def leave_part(parts, acc, total, row, place, pitch, here, T: gl.constexpr):
    """Consumer: leave the rows from `row` on, of which `acc` has the values and `total` the logarithms."""
    COUNT: gl.constexpr = len(acc)
    for i in gl.static_range(COUNT):
        _leave_values(parts, acc[i], value_part(T, i, 0), row, place, pitch, here, T)
    ROW: gl.constexpr = total.type.layout
    at, there = rows_of_part(ROW, row, place, pitch, here, T)
    gl.store(parts + at * (T.values + _PADDING) + T.values, total, mask=there)


@gluon.jit
def _leave_values(parts, acc, FIRST: gl.constexpr, row, place, pitch, here, T: gl.constexpr):
    LAYOUT: gl.constexpr = acc.type.layout
    column = FIRST + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    at, there = rows_of_part(ROW, row, place, pitch, here, T)
    pointers = (parts + at * (T.values + _PADDING))[:, None] + column[None, :]
    gl.store(pointers, acc, mask=there[:, None] & (column >= 0)[None, :])


@gluon.jit
def rows_of_part(LAYOUT: gl.constexpr, row, place, pitch, here, T: gl.constexpr):
    """(numbers of a group's rows among those of parts, which of them there are)."""
    rows = gl.arange(0, ROWS, layout=LAYOUT)
    return sums_of(0, place, pitch, here, row, rows, T)


@triton.jit(do_not_specialize=["total_q", "room", "part_rows", "out_row", "out_head", "columns"])
def add_parts(
    parts, row_blocks, out, lse, total_q, room, part_rows, out_row, out_head, columns, sinks,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PADDING: tl.constexpr, LSE: tl.constexpr, TOGETHER: tl.constexpr,
    SINKS: tl.constexpr = False,
):  # fmt: skip
    """One row of one head: the sum of its parts, by their weights. Words about a token that no sequence has may be
    anything: they are held to the memory there is."""
    token, head = tl.program_id(0), tl.program_id(1)
    words = row_blocks + (1 + room) * WORDS + token * TOKEN_WORDS
    first = tl.minimum(tl.maximum(tl.load(words), 0), part_rows - 1)
    apart = tl.maximum(tl.load(words + 2), 1)
    shares = tl.minimum(tl.load(words + 1), (part_rows - 1 - first) // apart + 1)
    own = parts + head.to(tl.int64) * part_rows * (WIDTH + PADDING)
    column = tl.arange(0, BLOCK)
    highest, total = -float("inf"), 0.0
    acc = tl.zeros([BLOCK], tl.float32)
    for done in range(0, shares, TOGETHER):
        share = done + tl.arange(0, TOGETHER)
        row = own + (first + share * apart).to(tl.int64) * (WIDTH + PADDING)
        logarithm = tl.load(row + WIDTH, mask=share < shares, other=-float("inf"))
        there = (share < shares)[:, None] & (column < WIDTH)[None, :]
        values = tl.load(row[:, None] + column[None, :], mask=there, other=0.0)
        new = tl.maximum(highest, tl.max(logarithm, 0))
        finite = tl.where(new == -float("inf"), 0.0, new)
        before, weight = tl.exp2(highest - finite), tl.exp2(logarithm - finite)
        acc = acc * before + tl.sum(weight[:, None] * values, 0)
        total = total * before + tl.sum(weight, 0)
        highest = new
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        new = tl.where(highest >= sink, highest, sink)  # NaN where the sink is
        finite = tl.where(new == -float("inf"), 0.0, new)
        kept = tl.exp2(highest - finite)
        acc, total, highest = acc * kept, total * kept + tl.where(sink == new, 1.0, tl.exp2(sink - finite)), new
    acc = acc / tl.where(total == 0.0, 1.0, total)
    at = out + token.to(tl.int64) * out_row + head.to(tl.int64) * out_head + column
    tl.store(at, acc.to(out.dtype.element_ty), mask=column < columns)
    if LSE:
        tl.store(lse + head.to(tl.int64) * total_q + token, (highest + tl.log2(total)) * LN2)
