"""One gradient by itself: a sweep. Three of them need 8 matrix products where the method "sums" needs 5. They are the
way beyond 128 columns, where dK and dV of a group's 64 keys would fill its registers: no sums in memory, the same bits
on every run.

A tile is 128 rows, 64 a group: of Q and dO for dQ, of K and V for dK, of K for dV. The groups meet every block of 64
rows of the other side, and never each other:

    dQ  S = Q K^T     dP = dO V^T    dQ += dS K          X, Y = Q, dO    U, W = K, V
    dK  S^T = K Q^T   dP^T = V dO^T  dK += dS^T Q        X, Y = K, V     U, W = Q, dO
    dV  S^T = K Q^T                  dV += P^T dO        X = K           U, W = Q, dO

Measured facts, D256, as in kernel.py (TFLOPS; cuDNN, FA3): full 1k 387 (296, 375), 16k 453 (357, 475); causal 4k 428
(349, 403), 16k 481 (377, 449). With a block's product of dQ and dK beside the scores of the next one, 335, 404, 367
and 411: X, Y and two blocks of U fill the shared memory, and the third is missed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from registry.plugins.gluon_fa3.backward import traits
from registry.plugins.gluon_fa3.backward.schedule import (
    extent_of,
    key_blocks,
    keys_of,
    next_block,
    nought,
    place_at,
    queries_of,
    query_blocks,
)
from registry.plugins.gluon_fa3.backward.scores import exponents, hide
from registry.plugins.gluon_fa3.places import LIMIT, box
from registry.plugins.gluon_fa3.softmax import pack, unpack
from registry.toolbox.hopper import (
    after_previous_kernel,
    as_matrix,
    barriers,
    init_barriers,
    load_tile,
    release,
    ring,
    slot,
    store_tile,
    store_wait,
    viewed,
    wait_empty,
    wait_full,
)

ROWS = gl.constexpr(64)
GROUP_REGISTERS = gl.constexpr(traits.GROUP_REGISTERS)
HELPER_REGISTERS = gl.constexpr(traits.HELPER_REGISTERS)


@gluon.constexpr_function
def _tiles(count, tensor_map, columns=None):
    """The shape of `count` boxes of a tensor map, or of wider ones."""
    return [count, *tensor_map.block_shape[:-1], columns or tensor_map.block_shape[-1]]


@gluon.jit
def visited(first, work, extent, T: gl.constexpr):
    """(heads of the other side to visit, lowest and highest block of it), from a tile's first row."""
    if T.of_queries:
        low, high = key_blocks(first, extent, T.rows, T.block, T)
        visits = 1
    else:
        low, high = query_blocks(first, extent, T.rows, T.block, T)
        visits = work[1]
    return visits, low, high


@gluon.jit
def own_box(place, row, T: gl.constexpr):
    """The coordinates of rows of X, Y and the gradient."""
    if T.of_queries:
        return box(queries_of(place, place[1], T), row, 0, T)
    else:
        return box(keys_of(place, T), row, 0, T)


@gluon.jit
def other_box(place, head, row, T: gl.constexpr):
    """Those of U and W."""
    if T.packed:
        if T.of_queries:
            return box((place[2], LIMIT - place[3], head), row, 0, T)
        else:
            return box(queries_of(place, head, T), row, 0, T)
    else:
        return box((place[2], head), row, 0, T)


@gluon.jit
def statistics_of(place, head, heads, work, T: gl.constexpr):
    """Where those of a query head begin, in blocks; there are `heads`."""
    if T.packed:
        return head * work[2] + place[6]
    else:
        return (place[2] * heads + head) * work[2]


@gluon.jit
def sweep_producer(maps, tiles, u_ring, w_ring, stats_tiles, extent, work, T: gl.constexpr):
    """X and Y once, then U and W of every block."""
    x_map, y_map, u_map, w_map, stats_map = maps
    X_TILE: gl.constexpr = x_map.layout
    X_BOX: gl.constexpr = x_map.block_shape
    x_tiles, x_ready, y_tiles, y_ready = tiles
    place = place_at(gl.program_id(0), work, T)
    first, head = place[0] * T.rows, place[1]
    visits, low, high = visited(first, work, extent_of(place, extent, T), T)
    heads, group = work[0], work[1]
    other = head * group
    if T.of_queries:
        other = head // group
    i = 0
    for h in range(other, other + visits):
        stats_row = statistics_of(place, h, heads * group, work, T)
        for m in range(low, high):
            if i == 0:
                for g in gl.static_range(2):
                    mbarrier.expect(x_ready.index(g), ROWS * T.x_columns * 2)
                    tile = viewed(x_tiles.index(g), X_BOX, X_TILE)
                    load_tile(x_map, own_box(place, first + g * ROWS, T), x_ready.index(g), tile)
            tile, ready = wait_empty(u_ring, i)
            if T.of_queries:
                mbarrier.expect(ready, T.block * T.x_columns * 2)
            else:
                mbarrier.expect(ready, T.block * T.x_columns * 2 + T.block * 8)
                load_tile(stats_map, [stats_row + m, 0, 0], ready, stats_tiles.index(slot(i, u_ring[0])[0]))
            load_tile(u_map, other_box(place, h, m * T.block, T), ready, tile)
            if i == 0 and T.gradient != "dv":
                for g in gl.static_range(2):
                    mbarrier.expect(y_ready.index(g), ROWS * T.w_columns * 2)
                    load_tile(y_map, own_box(place, first + g * ROWS, T), y_ready.index(g), y_tiles.index(g))
            tile, ready = wait_empty(w_ring, i)
            mbarrier.expect(ready, T.block * T.w_columns * 2)
            load_tile(w_map, other_box(place, h, m * T.block, T), ready, tile)
            i += 1


