"""FlashAttention-3-shaped forward attention for Hopper (sm_90a): the kernel. Roles: producer.py and consumer.py.

Tile: `groups` consumer warp groups own 64 query rows each and share every K and V block, which one producer warp
brings by bulk tensor copies through rings of `stages` slots. Consumer 0 is the kernel's default partition.

    consumer:  QK(i) issued | O *= alpha(i-1) | PV(i-1) issued | wait QK(i) | softmax(i) | wait V(i) | wait PV(i-1)

so that a group's softmax runs beside its own PV and, taking turns by named barriers, beside its neighbour's products.
Blocks are visited from the last visible key to the first: edges of the mask come first and the steady loop has no mask.
With `overlap` the first QK of the next tile takes the place of QK(i) beside the last PV of a tile.

Tensor maps are [batch, head, row, column]: a tile past the end of one head reads zeros and is cut on the way out, so
neither a neighbouring head nor a column beyond the head dim is ever read or written.

Measured facts. NVIDIA H200, torch 2.11, triton 3.6.0, bf16, 16k tokens, hidden size 2048, no LSE; TFLOPS, the middle
half of 14 to 16 shuffled rounds averaged. Compare within a line only: long cells run at the card's 700 W, and figures
drift by 3% between runs. Lengths are 1k / 4k / 16k.

helped, back to back, from benchmarks/results/h200/forward_configs.txt (drift between its two runs: up to 4%)
  softmax beside its PV   ptxas had moved the wait for PV before the exponentials in every build. It cannot move them
                          across the wait for the next V, which is a loop. D64, three groups, full 4k 496 -> 507, 16k
                          539 -> 558 (after_pv against before_pv: the former still waits first); D128 causal 16k with
                          64 columns of Q 653 -> 699, but the best config only 692 -> 701, in separate runs
  lazy maxima             D128 causal, 128 columns of Q: 16k 675 -> 692, 32/8 heads 8k 629 -> 662; with 64 columns alone
                          a loss (677 -> 653), which is none with the wait above
  parts of O, panels      192 with values of 128: BLOCK_N 64 -> 128 fits: causal 4k 587 -> 652, full 641 -> 722
  of FlashAttention-3     24 cells, 1k to 32k, the first configs (one cell with overlap, where it is declared without):
                          MHA 1.081 by geometric mean, least 1.015 (18); 32/8 heads 1.025, least 1.003 (6). Head dims
                          80 1.007 (least 0.961), 96 0.940 (0.871), 192 0.976 (0.947), 192 with values of 128 1.037
                          (0.972): 4 cells each

helped, at the limit of power: ratios to the config before, from benchmarks/results/h200/forward_configs_2.txt
  waits written out, O    D96 1.091 / 1.067 at 16k (full, causal), 1.070 / 1.038 at 4k, 1.073 / 1.017 at 1k; D80 1.058
  as one product          / 1.049 at 16k, 1.056 / 1.039 at 4k: products of 16 or 32 columns are probably slow. The
                          waits alone 1.03 (D96 causal) and 1.02 (D80); O of the next power of two instead 1.01 to
                          1.05 (D96)
  three stages, 128       192: 1.058 / 1.053 at 16k, 1.033 / 1.005 at 4k, 1.046 / 1.020 at 1k, with waits written out,
  columns of Q            which add 0.99 to 1.02 to it; with two stages 1.01 / 0.99 at 16k
  of FlashAttention-3     D80 1.057 (least 1.015; 1.004 before), D96 1.085 (0.953, full 16k; 1.022), 192 1.063 (1.010;
                          1.030): 4, 6 and 6 cells, of which 1k are the best

helped, on an H100: launches back to back, 12 rounds in shuffled turns (forward_sections.json)
  short causal sections   of 1.5 tiles an SM instead of all heads that fit 32 MiB: up to 700 rows 0.92 of the time
                          (0.87 to 1.02, 14 shapes), up to 1,100 0.96, up to 1,600 0.99, above 1.00 (0.99 to 1.01).
                          0.75, 1, 2 tiles 0.965, 0.973, 0.968 on all 55 for 0.966, but up to 1.10, 1.08, 1.02 for 1.03

helped, before
  overlap                 D64 full 426 / 494 / 527 -> 435 / 503 / 532; D128 causal 439 / 581 / 635 -> 447 / 589 / 633
  Q columns in registers  D128 causal 563 (none), 569 (64), 548 (128) at 4k; 614, 624, 600 at 16k
                          D128 full 612 (none), 619 (128) at 4k; D256 full 656 (none), 669 (64) at 4k
  a dynamic schedule      D128 full 553 / 613 / 635 -> 557 / 619 / 640 (causal far more: 506 -> 585 at 4k)
  drawing late            D256 causal 567 -> 602 at 4k, 611 -> 655 at 16k; equal elsewhere
  three consumer groups   D64 full 4k 455 -> 501, 16k 460 -> 536; causal 16k 467 -> 515, but 1k 348 -> 291
  rescale after_pv        D64 only: two groups causal 1k 348 -> 355; D64 full equal
  64-row tiles            one request of 8 heads, D128, full: S 512 109 -> 139, S 1024 282 -> 353; causal 53 -> 67,
                          138 -> 169

did not
  overlap on few tiles    8 heads, D128, S 512: 109 -> 99 (the block for nothing, and a longer way to the first product)
  rescale after_pv        D128 causal 16k 633 -> 606; D256 full 16k 730 -> 663. Now 699 -> 684, but 458 -> 473 at 1k
  ping-pong               "pair" and "qk" within 1%; off -1% at D128, +2% at D64 with two groups
  larger L2 sections      causal 16k with 16 / 32 / 64 / 128 MiB: D128 650 / 644 / 637 / 625, D256 693 / 694 / 687 / 674
  three stages            D64 three groups 4k 487 -> 492, nothing on top of overlap
  three groups at D128    with BLOCK_N 64: 4% slower at 4k; now causal 16k 688 of 699, 4k 588 of 613, full 661 of 700
  three groups at D80, D96  with BLOCK_N 64: 0.95 to 1.00 of two groups, but D96 full 16k 537 -> 558
  waits written out       D64 0.96 to 1.00; D128 full 0.98 to 1.01, causal 0.995 to 1.018 from 4k on (1.006 by
                          geometric mean of 11), 0.997 below; D256 0.995 to 1.003; 192 with values of 128 0.98 to 1.00
  packing half of P       beside the other half's exponentials, which waits for PV amid them: D64 0.93 to 0.96, D128
                          0.93 to 1.01
  maxima in eight chains  a row instead of one, the rest as it was: D64, D128 and D256 0.99 to 1.007
  128 columns of Q        at D256, with waits written out, a sixth fewer reads of shared memory: 0.997 to 1.001
  sections of 16, 64 MiB  32/8 heads at 32k, with waits written out: 1.003, 1.004, and 1.003 with 32 MiB
  smaller L2 sections     16 and 8 MiB at D128 causal 16k: 653 -> 653, 647
  packed, fewer heads     in turns than fit 32 MiB: 0.95 to 1.25 with 1 or 2 key heads, 0.99 to 1.00 with 8 (22 batches)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.consumer import consumer
from registry.plugins.gluon_fa3.producer import producer
from registry.plugins.gluon_fa3.tiles import PANEL, panels_of, rings_at_known_place, tile_ring
from registry.toolbox.hopper import ring

ROWS = gl.constexpr(64)


@gluon.jit
def query_rings(q_map, T: gl.constexpr):
    """One ring for each consumer group."""
    SLOTS: gl.constexpr = T.q_slots
    BOXES: gl.constexpr = T.q_boxes
    rings = ()
    GROUPS: gl.constexpr = T.groups
    for _ in gl.static_range(GROUPS):
        rings = rings + (tile_ring(q_map, T.head, SLOTS, 1, BOXES),)
    return rings


@gluon.jit
def attend(maps, o_map, sums, pitch, counter, extent, work, heads_q, group, scale, cap, T: gl.constexpr):
    """Shared memory, barriers and roles: all of the kernel, whichever way tiles are found.

    sums is where the LSE goes, or parts (varlen/parts.py), and where there are sinks a pair of that and them. pitch is
    the heads of the LSE, or of packed rows its row length (places.py). extent is (queries, keys, window to the left, to
    the right), work (tiles, row blocks, heads, heads of a section, and where there is one the list). notes is a ring of
    two messages, `messages` in consumer.py: where the next tile is (schedule.py).
    """
    G: gl.constexpr = T.groups
    STAGES: gl.constexpr = T.stages
    Q_BOXES: gl.constexpr = T.q_boxes
    o_tiles = panels_of(o_map, G * (T.o_columns // PANEL), Q_BOXES)
    notes = gl.allocate_shared_memory(gl.int64, [2, T.message_words], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q = query_rings(maps[0], T)
    if T.written:
        k, v = rings_at_known_place(maps[1], T)
    else:
        BOXES: gl.constexpr = T.boxes
        k = tile_ring(maps[1], T.head, STAGES, G, BOXES)
        v = tile_ring(maps[2], T.head_v, STAGES, G, BOXES)
    notes = ring(notes, 2, G)
    # Written out: a constexpr inside a tuple variable would lose its value.
    if G == 1:
        gl.warp_specialize(
            [
                (consumer, (0, o_map, o_tiles, q[0], k, v, notes, sums, extent, pitch, scale, cap, T)),
                (producer, (maps, q, k, v, notes, counter, extent, work, heads_q, group, T)),
            ],
            [1],
            [T.producer_registers],
        )
    elif G == 2:
        gl.warp_specialize(
            [
                (consumer, (0, o_map, o_tiles, q[0], k, v, notes, sums, extent, pitch, scale, cap, T)),
                (consumer, (1, o_map, o_tiles, q[1], k, v, notes, sums, extent, pitch, scale, cap, T)),
                (producer, (maps, q, k, v, notes, counter, extent, work, heads_q, group, T)),
            ],
            [4, 1],
            [T.consumer_registers, T.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (0, o_map, o_tiles, q[0], k, v, notes, sums, extent, pitch, scale, cap, T)),
                (consumer, (1, o_map, o_tiles, q[1], k, v, notes, sums, extent, pitch, scale, cap, T)),
                (consumer, (2, o_map, o_tiles, q[2], k, v, notes, sums, extent, pitch, scale, cap, T)),
                (producer, (maps, q, k, v, notes, counter, extent, work, heads_q, group, T)),
            ],
            [4, 4, 1],
            [T.consumer_registers, T.consumer_registers, T.producer_registers],
        )


SIZES = "seqlen_q seqlen_k left right heads_q group tiles row_blocks heads section_heads"


@gluon.jit(do_not_specialize=SIZES.split())
def attention_forward(
    q_map,
    k_map,
    v_map,
    o_map,
    lse,
    counter,
    seqlen_q,
    seqlen_k,
    left,
    right,
    heads_q,
    group,
    tiles,
    row_blocks,
    heads,
    section_heads,
    scale,
    cap,
    T: gl.constexpr,
):
    extent = (seqlen_q, seqlen_k, left, right)
    work = (tiles, row_blocks, heads, section_heads)
    maps = (q_map, k_map, v_map)
    attend(maps, o_map, lse, heads_q, counter.to(gl.int64), extent, work, heads_q, group, scale, cap, T)
