"""product.py on Hopper: dV = P^T dO, dK = dS^T Q and dQ = dS K in one persistent launch.

item       128 keys of dV or dK, or 128 rows of dQ, and COLUMNS of their columns; 64 of the rows for each warp group.
           Items of all three are drawn from one counter, the longest first, section by section of heads whose Q, K and
           dO fit L2 together: under a mask they differ in length, and a head of 16k keys has only 128 of each
ring       64 rows (or keys) at a time: W, which is P or dS, and what it weighs, COLUMNS wide. It runs on from item to
           item, so the next one's are on their way while the last one is stored
producer   one warp: draws items, brings their slices
consumer   acc += W^T X, or W X for dQ | to shared memory, and by TMA to where it belongs

Where a chunk has some of the keys, sums for dQ go on from chunk to chunk in float32 (ADDS, KEEPS).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from registry.plugins.triton_fa2.stored.pieces import GROUPS, ROWS, SLICE, kept_at
from registry.toolbox.drawn import announce_drawn, learn_drawn, messages_for
from registry.toolbox.hopper import (
    as_matrix,
    group_barrier,
    load_tile,
    release_slot,
    ring,
    slot_of,
    store_tile,
    store_wait,
    viewed,
    wait_slot_empty,
    wait_slot_full,
)

ITEM = gl.constexpr(128)
DV = gl.constexpr(0)
DK = gl.constexpr(1)
DQ = gl.constexpr(2)
NONE = gl.constexpr(3)
SIZES = """heads_kv heads first_head first_tile_k tiles_q tiles_k section_heads items seqlen_q seqlen_k window_left
    window_right"""


@gluon.jit
def item_at(item, work, T: gl.constexpr):
    """(what of, key head in the chunk, query head of its group, tile, part of the columns)."""
    heads, _, _, tiles_q, tiles_k, section_heads, _ = work
    BY_KEYS: gl.constexpr = T.PARTS_V + T.PARTS
    BY_ROWS: gl.constexpr = T.GROUP * T.PARTS
    key_tiles = tiles_k * (T.BLOCK_N // ITEM)
    if T.GROUP == 1:  # all of a rank are about as long
        of_a_head = gl.maximum(key_tiles, tiles_q) * (BY_KEYS + BY_ROWS)
    else:  # those by keys go through all heads of a group: they come first
        of_a_head = key_tiles * BY_KEYS + tiles_q * BY_ROWS
    first = item // (section_heads * of_a_head) * section_heads
    here = gl.minimum(section_heads, heads - first)
    within = item - first * of_a_head
    each = BY_KEYS + BY_ROWS
    skipped = 0
    if T.GROUP > 1:
        by_keys = here * key_tiles * BY_KEYS
        each = gl.where(within < by_keys, BY_KEYS, BY_ROWS)
        skipped = gl.where(within < by_keys, 0, BY_KEYS)
        within = gl.where(within < by_keys, within, within - by_keys)
    rank = within // (here * each)
    within -= rank * here * each
    head = within // each
    number = within - head * each + skipped
    member = 0
    tile = rank
    if number < T.PARTS_V:
        what = gl.where(rank < key_tiles, DV, NONE)
        part = number
    elif number < BY_KEYS:
        what = gl.where(rank < key_tiles, DK, NONE)
        part = number - T.PARTS_V
    else:
        what = gl.where(rank < tiles_q, DQ, NONE)
        member = (number - BY_KEYS) // T.PARTS
        part = number - BY_KEYS - member * T.PARTS
        if T.HAS_RIGHT and not T.HAS_LEFT:
            tile = tiles_q - 1 - rank
    return what, first + head, member, tile, part


@gluon.jit
def rows_seeing(key, sizes, T: gl.constexpr):
    """(first, how many slices) of the rows that see some of the ITEM keys from `key` on."""
    seqlen_q, seqlen_k, window_left, window_right = sizes
    shift = seqlen_k - seqlen_q
    start = 0
    end = seqlen_q
    if T.HAS_RIGHT:
        start = gl.maximum(key - shift - window_right, 0) // SLICE * SLICE
    if T.HAS_LEFT:
        end = gl.minimum(end, gl.minimum(key + ITEM, seqlen_k) - shift + window_left)
    end = gl.where(key < seqlen_k, end, 0)
    return start, gl.maximum(gl.cdiv(end - start, SLICE), 0)


@gluon.jit
def keys_seen(row, first_key, keys, sizes, T: gl.constexpr):
    """(first, how many slices) of the chunk's keys that some of the ITEM rows from `row` on see."""
    seqlen_q, seqlen_k, window_left, window_right = sizes
    shift = seqlen_k - seqlen_q
    start = first_key
    end = gl.minimum(seqlen_k, first_key + keys)
    if T.HAS_RIGHT:
        end = gl.minimum(end, gl.minimum(row + ITEM, seqlen_q) + shift + window_right)
    if T.HAS_LEFT:
        start = gl.maximum(start, gl.maximum(row + shift - window_left, 0) // SLICE * SLICE)
    return start, gl.maximum(gl.cdiv(end - start, SLICE), 0)


@gluon.jit
def load_slice(w_map, w_at, x_map, x_at, column, r, use, BY_KEYS: gl.constexpr, T: gl.constexpr):
    """Producer: 64 rows or keys."""
    w, x, x_rest = r[0]
    row, key, keys = w_at
    FIRST: gl.constexpr = T.FIRST // SLICE
    REST: gl.constexpr = T.REST // SLICE
    s = slot_of(use, r)
    ready = wait_slot_empty(r, s, use)
    mbarrier.expect(ready, (GROUPS * ROWS + T.COLUMNS) * SLICE * 2)
    for g in gl.static_range(GROUPS):
        down, across = (0, g * ROWS) if BY_KEYS else (g * ROWS, 0)
        load_tile(w_map, [kept_at(row + down, key + across, keys), 0], ready, w.index(s * GROUPS + g))
    batch, head, x_row = x_at
    for p in gl.static_range(FIRST):
        load_tile(x_map, [batch, head, x_row, column + p * SLICE], ready, x.index(s * FIRST + p))
    for p in gl.static_range(REST):
        load_tile(x_map, [batch, head, x_row, column + (FIRST + p) * SLICE], ready, x_rest.index(s * REST + p))


@gluon.jit
def load_by_keys(w_map, x_map, place, r, use, work, heads_kv, sizes, T: gl.constexpr):
    """Producer: an item of dV or dK."""
    _, in_chunk, _, tile, part = place
    _, first_head, first_tile_k, tiles_q, tiles_k, _, _ = work
    keys = tiles_k * T.BLOCK_N
    batch = (first_head + in_chunk) // heads_kv
    head = (first_head + in_chunk - batch * heads_kv) * T.GROUP
    start, count = rows_seeing(first_tile_k * T.BLOCK_N + tile * ITEM, sizes, T)
    for member in range(T.GROUP):
        kept = (in_chunk * T.GROUP + member) * tiles_q * ITEM
        for i in range(count):
            row = start + i * SLICE
            w_at, x_at = (kept + row, tile * ITEM, keys), (batch, head + member, row)
            load_slice(w_map, w_at, x_map, x_at, part * T.COLUMNS, r, use, True, T)
            use += 1
    return use


@gluon.jit
def load_by_rows(w_map, x_map, place, r, use, work, heads_kv, sizes, T: gl.constexpr):
    """Producer: an item of dQ."""
    _, in_chunk, member, tile, part = place
    _, first_head, first_tile_k, tiles_q, tiles_k, _, _ = work
    batch = (first_head + in_chunk) // heads_kv
    head = first_head + in_chunk - batch * heads_kv
    first_key = first_tile_k * T.BLOCK_N
    keys = tiles_k * T.BLOCK_N
    start, count = keys_seen(tile * ITEM, first_key, keys, sizes, T)
    kept = ((in_chunk * T.GROUP + member) * tiles_q + tile) * ITEM
    for i in range(count):
        key = start + i * SLICE
        load_slice(w_map, (kept, key - first_key, keys), x_map, (batch, head, key), part * T.COLUMNS, r, use, False, T)
        use += 1
    return use


@gluon.jit
def producer(maps, r, messages, counter, work, heads_kv, sizes, T: gl.constexpr):
    p_map, ds_map, q_map, k_map, do_map = maps
    items = work[6]
    item = gl.program_id(0)
    use = 0
    turn = 0
    while item < items:
        place = item_at(item, work, T)
        if place[0] == DV:
            use = load_by_keys(p_map, do_map, place, r, use, work, heads_kv, sizes, T)
        elif place[0] == DK:
            use = load_by_keys(ds_map, q_map, place, r, use, work, heads_kv, sizes, T)
        elif place[0] == DQ:
            use = load_by_rows(ds_map, k_map, place, r, use, work, heads_kv, sizes, T)
        item = announce_drawn(messages, turn, counter, items)
        turn += 1


@gluon.jit
def matrices(panels, COLUMNS: gl.constexpr, T: gl.constexpr):
    """The tiles of X of all stages, so many columns of them."""
    STAGES: gl.constexpr = T.STAGES
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SLICE, COLUMNS], panels.dtype)
    return viewed(panels, [STAGES, SLICE, COLUMNS], LAYOUT)


