"""A consumer warp group of a wide head: 64 query rows against every key block of its tile. ../consumer.py has the whole
schedule; here there is no next tile beside the end of one, and Q and K come in parts."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.ops.attention.lazy_maxima import LOWEST
from registry.plugins.gluon_fa3.pipeline import give_turn, take_turn
from registry.plugins.gluon_fa3.products import no_output, normalized, scaled, wait_pv
from registry.plugins.gluon_fa3.schedule import group_blocks, learn, tile_blocks
from registry.plugins.gluon_fa3.softmax import LN2, mask_block, mask_if_edge, pack, partial_sums, score, softmax
from registry.plugins.gluon_fa3.wide.products import await_panel, issue_pv, issue_qk, store_output, wait_qk
from registry.plugins.gluon_fa3.wide.tiles import (
    panel_of,
    queries_of,
    release_keys,
    release_use,
    value_column,
    wait_use,
)
from registry.toolbox import scopes

ROWS = gl.constexpr(64)


@gluon.jit
def pass_block(k_ring, v_ring, i, shift, GROUP: gl.constexpr, T: gl.constexpr):
    """A block that this group does not see and the other one does: only keep the counts in step."""
    NEXT: gl.constexpr = (GROUP + 1) % T.groups
    PARTS: gl.constexpr = T.k_parts
    for p in gl.static_range(PARTS):
        wait_use(k_ring, i * PARTS + shift + p)
    take_turn(GROUP, T)
    give_turn(NEXT, T)
    release_keys(k_ring, i * PARTS + shift, T)
    wait_use(v_ring, i)
    release_use(v_ring, i)


@gluon.jit
def attend_block(GROUP: gl.constexpr, step, state, block, MASKED: gl.constexpr, T: gl.constexpr):
    """The scores of one block, and beside them the product of the block before with its values."""
    q_registers, q, k_ring, v_ring, zero, row, rows, keys, extent, scale, cap, shift = step
    acc, alpha, m_i, sums, pairs, i = state
    NEXT: gl.constexpr = (GROUP + 1) % T.groups
    PRODUCTS: gl.constexpr = len(acc)
    use = i * T.k_parts + shift  # of K's ring, by block i
    scopes.enter("wait K")
    wait_use(k_ring, use)
    scopes.leave("wait K")
    take_turn(GROUP, T)
    scopes.enter("async QK")
    s_pending = issue_qk(q_registers, q, k_ring, use, zero, T)
    if T.pingpong == "qk":
        give_turn(NEXT, T)
    acc = scaled(acc, alpha)
    if T.v_slots == 1:
        wait_use(v_ring, i - 1)
    scopes.enter("async PV")
    o_pending = issue_pv(pairs, v_ring, i - 1, acc, T)
    if T.pingpong == "pair":
        give_turn(NEXT, T)
    scopes.enter("wait QK")
    s = wait_qk(k_ring, use, s_pending, PRODUCTS, T)
    scopes.leave("wait QK")
    scopes.leave("async QK")
    scopes.enter("softmax")
    s = score(s, scale, cap, T)
    if MASKED:
        if T.mask == "band":
            s = mask_if_edge(s, row, block, rows, keys, extent, T)
        else:
            s = mask_block(s, row, block, rows, keys, extent, T)
    p, alpha, m_i, sums = softmax(s, m_i, sums, scale, T)
    scopes.leave("softmax")
    scopes.enter("wait V")
    # Of the next product, or again of this one where there is no place for the next: a loop that keeps ptxas from
    # moving the wait for PV before the exponentials.
    wait_use(v_ring, i if T.v_slots > 1 else i - 1)
    scopes.leave("wait V")
    scopes.enter("wait PV")
    acc = wait_pv(o_pending)
    scopes.leave("wait PV")
    scopes.leave("async PV")
    release_use(v_ring, i - 1)
    pairs = pack(p, T)
    i += 1
    return acc, alpha, m_i, sums, pairs, i


@gluon.jit
def consumer(
    GROUP: gl.constexpr, o_map, q_tile, k_ring, v_ring, messages, lse, extent, pitch, scale, cap, T: gl.constexpr
):
    N: gl.constexpr = T.block_n
    DTYPE: gl.constexpr = o_map.dtype
    NEXT: gl.constexpr = (GROUP + 1) % T.groups
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S_LAYOUT, k_width=2)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    PANELS: gl.constexpr = T.q_panels
    GROUPS: gl.constexpr = T.groups
    rows = gl.arange(0, ROWS, layout=S_ROW)
    keys = gl.arange(0, N, layout=gl.SliceLayout(0, S_LAYOUT))
    lowest = gl.full([ROWS], LOWEST, gl.float32, layout=S_ROW)
    zero = gl.full([ROWS, N], 0.0, gl.float32, layout=S_LAYOUT)

    scopes.enter("wait tile")
    place, more = learn(messages, 0, T)
    scopes.leave("wait tile")
    turn = 0
    i = 0  # blocks taken
    shift = 0  # by how many uses K's ring is ahead of them: what Q took of it
    if T.groups - 1 == GROUP:
        give_turn(0, T)
    while more:
        row = place[0] * T.block_m + GROUP * ROWS
        low, high = group_blocks(place, GROUP, extent, T)
        tile_low, tile_high = tile_blocks(place, extent, T)
        acc = no_output(T)
        q_registers = ()
        if PANELS > 0:
            use = i * T.k_parts + shift
            scopes.enter("wait Q")
            for g in gl.static_range(GROUPS):
                wait_use(k_ring, use + g)
                if g == GROUP:
                    for p in gl.static_range(PANELS):
                        q_registers = q_registers + (panel_of(k_ring, use + g, p, Q_LAYOUT, T),)
                        await_panel(q_registers[p])
                release_use(k_ring, use + g)
            scopes.leave("wait Q")
            shift += GROUPS
        if T.skips:
            for _ in range(tile_high - high):
                pass_block(k_ring, v_ring, i, shift, GROUP, T)
                i += 1
        scopes.enter("wait Q")
        wait_use(q_tile, turn)
        scopes.leave("wait Q")
        # First block: the only one with a mask, unless the mask is a band.
        scopes.enter("wait K")
        wait_use(k_ring, i * T.k_parts + shift)
        scopes.leave("wait K")
        take_turn(GROUP, T)
        scopes.enter("async QK")
        s_pending = issue_qk(q_registers, q_tile, k_ring, i * T.k_parts + shift, zero, T)
        give_turn(NEXT, T)
        scopes.enter("wait QK")
        s = wait_qk(k_ring, i * T.k_parts + shift, s_pending, 0, T)
        scopes.leave("wait QK")
        scopes.leave("async QK")
        scopes.enter("softmax")
        s = mask_block(score(s, scale, cap, T), row, high, rows, keys, extent, T)
        p, alpha, m_i, sums = softmax(s, lowest, partial_sums(zero, T), scale, T)
        scopes.leave("softmax")
        pairs = pack(p, T)
        i += 1
        if T.v_slots > 1:
            scopes.enter("wait V")
            wait_use(v_ring, i - 1)
            scopes.leave("wait V")
        alpha = lowest  # times the empty accumulator

        step = (q_registers, q_tile, k_ring, v_ring, zero, row, rows, keys, extent, scale, cap, shift)
        state = (acc, alpha, m_i, sums, pairs, i)
        if T.mask == "shifted":  # a block or two on the diagonal, then those that all rows see
            whole = gl.minimum(gl.maximum((row + (extent[1] - extent[0]) + 1) // N, low), high)
            for j in range(high - whole):
                state = attend_block(GROUP, step, state, high - 1 - j, True, T)
            for j in range(whole - low):
                state = attend_block(GROUP, step, state, whole - 1 - j, False, T)
        else:
            for j in range(high - low):
                state = attend_block(GROUP, step, state, high - 1 - j, T.mask == "band", T)
        acc, alpha, m_i, sums, pairs, i = state

        scopes.enter("wait tile")
        next_place, more = learn(messages, turn + 1, T)
        scopes.leave("wait tile")
        total = gl.convert_layout(gl.sum(sums, 1), S_ROW)
        acc = scaled(acc, alpha)
        if T.v_slots == 1:
            wait_use(v_ring, i - 1)
        scopes.enter("async PV")
        o_pending = issue_pv(pairs, v_ring, i - 1, acc, T)
        inverse = 1.0 / gl.maximum(total, 1e-30)  # a row that saw no key: 0 * 1e30
        batch, head = queries_of(place, T)
        if T.lse:
            out_rows = row + rows
            first_half = place[1] % T.halves == 0
            row_sums = lse + (batch * (pitch // T.halves) + head).to(gl.int64) * extent[0] + out_rows
            gl.store(row_sums, (m_i + gl.log2(total)) * LN2, mask=(out_rows < extent[0]) & first_half)
        scopes.enter("wait PV")
        acc = wait_pv(o_pending)
        scopes.leave("wait PV")
        scopes.leave("async PV")
        release_use(v_ring, i - 1)
        if T.mask == "band" and T.skips:
            for _ in range(low - tile_low):
                pass_block(k_ring, v_ring, i, shift, GROUP, T)
                i += 1
        acc = normalized(acc, inverse)
        scopes.enter("store")
        store_output(o_map, q_tile[0][T.o_place], acc, (batch, head), row, value_column(place, T), DTYPE, T)
        scopes.leave("store")
        release_use(q_tile, turn)
        turn += 1
        place = next_place
    if GROUP == 0:
        take_turn(0, T)
