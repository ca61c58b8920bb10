"""What the specialised kernels are made of: rings of slices, products of them, and boxes of P and dS in memory.

slice        64 columns of Q, K, V or dO: what a swizzle of 128 bytes holds, with K's or V's a stage of a ring
rows         of Q or dO that stay in shared memory while an item's keys pass (ROWS_STAY)
turns        where rows stay, a group issues a product when the other has issued its own: one's exponentials run beside
             the other's products. Left alone both do the same at the same time, for they share the slices. Where the
             ring holds no whole product, TURN slices of it: no group can be further ahead of the other than the ring
boxes        P and dS lie in boxes of 64 x 64, each in one piece: `kept_at`
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from registry.toolbox.hopper import (
    as_matrix,
    group_barrier,
    load_tile,
    release_slot,
    slot_of,
    store_tile,
    store_wait,
    wait_slot_empty,
    wait_slot_full,
)

ROWS = gl.constexpr(64)  # of a warp group
SLICE = gl.constexpr(64)
GROUPS = gl.constexpr(2)
_RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@gluon.jit
def kept_at(row, key, keys):
    """Where a box of 64 x 64 of P or dS lies, of rows of so many keys: box after box, each in one piece, or a tile's
    rows would be spread over as many pages of memory."""
    return ((row // SLICE) * (keys // SLICE) + key // SLICE) * SLICE


@gluon.jit
def tiles_seen(row, shift, low, high, sizes, T: gl.constexpr):
    """(first, behind the last), of those tiles of keys from `low` to `high` that some rows of an item's see. The
    diagonal lies `shift` keys to the right."""
    seqlen_q, seqlen_k, window_left, window_right = sizes
    if T.HAS_RIGHT:
        last = gl.minimum(row + GROUPS * ROWS, seqlen_q) - 1
        end = gl.minimum(seqlen_k, last + shift + window_right + 1)
        high = gl.minimum(high, gl.cdiv(gl.maximum(end, 0), T.BLOCK_N))
    if T.HAS_LEFT:
        low = gl.maximum(low, gl.maximum(row + shift - window_left, 0) // T.BLOCK_N)
    return low, high


@gluon.jit
def load_rows(
    a_map, rows, number, where, row, FIRST: gl.constexpr, COUNT: gl.constexpr, BY_GROUP: gl.constexpr = False
):
    """Producer: an item's rows of Q or dO, where they stay, from their FIRST slice on: slice by slice, or those of a
    group in one piece."""
    ready = wait_slot_empty(rows, 0, number)
    mbarrier.expect(ready, GROUPS * ROWS * SLICE * COUNT * 2)
    for c in gl.static_range(COUNT):
        for g in gl.static_range(GROUPS):
            to = rows[0].index(g * COUNT + c if BY_GROUP else c * GROUPS + g)
            load_tile(a_map, [where[0], where[1], row + g * ROWS, (FIRST + c) * SLICE], ready, to)


@gluon.jit
def load_slices(maps, r, use, where, row, where_kv, key, COUNT: gl.constexpr, T: gl.constexpr):
    """Producer: the slices of both operands of one product; or of keys, where rows stay."""
    a_map, b_map = maps
    a, b = r[0]
    for c in range(COUNT):
        s = slot_of(use + c, r)
        ready = wait_slot_empty(r, s, use + c)
        if T.ROWS_STAY:
            mbarrier.expect(ready, T.BLOCK_N * SLICE * 2)
        else:
            mbarrier.expect(ready, (GROUPS * ROWS + T.BLOCK_N) * SLICE * 2)
            for g in gl.static_range(GROUPS):
                load_tile(a_map, [where[0], where[1], row + g * ROWS, c * SLICE], ready, a.index(s * GROUPS + g))
        load_tile(b_map, [where_kv[0], where_kv[1], key, c * SLICE], ready, b.index(s))


@gluon.jit
def multiplied(GROUP: gl.constexpr, r, rows, held, turns, own, use, zero, COUNT: gl.constexpr, T: gl.constexpr):
    """Consumer: the product of the next COUNT slices. Each is let go of when the next is on its way. What is `held` of
    the first operand, its first slices, is in registers."""
    HELD: gl.constexpr = len(held)
    a, b = r[0]
    acc = zero
    for c in gl.static_range(COUNT):
        if T.ROWS_STAY and c % T.TURN == 0:
            mbarrier.wait(turns.index(GROUP), ((own + c // T.TURN) & 1) ^ (1 - GROUP))
        s = slot_of(use + c, r)
        wait_slot_full(r, s, use + c)
        if c < HELD:
            a_slice = held[c]
        elif T.ROWS_STAY:
            a_slice = as_matrix(rows[0].index((c - HELD) * GROUPS + GROUP), ROWS, SLICE)
        else:
            a_slice = as_matrix(a.index(s * GROUPS + GROUP), ROWS, SLICE)
        b_tile = as_matrix(b.index(s), T.BLOCK_N, SLICE).permute((1, 0))
        acc = warpgroup_mma(a_slice, b_tile, acc, use_acc=c > 0, is_async=True)
        if c > 0:
            acc = warpgroup_mma_wait(1, [acc])
            release_slot(r, slot_of(use + c - 1, r))
        if T.ROWS_STAY and (c % T.TURN == T.TURN - 1 or c == COUNT - 1):
            mbarrier.arrive(turns.index(1 - GROUP), count=1)
    acc = warpgroup_mma_wait(0, [acc])
    release_slot(r, slot_of(use + COUNT - 1, r))
    return acc


@gluon.jit
def bent_to_one(x):
    """tanh(ln(2) / 2 x), of scores with a cap."""
    grown = gl.exp2(x) + 1.0
    return 1.0 - 2.0 * gl.inline_asm_elementwise(_RECIPROCAL, "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def hidden(x, row, key, rows, keys, sizes, VALUE: gl.constexpr, T: gl.constexpr):
    """VALUE for what rows do not see, where a tile meets an edge of the mask, or the end of the keys."""
    seqlen_q, seqlen_k, window_left, window_right = sizes
    own = row + (seqlen_k - seqlen_q)
    last = gl.full([ROWS], 0, gl.int32, layout=rows.type.layout) + (seqlen_k - 1)
    edge = key + T.BLOCK_N > seqlen_k
    if T.HAS_RIGHT:
        edge = edge | (key + T.BLOCK_N - 1 > own + window_right)
        last = gl.minimum(last, own + rows + window_right)
    if T.HAS_LEFT:
        edge = edge | (key < own + ROWS - 1 - window_left)
    if edge:
        columns = (key + keys)[None, :]
        x = gl.where(columns <= last[:, None], x, VALUE)
        if T.HAS_LEFT:
            x = gl.where(columns >= (own + rows - window_left)[:, None], x, VALUE)
    return x


@gluon.jit
def take_out(tile, to_map, place, at, T: gl.constexpr):
    """By way of this group's memory, once what it held is on its way."""
    matrix = as_matrix(place, ROWS, T.BLOCK_N)
    store_wait(0)
    group_barrier()
    matrix.store(tile)
    fence_async_shared()
    group_barrier()
    for i in gl.static_range(T.BLOCK_N // SLICE):
        store_tile(to_map, [at + i * SLICE, 0], place.index(i))
    return matrix
