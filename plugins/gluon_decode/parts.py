"""Where a tile's rows are read and written, and its parts: left in a workspace, and added up by who comes last.

A part is [row, column] float32, already divided by its sum, and its log-sum-exp in powers of two a row.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def spread(parts, rows, columns):
    """The layout [part, row, column] in which parts are added up: a thread has all parts of its numbers."""
    each = max(1, min(4, rows * columns // 128))
    lanes = min(32, columns // each)
    warps = min(4, columns // each // lanes)
    return gl.BlockedLayout([parts, 1, each], [1, 32 // lanes, lanes], [1, 4 // warps, warps], [2, 1, 0])


@gluon.jit
def rows_at(row, head, place, T: gl.constexpr):
    """(token, query head, whether it is there) of rows of a sequence."""
    q_start, queries = place
    kv = row // T.span
    own = row - kv * T.span
    query = own // T.group
    there = (own < queries * T.group) & (kv < T.heads)
    return q_start + query, (head * T.heads + kv) * T.group + (own - query * T.group), there


@gluon.jit
def column_of(m, T: gl.constexpr):
    """The column that row m of O^T is: see products.py."""
    if T.eight:
        return ((m & 7) << 2) | ((m >> 3) & 1) | ((m & 48) << 1) | ((m >> 5) & 2)
    else:
        return m


@gluon.jit
def _slot(chunk, head, T: gl.constexpr):
    """Each program has two slots: the first is for the tile that its share begins in, the second for the one that
    begins in its share. Slots of a head's chunks follow one another."""
    return (head * T.chunks + chunk) * 2


@gluon.jit
def leave(parts, chunk, begins, head, acc, lse2, T: gl.constexpr):
    """Leave a part: acc is [column, row]."""
    values, sums = parts
    slot = _slot(chunk, head, T) + begins.to(gl.int32)
    LAYOUT: gl.constexpr = acc.type.layout
    column = column_of(gl.arange(0, T.head, layout=gl.SliceLayout(1, LAYOUT)), T)
    row = gl.arange(0, T.rows, layout=gl.SliceLayout(0, LAYOUT))
    gl.store(sums + slot * T.part_rows + row, lse2, mask=row < T.part_rows)
    at = values + slot.to(gl.int64) * (T.part_rows * T.head)
    there = (row < T.part_rows)[None, :] & (column >= 0)[:, None]
    gl.store(at + (row[None, :] * T.head + column[:, None]), acc, mask=there)


@gluon.jit
def add_up(parts, first, last, head, T: gl.constexpr):
    """(values [row, column], log-sum-exps) of what the chunks first..last left, in their order."""
    values, sums = parts
    P: gl.constexpr = T.at_once
    R: gl.constexpr = T.part_rows
    LAYOUT: gl.constexpr = spread(P, R, T.head)
    SUMS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    FLAT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    part = gl.arange(0, P, layout=gl.SliceLayout(1, SUMS))
    row = gl.arange(0, R, layout=gl.SliceLayout(0, SUMS))
    part3 = gl.arange(0, P, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None][:, :, None]
    row3 = gl.arange(0, R, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :][:, :, None]
    column3 = gl.arange(0, T.head, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :][:, None, :]
    acc = gl.full([R, T.head], 0.0, gl.float32, layout=FLAT)
    highest = gl.full([R], -float("inf"), gl.float32, layout=gl.SliceLayout(0, SUMS))
    total = gl.full([R], 0.0, gl.float32, layout=gl.SliceLayout(0, SUMS))
    for some in range(first, last + 1, P):
        slot = _slot(some, head, T)
        second = ((part == 0) & (some == first)).to(gl.int32)
        place = part * 2 + second
        there = part <= last - some
        at = sums + slot * R + (place[:, None] * R + row[None, :])
        lse2 = gl.load(at, mask=there[:, None] & (row >= 0)[None, :], other=-float("inf"), cache_modifier=".cg")
        place3 = part3 * 2 + ((part3 == 0) & (some == first)).to(gl.int32)
        offsets = place3 * (R * T.head) + row3 * T.head + column3
        inside = (part3 <= last - some) & (row3 >= 0) & (column3 >= 0)
        at = values + slot.to(gl.int64) * (R * T.head)
        found = gl.load(at + offsets, mask=inside, other=0.0, cache_modifier=".cg")
        new = gl.maximum(highest, gl.max(lse2, 0))
        finite = gl.where(new == -float("inf"), 0.0, new)
        rescale = gl.exp2(highest - finite)
        weight = gl.exp2(lse2 - finite[None, :])
        total = total * rescale + gl.sum(weight, 0)
        back = gl.convert_layout(rescale, gl.SliceLayout(1, FLAT))[:, None]
        acc = acc * back + gl.sum(found * weight[:, :, None], 0)
        highest = new
    lse2 = highest + gl.log2(total)
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, FLAT))[:, None]
    return acc, gl.convert_layout(lse2, gl.SliceLayout(1, FLAT))


@gluon.jit
def write(results, scales, place, head, acc, lse2, ROW_DIM: gl.constexpr, T: gl.constexpr):
    """Store rows that have seen all their keys; rows lie along dimension ROW_DIM of acc."""
    out, lse, sinks, out_row, out_head, total_q = results
    LAYOUT: gl.constexpr = acc.type.layout
    ROWS: gl.constexpr = acc.shape[ROW_DIM]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1 - ROW_DIM, LAYOUT))
    column = gl.arange(0, T.head, layout=gl.SliceLayout(ROW_DIM, LAYOUT))
    if T.eight and ROW_DIM == 1:
        column = column_of(column, T)
    token, q_head, there = rows_at(row, head, place, T)
    if T.eight:
        own_scale = gl.load(scales[1] + q_head // T.group * scales[3], mask=there, other=0.0)
        acc = acc * gl.expand_dims(own_scale, 1 - ROW_DIM)
    if T.sinks:
        sink = gl.load(sinks + q_head, mask=there, other=0.0).to(gl.float32) * LOG2E
        whole = gl.maximum(lse2, sink)
        finite = gl.where(whole == -float("inf"), 0.0, whole)
        whole = finite + gl.log2(gl.exp2(lse2 - finite) + gl.exp2(sink - finite))
        acc = acc * gl.expand_dims(gl.exp2(lse2 - gl.where(whole == -float("inf"), 0.0, whole)), 1 - ROW_DIM)
        lse2 = whole
    at = out + (token.to(gl.int64) * (out_row * 8) + q_head * (out_head * 8))
    inside = gl.expand_dims(there, 1 - ROW_DIM) & gl.expand_dims(column < T.columns, ROW_DIM)
    pointers = gl.expand_dims(at, 1 - ROW_DIM) + gl.expand_dims(column, ROW_DIM)
    gl.store(pointers, acc.to(out.dtype.element_ty), mask=inside)
    if T.lse:
        gl.store(lse + q_head.to(gl.int64) * total_q + token, lse2 * LN2, mask=there)
