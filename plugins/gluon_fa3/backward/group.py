"""A matrix warp group: 64 keys of the tile against every query block that can see the tile.

    S(i) issued | dQ(i-1), dK(i-1) issued | wait S | P(i) | wait dQ, hand it over | dP(i), dV(i) issued | wait dP |
    dS(i), stored for both groups | wait dV

so that exponentials run beside dQ and dK of the step before, and dS is formed beside dV.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from registry.plugins.gluon_fa3.backward.schedule import extent_of, keys_of, next_block, nought, place_at, query_blocks
from registry.plugins.gluon_fa3.backward.scores import exponents, hide
from registry.plugins.gluon_fa3.backward.signals import await_ds, await_free_dq, groups_meet, hand_dq, tell_ds
from registry.plugins.gluon_fa3.places import box
from registry.toolbox.hopper import as_matrix, release, slot, store_tile, store_wait, viewed, wait_full

KEYS = gl.constexpr(64)


@gluon.jit
def hand_over_dq(GROUP: gl.constexpr, dq, dq_tile, T: gl.constexpr):
    """In the order in which the registers hold it, 16 bytes a thread: no bank conflicts. sums.py puts it in order."""
    C: gl.constexpr = T.dq_columns
    ordered = dq.reshape([4, 2, 8, C // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([1, C // 4, 256])
    await_free_dq(GROUP)
    dq_tile.store(ordered)
    fence_async_shared()
    hand_dq(GROUP)


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
    x = hide(x - lse[None, :], "exponents", own, m * T.block_m, keys, queries, extent, T)
    p = hide(gl.exp2(x), "probabilities", own, m * T.block_m, keys, queries, extent, T)
    return p, bent


@gluon.jit
def issue_dp_dv(i, p, v, dv, zero, do_ring, LAYOUT: gl.constexpr, T: gl.constexpr):
    """dP = V dO^T and dV += P dO, both on this group's keys."""
    do = as_matrix(wait_full(do_ring, i), T.block_m, T.head_v)
    dp_pending = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    dv_pending = warpgroup_mma(gl.convert_layout(p.to(v.dtype), LAYOUT), do, dv, is_async=True)
    return dp_pending, dv_pending


@gluon.jit
def hand_over_ds(GROUP: gl.constexpr, i, p, bent, dp, deltas, ds_tiles, DTYPE: gl.constexpr, T: gl.constexpr):
    """dS, stored for dQ and dK."""
    if T.softcap:
        p = p * (1.0 - bent * bent)
    ds = p * (dp - deltas.load(gl.SliceLayout(0, p.type.layout))[None, :])
    ds_tiles.index(i & 1).slice(GROUP * KEYS, KEYS, dim=0).store(ds.to(DTYPE))
    fence_async_shared()
    tell_ds(GROUP, i)


