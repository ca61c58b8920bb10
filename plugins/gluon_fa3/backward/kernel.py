"""FlashAttention-3-shaped backward attention for Hopper (sm_90a): the main kernel. Roles: helpers.py and group.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3.backward.group import matrix_group
from registry.plugins.gluon_fa3.backward.helpers import producer, reducer
from registry.toolbox.hopper import after_previous_kernel, ring

SIZES = "seqlen_q seqlen_k left right heads_kv group row_blocks key_blocks heads section_heads last_first"


@gluon.jit(do_not_specialize=SIZES.split())
def attention_backward(
    q_map,
    k_map,
    v_map,
    do_map,
    stats_map,
    dq_map,
    dk_map,
    dv_map,
    turns,
    seqlen_q,
    seqlen_k,
    left,
    right,
    heads_kv,
    group,
    row_blocks,
    key_blocks,
    heads,
    section_heads,
    last_first,
    scale,
    scale_log2,
    cap,
    T: gl.constexpr,
):
    DTYPE: gl.constexpr = q_map.dtype
    M: gl.constexpr = T.block_m
    N: gl.constexpr = T.block_n
    STAGES: gl.constexpr = T.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], DTYPE)
    k_tile = gl.allocate_shared_memory(DTYPE, [1, 1, 1, N, T.head], k_map.layout)
    v_tile = gl.allocate_shared_memory(DTYPE, [1, 1, 1, N, T.head_v], v_map.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, M, T.head], q_map.layout)
    do_tiles = gl.allocate_shared_memory(DTYPE, [T.do_stages, 1, 1, M, T.head_v], do_map.layout)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [2, N, M], DS_LAYOUT)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, T.dq_columns // 4, 256], dq_map.layout)
    stats_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, M], stats_map.layout)
    k_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_ready = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    mbarrier.init(k_ready, count=1)
    mbarrier.init(v_ready, count=1)
    q = ring(q_tiles, STAGES, 2)
    do = ring(do_tiles, T.do_stages, 2)
    k = (k_tile, k_ready)
    v = (v_tile, v_ready)
    extent = (seqlen_q, seqlen_k, left, right)
    work = (heads_kv, group, row_blocks, key_blocks, heads, section_heads, last_first)
    inputs = (q_map, k_map, v_map, do_map, stats_map)
    outputs = (dk_map, dv_map)
    after_previous_kernel()
    # Written out: a constexpr inside a tuple variable would lose its value.
    gl.warp_specialize(
        [
            (
                matrix_group,
                (0, outputs, k, v, q, do, stats_tiles, ds_tiles, dq_tiles, extent, work, scale, scale_log2, cap, T),
            ),
            (
                matrix_group,
                (1, outputs, k, v, q, do, stats_tiles, ds_tiles, dq_tiles, extent, work, scale, scale_log2, cap, T),
            ),
            (producer, (inputs, k, v, q, do, stats_tiles, extent, work, T)),
            (reducer, (0, dq_map, dq_tiles, turns.to(gl.int64), extent, work, T)),
            (reducer, (1, dq_map, dq_tiles, turns.to(gl.int64), extent, work, T)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
