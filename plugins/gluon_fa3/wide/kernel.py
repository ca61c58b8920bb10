"""Heads over 256 on Hopper: gluon_fa3's roles and softmax, with a head in pieces.

tile       128 rows of queries by 256 columns of values, which is what two warp groups' registers hold of O. Wider
           values are two tiles: each finds the scores for itself, and that is a third of all products at 512
Q          most in shared memory, its first panels in registers alone; O leaves through Q's place
K          a block in parts, each in a slot of its own, so that few slots hold many bytes on their way
producer   Q's panels through slots of K, K(0), Q, then K(i) V(i-1), and the last V
consumer   QK(i) issued part by part | O *= alpha(i-1) | PV(i-1) issued | wait QK(i) | softmax(i) | wait PV(i-1)

Measured facts. NVIDIA H200, torch 2.11, triton 3.6.0, bf16, 32 heads of 4k and 8 of 16k, TFLOPS, graphs in shuffled
rounds (wide_heads_configs.txt). Compare within a line: runs differ by up to 9%. gluon_fa3 at 256 had 793 to 822 full,
735 to 764 causal at 4k beside them, triton_fa2 249 at 512.

helped
  320 columns of O at once  320: 372 -> 670, causal 4k 580: no scores are found twice. 384 spill, serialised
  panels of Q in registers  512 in blocks of 32: none and two slots of K 435, two panels and three slots 464
  V awaited at its product  one slot of V, blocks of 64 of 512: 367 -> 413 in turns, 506 without. It was awaited at a
                            block's end, before the next scores could be issued
  no turns                  that: 423 in turns of scores alone, 413 of pairs. In blocks of 32 all ways within 3%
  parts let go one by one   512, four parts and six slots: 469 of 506 full, 471 of 464 causal, 474 of 500 at 16k causal;
                            in another run 459 of 461, 460 of 456, 479 of 476
  blocks of 64              512: 454 -> 506, 16k causal 445 -> 500: half the reads of Q for as many keys, where a block
                            and a half of K fit

did not
  two slots of V, one block of K  512: 398 without turns, 379 in pairs
  blocks of 64 at 576       one block of K fits beside V: 397, with 31 spills, of 434
  parts of K at 576         blocks of 32: 397 of 434
  four panels of Q          at 512 and 576 they spill, and products are serialised
  trap in `await_panel`     instead of a sleep that never is: products were serialised, for lack of registers
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.places import keys_of
from registry.plugins.gluon_fa3.schedule import announce, next_tile, tile_at, tile_blocks
from registry.plugins.gluon_fa3.tiles import tile_ring
from registry.plugins.gluon_fa3.wide.consumer import consumer
from registry.plugins.gluon_fa3.wide.tiles import (
    load_columns,
    load_keys,
    load_panels,
    load_queries,
    queries_of,
    query_tile,
    value_column,
)
from registry.toolbox.hopper import ring

ROWS = gl.constexpr(64)
SIZES = "seqlen_q seqlen_k left right heads_q group tiles row_blocks heads section_heads"


@gluon.jit
def producer(maps, q_rings, k_ring, v_ring, messages, counter, extent, work, heads_q, group, T: gl.constexpr):
    """In the order in which the consumers need them."""
    G: gl.constexpr = T.groups
    q_map, k_map, v_map = maps
    tiles = work[0]
    tile = gl.program_id(0)
    place = tile_at(tile, work, heads_q, T)
    announce(messages, 0, place, tile < tiles, T)
    low, high = tile_blocks(place, extent, T)
    turn = 0  # tiles begun
    used = 0  # blocks of the tiles before
    shift = 0  # by how many uses K's ring is ahead of them: what Q took of it
    while tile < tiles:
        keys = keys_of(place, group, T)
        queries = queries_of(place, T)
        column = value_column(place, T)
        row = place[0] * T.block_m
        steps = high - low
        last_block = low
        if T.q_panels > 0:
            for g in gl.static_range(G):
                load_panels(q_map, k_ring, used * T.k_parts + shift + g, queries, row + g * ROWS, T)
            shift += G
        load_keys(k_map, k_ring, used * T.k_parts + shift, keys, high, T)
        for g in gl.static_range(G):
            load_queries(q_map, q_rings[g], turn, queries, row + g * ROWS, T)
        turn += 1
        if T.schedule != "dynamic":
            tile = next_tile(tile, counter, work, T)
            place = tile_at(gl.minimum(tile, tiles - 1), work, heads_q, T)
            announce(messages, turn, place, tile < tiles, T)
        for j in range(1, steps + 1):
            load_keys(k_map, k_ring, (used + j) * T.k_parts + shift, keys, high - j, T)
            at = (high - j + 1) * T.block_n
            load_columns(v_map, v_ring, used + j - 1, keys, at, column, T.head_v, T.head_v, T)
        if T.schedule == "dynamic":
            tile = next_tile(tile, counter, work, T)
            place = tile_at(gl.minimum(tile, tiles - 1), work, heads_q, T)
            announce(messages, turn, place, tile < tiles, T)
        low, high = tile_blocks(place, extent, T)
        load_columns(v_map, v_ring, used + steps, keys, last_block * T.block_n, column, T.head_v, T.head_v, T)
        used += steps + 1


@gluon.jit(do_not_specialize=SIZES.split())
def attention_wide(
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
    """`heads_q`, `group`, `heads` and `section_heads` count a head once for each tile of its values."""
    extent = (seqlen_q, seqlen_k, left, right)
    work = (tiles, row_blocks, heads, section_heads)
    maps = (q_map, k_map, v_map)
    counter = counter.to(gl.int64)
    G: gl.constexpr = T.groups
    notes = gl.allocate_shared_memory(gl.int64, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q0 = query_tile(q_map, T)
    q1 = query_tile(q_map, T)
    k = tile_ring(k_map, T.k_slot, T.k_slots, G)
    v = tile_ring(v_map, T.head_v, T.v_slots, G)
    notes = ring(notes, 2, G)
    gl.warp_specialize(
        [
            (consumer, (0, o_map, q0, k, v, notes, lse, extent, heads_q, scale, cap, T)),
            (consumer, (1, o_map, q1, k, v, notes, lse, extent, heads_q, scale, cap, T)),
            (producer, (maps, (q0, q1), k, v, notes, counter, extent, work, heads_q, group, T)),
        ],
        [4, 1],
        [T.consumer_registers, T.producer_registers],
    )
