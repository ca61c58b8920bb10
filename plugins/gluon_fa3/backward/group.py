"""A matrix warp group: 64 keys of the tile against every query block that can see the tile.

    S(i), dP(i) issued | P(i), dS(i), stored for both groups | dQ(i-1), dV(i), dK(i) issued | dQ handed over | wait

The products of one group run beside the arithmetic of the other. That needs room between them: dQ, for which a group
reads what the other has stored, is a step late, so that either may be half a step ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from registry.plugins.gluon_fa3.backward.helpers import sums_tile
from registry.plugins.gluon_fa3.backward.schedule import (
    extent_of,
    first_step,
    learn_first,
    learn_next,
    next_step,
    nought,
    place_at,
    query_blocks,
    tiles_of,
)
from registry.plugins.gluon_fa3.backward.scores import exponents, hide
from registry.plugins.gluon_fa3.backward.signals import await_ds, await_free_tile, hand_tile, tell_ds
from registry.plugins.gluon_fa3.backward.terms import DELTA, LSE, issue_product, less_delta, lse_of
from registry.plugins.gluon_fa3.softmax import pack, unpack
from registry.toolbox import scopes
from registry.toolbox.hopper import as_matrix, release, retyped, slot, wait_empty, wait_full

KEYS = gl.constexpr(64)


@gluon.jit
def hand_over_sums(GROUP: gl.constexpr, x, handed, T: gl.constexpr):
    """In the order in which the registers hold it, 16 bytes a thread: no bank conflicts. sums.py puts it in order."""
    C: gl.constexpr = x.shape[1]
    ordered = x.reshape([4, 2, 8, C // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([1, C // 4, 256])
    scopes.enter("wait tile to hand over")
    await_free_tile(GROUP)
    scopes.leave("wait tile to hand over")
    sums_tile(handed, T).store(ordered)
    fence_async_shared()
    hand_tile(GROUP)


@gluon.jit
def hand_over_rows(GROUP: gl.constexpr, x, handed, DTYPE: gl.constexpr):
    """Rows of a gradient that no other block adds to."""
    C: gl.constexpr = x.shape[1]
    scopes.enter("wait tile to hand over")
    await_free_tile(GROUP)
    scopes.leave("wait tile to hand over")
    tile = retyped(handed, DTYPE, [KEYS, C], gl.NVMMASharedLayout.get_default_for([KEYS, C], DTYPE))
    tile.store(x.to(DTYPE))
    fence_async_shared()
    hand_tile(GROUP)


@gluon.jit
def hand_over_gradient(GROUP: gl.constexpr, x, handed, DTYPE: gl.constexpr, T: gl.constexpr):
    """dK or dV of the tile: whole, or of one part in sums as wide as those of dQ."""
    if T.parts == 1:
        hand_over_rows(GROUP, x, handed, DTYPE)
    elif x.shape[1] == T.dq_columns:
        hand_over_sums(GROUP, x, handed, T)
    else:
        gl.static_assert(x.shape[1] == 2 * T.dq_columns)
        low, high = gl.split(x.reshape([KEYS, 2, T.dq_columns]).permute((0, 2, 1)))
        hand_over_sums(GROUP, low, handed, T)
        hand_over_sums(GROUP, high, handed, T)


@gluon.jit
def issue_dq(GROUP: gl.constexpr, ds_tile, k, zero, T: gl.constexpr):
    """dQ = dS K over the keys of both groups: this group's half of the rows, or of the columns."""
    if T.dq_rows:
        ds = ds_tile.slice(GROUP * 64, 64, dim=1).permute((1, 0))
        return warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)
    else:
        columns = k.slice(GROUP * T.dq_columns, T.dq_columns, dim=1)
        return warpgroup_mma(ds_tile.permute((1, 0)), columns, zero, use_acc=False, is_async=True)


@gluon.jit
def probabilities(s, lse, own, m, keys, queries, extent, scale, cap, T: gl.constexpr):
    """P, and the tanh that a cap bent the scores by."""
    x, bent = exponents(s, scale, cap, T)
    if not T.folded:
        x = x - lse[None, :]
    x = hide(x, "exponents", own, m * T.block_m, keys, queries, extent, T)
    p = hide(gl.exp2(x), "probabilities", own, m * T.block_m, keys, queries, extent, T)
    return p, bent


