"""Heads over 256 on Hopper: gluon_fa3's roles and softmax, with a head in pieces.

tile       128 rows of queries by 256 columns of values, which is what two warp groups' registers hold of O. Wider
           values are two tiles: each finds the scores for itself, and that is a third of all products at 512
Q          most in shared memory, its first panels in registers alone; O leaves through Q's place
K          a block in parts, each in a slot of its own, so that few slots hold many bytes on their way
producer   Q's panels through slots of K, K(0), Q, then K(i) V(i-1), and the last V
consumer   QK(i) issued part by part | O *= alpha(i-1) | PV(i-1) issued | wait QK(i) | softmax(i) | wait PV(i-1)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from registry.plugins.gluon_fa3.pipeline import give_turn, take_turn
from registry.plugins.gluon_fa3.places import box, keys_of
from registry.plugins.gluon_fa3.products import no_output, normalized, scaled, wait_pv
from registry.plugins.gluon_fa3.schedule import announce, group_blocks, learn, next_tile, tile_at, tile_blocks
from registry.plugins.gluon_fa3.softmax import (
    LN2,
    LOWEST,
    mask_block,
    mask_if_edge,
    pack,
    partial_sums,
    score,
    softmax,
    unpack,
)
from registry.plugins.gluon_fa3.tiles import PANEL, tile_ring
from registry.plugins.gluon_fa3.wide.tiles import (
    in_slot,
    load_columns,
    load_keys,
    load_panels,
    load_queries,
    matrix_of,
    panel_of,
    query_tile,
    release_keys,
    release_use,
    wait_use,
)
from registry.toolbox import scopes
from registry.toolbox.hopper import ring, store_tile, store_wait

ROWS = gl.constexpr(64)
SIZES = "seqlen_q seqlen_k left right heads_q group tiles row_blocks heads section_heads"


@gluon.constexpr_function
def _products(T):
    return len(T.products)


@gluon.constexpr_function
def _product(T, i, which):
    return T.products[i][which]


@gluon.constexpr_function
def _products_after(T, part):
    return T.products_after(part)


@gluon.constexpr_function
def _begins_part(T, i):
    return i == 0 or T.products[i][0] != T.products[i - 1][0]


# Never sleeps: a grid has at least one block in each direction. Asks for 32 values of 16 bits, in $8 to $23.
_ASK = gl.constexpr(
    "{ .reg .b32 all, z; .reg .pred p; mov.u32 z, %nctaid.z; mov.b32 all, z; "
    + " ".join(f"xor.b32 all, all, ${i};" for i in range(8, 24))
    + " setp.eq.u32 p, z, 0; setp.eq.and.u32 p, all, 0, p; @p nanosleep.u32 20; "
    + " ".join(f"mov.b32 ${i}, 0;" for i in range(8))
    + " }"
)
_ASK_OPERANDS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 16))


@gluon.jit
def await_panel(panel):
    """Until a panel of Q is in its registers: a load that is under way does not hold back the barrier that lets go of
    what it reads (../consumer.py), and an instruction that asks for all of it does."""
    gl.inline_asm_elementwise(_ASK, _ASK_OPERANDS, [panel], dtype=gl.int8, is_pure=False, pack=32)


@gluon.constexpr_function
def _value_part(T, part, which):
    return T.value_parts[part][which]


@gluon.jit
def queries_of(place, T: gl.constexpr):
    """(batch, head) of a tile's queries; its number among the heads counts halves of the values."""
    return place[2], place[1] // T.halves


@gluon.jit
def value_column(place, T: gl.constexpr):
    """The first of a tile's values."""
    return (place[1] % T.halves) * T.head_v


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


@gluon.jit
def _qk(q_registers, q, k_ring, first, s, N: gl.constexpr, T: gl.constexpr):
    WIDE: gl.constexpr = _product(T, N, 2)
    Q: gl.constexpr = _product(T, N, 3)
    FROM: gl.constexpr = _product(T, N, 4)
    use = first + _product(T, N, 0)
    if _begins_part(T, N) and N > 0:  # the first has been waited for
        wait_use(k_ring, use)
    k = in_slot(k_ring, use, _product(T, N, 1), WIDE, T.k_slot).permute((1, 0))
    if Q < 0:
        return warpgroup_mma(q_registers[-1 - Q], k, s, use_acc=N > 0, is_async=True)
    else:
        part = matrix_of(q[0][Q], q[0][Q].shape[0] * PANEL)
        if WIDE < part.shape[1]:
            part = part.slice(FROM, WIDE, dim=1)
        return warpgroup_mma(part, k, s, use_acc=N > 0, is_async=True)


@gluon.jit
def issue_qk(q_registers, q, k_ring, use, zero, T: gl.constexpr):
    """S = Q K^T of the block whose first part is this use, its parts as they come."""
    COUNT: gl.constexpr = _products(T)
    s = zero
    for n in gl.static_range(COUNT):
        s = _qk(q_registers, q, k_ring, use, s, n, T)
    return s


@gluon.jit
def wait_qk(k_ring, use, s, MORE: gl.constexpr, T: gl.constexpr):
    """S, once its products are done; each part of K is let go of as soon as its own are. MORE are on their way behind."""
    PARTS: gl.constexpr = T.k_parts
    for p in gl.static_range(PARTS):
        s = warpgroup_mma_wait(MORE + _products_after(T, p), [s])
        release_use(k_ring, use + p)
    return s


@gluon.jit
def _pv(pairs, v, acc, T: gl.constexpr):
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    return warpgroup_mma(unpack(pairs, v.dtype, LAYOUT, T), v, acc, is_async=True)


@gluon.jit
def issue_pv(pairs, v_ring, use, acc, T: gl.constexpr):
    """O += P V, with P from registers."""
    COUNT: gl.constexpr = len(acc)
    out = ()
    for n in gl.static_range(COUNT):
        v = in_slot(v_ring, use, _value_part(T, n, 0), _value_part(T, n, 1), T.head_v)
        out = out + (_pv(pairs, v, acc[n], T),)
    return out


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
def _store_part(o_map, o_panels, part, where, row, column, DTYPE: gl.constexpr, T: gl.constexpr):
    COLUMNS: gl.constexpr = part.shape[1]
    WIDE: gl.constexpr = o_panels.shape[0] * PANEL
    o = matrix_of(o_panels, WIDE)
    if COLUMNS < WIDE:
        o = o.slice(0, COLUMNS, dim=1)
    store_wait(0)
    o.store(part.to(DTYPE))
    fence_async_shared()
    for p in gl.static_range(COLUMNS // PANEL):
        store_tile(o_map, box(where, row, column + p * PANEL, T), o_panels.index(p))


@gluon.jit
def store_output(o_map, o_panels, acc, where, row, column, DTYPE: gl.constexpr, T: gl.constexpr):
    """Through a place of Q's, one part after the other. What is stored past the head dim is cut off."""
    COUNT: gl.constexpr = len(acc)
    for n in gl.static_range(COUNT):
        _store_part(o_map, o_panels, acc[n], where, row, column + _value_part(T, n, 0), DTYPE, T)
    store_wait(0)


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
