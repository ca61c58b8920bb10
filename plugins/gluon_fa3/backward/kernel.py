"""FlashAttention-3-shaped gradients of attention for Hopper (sm_90a): the kernel of the method "sums".

A tile is `block_n` keys: a block walks over all queries that see them, of all query heads that share the keys. dK and
dV stay in registers, and dQ is added up in memory. All tiles walk the same way, from the last queries to the first, and
through all heads of a block of queries before the next block: those of one head, of which several run at a time, read
and add to the same memory at about the same time (how many heads take turns, and what was measured: sections.py).

Roles: a producer warp, two matrix warp groups of 64 keys each (group.py), and for each of them a sender, a warp that
takes what the group hands over to memory (helpers.py): dQ's part of each step, at a tile's end dV and dK. Group 0 is
the default partition.

A block takes one tile, or a block of each SM draws one after the other: the producer draws, tells the rest, and brings
the next tile's Q, dO and V while the groups still end the last one. Where tiles are few, the query heads that share
keys are divided among blocks, and dK and dV are added up in memory like dQ (traits.py says when).

    group:  S(i), dP(i) issued | P(i), dS(i), stored | dQ(i-1), dV(i), dK(i) issued | wait dQ, hand it over | wait

dQ is a step late, so that one group may be half a step ahead and its products run beside the other's arithmetic. LSE
and delta come in through the products (terms.py).

Scores are transposed, so that P^T and dS^T come out of one product as the next one takes operand A, in registers. Each
group computes dQ of all keys for half of the columns, or with 128 rows a step for half of the rows: for that, dS passes
through shared memory.

    before (sums.py)    delta = rowsum(O * dO) - dlse, LSE, zeroes                 memory-bound
    this                five products
    after (sums.py)     sums from the order of the registers to rows, scaled, rounded

Each starts while the one before it ends (programmatic dependent launch). Tensor maps are [batch, head, row, column]: a
tile past the end of one head reads zeros and is cut on the way out.

With order "fixed", tiles add to a block of dQ from the first keys to the last, each when a counter says that it is its
turn: the same bits on every run. Tiles start in that order too, whichever blocks have an SM, the longest of a causal
mask first; each follows the one before it at a distance of one turn, whatever its length. A tile is then divided in two
at most: two parts of dK make one sum, whichever comes first.

Measured facts. NVIDIA H200, torch 2.11, triton 3.6.0, bf16, 16k tokens, hidden size 2048; TFLOPS of all three launches,
2.5 times the forward's operations counted; back to back, shuffled rounds. Compare within a line only: long cells run at
the card's power limit. Lengths are 1k / 4k / 16k. "Of the best" is over the better of cuDNN and FA3's dense build, the
geometric mean over those lengths, full and causal, in one run.

of the best             D64, D128
  S(i) | dQ(i-1), dK(i-1) | P(i) | dP(i), dV(i) | dS(i)    0.860, 0.981    what stood here before
  the same with terms                                      0.875, 0.983
  FA3's order: all of step i, dS from registers            0.895, 0.897 (an earlier run)
  the same with terms                                      0.950, 1.005
  dQ a step late                                           0.959, 0.909
  the same with terms                                      not built, 1.078
this, in a later run    three stages 0.983, 1.067; two 0.977, 1.056. Ours and FA3:
  D64                   full 396 / 524 / 537, 419 / 489 / 543; causal 289 / 476 / 549, 305 / 487 / 565
  D128                  full 472 / 597 / 657, 456 / 546 / 586; causal 354 / 560 / 638, 353 / 528 / 584
a later run, before and since tiles are drawn (D64, and D128 with at most 16 steps) and divided, and FA3
  D64 causal            1k 287 -> 330, 303; 4k 476 -> 504, 484
  D128                  causal 1k 361 -> 377, 361; 4k 559 -> 550, 520; full 1k 479 -> 486, 468; 4k 644 -> 637, 572
  32/8 heads, causal    B 1: 2k 320 -> 457, 387; 8k 551 -> 651, 562; B 4: 2k 459 -> 473, 405; 8k 607 -> 599, 547
tiles walk downwards, of 16 heads in turns, over upwards, of heads that fit the L2 cache (another run)
  D64                   full 1k, 16k 0.99, 1.02; causal 1.03, 1.03, 1.10
  D128                  full 1.01, 1.04, 1.01; causal 1.02, 1.10, 1.18; with 32/8 heads B 1 2k 1.02, 8k 1.02, B 4 1.09,
                        1.18
order "fixed" over "any", both downwards (another run)
  D64                   full 0.99, 0.98, 0.99; causal 0.92, 0.93, 0.98
  D128                  full 0.92, 1.02, 0.98; causal 0.89, 0.93, 0.96; with 32/8 heads B 1 2k 0.90, 8k 0.91, B 4 0.95,
                        0.98
  what it was           shortest tiles first, walking upwards, a head at a time: D128 causal 0.85, 0.93, with 32/8 heads
                        0.69 to 0.92
  a turn looked up      beside the wait for the last part, with a release: D128 causal 1k 0.90 -> 0.91 of "any" then,
                        32/8 heads B 1 2k 0.85 -> 0.90; relaxed 0.95 and 0.96, but not always the same bits
tiles drawn at D128     full 4k 607 -> 542, 16k 664 -> 581, causal 16k 647 -> 615: inside the loop over tiles ptxas
                        keeps counters and addresses of the steady loop in ordinary registers, and moves them to uniform
                        ones at each use
after                   whole loads instead of gathered ones: 73 -> 57 us at D64, 79 -> 65 at D128 (causal 1k)
counters, full, 4k      cycles and time of the matrix units: D64 before 4.78 M, 55%; FA3 4.20 M, 62%; FA3's order with
                        terms 4.26 M, 67%; D128 before 3.68 M, 72%; a step late with terms 3.22 M, 87%. Loads of LSE and
                        delta were 16% of the shared memory's work at D64, and warps stood still for them a fifth of the
                        time
did not
  tiles in turns of a fixed stride, a block an SM      D128 causal 1k, 4k: 349, 541 -> 276, 409: uneven
  many heads as one section, walking upwards           D64 causal 1k, 4k: 327, 498 -> 248, 338: their queries leave L2
  32 or 64 rows a program of `before`                  D64 causal 1k: 327 -> 332, 331; D128 causal 1k: 372 -> 371, 367
  exponentials held before the wait for products under way (an asm that ptxas may not move them across): D64 0.86 ->
                        0.85, D256's sweeps 386 / 467 -> 363 / 464 (1k, 16k, full); without it ptxas mixes exponentials
                        and the arithmetic of dS, which use different units. With terms, it helped the old order: 0.93,
                        1.04
  tiles of a head spread over dQ   D128 full 1k, 16k: 440, 602 -> 435, 596
  64 rows a step at D64            full 1k, 16k: 370, 472 -> 349, 443
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.backward import traits
from registry.plugins.gluon_fa3.backward.group import matrix_group
from registry.plugins.gluon_fa3.backward.helpers import producer, sender
from registry.plugins.gluon_fa3.backward.signals import emptied
from registry.plugins.gluon_fa3.backward.terms import COLUMNS
from registry.toolbox.drawn import messages_for
from registry.toolbox.hopper import after_previous_kernel, ring

GROUP_REGISTERS = gl.constexpr(traits.GROUP_REGISTERS)
HELPER_REGISTERS = gl.constexpr(traits.HELPER_REGISTERS)


@gluon.jit
def differentiate(inputs, outputs, dq_map, turns, counter, extent, work, scale, scale_log2, cap, T: gl.constexpr):
    """Shared memory, barriers and roles: all of the kernel, whichever way its tile is found."""
    q_map, k_map, v_map, do_map, stats_map = inputs
    DTYPE: gl.constexpr = q_map.dtype
    M: gl.constexpr = T.block_m
    N: gl.constexpr = T.block_n
    STAGES: gl.constexpr = T.stages
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([N, M], DTYPE)
    k_tile = gl.allocate_shared_memory(DTYPE, [1] + k_map.block_shape, k_map.layout)
    v_tile = gl.allocate_shared_memory(DTYPE, [1] + v_map.block_shape, v_map.layout)
    q_tiles = gl.allocate_shared_memory(DTYPE, [STAGES] + q_map.block_shape, q_map.layout)
    do_tiles = gl.allocate_shared_memory(DTYPE, [T.do_stages] + do_map.block_shape, do_map.layout)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [2, N, M], DS_LAYOUT)
    HANDED_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(T.handed_shape, DTYPE)
    handed_tiles = gl.allocate_shared_memory(DTYPE, [2] + T.handed_shape, HANDED_LAYOUT)
    if T.folded:
        stats_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, M, COLUMNS], stats_map.layout)
    else:
        stats_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 2, M], stats_map.layout)
    k = ring(k_tile, 1, 2)
    v = ring(v_tile, 1, 2)
    q = ring(q_tiles, STAGES, 2)
    if T.packed:  # dense kernels lend no barrier's memory (toolbox.hopper), and are as they were measured
        ds = (emptied(ds_tiles), emptied(ds_tiles))  # for what each group writes, which the other one reads
    else:
        ds = (ring(ds_tiles, 2, 1), ring(ds_tiles, 2, 1))
    do = ring(do_tiles, T.do_stages, 2)
    if T.drawn or not T.packed:
        messages = messages_for(4)
    else:
        messages = ds  # which nobody asks
    after_previous_kernel()
    # Written out: a constexpr inside a tuple variable would lose its value.
    gl.warp_specialize(
        [
            (
                matrix_group,
                (
                    0,
                    DTYPE,
                    k,
                    v,
                    q,
                    do,
                    stats_tiles,
                    ds,
                    handed_tiles,
                    messages,
                    extent,
                    work,
                    scale,
                    scale_log2,
                    cap,
                    T,
                ),
            ),
            (
                matrix_group,
                (
                    1,
                    DTYPE,
                    k,
                    v,
                    q,
                    do,
                    stats_tiles,
                    ds,
                    handed_tiles,
                    messages,
                    extent,
                    work,
                    scale,
                    scale_log2,
                    cap,
                    T,
                ),
            ),
            (producer, (inputs, k, v, q, do, stats_tiles, messages, counter, extent, work, T)),
            (sender, (0, outputs, dq_map, handed_tiles, messages, turns, extent, work, T)),
            (sender, (1, outputs, dq_map, handed_tiles, messages, turns, extent, work, T)),
        ],
        [4, 1, 1, 1],
        [GROUP_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS],
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
    counter,
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
    differentiate(
        inputs,
        (dk_map, dv_map),
        dq_map,
        turns.to(gl.int64),
        counter.to(gl.int64),
        extent,
        work,
        scale,
        scale_log2,
        cap,
        T,
    )