@gluon.jit
def probabilities(s, lse, first, m, rows, columns, extent, scale, cap, T: gl.constexpr):
    """P; for dQ and dK times the cap's slope, so that the tanh need not wait in registers."""
    x, bent = exponents(s, scale, cap, T)
    if T.of_queries:
        x = x - lse[:, None]
    else:
        x = x - lse[None, :]
    p = gl.exp2(hide(x, "exponents", first, m * T.block, rows, columns, extent, T))
    if T.softcap and T.gradient != "dv":
        p = p * (1.0 - bent * bent)
    return hide(p, "probabilities", first, m * T.block, rows, columns, extent, T)


@gluon.jit
def score_gradients(p, dp, delta, T: gl.constexpr):
    """dS."""
    if T.of_queries:
        ds = p * (dp - delta[:, None])
    else:
        ds = p * (dp - delta[None, :])
    return ds


@gluon.jit
def sweep_group(
    GROUP: gl.constexpr,
    out_map,
    tiles,
    u_ring,
    w_ring,
    stats_tiles,
    stats,
    extent,
    work,
    scale,
    scale_log2,
    cap,
    T: gl.constexpr,
):
    B: gl.constexpr = T.block
    DTYPE: gl.constexpr = out_map.dtype
    OUT: gl.constexpr = T.out_columns
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, B, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, OUT, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    STATS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.arange(0, ROWS, layout=BY_ROW)
    columns = gl.arange(0, B, layout=BY_COLUMN)
    zero = gl.full([ROWS, B], 0.0, gl.float32, layout=S_LAYOUT)
    acc = gl.full([ROWS, OUT], 0.0, gl.float32, layout=O_LAYOUT)

    x_tiles, x_ready, y_tiles, y_ready = tiles
    place = place_at(gl.program_id(0), work, T)
    extent = extent_of(place, extent, T)
    first = place[0] * T.rows
    visits, low, high = visited(first, work, extent, T)
    first += GROUP * ROWS
    steps = (high - low) * visits
    x_tile = x_tiles.index(GROUP)
    x = as_matrix(x_tile, ROWS, T.x_columns)
    y = as_matrix(y_tiles.index(GROUP), ROWS, T.w_columns)
    if T.of_queries:  # a block of the statistics has B rows
        last = work[2] - 1
        if T.packed:
            last = (extent[0] - 1) // B
        block = gl.minimum(first // B, last)
        base = stats + (statistics_of(place, place[1], work[0], work, T) + block).to(gl.int64) * (2 * B)
        lse = gl.load(base + rows)
        delta = gl.load(base + B + rows)
    mbarrier.wait(x_ready.index(GROUP), 0)

    if T.gradient != "dv":
        m = low
        for i in range(steps):
            x = as_matrix(x_tiles.index(GROUP + nought(i)), ROWS, T.x_columns)
            y = as_matrix(y_tiles.index(GROUP + nought(i)), ROWS, T.w_columns)
            if i == 0:
                mbarrier.wait(y_ready.index(GROUP), 0)
            u = as_matrix(wait_full(u_ring, i), B, T.x_columns)
            s_pending = warpgroup_mma(x, u.permute((1, 0)), zero, use_acc=False, is_async=True)
            w = as_matrix(wait_full(w_ring, i), B, T.w_columns)
            dp_pending = warpgroup_mma(y, w.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, [s_pending])
            if not T.of_queries:
                table = viewed(stats_tiles.index(slot(i, u_ring[0])[0]), [2, B], STATS)
                lse = table.index(0).load(BY_COLUMN)
            p = probabilities(s, lse, first, m, rows, columns, extent, scale_log2, cap, T)
            if not T.of_queries:
                delta = table.index(1).load(BY_COLUMN)
            dp = warpgroup_mma_wait(0, [dp_pending])
            release(w_ring, i)
            ds = gl.convert_layout(score_gradients(p, dp, delta, T).to(DTYPE), OPERAND)
            acc_pending = warpgroup_mma(ds, u, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc_pending])
            release(u_ring, i)
            m = next_block(m, low, high)
    else:  # the product of a block runs beside the scores of the next one
        u = as_matrix(wait_full(u_ring, 0), B, T.x_columns)
        s_pending = warpgroup_mma(x, u.permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, [s_pending])
        table = viewed(stats_tiles.index(0), [2, B], STATS)
        lse = table.index(0).load(BY_COLUMN)
        p = probabilities(s, lse, first, low, rows, columns, extent, scale_log2, cap, T)
        pairs = pack(p, T)
        m = low
        for i in range(1, steps):
            m = next_block(m, low, high)
            x = as_matrix(x_tiles.index(GROUP + nought(i)), ROWS, T.x_columns)
            u = as_matrix(wait_full(u_ring, i), B, T.x_columns)
            s_pending = warpgroup_mma(x, u.permute((1, 0)), zero, use_acc=False, is_async=True)
            w = as_matrix(wait_full(w_ring, i - 1), B, OUT)
            acc_pending = warpgroup_mma(unpack(pairs, DTYPE, OPERAND), w, acc, is_async=True)
            s = warpgroup_mma_wait(1, [s_pending])
            table = viewed(stats_tiles.index(slot(i, u_ring[0])[0]), [2, B], STATS)
            lse = table.index(0).load(BY_COLUMN)
            p = probabilities(s, lse, first, m, rows, columns, extent, scale_log2, cap, T)
            acc = warpgroup_mma_wait(0, [acc_pending])
            release(u_ring, i - 1)  # its statistics were in use until then
            release(w_ring, i - 1)
            pairs = pack(p, T)
        last = steps - 1
        w = as_matrix(wait_full(w_ring, last), B, OUT)
        acc_pending = warpgroup_mma(unpack(pairs, DTYPE, OPERAND), w, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc_pending])
    if T.gradient != "dv":
        acc = acc * scale
    OUT_TILE: gl.constexpr = out_map.layout
    OUT_BOX: gl.constexpr = out_map.block_shape
    part = viewed(x_tile, OUT_BOX, OUT_TILE)
    as_matrix(part, ROWS, OUT).store(acc.to(DTYPE))
    fence_async_shared()
    store_tile(out_map, own_box(place, first, T), part)
    store_wait(0)


