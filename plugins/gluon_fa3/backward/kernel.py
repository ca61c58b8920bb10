"""FlashAttention-3-shaped gradients of attention for Hopper (sm_90a): the kernel of the method "sums".

A block owns `block_n` keys and walks over all queries that see them, of all query heads that share the keys: dK and
dV stay in registers, and dQ is added up in memory. Roles: a producer warp, two matrix warp groups of 64 keys each
(group.py), and for each of them a warp that adds its part of dQ (helpers.py). Group 0 is the default partition.

    group:  S(i) issued | dQ(i-1), dK(i-1) issued | wait S | P(i) | wait dQ | dP(i), dV(i) issued | wait dK | dS(i)

Scores are transposed, so that P^T and dS^T come out of one product as the next one takes operand A. Each group computes
dQ of all keys for half of the columns, or with 128 rows a step for half of the rows: dS passes through shared memory.

    before (sums.py)    delta = rowsum(O * dO) - dlse, LSE in base 2, zeroes       memory-bound
    this                five products
    after (sums.py)     dQ from the order of the registers to rows, scaled, rounded

Each starts while the one before it ends (programmatic dependent launch). Tensor maps are [batch, head, row, column]: a
tile past the end of one head reads zeros and is cut on the way out.

With order "fixed", tiles add to a block of dQ from the last keys to the first, each when a counter says that it is its
turn: the same bits on every run. Tiles start in that order too, so that none waits for one that cannot start.

Measured facts. NVIDIA H200, torch 2.11, triton 3.6.0, bf16, 16k tokens, hidden size 2048; TFLOPS of all three launches,
2.5 times the forward's operations counted; back to back, shuffled rounds. Compare within a line only: long cells run at
the card's power limit. Lengths are 1k / 16k, unless named.

helped
  three Q tiles           Two leave half a step to bring one, for dK holds that of the step before. D128 full
                          366 / 469 -> 440 / 602, causal 297 / 498 -> 333 / 589; D64 full 350 / 451 -> 369 / 484
                          (separate runs; with it came a reducer for each group, and a race was mended)
  addresses made anew     of tiles that stay (schedule.nought): 14 spill instructions in D128's steady loops -> none
did not
  tiles of a head spread over dQ   D128 full 440 / 602 -> 435 / 596
  dS from registers for dK         D128 full 440 / 602 -> 442 / 586 (it spills); causal 4k 521 -> 525, 16k 604 -> 600
  64 rows a step at D64            full 370 / 472 -> 349 / 443, with dS from registers
order "fixed"             D128 full 440 / 602 -> 426 / 581, causal 333 / 589 -> 309 / 561;
                          D64 full 369 / 484 -> 365 / 472
beside cuDNN, FA3         D128 full 412 / 542, 462 / 602; causal 309 / 513, 356 / 602; D64 full 370 / 457, 421 / 559
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3.backward.group import matrix_group
from registry.plugins.gluon_fa3.backward.helpers import producer, reducer
from registry.toolbox.hopper import after_previous_kernel, ring


@gluon.jit
def differentiate(inputs, outputs, dq_map, turns, extent, work, scale, scale_log2, cap, T: gl.constexpr):
    """Shared memory, barriers and roles: all of the kernel, whichever way its tile is found."""
    q_map, k_map, v_map, do_map, stats_map = inputs
    dk_map, dv_map = outputs
    DTYPE: gl.constexpr = q_map.dtype
    M: gl.constexpr = T.block_m
    N: gl.constexpr = T.block_n
    STAGES: gl.constexpr = T.stages
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], DTYPE)
    k_tile = gl.allocate_shared_memory(DTYPE, [1] + k_map.block_shape, k_map.layout)
    v_tile = gl.allocate_shared_memory(DTYPE, [1] + v_map.block_shape, v_map.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + q_map.block_shape, q_map.layout)
    do_tiles = gl.allocate_shared_memory(DTYPE, [T.do_stages] + do_map.block_shape, do_map.layout)
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
            (reducer, (0, dq_map, dq_tiles, turns, extent, work, T)),
            (reducer, (1, dq_map, dq_tiles, turns, extent, work, T)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )


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
    extent = (seqlen_q, seqlen_k, left, right)
    work = (heads_kv, group, row_blocks, key_blocks, heads, section_heads, last_first)
    inputs = (q_map, k_map, v_map, do_map, stats_map)
    differentiate(inputs, (dk_map, dv_map), dq_map, turns.to(gl.int64), extent, work, scale, scale_log2, cap, T)