@gluon.jit
def summed(acc, rest, GROUP: gl.constexpr, r, use, count, BY_KEYS: gl.constexpr, T: gl.constexpr):
    """Consumer: acc and the product of the next `count` slices. Each is let go of when the next is on its way."""
    w, x, x_rest = r[0]
    FIRST: gl.constexpr = T.FIRST
    REST: gl.constexpr = T.REST
    x = matrices(x, FIRST, T)
    if REST:
        x_rest = matrices(x_rest, REST, T)
    last = 0
    for i in range(count):
        s = slot_of(use, r)
        wait_slot_full(r, s, use)
        a = as_matrix(w.index(s * GROUPS + GROUP), ROWS, SLICE)
        if BY_KEYS:
            a = a.permute((1, 0))
        acc = warpgroup_mma(a, x.index(s), acc, is_async=True)
        if REST:
            rest = warpgroup_mma(a, x_rest.index(s), rest, is_async=True)
            acc, rest = warpgroup_mma_wait(2, [acc, rest])
        else:
            acc = warpgroup_mma_wait(1, [acc])
        if i > 0:
            release_slot(r, last)
        last = s
        use += 1
    if REST:
        acc, rest = warpgroup_mma_wait(0, [acc, rest])
    else:
        acc = warpgroup_mma_wait(0, [acc])
    if count > 0:
        release_slot(r, last)
    return acc, rest, use


