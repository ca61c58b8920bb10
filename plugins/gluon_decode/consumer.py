"""The consumer: one warp group that multiplies. Rows of a tile are (query, head) pairs, the heads that share a key head
side by side, and few: so keys are the M of the first product and rows its N (see products.py).

Keys and values of 8 bits pass through registers on their way to a product. With few rows the products are those of
single warps, whose operands all lie in registers: the compiler converts the next ones while one multiplies.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from registry.plugins.gluon_decode.line import chunk_of, my_share, next_piece
from registry.plugins.gluon_decode.parts import add_up, leave, write
from registry.plugins.gluon_decode.products import (
    hand_over,
    keys_by_queries,
    load_queries,
    matrices,
    right_factor,
    values_by_weights,
    widened_keys,
    widened_values,
)
from registry.toolbox.hopper import group_barrier, release_slot, slot_of, wait_slot_full

LOWEST = gl.constexpr(-1e30)  # finite, so that a block in which a row sees nothing needs no special case


@gluon.jit
def _masked(s, n, end, diagonal, left, right, T: gl.constexpr):
    """-inf where a row does not see a key."""
    LAYOUT: gl.constexpr = s.type.layout
    at = gl.arange(0, T.block_n, layout=gl.SliceLayout(1, LAYOUT))
    key = n + at // T.heads
    seen = (key < end)[:, None]
    if T.heads > 1:
        row = gl.arange(0, T.rows, layout=gl.SliceLayout(0, LAYOUT))
        seen = seen & ((at % T.heads)[:, None] == (row // T.span)[None, :])
    if T.right:
        seen = seen & (key[:, None] <= (diagonal + right)[None, :])
    if T.left:
        seen = seen & (key[:, None] >= (diagonal - left)[None, :])
    return gl.where(seen, s, -float("inf"))


@gluon.constexpr_function
def _all_warps(rows):
    """[warp, row]: a thread has the numbers of all warps for the rows that it has of a product."""
    registers = [[1, 0], [2, 0], [0, 1]] + [[0, row] for row in (8, 16, 32) if row < rows]
    return gl.DistributedLinearLayout(
        registers, [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, rows]
    )


@gluon.constexpr_function
def _sums_layout(rows, small):
    """Of both products: of every 64 keys or columns a warp has 16."""
    if small:
        return gl.NVMMADistributedLayout([2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    return gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])


@gluon.jit
def highest(s, maxima, T: gl.constexpr):
    """The maximum of each row over the keys of a block, by way of one barrier."""
    TALL: gl.constexpr = T.block_n // 64
    N: gl.constexpr = T.rows
    LAYOUT: gl.constexpr = _all_warps(T.rows)
    each = gl.max(gl.max(s.reshape([TALL, 4, 16, N]), 2), 0)
    maxima.store(each)
    found = gl.max(maxima.load(LAYOUT), 0)
    return gl.convert_layout(found, gl.SliceLayout(0, s.type.layout))


@gluon.jit
def _weigh(s, factor, n, sight, state, tiles, maxima, T: gl.constexpr):
    """The scores of a block from key n on become weights in shared memory, and what is summed up is held against the
    new maximum."""
    keys, diagonal, left, right, cap = sight
    m, sums, acc = state
    scores = s * factor
    if T.cap:
        scores = cap - 2.0 * cap / (1.0 + gl.exp2(scores))
    scores = _masked(scores, n, keys, diagonal, left, right, T)
    new = gl.maximum(m, highest(scores, maxima, T))
    p = gl.exp2(scores - new[None, :])
    alpha = gl.exp2(m - new)
    sums = sums * alpha[None, :] + p
    acc = acc * alpha[None, :]
    tiles[1].permute((1, 0)).store(p.to(tiles[1].dtype))
    if not T.small:
        fence_async_shared()
    return new, sums, acc


@gluon.jit
def _attend(rings, matrices_of, i, block, take, factor, sight, state, tiles, maxima, zero, T: gl.constexpr):
    """The blocks of a piece, as use i of the rings and further ones: (maximum, sums, values, next use)."""
    k_ring, v_ring = rings
    k, v = matrices_of
    m, sums, acc = state
    for j in range(take):
        n = (block + j) * T.tokens
        stage = slot_of(i, k_ring)
        wait_slot_full(k_ring, stage, i)
        s = warpgroup_mma_wait(0, [keys_by_queries(k.index(stage), tiles[0], zero, T)])
        m, sums, acc = _weigh(s, factor, n, sight, (m, sums, acc), tiles, maxima, T)
        wait_slot_full(v_ring, stage, i)
        acc = warpgroup_mma_wait(0, [values_by_weights(v.index(stage), tiles[1], acc, n, sight[0], T)])
        release_slot(k_ring, stage)
        i += 1
    return m, sums, acc, i


@gluon.jit
def _attend_small(rings, matrices_of, i, block, take, factor, sight, state, tiles, maxima, zero, T: gl.constexpr):
    """The same of 8 bits and few rows, by products of single warps."""
    k_ring, v_ring = rings
    k, v = matrices_of
    m, sums, acc = state
    q = right_factor(tiles[0], zero)
    for j in range(take):
        n = (block + j) * T.tokens
        stage = slot_of(i, k_ring)
        wait_slot_full(k_ring, stage, i)
        s = mma_v2(widened_keys(k.index(stage), zero, T), q, zero)
        wait_slot_full(v_ring, stage, i)
        x = widened_values(v.index(stage), acc, n, sight[0], T)
        m, sums, acc = _weigh(s, factor, n, sight, (m, sums, acc), tiles, maxima, T)
        acc = mma_v2(x, right_factor(tiles[1], acc), acc)
        release_slot(k_ring, stage)
        i += 1
    return m, sums, acc, i


@gluon.jit
def consumer(queries_of, rings, tiles, lengths, workspace, results, scales, overhead, numbers, T: gl.constexpr):
    q_tile, p_tile = tiles
    parts = (workspace[0], workspace[1])
    counters = workspace[2]
    scale, cap, left, right = numbers
    N: gl.constexpr = T.rows
    S_LAYOUT: gl.constexpr = _sums_layout(T.rows, T.small)
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    head, chunk = gl.program_id(0), gl.program_id(1)
    unit, stop, b, before, overhead, share, longer = my_share(lengths, left, chunk, overhead, 4, T)
    k_ring, v_ring = rings
    k, v = matrices(k_ring[0], T), matrices(v_ring[0], T)
    maxima = gl.allocate_shared_memory(gl.float32, [4, N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    zero = gl.full([T.block_n, N], 0.0, gl.float32, layout=S_LAYOUT)
    row = gl.arange(0, N, layout=ROW)
    factor = scale
    if T.eight:
        factor = scale * gl.load(scales[0] + (head * T.heads + gl.minimum(row // T.span, T.heads - 1)) * scales[2])
    i = 0
    piece = next_piece(unit, stop, b, before, overhead, lengths, left, T)
    x = load_queries(queries_of, (piece[3], piece[4]), head, T)
    while piece[9] > 0:
        unit, b, before, q_start, queries, keys, begin, blocks, block, take = piece
        place = (q_start, queries)
        unit_of = hand_over(x, q_tile, ROW, T) * factor
        # The queries of the next piece are under way while this one is attended to.
        piece = next_piece(unit + take, stop, b, before, overhead, lengths, left, T)
        x = load_queries(queries_of, (piece[3], piece[4] * gl.minimum(piece[9], 1)), head, T)
        diagonal = row % T.span // T.group + (keys - queries)
        m = gl.full([N], LOWEST, gl.float32, layout=ROW)
        sums = zero
        acc = gl.full([T.head, N], 0.0, gl.float32, layout=S_LAYOUT)
        from_chunk = chunk_of(begin, share, longer)
        to_chunk = chunk_of(begin + blocks - 1, share, longer)
        sight = (keys, diagonal, left, right, cap)
        state = (m, sums, acc)
        if T.small:
            m, sums, acc, i = _attend_small(
                rings, (k, v), i, block, take, unit_of[None, :], sight, state, tiles, maxima, zero, T
            )
        elif T.eight:
            m, sums, acc, i = _attend(
                rings, (k, v), i, block, take, unit_of[None, :], sight, state, tiles, maxima, zero, T
            )
        else:
            m, sums, acc, i = _attend(rings, (k, v), i, block, take, scale, sight, state, tiles, maxima, zero, T)
        total = gl.sum(sums, 0)
        lse2 = m + gl.log2(total)
        acc = acc * (1.0 / gl.where(total == 0.0, 1.0, total))[None, :]
        if take < blocks:
            leave(parts, chunk, unit == begin, head, acc, lse2, T)
            group_barrier()  # all of the part is written before the count says so
            counter = counters + from_chunk * gl.num_programs(0) + head
            if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == to_chunk - from_chunk:
                gl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
                whole, whole_lse2 = add_up(parts, from_chunk, to_chunk, head, T)
                write(results, scales, place, head, whole, whole_lse2, 0, T)
        else:
            write(results, scales, place, head, acc, lse2, 1, T)
