"""A consumer warp group: 64 query rows against every key block of its tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from registry.ops.attention.lazy_maxima import LOWEST
from registry.plugins.gluon_fa3.pipeline import give_turn, take_turn
from registry.plugins.gluon_fa3.places import extent_of, queries_of, sinks_of, sums_of
from registry.plugins.gluon_fa3.products import (
    issue_pv,
    issue_qk,
    no_output,
    normalized,
    scaled,
    store_output,
    value_products,
    wait_pv,
)
from registry.plugins.gluon_fa3.schedule import group_blocks, learn, tile_blocks
from registry.plugins.gluon_fa3.softmax import (
    LN2,
    mask_block,
    mask_if_edge,
    pack,
    partial_sums,
    score,
    softmax,
    with_sinks,
)
from registry.plugins.gluon_fa3.tiles import columns_of, release_tile, tile_of, wait_tile
from registry.plugins.gluon_fa3.varlen.parts import leave_part
from registry.toolbox import scopes
from registry.toolbox.hopper import store_wait

ROWS = gl.constexpr(64)


@gluon.jit
def pass_block(k_ring, v_ring, i, GROUP: gl.constexpr, T: gl.constexpr):
    """A block that this group does not see and another group of the tile does: only keep the counts in step."""
    NEXT: gl.constexpr = (GROUP + 1) % T.groups
    wait_tile(k_ring, i, "K", T)
    take_turn(GROUP, T)
    give_turn(NEXT, T)
    release_tile(k_ring, i, "K", T)
    wait_tile(v_ring, i, "V", T)
    release_tile(v_ring, i, "V", T)


@gluon.jit
def attend_block(GROUP: gl.constexpr, step, state, block, MASKED: gl.constexpr, T: gl.constexpr):
    """The scores of one block, and beside them the product of the block before with its values."""
    q_registers, q, k_ring, v_ring, zero, row, rows, keys, here, scale, cap = step
    acc, alpha, m_i, sums, pairs, i = state
    NEXT: gl.constexpr = (GROUP + 1) % T.groups
    PRODUCTS: gl.constexpr = value_products(T)
    scopes.enter("wait K")
    k = wait_tile(k_ring, i, "K", T)
    scopes.leave("wait K")
    take_turn(GROUP, T)
    scopes.enter("async QK")
    s_pending = issue_qk(q_registers, q, k, zero, T.q_columns, T)
    if T.pingpong == "qk":
        give_turn(NEXT, T)
    if T.rescale == "before_pv":
        acc = scaled(acc, alpha)
    scopes.enter("async PV")
    o_pending = issue_pv(pairs, tile_of(v_ring, i - 1, "V", T), acc, T)
    if T.pingpong == "pair":
        give_turn(NEXT, T)
    scopes.enter("wait QK")
    s = warpgroup_mma_wait(PRODUCTS, [s_pending])
    scopes.leave("wait QK")
    scopes.leave("async QK")
    release_tile(k_ring, i, "K", T)
    scopes.enter("softmax")
    s = score(s, scale, cap, T)
    if MASKED:
        if T.mask == "band":
            s = mask_if_edge(s, row, block, rows, keys, here, T)
        else:
            s = mask_block(s, row, block, rows, keys, here, T)
    p, alpha, m_i, sums = softmax(s, m_i, sums, scale, T)
    scopes.leave("softmax")
    scopes.enter("wait V")
    # Of the next product: here, or ptxas would move the wait for PV before the exponentials.
    wait_tile(v_ring, i, "V", T)
    scopes.leave("wait V")
    scopes.enter("wait PV")
    acc = wait_pv(o_pending)
    scopes.leave("wait PV")
    scopes.leave("async PV")
    release_tile(v_ring, i - 1, "V", T)
    if T.rescale == "after_pv":
        acc = scaled(acc, alpha)
    pairs = pack(p, T)
    i += 1
    return acc, alpha, m_i, sums, pairs, i


@gluon.jit
def consumer(
    GROUP: gl.constexpr,
    o_map,
    o_tiles,
    q_ring,
    k_ring,
    v_ring,
    messages,
    sums_and_sinks,
    extent,
    pitch,
    scale,
    cap,
    T: gl.constexpr,
):
    N: gl.constexpr = T.block_n
    DTYPE: gl.constexpr = o_map.dtype
    NEXT: gl.constexpr = (GROUP + 1) % T.groups
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    PRODUCTS: gl.constexpr = value_products(T)
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    tile_rows = gl.arange(0, ROWS, layout=S_ROW)
    rows = tile_rows % T.rows if T.heads > 1 else tile_rows
    keys = gl.arange(0, N, layout=gl.SliceLayout(0, S_LAYOUT))
    lowest = gl.full([ROWS], LOWEST, gl.float32, layout=S_ROW)
    zero = gl.full([ROWS, N], 0.0, gl.float32, layout=S_LAYOUT)
    if T.sinks:
        lse, sinks = sums_and_sinks
    else:
        lse = sums_and_sinks

    scopes.enter("wait tile")
    place, more = learn(messages, 0, T)
    scopes.leave("wait tile")
    turn = 0
    i = 0  # K blocks taken, and one more than V blocks taken
    if T.groups - 1 == GROUP:
        give_turn(0, T)
    if T.overlap:  # the first block of the first tile; those of the others come beside the last product before them
        row = place[0] * T.block_m + GROUP * T.rows
        scopes.enter("wait Q")
        q = wait_tile(q_ring, 0, "Q", T)
        scopes.leave("wait Q")
        scopes.enter("wait K")
        k = wait_tile(k_ring, 0, "K", T)
        scopes.leave("wait K")
        take_turn(GROUP, T)
        scopes.enter("async QK")
        s_pending = issue_qk(lowest, q, k, zero, 0, T)
        give_turn(NEXT, T)
        scopes.enter("wait QK")
        s = warpgroup_mma_wait(0, [s_pending])
        scopes.leave("wait QK")
        scopes.leave("async QK")
        release_tile(k_ring, 0, "K", T)
        low, high = group_blocks(place, GROUP, extent, T)
        scopes.enter("softmax")
        s = mask_block(score(s, scale, cap, T), row, high, rows, keys, extent_of(place, extent, T), T)
        p, alpha, m_i, sums = softmax(s, lowest, partial_sums(zero, T), scale, T)
        scopes.leave("softmax")
        pairs = pack(p, T)
        i += 1

    while more:
        row = place[0] * T.block_m + GROUP * T.rows
        here = extent_of(place, extent, T)
        low, high = group_blocks(place, GROUP, extent, T)
        acc = no_output(T)
        tile_low, tile_high = tile_blocks(place, extent, T)
        if T.skips:
            for _ in range(tile_high - high):
                pass_block(k_ring, v_ring, i, GROUP, T)
                i += 1
        scopes.enter("wait Q")
        q = wait_tile(q_ring, turn, "Q", T)
        scopes.leave("wait Q")
        if T.q_columns > 0:
            q_registers = columns_of(q, 0, T.q_columns, T.head).load(Q_LAYOUT)
        else:
            q_registers = lowest  # unused
        if not T.overlap:  # first block: the only one with a mask, unless the mask is a band
            scopes.enter("wait K")
            k = wait_tile(k_ring, i, "K", T)
            scopes.leave("wait K")
            take_turn(GROUP, T)
            scopes.enter("async QK")
            s_pending = issue_qk(q_registers, q, k, zero, T.q_columns, T)
            give_turn(NEXT, T)
            scopes.enter("wait QK")
            s = warpgroup_mma_wait(0, [s_pending])
            scopes.leave("wait QK")
            scopes.leave("async QK")
            release_tile(k_ring, i, "K", T)
            if T.q_columns == T.head:
                # Not before a product has used the registers: a load that is under way does not hold back the barrier,
                # and the copy of the next tile's Q overtook it (measured: in tiles of one key block, wrong).
                release_tile(q_ring, turn, "Q", T)
            scopes.enter("softmax")
            s = mask_block(score(s, scale, cap, T), row, high, rows, keys, here, T)
            p, alpha, m_i, sums = softmax(s, lowest, partial_sums(zero, T), scale, T)
            scopes.leave("softmax")
            pairs = pack(p, T)
            i += 1
        scopes.enter("wait V")
        wait_tile(v_ring, i - 1, "V", T)
        scopes.leave("wait V")
        alpha = lowest  # times the empty accumulator

        step = (q_registers, q, k_ring, v_ring, zero, row, rows, keys, here, scale, cap)
        state = (acc, alpha, m_i, sums, pairs, i)
        if T.mask == "shifted":  # a row or two of blocks on the diagonal, then those that all rows see
            whole = gl.minimum(gl.maximum((row + (here[1] - here[0]) + 1) // N, low), high)
            for j in range(high - whole):
                state = attend_block(GROUP, step, state, high - 1 - j, True, T)
            for j in range(whole - low):
                state = attend_block(GROUP, step, state, whole - 1 - j, False, T)
        else:
            for j in range(high - low):
                state = attend_block(GROUP, step, state, high - 1 - j, T.mask == "band", T)
        acc, alpha, m_i, sums, pairs, i = state
        if T.overlap or T.q_columns != T.head:
            release_tile(q_ring, turn, "Q", T)
        turn += 1

        # The last product; with `overlap` beside it the next tile's first block (after the last tile: for nothing).
        scopes.enter("wait tile")
        next_place, more = learn(messages, turn, T)
        scopes.leave("wait tile")
        total = gl.convert_layout(gl.sum(sums, 1), S_ROW)
        last_m = m_i
        if T.rescale == "before_pv":  # here, not between the products: with `overlap` those need the registers
            acc = scaled(acc, alpha)
        if T.overlap:
            next_row = next_place[0] * T.block_m + GROUP * T.rows
            scopes.enter("wait Q")
            q = wait_tile(q_ring, turn, "Q", T)
            scopes.leave("wait Q")
            scopes.enter("wait K")
            k = wait_tile(k_ring, i, "K", T)
            scopes.leave("wait K")
            take_turn(GROUP, T)
            scopes.enter("async QK")
            s_pending = issue_qk(lowest, q, k, zero, 0, T)
            if T.pingpong == "qk":
                give_turn(NEXT, T)
        scopes.enter("async PV")
        o_pending = issue_pv(pairs, tile_of(v_ring, i - 1, "V", T), acc, T)
        if T.overlap:
            if T.pingpong == "pair":
                give_turn(NEXT, T)
            scopes.enter("wait QK")
            s = warpgroup_mma_wait(PRODUCTS, [s_pending])
            scopes.leave("wait QK")
            scopes.leave("async QK")
            release_tile(k_ring, i, "K", T)
            low, high = group_blocks(next_place, GROUP, extent, T)
            scopes.enter("softmax")
            s = mask_block(score(s, scale, cap, T), next_row, high, rows, keys, extent_of(next_place, extent, T), T)
            p, alpha, m_i, sums = softmax(s, lowest, partial_sums(zero, T), scale, T)
            scopes.leave("softmax")
        if T.sinks:
            last_m, total, kept = with_sinks(last_m, total, sinks_of(sinks, place, tile_rows, T))
        inverse = 1.0 / gl.maximum(total, 1e-30)  # a row that saw no key: 0 * 1e30
        if T.sinks:
            inverse *= kept
        if T.lse and not T.shared_out:
            row_sums, there = sums_of(lse, place, pitch, here, row, tile_rows, T)
            gl.store(row_sums, (last_m + gl.log2(total)) * LN2, mask=there)
        store_wait(0)
        scopes.enter("wait PV")
        acc = wait_pv(o_pending)
        scopes.leave("wait PV")
        scopes.leave("async PV")
        release_tile(v_ring, i - 1, "V", T)
        if T.overlap:
            pairs = pack(p, T)
            i += 1
        if T.mask == "band" and T.skips:
            for _ in range(low - tile_low):
                pass_block(k_ring, v_ring, i, GROUP, T)
                i += 1
        acc = normalized(acc, inverse)
        scopes.enter("store")
        if T.shared_out:
            leave_part(lse, acc, last_m + gl.log2(total), row, place, pitch, here, T)
        else:
            store_output(o_map, ((o_tiles,), GROUP, GROUP), acc, queries_of(place, T), row, DTYPE, T)
        scopes.leave("store")
        place = next_place
    if GROUP == 0:
        take_turn(0, T)
    store_wait(0)