@gluon.jit
def sums_at(sums, row, column, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr, T: gl.constexpr):
    """Where a group's float32 sums lie, so many columns of them, in rows as wide as all parts."""
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    return sums + (rows.to(gl.int64) * (T.PARTS * T.COLUMNS))[:, None] + columns[None, :]


@gluon.jit
def take_out(tile, panels, out_maps, what, where, column):
    """To this group's memory, and by TMA to the gradient that it is of."""
    dq_map, dk_map, dv_map = out_maps
    batch, head, row = where
    as_matrix(panels, ROWS, tile.shape[1]).store(tile.to(panels.dtype))
    fence_async_shared()
    group_barrier()
    for p in gl.static_range(tile.shape[1] // SLICE):
        if what == DV:
            store_tile(dv_map, [batch, head, row, column + p * SLICE], panels.index(p))
        elif what == DK:
            store_tile(dk_map, [batch, head, row, column + p * SLICE], panels.index(p))
        else:
            store_tile(dq_map, [batch, head, row, column + p * SLICE], panels.index(p))


@gluon.constexpr_function
def accumulators(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def consumer(GROUP: gl.constexpr, out_maps, places, r, messages, sums, work, heads_kv, sizes, scale, T: gl.constexpr):
    FIRST: gl.constexpr = T.FIRST
    REST: gl.constexpr = T.REST if T.REST else 8  # a dummy, where there is none
    LAYOUT: gl.constexpr = accumulators(FIRST)
    REST_LAYOUT: gl.constexpr = accumulators(REST)
    heads, first_head, first_tile_k, tiles_q, tiles_k, _, items = work
    first_key = first_tile_k * T.BLOCK_N
    item = gl.program_id(0)
    use = 0
    turn = 0
    while item < items:
        what, in_chunk, member, tile, part = item_at(item, work, T)
        column = part * T.COLUMNS
        kept = ((in_chunk * T.GROUP + member) * tiles_q + tile) * ITEM + GROUP * ROWS
        acc = gl.full([ROWS, FIRST], 0.0, gl.float32, layout=LAYOUT)
        rest = gl.full([ROWS, REST], 0.0, gl.float32, layout=REST_LAYOUT)
        if what < DQ:
            _, count = rows_seeing(first_key + tile * ITEM, sizes, T)
            acc, rest, use = summed(acc, rest, GROUP, r, use, count * T.GROUP, True, T)
        elif what == DQ:
            if T.ADDS:
                acc = gl.load(sums_at(sums, kept, column, LAYOUT, FIRST, T))
                if T.REST:
                    rest = gl.load(sums_at(sums, kept, column + FIRST, REST_LAYOUT, REST, T))
            _, count = keys_seen(tile * ITEM, first_key, tiles_k * T.BLOCK_N, sizes, T)
            acc, rest, use = summed(acc, rest, GROUP, r, use, count, False, T)
        leaves = what != NONE
        if T.KEEPS and what == DQ:
            leaves = False
            gl.store(sums_at(sums, kept, column, LAYOUT, FIRST, T), acc)
            if T.REST:
                gl.store(sums_at(sums, kept, column + FIRST, REST_LAYOUT, REST, T), rest)
        if leaves:
            batch = (first_head + in_chunk) // heads_kv
            head = first_head + in_chunk - batch * heads_kv
            head = gl.where(what == DQ, head * T.GROUP + member, head)
            row = tile * ITEM + GROUP * ROWS + gl.where(what == DQ, 0, first_key)
            factor = gl.where(what == DV, 1.0, scale)
            store_wait(0)
            group_barrier()
            take_out(acc * factor, places[0], out_maps, what, (batch, head, row), column)
            if T.REST:
                take_out(rest * factor, places[1], out_maps, what, (batch, head, row), column + FIRST)
        item = learn_drawn(messages, turn, 4)
        turn += 1
    store_wait(0)


@gluon.jit
def panels_for(tensor, COUNT: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for so many tiles of so many columns, as boxes of a tensor map."""
    return gl.allocate_shared_memory(tensor.dtype, [COUNT * (COLUMNS // SLICE)] + tensor.block_shape, tensor.layout)


@gluon.jit
def tiles_for(tensor, COUNT: gl.constexpr, T: gl.constexpr):
    """The same for tiles of COLUMNS: their first, a power of two, and the rest of them."""
    first = panels_for(tensor, COUNT, T.FIRST)
    if T.REST:
        return first, panels_for(tensor, COUNT, T.REST)
    else:
        return first, first


@gluon.jit(do_not_specialize=SIZES.split())
def specialised_products(
    p_map,
    ds_map,
    q_map,
    k_map,
    do_map,
    dq_map,
    dk_map,
    dv_map,
    sums,
    counter,
    heads_kv,
    heads,
    first_head,
    first_tile_k,
    tiles_q,
    tiles_k,
    section_heads,
    items,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    scale,
    T: gl.constexpr,
):
    """All gradients of the chunk's key heads, or of some of their keys. See weights.py for what is counted how."""
    work = (heads, first_head, first_tile_k, tiles_q, tiles_k, section_heads, items)
    sizes = (seqlen_q, seqlen_k, window_left, window_right)
    w = gl.allocate_shared_memory(p_map.dtype, [T.STAGES * GROUPS] + p_map.block_shape, p_map.layout)
    x, x_rest = tiles_for(q_map, T.STAGES, T)
    out0, out1 = tiles_for(dq_map, 1, T), tiles_for(dq_map, 1, T)
    r = ring((w, x, x_rest), T.STAGES, GROUPS)
    messages = messages_for(GROUPS)
    inputs, outputs = (p_map, ds_map, q_map, k_map, do_map), (dq_map, dk_map, dv_map)
    gl.warp_specialize(
        [
            (consumer, (0, outputs, out0, r, messages, sums, work, heads_kv, sizes, scale, T)),
            (consumer, (1, outputs, out1, r, messages, sums, work, heads_kv, sizes, scale, T)),
            (producer, (inputs, r, messages, counter.to(gl.int64), work, heads_kv, sizes, T)),
        ],
        [4, 1],
        [T.CONSUMER_REGISTERS, T.PRODUCER_REGISTERS],
    )