@gluon.jit
def score_gradients(i, m, own, k, v, q_ring, do_ring, stats_tiles, extent, scale, cap, zero, T: gl.constexpr):
    """Of step i: P in pairs, dS, and the tiles of Q and dO that they came from.

    Exponentials and the rest go to different units, so ptxas may mix what comes before dP is waited for and after it.
    """
    M: gl.constexpr = T.block_m
    LAYOUT: gl.constexpr = zero.type.layout
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(1, LAYOUT))
    queries = gl.arange(0, M, layout=gl.SliceLayout(0, LAYOUT))
    scopes.enter("wait Q")
    q = as_matrix(wait_full(q_ring, i), M, T.head)
    scopes.leave("wait Q")
    stats = stats_tiles.index(slot(i, q_ring[0])[0])
    scopes.enter("async S")
    s_pending = issue_product(k, q, LSE, stats, zero, T)
    scopes.enter("wait dO")
    do = as_matrix(wait_full(do_ring, i), M, T.head_v)
    scopes.leave("wait dO")
    scopes.enter("async dP")
    dp_pending = issue_product(v, do, DELTA, stats, zero, T)
    scopes.enter("wait S")
    s = warpgroup_mma_wait(2 if T.folded else 1, [s_pending])
    scopes.leave("wait S")
    scopes.leave("async S")
    scopes.enter("P")
    p, bent = probabilities(s, lse_of(stats, zero, T), own, m, keys, queries, extent, scale, cap, T)
    scopes.leave("P")
    scopes.enter("wait dP")
    dp = warpgroup_mma_wait(0, [dp_pending])
    scopes.leave("wait dP")
    scopes.leave("async dP")
    scopes.enter("dS")
    pairs = pack(p, T)
    slope = p
    if T.softcap:
        slope = p * (1.0 - bent * bent)
    ds = slope * less_delta(dp, stats, T)
    scopes.leave("dS")
    return pairs, ds, q, do


@gluon.jit
def store_ds(GROUP: gl.constexpr, i, ds, ds_ring, DTYPE: gl.constexpr, T: gl.constexpr):
    """For dQ of both groups, as soon as the other one has read what lies there; gives the same as pairs, for dK."""
    LAYOUT: gl.constexpr = ds.type.layout
    pairs = pack(ds, T)
    scopes.enter("wait dS tile")
    tile, _ = wait_empty(ds_ring, i)
    scopes.leave("wait dS tile")
    tile.slice(GROUP * KEYS, KEYS, dim=0).store(unpack(pairs, DTYPE, LAYOUT))
    fence_async_shared()
    tell_ds(GROUP, i)
    return pairs


