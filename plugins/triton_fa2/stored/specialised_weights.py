"""P and dS of weights.py on Hopper, by pieces.py: a persistent kernel of a producer warp and two warp groups.

item       128 rows of a head, and some tiles of their keys one after the other; drawn from a counter, the longest first
tile       P and dS of these rows and of 128 keys, or 256
ring       slices of 64 columns: K's for the scores, then V's for dP. Heads up to 256: Q and dO of an item's rows stay
           in shared memory while its keys pass (ROWS_STAY). Wider heads: slices of them come with those of K and V
producer   draws items, brings their rows and slices in the order in which they are used
consumer   S = Q K^T, slice by slice | P, to shared memory and from there to memory | dP = dO V^T into the same
           registers | dS from P as it was rounded, the same way out

Measured facts. NVIDIA H200, torch 2.11, triton 3.6.0, bf16, TFLOPS of all gradients by 5 products (2.5 times the
forward's), queues of launches, rested and at the limit of power; beside gluon_fa3_backward and FlashAttention-3's
build, for 512 and 320 beside weights.py and product.py (stored_gradients.txt):

                            rested              at the limit
    256, 4k, full           615  478  465       571  396  379
    256, 4k, causal         546  451  450       503  374  365
    256, 16k, full          578  463  438       517  411  421
    256, 16k, causal        573  505  464       501  422  421
    256, 1k, full           443  393  382       429  356  357
    256, 1k, causal         355  307  297       346  304  291
    256, 4k, 32/8, causal   525  419  434       503  403  386
    192, 4k, full           537  371  555       480  298  490
    192, 4k, causal         478  354  511       451  306  439
    512, 4k, full           656  493            554  453
    512, 4k, causal         598  445            524  397
    320, 4k, full           529  429            481  382

With a softcap, beside gluon_fa3_backward: 256, 4k, causal 498 and 377, at the limit 455 and 310; 192, 4k, full 490 and
312, 435 and 256.

helped, us of this kernel at 256, 4k, full / causal
  rows stay, turns, 128 keys    1,303 / 820 -> 1,201 / 719
  items of a third the size     1,201 / 719 -> 1,049 / 689: at 12 items an SM the last ones are waited for
  boxes in one piece            1,201 -> 1,134 at 12 items, 1,049 -> 1,021 at 24 and more
  1 GiB of P and dS at a time   512 MiB: 604 for 615 TFLOPS, 256 MiB: 582; under a mask 524 and 489 for 546
helped, us of the products
  one launch for all three      16k, causal: 372 -> 480 TFLOPS; 4k, causal 400 -> 441 (it runs at the speed of
                                product.py, 670 TFLOPS, where there is no mask)
  tiles of 192 columns          head dim 192: 2,744 -> 2,041 us, 461 -> 537 TFLOPS in all; 320: 2,148 -> 2,025
did not
  a cap's slope in float32      or of what is left of P with it: 5 to 90 registers spill. It is kept in 16 bits
  three products in product.py  with as many dots in one kernel of 8 warps ptxas makes every wgmma wait (C7515)
  P kept in registers           at 256 keys a tile it spills; it is read back there
of the whole                    192 is where FlashAttention-3 stays ahead: 0.94 to 1.03 of it
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.triton_fa2.stored.pieces import (
    GROUPS,
    ROWS,
    SLICE,
    bent_to_one,
    hidden,
    kept_at,
    load_rows,
    load_slices,
    multiplied,
    take_out,
    tiles_seen,
)
from registry.toolbox.drawn import announce_drawn, learn_drawn, messages_for
from registry.toolbox.hopper import barriers, init_barriers, release_slot, ring, store_wait, wait_slot_full

LOG2_E = gl.constexpr(1.4426950408889634)
INFINITY = gl.constexpr(float("inf"))
SIZES = """heads_q group first_head first_tile_k tiles_q tiles_k tiles_an_item items seqlen_q seqlen_k window_left
    window_right"""


@gluon.jit
def item_at(item, counts, sizes, T: gl.constexpr):
    """(head in the chunk, first row, first tile of keys, behind the last), of what some of the rows see."""
    first_tile_k, tiles_q, tiles_k, tiles_an_item, _ = counts
    sections = gl.cdiv(tiles_k, tiles_an_item)
    head = item // (tiles_q * sections)
    within = item - head * (tiles_q * sections)
    tile = within // sections
    section = within - tile * sections
    if T.HAS_RIGHT and not T.HAS_LEFT:  # the longest first
        tile = tiles_q - 1 - tile
    row = tile * (GROUPS * ROWS)
    shift = sizes[1] - sizes[0]
    low = first_tile_k + section * tiles_an_item
    high = gl.minimum(low + tiles_an_item, first_tile_k + tiles_k)
    low, high = tiles_seen(row, shift, low, high, sizes, T)
    return head, row, low, high


@gluon.jit
def producer(maps, r, rows, messages, counter, counts, sizes, heads, T: gl.constexpr):
    q_map, k_map, v_map, do_map = maps
    q_rows, do_rows = rows
    heads_q, group, first_head = heads
    items = counts[4]
    item = gl.program_id(0)
    use = 0
    turn = 0
    number = 0  # of items with something to do
    while item < items:
        in_chunk, row, low, high = item_at(item, counts, sizes, T)
        batch = (first_head + in_chunk) // heads_q
        head = first_head + in_chunk - batch * heads_q
        for tile in range(low, high):
            key = tile * T.BLOCK_N
            if T.ROWS_STAY and tile == low:
                load_rows(q_map, q_rows, number, (batch, head), row, 0, T.SLICES)
            load_slices((q_map, k_map), r, use, (batch, head), row, (batch, head // group), key, T.SLICES, T)
            use += T.SLICES
            if T.ROWS_STAY and tile == low:
                load_rows(do_map, do_rows, number, (batch, head), row, 0, T.SLICES_V)
            load_slices((do_map, v_map), r, use, (batch, head), row, (batch, head // group), key, T.SLICES_V, T)
            use += T.SLICES_V
        number += (low < high).to(gl.int32)
        item = announce_drawn(messages, turn, counter, items)
        turn += 1


@gluon.jit
def consumer(
    GROUP: gl.constexpr,
    out_maps,
    place,
    r,
    rows_there,
    turns,
    messages,
    lse,
    delta,
    counts,
    sizes,
    first_head,
    scales,
    T: gl.constexpr,
):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, T.BLOCK_N, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    p_map, ds_map = out_maps
    q_rows, do_rows = rows_there
    first_tile_k, tiles_q, tiles_k, _, items = counts
    seqlen_q = sizes[0]
    scale_log2, softcap_log2 = scales
    rows = gl.arange(0, ROWS, layout=ROW)
    keys = gl.arange(0, T.BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, layout=LAYOUT)
    item = gl.program_id(0)
    use = 0
    turn = 0
    number = 0
    own = 0
    while item < items:
        in_chunk, row, low, high = item_at(item, counts, sizes, T)
        row += GROUP * ROWS
        # A row past the end, or one that sees no key: its P and dS are zero.
        numbers = (first_head + in_chunk).to(gl.int64) * seqlen_q + row + rows
        there = row + rows < seqlen_q
        lse2 = gl.load(lse + numbers, mask=there, other=INFINITY) * LOG2_E
        lse2 = gl.where(lse2 == -INFINITY, INFINITY, lse2)
        own_delta = gl.load(delta + numbers, mask=there, other=0.0)
        kept_row = in_chunk * tiles_q * (GROUPS * ROWS) + row
        for tile in range(low, high):
            at = kept_at(kept_row, (tile - first_tile_k) * T.BLOCK_N, tiles_k * T.BLOCK_N)
            if T.ROWS_STAY and tile == low:
                wait_slot_full(q_rows, 0, number)
            s = multiplied(GROUP, r, q_rows, (), turns, own, use, zero, T.SLICES, T)
            use += T.SLICES
            if T.ROWS_STAY and tile == high - 1:
                release_slot(q_rows, 0)
            if T.SOFTCAP:
                bent = bent_to_one(s * scale_log2)
                slope = (1.0 - bent * bent).to(p_map.dtype)  # of what is capped: at most 1. Longer, it spills
                s = bent * softcap_log2
            else:
                s = s * scale_log2
            p = gl.exp2(s - lse2[:, None])
            p = hidden(p, row, tile * T.BLOCK_N, rows, keys, sizes, 0.0, T).to(p_map.dtype)
            matrix = take_out(p, p_map, place, at, T)
            if T.SOFTCAP:
                p = (p.to(gl.float32) * slope.to(gl.float32)).to(p_map.dtype)
            if T.ROWS_STAY and tile == low:
                wait_slot_full(do_rows, 0, number)
            dp = multiplied(GROUP, r, do_rows, (), turns, own + 1, use, zero, T.SLICES_V, T)
            use += T.SLICES_V
            own += 2
            if T.ROWS_STAY and tile == high - 1:
                release_slot(do_rows, 0)
            if T.BLOCK_N > 128 and not T.SOFTCAP:  # registers are for 256 keys of dP
                p = matrix.load(LAYOUT)
            ds = p.to(gl.float32) * (dp - own_delta[:, None])
            take_out(ds.to(ds_map.dtype), ds_map, place, at, T)
        number += (low < high).to(gl.int32)
        item = learn_drawn(messages, turn, 4)
        turn += 1
    store_wait(0)


@gluon.jit(do_not_specialize=SIZES.split())
def specialised_weights(
    q_map,
    k_map,
    v_map,
    do_map,
    p_map,
    ds_map,
    lse,
    delta,
    counter,
    heads_q,
    group,
    first_head,
    first_tile_k,
    tiles_q,
    tiles_k,
    tiles_an_item,
    items,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    scale_log2,
    softcap_log2,
    T: gl.constexpr,
):
    """P and dS of the chunk's query heads. See weights.py for what is counted how."""
    counts = (first_tile_k, tiles_q, tiles_k, tiles_an_item, items)
    sizes = (seqlen_q, seqlen_k, window_left, window_right)
    if T.SOFTCAP:
        scales = (scale_log2, softcap_log2)
    else:  # which is None then
        scales = (scale_log2, scale_log2)
    STAGES: gl.constexpr = T.STAGES
    PANELS: gl.constexpr = T.BLOCK_N // SLICE
    b = gl.allocate_shared_memory(k_map.dtype, [STAGES] + k_map.block_shape, k_map.layout)
    out0 = gl.allocate_shared_memory(p_map.dtype, [PANELS] + p_map.block_shape, p_map.layout)
    out1 = gl.allocate_shared_memory(p_map.dtype, [PANELS] + p_map.block_shape, p_map.layout)
    if T.ROWS_STAY:
        q = gl.allocate_shared_memory(q_map.dtype, [T.SLICES * GROUPS] + q_map.block_shape, q_map.layout)
        do = gl.allocate_shared_memory(q_map.dtype, [T.SLICES_V * GROUPS] + q_map.block_shape, q_map.layout)
        r = ring((b, b), STAGES, GROUPS)
        turns = barriers(GROUPS)
        init_barriers(turns, 1)
        rows = ring(q, 1, GROUPS), ring(do, 1, GROUPS)
    else:
        a = gl.allocate_shared_memory(q_map.dtype, [STAGES * GROUPS] + q_map.block_shape, q_map.layout)
        r = ring((a, b), STAGES, GROUPS)
        turns = r[1]
        rows = r, r
    messages = messages_for(GROUPS)
    maps = (p_map, ds_map)
    gl.warp_specialize(
        [
            (consumer, (0, maps, out0, r, rows, turns, messages, lse, delta, counts, sizes, first_head, scales, T)),
            (consumer, (1, maps, out1, r, rows, turns, messages, lse, delta, counts, sizes, first_head, scales, T)),
            (
                producer,
                (
                    (q_map, k_map, v_map, do_map),
                    r,
                    rows,
                    messages,
                    counter.to(gl.int64),
                    counts,
                    sizes,
                    (heads_q, group, first_head),
                    T,
                ),
            ),
        ],
        [4, 1],
        [T.CONSUMER_REGISTERS, T.PRODUCER_REGISTERS],
    )
