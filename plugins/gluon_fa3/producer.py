"""The producer: one warp that decides on tiles and brings Q, K and V by bulk tensor copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.pages import load_pages
from registry.plugins.gluon_fa3.places import keys_of, queries_of
from registry.plugins.gluon_fa3.schedule import announce, next_tile, tile_at, tile_blocks
from registry.plugins.gluon_fa3.tiles import load_columns


@gluon.jit
def load_block(tensor, r, i, keys, block, work, NAME: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr):
    """Bring one K or V block as use i of its ring."""
    if T.page > 0:
        load_pages(tensor, r, i, keys, block * T.block_n, work[5], COLUMNS, T)
    else:
        load_columns(tensor, r, i, keys, block * T.block_n, NAME, COLUMNS, T)


@gluon.jit
def load_queries(q_map, q_rings, turn, place, T: gl.constexpr):
    """Bring the Q tiles of all groups, each with barriers of its own: the first group need not wait for the last."""
    GROUPS: gl.constexpr = T.groups
    for g in gl.static_range(GROUPS):
        row = place[0] * T.block_m + g * T.rows
        load_columns(q_map, q_rings[g], turn, queries_of(place, T), row, "Q", T.head, T)


@gluon.jit
def producer(maps, q_rings, k_ring, v_ring, messages, counter, extent, work, heads_q, group, T: gl.constexpr):
    """In the order in which the consumers need them: K(0) Q, then K(i) V(i-1), then V of the last block.

    With `overlap` the next tile's K(0) and Q come before the last V, and after the last tile once more, for nothing: so
    that consumers need no special case for it.
    """
    q_map, k_map, v_map = maps
    tiles = work[0]
    tile = gl.program_id(0)
    place = tile_at(tile, work, heads_q, T)
    announce(messages, 0, place, tile < tiles, T)
    low, high = tile_blocks(place, extent, T)
    turn = 0  # tiles begun
    used = 0  # K blocks of the tiles before
    if T.overlap:
        load_block(k_map, k_ring, 0, keys_of(place, group, T), high, work, "K", T.head, T)
        load_queries(q_map, q_rings, 0, place, T)
    while tile < tiles:
        keys = keys_of(place, group, T)
        steps = high - low
        last_block = low
        if not T.overlap:
            load_block(k_map, k_ring, used, keys, high, work, "K", T.head, T)
            load_queries(q_map, q_rings, turn, place, T)
        turn += 1
        if T.schedule != "dynamic":
            tile = next_tile(tile, counter, work, T)
            place = tile_at(gl.minimum(tile, tiles - 1), work, heads_q, T)
            announce(messages, turn, place, tile < tiles, T)
        for j in range(1, steps + 1):
            load_block(k_map, k_ring, used + j, keys, high - j, work, "K", T.head, T)
            load_block(v_map, v_ring, used + j - 1, keys, high - j + 1, work, "V", T.head_v, T)
        if T.schedule == "dynamic":
            tile = next_tile(tile, counter, work, T)
            place = tile_at(gl.minimum(tile, tiles - 1), work, heads_q, T)
            announce(messages, turn, place, tile < tiles, T)
        low, high = tile_blocks(place, extent, T)
        if T.overlap:
            load_block(k_map, k_ring, used + steps + 1, keys_of(place, group, T), high, work, "K", T.head, T)
            load_queries(q_map, q_rings, turn, place, T)
        load_block(v_map, v_ring, used + steps, keys, last_block, work, "V", T.head_v, T)
        used += steps + 1