@gluon.jit
def tile_gradients(
    GROUP: gl.constexpr,
    DTYPE: gl.constexpr,
    tile,
    tiles,
    begin,
    k_ring,
    v_ring,
    q_ring,
    do_ring,
    stats_tiles,
    ds_rings,
    handed_tiles,
    extent,
    work,
    scale,
    scale_log2,
    cap,
    T: gl.constexpr,
):
    """Of one tile, the block's number `tiles`, whose first step is the block's number `begin`; gives that of the next
    tile."""
    M: gl.constexpr = T.block_m
    D: gl.constexpr = T.head
    D_V: gl.constexpr = T.head_v
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, D_V, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, T.dq_columns, 16])
    DS_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=K_LAYOUT, k_width=2)
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=V_LAYOUT, k_width=2)
    zero = gl.full([KEYS, M], 0.0, gl.float32, layout=S_LAYOUT)
    zero_dq = gl.full([KEYS, T.dq_columns], 0.0, gl.float32, layout=Q_LAYOUT)
    ds_ring = ds_rings[GROUP]
    read_ring = ds_rings[1 - GROUP]  # what the other group waits for
    handed = handed_tiles.index(GROUP)

    place = place_at(tile, work, T)
    here = extent_of(place, extent, T)
    n = place[0]
    low, high = query_blocks(n * T.block_n, here, T.block_n, T.block_m, T)
    end = begin + (high - low) * work[1]
    own = n * T.block_n + GROUP * KEYS
    m, g = first_step(high)
    dk = gl.full([KEYS, D], 0.0, gl.float32, layout=K_LAYOUT)
    dv = gl.full([KEYS, D_V], 0.0, gl.float32, layout=V_LAYOUT)
    scopes.enter("wait K and V")
    k_own = as_matrix(wait_full(k_ring, tiles), T.block_n, D).slice(GROUP * KEYS, KEYS, dim=0)
    v_own = as_matrix(wait_full(v_ring, tiles), T.block_n, D_V).slice(GROUP * KEYS, KEYS, dim=0)
    scopes.leave("wait K and V")
    p, ds, q, do = score_gradients(
        begin, m, own, k_own, v_own, q_ring, do_ring, stats_tiles, here, scale_log2, cap, zero, T
    )
    ds_pairs = store_ds(GROUP, begin, ds, ds_ring, DTYPE, T)
    dv_pending = warpgroup_mma(unpack(p, DTYPE, P_OPERAND), do, dv, is_async=True)
    dk_pending = warpgroup_mma(unpack(ds_pairs, DTYPE, DS_OPERAND), q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, [dv_pending])
    release(do_ring, begin)
    dk = warpgroup_mma_wait(0, [dk_pending])
    release(q_ring, begin)
    for i in range(begin + 1, end):
        m, g = next_step(m, g, work[1])
        k_all = as_matrix(k_ring[0].index(nought(i)), T.block_n, D)
        k_own = k_all.slice(GROUP * KEYS, KEYS, dim=0)
        v_own = as_matrix(v_ring[0].index(nought(i)), T.block_n, D_V).slice(GROUP * KEYS, KEYS, dim=0)
        p, ds, q, do = score_gradients(
            i, m, own, k_own, v_own, q_ring, do_ring, stats_tiles, here, scale_log2, cap, zero, T
        )
        ds_pairs = store_ds(GROUP, i, ds, ds_ring, DTYPE, T)
        scopes.enter("wait dS")
        await_ds(GROUP, i - 1)
        scopes.leave("wait dS")
        scopes.enter("async dQ")
        dq_pending = issue_dq(GROUP, ds_ring[0].index((i - 1) & 1), k_all, zero_dq, T)
        scopes.enter("async dV dK")
        dv_pending = warpgroup_mma(unpack(p, DTYPE, P_OPERAND), do, dv, is_async=True)
        dk_pending = warpgroup_mma(unpack(ds_pairs, DTYPE, DS_OPERAND), q, dk, is_async=True)
        scopes.enter("wait dQ")
        dq = warpgroup_mma_wait(2, [dq_pending])
        scopes.leave("wait dQ")
        scopes.leave("async dQ")
        scopes.enter("hand over dQ")
        hand_over_sums(GROUP, dq, handed, T)
        scopes.leave("hand over dQ")
        release(read_ring, i - 1)
        scopes.enter("wait dV dK")
        dv = warpgroup_mma_wait(1, [dv_pending])
        release(do_ring, i)
        dk = warpgroup_mma_wait(0, [dk_pending])
        release(q_ring, i)
        scopes.leave("wait dV dK")
        scopes.leave("async dV dK")
    release(v_ring, tiles)
    scopes.enter("wait dS")
    await_ds(GROUP, end - 1)
    scopes.leave("wait dS")
    k_all = as_matrix(k_ring[0].index(0), T.block_n, D)
    dq_pending = issue_dq(GROUP, ds_ring[0].index((end - 1) & 1), k_all, zero_dq, T)
    scopes.enter("hand over dV")
    hand_over_gradient(GROUP, dv, handed, DTYPE, T)
    scopes.leave("hand over dV")
    dq = warpgroup_mma_wait(0, [dq_pending])
    release(k_ring, tiles)
    release(read_ring, end - 1)
    scopes.enter("hand over dK")
    hand_over_sums(GROUP, dq, handed, T)
    hand_over_gradient(GROUP, dk * scale if T.parts == 1 else dk, handed, DTYPE, T)
    scopes.leave("hand over dK")
    return end


@gluon.jit
def matrix_group(
    GROUP: gl.constexpr,
    DTYPE: gl.constexpr,
    k_ring,
    v_ring,
    q_ring,
    do_ring,
    stats_tiles,
    ds_rings,
    handed_tiles,
    messages,
    extent,
    work,
    scale,
    scale_log2,
    cap,
    T: gl.constexpr,
):
    tile = learn_first(messages, 4, T)
    if T.drawn:
        tiles = 0
        begin = 0
        while tile < tiles_of(work):
            begin = tile_gradients(
                GROUP, DTYPE, tile, tiles, begin, k_ring, v_ring, q_ring, do_ring, stats_tiles, ds_rings, handed_tiles,
                extent, work, scale, scale_log2, cap, T,
            )  # fmt: skip
            tile = learn_next(messages, tiles, work, 4, T)
            tiles += 1
    else:
        tile_gradients(
            GROUP, DTYPE, tile, 0, 0, k_ring, v_ring, q_ring, do_ring, stats_tiles, ds_rings, handed_tiles,
            extent, work, scale, scale_log2, cap, T,
        )  # fmt: skip