@gluon.jit
def sweep(maps, out_map, stats, extent, work, scale, scale_log2, cap, T: gl.constexpr):
    """Shared memory, barriers and roles: all of the kernel, whichever way its tile is found."""
    x_map, y_map, u_map, w_map, stats_map = maps
    DTYPE: gl.constexpr = x_map.dtype
    B: gl.constexpr = T.block
    x_tiles = gl.allocate_shared_memory(DTYPE, _tiles(2, x_map, T.tile_columns), x_map.layout)
    u_tiles = gl.allocate_shared_memory(DTYPE, _tiles(T.stages, u_map), u_map.layout)
    w_tiles = gl.allocate_shared_memory(DTYPE, _tiles(T.w_stages, w_map), w_map.layout)
    if T.gradient == "dv":
        y_tiles = x_tiles
    else:
        y_tiles = gl.allocate_shared_memory(DTYPE, _tiles(2, y_map), y_map.layout)
    stats_tiles = gl.allocate_shared_memory(gl.float32, [T.stages, 1, 2, B], stats_map.layout)
    x_ready = barriers(2)
    init_barriers(x_ready, 1)
    if T.packed and T.gradient == "dv":
        y_ready = x_ready
    else:
        y_ready = barriers(2)
        init_barriers(y_ready, 1)
    u = ring(u_tiles, T.stages, 2)
    w = ring(w_tiles, T.w_stages, 2)
    own = (x_tiles, x_ready, y_tiles, y_ready)
    if not T.packed:
        after_previous_kernel()
    # Written out: a constexpr inside a tuple variable would lose its value.
    gl.warp_specialize(
        [
            (sweep_group, (0, out_map, own, u, w, stats_tiles, stats, extent, work, scale, scale_log2, cap, T)),
            (sweep_group, (1, out_map, own, u, w, stats_tiles, stats, extent, work, scale, scale_log2, cap, T)),
            (sweep_producer, (maps, own, u, w, stats_tiles, extent, work, T)),
        ],
        [4, 1],
        [GROUP_REGISTERS, HELPER_REGISTERS],
    )


SIZES = "seqlen_q seqlen_k left right heads_own group row_blocks tiles heads section_heads last_first"


@gluon.jit(do_not_specialize=SIZES.split())
def attention_gradient(
    x_map,
    y_map,
    u_map,
    w_map,
    stats_map,
    out_map,
    stats,
    seqlen_q,
    seqlen_k,
    left,
    right,
    heads_own,
    group,
    row_blocks,
    tiles,
    heads,
    section_heads,
    last_first,
    scale,
    scale_log2,
    cap,
    T: gl.constexpr,
):
    extent = (seqlen_q, seqlen_k, left, right)
    work = (heads_own, group, row_blocks, tiles, heads, section_heads, last_first)
    maps = (x_map, y_map, u_map, w_map, stats_map)
    sweep(maps, out_map, stats, extent, work, scale, scale_log2, cap, T)
