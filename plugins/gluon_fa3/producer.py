"""The producer: one warp that decides on tiles and brings Q, K and V by bulk tensor copies."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from registry.plugins.gluon_fa3.schedule import announce, key_blocks, next_tile, tile_at
from registry.toolbox import scopes
from registry.toolbox.hopper import load_tile, wait_empty

ROWS = gl.constexpr(64)


@gluon.jit
def load_block(tensor, r, i, b, h, block, T: gl.constexpr):
    """Bring one K or V block as use i of its ring."""
    scopes.enter("wait slot of K or V")
    tile, ready = wait_empty(r, i)
    scopes.leave("wait slot of K or V")
    mbarrier.expect(ready, tile.shape[2] * tile.shape[3] * 2)
    load_tile(tensor, [b, h, block * T.block_n, 0], ready, tile)


@gluon.jit
def load_queries(q_map, q_rings, turn, b, h, m, T: gl.constexpr):
    """Bring the Q tiles of all groups, each with barriers of its own: the first group need not wait for the last."""
    GROUPS: gl.constexpr = T.groups
    for g in gl.static_range(GROUPS):
        scopes.enter("wait slot of Q")
        tile, ready = wait_empty(q_rings[g], turn)
        scopes.leave("wait slot of Q")
        mbarrier.expect(ready, ROWS * T.head * 2)
        load_tile(q_map, [b, h, m * T.block_m + g * ROWS, 0], ready, tile)


@gluon.jit
def producer(maps, q_rings, k_ring, v_ring, messages, counter, extent, work, heads_q, group, T: gl.constexpr):
    """In the order in which the consumers need them: K(0) Q, then K(i) V(i-1), then V of the last block.

    With `overlap` the next tile's K(0) and Q come before the last V, and after the last tile once more, for nothing: so
    that consumers need no special case for it.
    """
    q_map, k_map, v_map = maps
    tiles, row_blocks, heads, section_heads = work
    tile = gl.program_id(0)
    m, h, b = tile_at(tile, work, heads_q, T)
    announce(messages, 0, m, h, b, True)
    low, high = key_blocks(m * T.block_m, m * T.block_m + T.block_m - 1, extent, T)
    turn = 0  # tiles begun
    used = 0  # K blocks of the tiles before
    if T.overlap:
        load_block(k_map, k_ring, 0, b, h // group, high, T)
        load_queries(q_map, q_rings, 0, b, h, m, T)
    while tile < tiles:
        kv = h // group
        here = b
        steps = high - low
        last_block = low
        if not T.overlap:
            load_block(k_map, k_ring, used, b, kv, high, T)
            load_queries(q_map, q_rings, turn, b, h, m, T)
        turn += 1
        if T.schedule != "dynamic":
            tile = next_tile(tile, counter, work, T)
            m, h, b = tile_at(gl.minimum(tile, tiles - 1), work, heads_q, T)
            announce(messages, turn, m, h, b, tile < tiles)
        for j in range(1, steps + 1):
            load_block(k_map, k_ring, used + j, here, kv, high - j, T)
            load_block(v_map, v_ring, used + j - 1, here, kv, high - j + 1, T)
        if T.schedule == "dynamic":
            tile = next_tile(tile, counter, work, T)
            m, h, b = tile_at(gl.minimum(tile, tiles - 1), work, heads_q, T)
            announce(messages, turn, m, h, b, tile < tiles)
        low, high = key_blocks(m * T.block_m, m * T.block_m + T.block_m - 1, extent, T)
        if T.overlap:
            load_block(k_map, k_ring, used + steps + 1, b, h // group, high, T)
            load_queries(q_map, q_rings, turn, b, h, m, T)
        load_block(v_map, v_ring, used + steps, here, kv, last_block, T)
        used += steps + 1