@gluon.jit
def matrix_group(
    GROUP: gl.constexpr,
    maps,
    k,
    v,
    q_ring,
    do_ring,
    stats_tiles,
    ds_tiles,
    dq_tiles,
    extent,
    work,
    scale,
    scale_log2,
    cap,
    T: gl.constexpr,
):
    dk_map, dv_map = maps
    M: gl.constexpr = T.block_m
    D: gl.constexpr = T.head
    D_V: gl.constexpr = T.head_v
    DTYPE: gl.constexpr = dk_map.dtype
    DK_TILE: gl.constexpr = dk_map.layout
    DV_TILE: gl.constexpr = dv_map.layout
    DK_BOXES: gl.constexpr = [2] + dk_map.block_shape
    DV_BOXES: gl.constexpr = [2] + dv_map.block_shape
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, M, 16])
    K_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    V_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, D_V, 16])
    Q_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, T.dq_columns, 16])
    P_OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=V_LAYOUT, k_width=2)
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(1, S_LAYOUT))
    queries = gl.arange(0, M, layout=gl.SliceLayout(0, S_LAYOUT))
    zero = gl.full([KEYS, M], 0.0, gl.float32, layout=S_LAYOUT)
    zero_dq = gl.full([KEYS, T.dq_columns], 0.0, gl.float32, layout=Q_LAYOUT)
    dk = gl.full([KEYS, D], 0.0, gl.float32, layout=K_LAYOUT)
    dv = gl.full([KEYS, D_V], 0.0, gl.float32, layout=V_LAYOUT)
    STATS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROW: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)

    place = place_at(gl.program_id(0), work, T)
    extent = extent_of(place, extent, T)
    n = place[0]
    low, high = query_blocks(n * T.block_n, extent, T.block_n, T.block_m, T)
    steps = (high - low) * work[1]
    own = n * T.block_n + GROUP * KEYS
    k_tile, k_ready = k
    v_tile, v_ready = v
    k_all = as_matrix(k_tile.index(0), T.block_n, D)
    k_own = k_all.slice(GROUP * KEYS, KEYS, dim=0)
    v_own = as_matrix(v_tile.index(0), T.block_n, D_V).slice(GROUP * KEYS, KEYS, dim=0)

    m = low
    mbarrier.wait(k_ready, 0)
    q = as_matrix(wait_full(q_ring, 0), M, D)
    s_pending = warpgroup_mma(k_own, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    stats = viewed(stats_tiles.index(0), [2, M], STATS)
    lse = stats.index(0).load(ROW)
    s = warpgroup_mma_wait(0, [s_pending])
    p, bent = probabilities(s, lse, own, m, keys, queries, extent, scale_log2, cap, T)
    mbarrier.wait(v_ready, 0)
    dp_pending, dv_pending = issue_dp_dv(0, p, v_own, dv, zero, do_ring, P_OPERAND, T)
    dp = warpgroup_mma_wait(1, [dp_pending])
    hand_over_ds(GROUP, 0, p, bent, dp, stats.index(1), ds_tiles, DTYPE, T)
    dv = warpgroup_mma_wait(0, [dv_pending])
    release(do_ring, 0)
    for i in range(1, steps):
        m = next_block(m, low, high)
        k_all = as_matrix(k_tile.index(nought(i)), T.block_n, D)
        k_own = k_all.slice(GROUP * KEYS, KEYS, dim=0)
        v_own = as_matrix(v_tile.index(nought(i)), T.block_n, D_V).slice(GROUP * KEYS, KEYS, dim=0)
        q_before = q_ring[0].index(slot(i - 1, q_ring[0])[0])
        q = as_matrix(wait_full(q_ring, i), M, D)
        s_pending = warpgroup_mma(k_own, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        await_ds(GROUP, i - 1)
        ds_tile = ds_tiles.index((i - 1) & 1)
        dq_pending = issue_dq(GROUP, ds_tile, k_all, zero_dq, T)
        dk_pending = warpgroup_mma(
            ds_tile.slice(GROUP * KEYS, KEYS, dim=0), as_matrix(q_before, M, D), dk, is_async=True
        )
        stats = viewed(stats_tiles.index(slot(i, q_ring[0])[0]), [2, M], STATS)
        s = warpgroup_mma_wait(2, [s_pending])
        lse = stats.index(0).load(ROW)
        p, bent = probabilities(s, lse, own, m, keys, queries, extent, scale_log2, cap, T)
        dq = warpgroup_mma_wait(1, [dq_pending])
        hand_over_dq(GROUP, dq, dq_tiles.index(GROUP), T)
        dp_pending, dv_pending = issue_dp_dv(i, p, v_own, dv, zero, do_ring, P_OPERAND, T)
        dk = warpgroup_mma_wait(2, [dk_pending])
        release(q_ring, i - 1)
        dp = warpgroup_mma_wait(1, [dp_pending])
        hand_over_ds(GROUP, i, p, bent, dp, stats.index(1), ds_tiles, DTYPE, T)
        dv = warpgroup_mma_wait(0, [dv_pending])
        release(do_ring, i)

    last = steps - 1
    await_ds(GROUP, last)
    ds_tile = ds_tiles.index(last & 1)
    q_before = q_ring[0].index(slot(last, q_ring[0])[0])
    dq_pending = issue_dq(GROUP, ds_tile, k_all, zero_dq, T)
    dk_pending = warpgroup_mma(ds_tile.slice(GROUP * KEYS, KEYS, dim=0), as_matrix(q_before, M, D), dk, is_async=True)
    dq = warpgroup_mma_wait(1, [dq_pending])
    hand_over_dq(GROUP, dq, dq_tiles.index(GROUP), T)
    dk = warpgroup_mma_wait(0, [dk_pending])
    groups_meet(GROUP, steps)  # both are done with K and V, through whose tiles dK and dV leave
    part = viewed(v_tile, DV_BOXES, DV_TILE).index(GROUP)
    as_matrix(part, KEYS, D_V).store(dv.to(DTYPE))
    fence_async_shared()
    store_tile(dv_map, box(keys_of(place, T), own, 0, T), part)
    part = viewed(k_tile, DK_BOXES, DK_TILE).index(GROUP)
    as_matrix(part, KEYS, D).store((dk * scale).to(DTYPE))
    fence_async_shared()
    store_tile(dk_map, box(keys_of(place, T), own, 0, T), part)
    store_wait(0)
