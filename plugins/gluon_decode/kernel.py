"""Attention of few queries over the keys of a cache or of pages, of ragged lengths: the kernel. Roles: producer.py and
consumer.py, the work: line.py, what becomes of parts of sequences: parts.py.

Measured facts (NVIDIA H200, torch 2.11, triton 3.6, D128, one query a sequence, pages of 64 in random order, CUDA
graphs over rotated sets, so that L2 is cold; benchmarks/results/h200/gluon_decode.txt, section 3 if no other is named):
- The first config: 1.075 of triton_varlen_split by geometric mean of 19 cells, least 0.965 (128 sequences of mixed
  lengths, 64/8 heads); 1.23 of FlashAttention-3 paged (least 1.05); 1.07 of cuDNN's dense decode over 15 uniform cells
  (least 0.988: 16 x 4k and 128 x 1k). Caches of 8 bits: 1.13 of triton_varlen_split, least 0.965.
- One sequence of 1k: 6.1 us, of 8k 13.4 (triton_varlen_split 7.5 and 16.0, cuDNN 7.6 and 15.5); with keys in L2 5.4
  and 8.8 (6.9 and 12.3, 6.6 and 11.3). 4.37 TB/s at 64 x 4k; 3.9 to 4.1 where lengths differ, as triton_varlen_split.
- In a later run beside FlashAttention-3 and cuDNN (section 7, 18 cells): 1.15 and, from 64 MiB on, 1.02 of them (least
  1.037 and 0.981).
- float8 is 1.64 to 1.85 times as fast as bf16 from 248 MiB of bf16 on, 1.75 by geometric mean of 13 cells, and 1.47 to
  1.49 at 64 MiB, where 7 us of a launch are no reading (section 7, the first config).
- float8 with few rows by products of single warps, whose operands lie in registers, instead of the warp group's: 1.02
  by geometric mean of 15 cells (43.5 us became 41.9 where 16 lengths differ, 82.1 became 77.1 where 128 do, 45.6 became
  42.9 with 16 rows, 11.2 became 11.3 at one sequence of 8k). One program an SM is fast now: 36.9 for 39.4 us at
  16 x 4k, 9.9 for 11.2 at 8k, 39.4 for 45.6 with 16 rows, but 45.7 for 41.9 where 16 lengths differ (section 6).
- What bounds float8 (section 5): without any product 16 x 4k takes 37.3 us with two programs an SM, and 34.0 with one,
  where no sequence is divided; with the warp group's products, the next block's conversions beside them, 41.0 and 38.8.
  Tried and lost: values converted beside the keys' product (39.7 us became 40.1, 42.8 became 45.5), the next block's
  keys and values converted beside this one's products (41.0; it spills with 8 heads a group: 80 us became 110), the
  conversion by shifts (43.3), an overhead of 2 blocks (40.9 for 41.9 where 16 lengths differ, else within 1%).
- One program an SM and 128 keys a block instead of two and 64: 66.5 us became 63.7 at 16 x 4k, 14.9 became 13.2 at one
  sequence of 8k (section 1); 8 bits want two: one took 85 us for 70 at 131k.
- Boxes beyond the last key left away, and queries loaded a piece ahead: 153.1 us became 150.4 where 64 lengths differ,
  70.3 became 68.8 with one long among short, 90.2 became 87.5 in float8 (sections 2 and 3).
- Tried and lost before: two key heads side by side, so that more is read in a row (8k 13.4 us became 15.8: parts are
  twice as large; but 138.0 became 129.8 at 64 x 4k in float8), four (6.2 became 12.2 at 1k in float8, section 2); the
  next block's first product beside a block's softmax (in float8 39.5 us became 43.5 at 16 x 4k, 84.6 became 104.9 with
  16 rows); three programs an SM. Overheads of a sequence from 0 to 4 blocks: within 2%, but 3 and 4 lose 1 to 5% where
  128 lengths differ.
- Memory of a barrier must not be lent. Values once had empty barriers of their own, which nobody used, and the
  allocator gave their bytes to the maxima. With two programs an SM and 6 stages (64 keys, D64) rows of a program's
  first piece came out wrong, mostly the odd ones, in 120 of 300 launches, though the machine code has a barrier of
  all threads between setting the barriers up and writing the maxima. With the keys' empty barriers for both: 0 of
  720, and 0 of 1,698 of 6 kinds of random batches; with the old ones, and maxima elsewhere, 0 of 300; without maxima,
  sums in that memory, 118 of 300; without dependent launch 120 of 300.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_decode.consumer import consumer
from registry.plugins.gluon_decode.producer import producer
from registry.toolbox.hopper import after_previous_kernel, barriers, init_barriers, ring

INTEGERS = (
    "q_row q_head out_row out_head k_scale_head v_scale_head table_row pages batch total_q room most_q most_k overhead"
    " window_left window_right"
)


@gluon.jit
def blocks_of(tensor, T: gl.constexpr):
    COUNT: gl.constexpr = T.stages * T.panels * T.boxes
    return gl.allocate_shared_memory(tensor.dtype, [COUNT] + tensor.block_shape, tensor.layout)


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
    k_ring = ring(blocks_of(k_map, T), T.stages, 1)
    v_full = barriers(T.stages)
    init_barriers(v_full, 1)
    rings = (k_ring, (blocks_of(v_map, T), v_full, k_ring[2]))  # keys and values of a block are let go of together
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
