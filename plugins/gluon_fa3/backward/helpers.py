"""The helper warps: a producer brings tiles, and for each matrix group a sender takes what it hands over to memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3.backward.schedule import (
    announce_first,
    announce_next,
    extent_of,
    first_row_block,
    first_step,
    first_tile,
    keys_of,
    learn_first,
    learn_next,
    next_step,
    number_of,
    place_at,
    queries_of,
    query_blocks,
    tiles_of,
)
from registry.plugins.gluon_fa3.backward.signals import await_turn, pass_turn, take_tile, tile_is_free
from registry.plugins.gluon_fa3.places import box
from registry.toolbox import scopes
from registry.toolbox.hopper import load_tile, reduce_tile, retyped, slot, store_tile, store_wait, wait_empty

KEYS = gl.constexpr(64)


@gluon.jit
def sums_tile(handed, T: gl.constexpr):
    """A group's tile as sums in the order of the registers."""
    C: gl.constexpr = T.dq_columns
    return retyped(handed, gl.float32, [1, C // 4, 256], gl.NVMMASharedLayout(0, 32, 3))


@gluon.jit
def producer(maps, k_ring, v_ring, q_ring, do_ring, stats_tiles, messages, counter, extent, work, T: gl.constexpr):
    """Q with its rows' LSE and delta, then dO, and so on. K and V of a tile come with its first ones: V before K, for
    the groups still read the last tile's K when they are done with its V."""
    q_map, k_map, v_map, do_map, stats_map = maps
    group = work[1]
    tiles = 0
    i = 0
    tile = announce_first(messages, counter, work, T)
    while tile < tiles_of(work):
        place = place_at(tile, work, T)
        here = extent_of(place, extent, T)
        n = place[0]
        low, high = query_blocks(n * T.block_n, here, T.block_n, T.block_m, T)
        m, g = first_step(high)
        for step in range((high - low) * group):
            h = place[1] * group + g
            stats_row = first_row_block(place, h, work, T)
            scopes.enter("wait slot of Q")
            q_tile, ready = wait_empty(q_ring, i)
            scopes.leave("wait slot of Q")
            mbarrier.expect(ready, T.block_m * T.head * 2 + T.stats_bytes)
            load_tile(q_map, box(queries_of(place, h, T), m * T.block_m, 0, T), ready, q_tile)
            s, _ = slot(i, q_ring[0])
            load_tile(stats_map, [stats_row + m, 0, 0], ready, stats_tiles.index(s))
            if step == 0:
                scopes.enter("wait slot of V")
                v_tile, ready = wait_empty(v_ring, tiles)
                scopes.leave("wait slot of V")
                mbarrier.expect(ready, T.block_n * T.head_v * 2)
                load_tile(v_map, box(keys_of(place, T), n * T.block_n, 0, T), ready, v_tile)
                scopes.enter("wait slot of K")
                k_tile, ready = wait_empty(k_ring, tiles)
                scopes.leave("wait slot of K")
                mbarrier.expect(ready, T.block_n * T.head * 2)
                load_tile(k_map, box(keys_of(place, T), n * T.block_n, 0, T), ready, k_tile)
            scopes.enter("wait slot of dO")
            do_tile, ready = wait_empty(do_ring, i)
            scopes.leave("wait slot of dO")
            mbarrier.expect(ready, T.block_m * T.head_v * 2)
            load_tile(do_map, box(queries_of(place, h, T), m * T.block_m, 0, T), ready, do_tile)
            i += 1
            m, g = next_step(m, g, group)
        tile = announce_next(messages, tiles, counter, work, T)
        tiles += 1


@gluon.jit
def send_gradient(GROUP: gl.constexpr, out_map, sums_map, handed, place, unit, COLUMNS: gl.constexpr, T: gl.constexpr):
    """dK or dV of GROUP's keys: as rows, or added to the sums from `unit` on."""
    if T.parts == 1:
        scopes.enter("wait dK or dV")
        take_tile(GROUP)
        scopes.leave("wait dK or dV")
        OUT_TILE: gl.constexpr = out_map.layout
        OUT_TYPE: gl.constexpr = out_map.dtype
        OUT_BOX: gl.constexpr = out_map.block_shape
        tile = retyped(handed, OUT_TYPE, OUT_BOX, OUT_TILE)
        store_tile(out_map, box(keys_of(place, T), place[0] * T.block_n + GROUP * KEYS, 0, T), tile)
        store_wait(0)
    else:
        for c in gl.static_range(COLUMNS // T.dq_columns):
            take_tile(GROUP)
            reduce_tile(sums_map, [unit + c, 0, 0], sums_tile(handed, T))
            store_wait(0)
            if c + 1 < COLUMNS // T.dq_columns:
                tile_is_free(GROUP)


@gluon.jit
def part_of(place, m, g, GROUP: gl.constexpr, work, T: gl.constexpr):
    """Which block of dQ's sums is GROUP's in a step."""
    return 2 * (first_row_block(place, place[1] * work[1] + g, work, T) + m) + GROUP


@gluon.jit
def turn_of(turns, part):
    """Where is counted how many tiles have added theirs."""
    return turns + 4 * part.to(gl.int64)


@gluon.jit
def sender(GROUP: gl.constexpr, outputs, sums_map, handed_tiles, messages, turns, extent, work, T: gl.constexpr):
    """What GROUP hands over goes to memory: its part of dQ is added up in each step, then come dV and dK. It gives the
    tile back once it was read."""
    dk_map, dv_map = outputs
    handed = handed_tiles.index(GROUP)
    group = work[1]
    tiles = 0
    tile = learn_first(messages, 1, T)
    while tile < tiles_of(work):
        place = place_at(tile, work, T)
        here = extent_of(place, extent, T)
        n = place[0]
        low, high = query_blocks(n * T.block_n, here, T.block_n, T.block_m, T)
        K_UNITS: gl.constexpr = T.head // T.dq_columns
        V_UNITS: gl.constexpr = T.head_v // T.dq_columns
        m, g = first_step(high)
        unit = 0
        if T.parts > 1:
            own = number_of(place, work, T) * 2 + GROUP
            unit = 2 * work[2] * work[4] * group + own * (K_UNITS + V_UNITS)
        tile_is_free(GROUP)
        steps = (high - low) * group
        seen = -1
        turn = turn_of(turns, part_of(place, m, g, GROUP, work, T))
        for step in range(steps):
            if step + 1 == steps:
                send_gradient(GROUP, dv_map, sums_map, handed, place, unit + K_UNITS, T.head_v, T)
                tile_is_free(GROUP)
            part = part_of(place, m, g, GROUP, work, T)
            if T.ordered:
                scopes.enter("wait turn")
                await_turn(turn, n - first_tile(m, here, T), seen)
                scopes.leave("wait turn")
            scopes.enter("wait dQ")
            take_tile(GROUP)
            scopes.leave("wait dQ")
            scopes.enter("add dQ")
            reduce_tile(sums_map, [part, 0, 0], sums_tile(handed, T))
            store_wait(0)
            scopes.leave("add dQ")
            tile_is_free(GROUP)
            m, g = next_step(m, g, group)
            if T.ordered:
                following = turn_of(turns, part_of(place, gl.maximum(m, low), g, GROUP, work, T))
                seen = pass_turn(turn, following)
                turn = following
        send_gradient(GROUP, dk_map, sums_map, handed, place, unit, T.head, T)
        tile = learn_next(messages, tiles, work, 1, T)
        tiles += 1
