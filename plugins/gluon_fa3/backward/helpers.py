"""The helper warps: a producer brings tiles, and for each matrix group a reducer adds its parts of dQ to the sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3.backward.schedule import (
    extent_of,
    first_row_block,
    keys_of,
    last_tile,
    place_at,
    queries_of,
    query_blocks,
)
from registry.plugins.gluon_fa3.backward.signals import await_turn, dq_is_free, pass_turn, take_dq
from registry.plugins.gluon_fa3.places import box
from registry.toolbox.hopper import load_tile, reduce_tile, slot, store_wait, wait_empty


@gluon.jit
def producer(maps, k, v, q_ring, do_ring, stats_tiles, extent, work, T: gl.constexpr):
    """K, then Q with its rows' LSE and delta, then V, then dO, and so on: in the order in which they are needed."""
    q_map, k_map, v_map, do_map, stats_map = maps
    k_tile, k_ready = k
    v_tile, v_ready = v
    group = work[1]
    place = place_at(gl.program_id(0), work, T)
    extent = extent_of(place, extent, T)
    n = place[0]
    head = place[1]
    low, high = query_blocks(n * T.block_n, extent, T.block_n, T.block_m, T)
    mbarrier.expect(k_ready, T.block_n * T.head * 2)
    load_tile(k_map, box(keys_of(place, T), n * T.block_n, 0, T), k_ready, k_tile.index(0))
    i = 0
    for h in range(head * group, head * group + group):
        stats_row = first_row_block(place, h, work, T)
        for m in range(low, high):
            tile, ready = wait_empty(q_ring, i)
            mbarrier.expect(ready, T.block_m * T.head * 2 + T.stats_bytes)
            load_tile(q_map, box(queries_of(place, h, T), m * T.block_m, 0, T), ready, tile)
            s, _ = slot(i, q_ring[0])
            load_tile(stats_map, [stats_row + m, 0, 0], ready, stats_tiles.index(s))
            if i == 0:
                mbarrier.expect(v_ready, T.block_n * T.head_v * 2)
                load_tile(v_map, box(keys_of(place, T), n * T.block_n, 0, T), v_ready, v_tile.index(0))
            tile, ready = wait_empty(do_ring, i)
            mbarrier.expect(ready, T.block_m * T.head_v * 2)
            load_tile(do_map, box(queries_of(place, h, T), m * T.block_m, 0, T), ready, tile)
            i += 1


@gluon.jit
def reducer(GROUP: gl.constexpr, dq_map, dq_tiles, turns, extent, work, T: gl.constexpr):
    """Owns GROUP's part of dQ: takes that of each step when it is ready, and gives the tile back once it was read."""
    group = work[1]
    place = place_at(gl.program_id(0), work, T)
    extent = extent_of(place, extent, T)
    n = place[0]
    head = place[1]
    low, high = query_blocks(n * T.block_n, extent, T.block_n, T.block_m, T)
    left = (high - low) * group  # steps
    key_blocks = work[3]
    if T.packed:
        key_blocks = (extent[1] + T.block_n - 1) // T.block_n
    dq_is_free(GROUP)
    for h in range(head * group, head * group + group):
        row = first_row_block(place, h, work, T)
        for m in range(low, high):
            part = 2 * (row + m) + GROUP
            turn = turns + 4 * part.to(gl.int64)
            if T.ordered:
                await_turn(turn, last_tile(m, key_blocks, extent, T) - n)
            take_dq(GROUP)
            reduce_tile(dq_map, [part, 0, 0], dq_tiles.index(GROUP))
            store_wait(0)
            left -= 1
            if left > 0:
                dq_is_free(GROUP)
            if T.ordered:
                pass_turn(turn)
