"""Attention of few queries over the keys of a cache or of pages, of ragged lengths: the kernel. Roles: producer.py and
consumer.py, the work: line.py, what becomes of parts of tiles: parts.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_decode.consumer import consumer
from registry.plugins.gluon_decode.producer import producer
from registry.toolbox.hopper import after_previous_kernel, ring

INTEGERS = (
    "q_row q_head out_row out_head k_scale_head v_scale_head table_row pages batch total_q room most_q most_k overhead"
    " window_left window_right"
)


@gluon.jit
def block_ring(tensor, T: gl.constexpr):
    COUNT: gl.constexpr = T.stages * T.panels * T.boxes
    tiles = gl.allocate_shared_memory(tensor.dtype, [COUNT] + tensor.block_shape, tensor.layout)
    return ring(tiles, T.stages, 1)


@gluon.jit(do_not_specialize=INTEGERS.split())
def decode(
    q,
    k_map,
    v_map,
    out,
    lse,
    parts,
    sums,
    counters,
    complaints,
    cu_q,
    used,
    table,
    sinks,
    k_scale,
    v_scale,
    # Strides of q and out count units of 8 elements.
    q_row,
    q_head,
    out_row,
    out_head,
    k_scale_head,
    v_scale_head,
    table_row,
    pages,
    batch,
    total_q,
    room,
    most_q,
    most_k,
    overhead,
    window_left,
    window_right,
    scale,
    cap,
    T: gl.constexpr,
):
    DTYPE: gl.constexpr = gl.float16 if T.eight else k_map.dtype
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T.rows, T.head], DTYPE)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T.rows, T.block_n], DTYPE)
    q_tile = gl.allocate_shared_memory(DTYPE, [T.rows, T.head], Q_LAYOUT)
    p_tile = gl.allocate_shared_memory(DTYPE, [T.rows, T.block_n], P_LAYOUT)
    rings = (block_ring(k_map, T), block_ring(v_map, T))
    after_previous_kernel()
    lengths = (cu_q, used, batch, total_q, room)
    results = (out, lse, sinks, out_row, out_head, total_q)
    queries = (q, q_row, q_head)
    numbers = (scale, cap, window_left, window_right)
    pages = (table, table_row, pages)
    limits = (window_left, most_q, most_k)
    scales = (k_scale, v_scale, k_scale_head, v_scale_head)
    workspace = (parts, sums, counters)
    gl.warp_specialize(
        [
            (consumer, (queries, rings, (q_tile, p_tile), lengths, workspace, results, scales, overhead, numbers, T)),
            (producer, ((k_map, v_map), rings, lengths, pages, limits, overhead, complaints, T)),
        ],
        [1],
        [T.producer_registers],
    )
