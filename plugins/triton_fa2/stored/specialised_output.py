"""Attention by way of memory on Hopper, the second of two kernels: O = P V, of what specialised_scores.py kept.

item       128 rows of a head, 64 for each warp group, and COLUMNS of their values; drawn from a counter
ring       64 keys at a time: their probabilities and COLUMNS of their values
producer   one warp: draws items, brings their slices
consumer   O *= 2^-rise of what is subtracted of a row, behind a branch that hardly any warp takes | O += P V | at the
           end over the row's sum, to shared memory, and by TMA to memory
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from registry.ops.attention.lazy_maxima import LOWEST, rescaled
from registry.plugins.triton_fa2.stored.pieces import GROUPS, ROWS, SLICE
from registry.plugins.triton_fa2.stored.specialised_product import accumulators, load_slice, summed, tiles_for
from registry.plugins.triton_fa2.stored.specialised_scores import SIZES, item_at
from registry.toolbox.drawn import announce_drawn, learn_drawn, messages_for
from registry.toolbox.hopper import as_matrix, group_barrier, ring, store_tile, store_wait


@gluon.jit
def part_at(item, counts, sizes, T: gl.constexpr):
    """`item_at`, and which part of the columns: those of the same rows side by side, for they read the same P."""
    rows = item // T.PARTS
    return item_at(rows, counts, sizes, T), item - rows * T.PARTS


@gluon.jit
def producer(maps, r, messages, counter, counts, sizes, heads, T: gl.constexpr):
    p_map, v_map = maps
    heads_q, group, first_head = heads
    keys = counts[2] * T.BLOCK_N
    items = counts[3] * T.PARTS
    item = gl.program_id(0)
    use = 0
    turn = 0
    while item < items:
        place, part = part_at(item, counts, sizes, T)
        in_chunk, kept_row, _, low, high = place
        batch = (first_head + in_chunk) // heads_q
        head = (first_head + in_chunk - batch * heads_q) // group
        for slice in range(low * (T.BLOCK_N // SLICE), high * (T.BLOCK_N // SLICE)):
            key = slice * SLICE
            at = (kept_row, key, keys)
            load_slice(p_map, at, v_map, (batch, head, key), part * T.COLUMNS, r, use, False, T)
            use += 1
        item = announce_drawn(messages, turn, counter, items)
        turn += 1


@gluon.jit
def faded(acc, factor):
    return rescaled(acc, gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)))


@gluon.jit
def take_out(tile, inverse, panels, out_map, where, column):
    """Over the sums of its rows, to this group's memory, and by TMA to O."""
    batch, head, row = where
    tile = tile * gl.convert_layout(inverse, gl.SliceLayout(1, tile.type.layout))[:, None]
    as_matrix(panels, ROWS, tile.shape[1]).store(tile.to(panels.dtype))
    fence_async_shared()
    group_barrier()
    for p in gl.static_range(tile.shape[1] // SLICE):
        store_tile(out_map, [batch, head, row, column + p * SLICE], panels.index(p))


@gluon.jit
def consumer(GROUP: gl.constexpr, out_map, places, r, messages, kept, counts, sizes, heads, T: gl.constexpr):
    FIRST: gl.constexpr = T.FIRST
    REST: gl.constexpr = T.REST if T.REST else 8  # a dummy, where there is none
    LAYOUT: gl.constexpr = accumulators(FIRST)
    REST_LAYOUT: gl.constexpr = accumulators(REST)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    references, inverses = kept
    heads_q, _, first_head = heads
    items = counts[3] * T.PARTS
    pitch = counts[3] * (GROUPS * ROWS)
    rows = gl.arange(0, ROWS, layout=ROW)
    item = gl.program_id(0)
    use = 0
    turn = 0
    while item < items:
        place, part = part_at(item, counts, sizes, T)
        in_chunk, kept_row, row, low, high = place
        own = kept_row + GROUP * ROWS + rows
        acc = gl.full([ROWS, FIRST], 0.0, gl.float32, layout=LAYOUT)
        rest = gl.full([ROWS, REST], 0.0, gl.float32, layout=REST_LAYOUT)
        before = gl.full([ROWS], LOWEST, gl.float32, layout=ROW)
        inverse = gl.load(inverses + own)
        coming = gl.load(references + low * pitch + own, mask=(rows >= 0) & (low < high), other=0.0)
        for tile in range(low, high):
            reference = coming  # a tile ahead: memory is far
            following = gl.minimum(tile + 1, high - 1)
            coming = gl.load(references + following * pitch + own)
            factor = gl.exp2(before - reference)
            before = reference
            acc = faded(acc, factor)
            if T.REST:
                rest = faded(rest, factor)
            acc, rest, use = summed(acc, rest, GROUP, r, use, T.BLOCK_N // SLICE, False, T)
        batch = (first_head + in_chunk) // heads_q
        where = (batch, first_head + in_chunk - batch * heads_q, row + GROUP * ROWS)
        column = part * T.COLUMNS
        store_wait(0)
        group_barrier()
        take_out(acc, inverse, places[0], out_map, where, column)
        if T.REST:
            take_out(rest, inverse, places[1], out_map, where, column + FIRST)
        item = learn_drawn(messages, turn, 4)
        turn += 1
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES.split())
def specialised_output(
    p_map,
    v_map,
    out_map,
    references,
    inverses,
    counter,
    heads_q,
    group,
    first_head,
    first_tile_q,
    tiles_q,
    tiles_k,
    items,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    T: gl.constexpr,
):
    """The outputs of those rows; `items` are those of specialised_scores.py."""
    counts = (first_tile_q, tiles_q, tiles_k, items)
    sizes = (seqlen_q, seqlen_k, window_left, window_right)
    heads = (heads_q, group, first_head)
    kept = (references, inverses)
    w = gl.allocate_shared_memory(p_map.dtype, [T.STAGES * GROUPS] + p_map.block_shape, p_map.layout)
    x, x_rest = tiles_for(v_map, T.STAGES, T)
    out0, out1 = tiles_for(out_map, 1, T), tiles_for(out_map, 1, T)
    r = ring((w, x, x_rest), T.STAGES, GROUPS)
    messages = messages_for(GROUPS)
    gl.warp_specialize(
        [
            (consumer, (0, out_map, out0, r, messages, kept, counts, sizes, heads, T)),
            (consumer, (1, out_map, out1, r, messages, kept, counts, sizes, heads, T)),
            (producer, ((p_map, v_map), r, messages, counter.to(gl.int64), counts, sizes, heads, T)),
        ],
        [4, 1],
        [T.CONSUMER_REGISTERS, T.PRODUCER_REGISTERS],
    )
