"""P and dS of weights.py on Hopper: a producer warp, and two warp groups with 64 rows each of a tile of 128 x 256.

tile       P and dS of 128 rows and 256 keys. A block goes through those of its rows, so that slices of the next tile
           are on their way while P and dS of this one are worked out
ring       slices of 64 columns: of Q and K for the scores, then of dO and V for dP
producer   slices in the order in which they are used
consumer   S = Q K^T, slice by slice | P, to shared memory and from there to memory | dP = dO V^T into the same
           registers | dS from P as it was rounded, the same way out

So one group's exponentials run beside the other's products, and a thread holds one accumulator at a time.

Measured facts. NVIDIA H200, torch 2.11, triton 3.6.0, bf16, TFLOPS of all gradients by 5 products (2.5 times the
forward's), queues of launches, rested and at the limit of power; beside weights.py and gluon_fa3_backward
(stored_gradients.txt):

                            rested                     at the limit
    512, 4k, full           603  552 in plain Triton   514  480
    512, 4k, causal         492  449                   449  415
    256, 4k, full           521  476 of gluon_fa3      469  402
    256, 4k, causal         400  450                   381  409
    256, 16k, full          528  482                   511  439
    256, 16k, causal        372  504                   375  474
    256, 1k, full           429  394                   409  349
    256, 4k, 32/8, causal   375  415                   370  394

helped
  1 GiB of P and dS at a time   512 MiB: 256, 16k, full 434 for 528; 32/8 heads 278 for 375. What is added up by keys
                                has a block for 128 keys of a head in memory, and those were 64
not enough
  a mask                        of what is left under one, tiles of 256 keys and products of one round of blocks lose
                                more than five products for seven gain
of the whole                    256, 4k, full: this kernel 1,377 us (400 TFLOPS), the products 1,230 (670)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from registry.toolbox.hopper import (
    as_matrix,
    group_barrier,
    load_tile,
    release_slot,
    ring,
    slot_of,
    store_tile,
    store_wait,
    wait_slot_empty,
    wait_slot_full,
)

ROWS = gl.constexpr(64)  # of a warp group
SLICE = gl.constexpr(64)  # columns: what a swizzle of 128 bytes holds
GROUPS = gl.constexpr(2)
LOG2_E = gl.constexpr(1.4426950408889634)
INFINITY = gl.constexpr(float("inf"))
SIZES = """heads_q group first_head first_tile_k tiles_q tiles_k tiles_a_block seqlen_q seqlen_k window_left
    window_right"""


@gluon.jit
def place_of(counts, sizes, T: gl.constexpr):
    """(head in the chunk, first row, first tile of keys, behind the last), of what some of the rows see."""
    first_tile_k, tiles_q, tiles_k, tiles_a_block = counts
    seqlen_q, seqlen_k, window_left, window_right = sizes
    sections = gl.cdiv(tiles_k, tiles_a_block)
    head = gl.program_id(0) // (tiles_q * sections)
    within = gl.program_id(0) - head * (tiles_q * sections)
    tile = within // sections
    section = within - tile * sections
    if T.HAS_RIGHT and not T.HAS_LEFT:  # the longest first
        tile = tiles_q - 1 - tile
    row = tile * (GROUPS * ROWS)
    shift = seqlen_k - seqlen_q
    low = first_tile_k + section * tiles_a_block
    high = gl.minimum(low + tiles_a_block, first_tile_k + tiles_k)
    if T.HAS_RIGHT:
        last = gl.minimum(row + GROUPS * ROWS, seqlen_q) - 1
        end = gl.minimum(seqlen_k, last + shift + window_right + 1)
        high = gl.minimum(high, gl.cdiv(gl.maximum(end, 0), T.BLOCK_N))
    if T.HAS_LEFT:
        low = gl.maximum(low, gl.maximum(row + shift - window_left, 0) // T.BLOCK_N)
    return head, row, low, high


@gluon.jit
def load_slices(maps, r, use, where, row, where_kv, key, COUNT: gl.constexpr, T: gl.constexpr):
    """Producer: the slices of both operands of one product."""
    a_map, b_map = maps
    tiles, full, empty = r
    a0, a1, b = tiles
    for c in range(COUNT):
        s = slot_of(use + c, r)
        ready = wait_slot_empty(r, s, use + c)
        mbarrier.expect(ready, (GROUPS * ROWS + T.BLOCK_N) * SLICE * 2)
        load_tile(a_map, [where[0], where[1], row, c * SLICE], ready, a0.index(s))
        load_tile(a_map, [where[0], where[1], row + ROWS, c * SLICE], ready, a1.index(s))
        load_tile(b_map, [where_kv[0], where_kv[1], key, c * SLICE], ready, b.index(s))


@gluon.jit
def producer(maps, r, counts, sizes, heads, T: gl.constexpr):
    q_map, k_map, v_map, do_map = maps
    heads_q, group, first_head = heads
    in_chunk, row, low, high = place_of(counts, sizes, T)
    batch = (first_head + in_chunk) // heads_q
    head = first_head + in_chunk - batch * heads_q
    use = 0
    for tile in range(low, high):
        key = tile * T.BLOCK_N
        load_slices((q_map, k_map), r, use, (batch, head), row, (batch, head // group), key, T.SLICES, T)
        use += T.SLICES
        load_slices((do_map, v_map), r, use, (batch, head), row, (batch, head // group), key, T.SLICES_V, T)
        use += T.SLICES_V


@gluon.jit
def multiplied(GROUP: gl.constexpr, r, use, zero, COUNT: gl.constexpr, T: gl.constexpr):
    """Consumer: the product of the next COUNT slices. Each is let go of when the next is on its way."""
    acc = zero
    for c in gl.static_range(COUNT):
        s = slot_of(use + c, r)
        wait_slot_full(r, s, use + c)
        a = as_matrix(r[0][GROUP].index(s), ROWS, SLICE)
        b = as_matrix(r[0][2].index(s), T.BLOCK_N, SLICE).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=c > 0, is_async=True)
        if c > 0:
            acc = warpgroup_mma_wait(1, [acc])
            release_slot(r, slot_of(use + c - 1, r))
    acc = warpgroup_mma_wait(0, [acc])
    release_slot(r, slot_of(use + COUNT - 1, r))
    return acc


@gluon.jit
def hidden_to_zero(p, row, key, rows, keys, sizes, T: gl.constexpr):
    """Where a tile meets an edge of the mask, or the end of the keys."""
    seqlen_q, seqlen_k, window_left, window_right = sizes
    own = row + (seqlen_k - seqlen_q)
    last = gl.full([ROWS], 0, gl.int32, layout=rows.type.layout) + (seqlen_k - 1)
    edge = key + T.BLOCK_N > seqlen_k
    if T.HAS_RIGHT:
        edge = edge | (key + T.BLOCK_N - 1 > own + window_right)
        last = gl.minimum(last, own + rows + window_right)
    if T.HAS_LEFT:
        edge = edge | (key < own + ROWS - 1 - window_left)
    if edge:
        columns = (key + keys)[None, :]
        p = gl.where(columns <= last[:, None], p, 0.0)
        if T.HAS_LEFT:
            p = gl.where(columns >= (own + rows - window_left)[:, None], p, 0.0)
    return p


@gluon.jit
def take_out(tile, to_map, place, row, column, T: gl.constexpr):
    """By way of this group's memory, once what it held is on its way."""
    matrix = as_matrix(place, ROWS, T.BLOCK_N)
    store_wait(0)
    group_barrier()
    matrix.store(tile)
    fence_async_shared()
    group_barrier()
    for i in gl.static_range(T.BLOCK_N // SLICE):
        store_tile(to_map, [row, column + i * SLICE], place.index(i))
    return matrix


@gluon.jit
def consumer(
    GROUP: gl.constexpr, out_maps, place, r, lse, delta, counts, sizes, first_head, scale_log2, T: gl.constexpr
):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, T.BLOCK_N, 16]
    )
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    p_map, ds_map = out_maps
    first_tile_k, tiles_q, tiles_k, tiles_a_block = counts
    seqlen_q = sizes[0]
    rows = gl.arange(0, ROWS, layout=ROW)
    keys = gl.arange(0, T.BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, layout=LAYOUT)
    in_chunk, row, low, high = place_of(counts, sizes, T)
    row += GROUP * ROWS
    # A row past the end, or one that sees no key: its P and dS are zero.
    numbers = (first_head + in_chunk).to(gl.int64) * seqlen_q + row + rows
    there = row + rows < seqlen_q
    lse2 = gl.load(lse + numbers, mask=there, other=INFINITY) * LOG2_E
    lse2 = gl.where(lse2 == -INFINITY, INFINITY, lse2)
    own_delta = gl.load(delta + numbers, mask=there, other=0.0)
    kept_row = in_chunk * tiles_q * (GROUPS * ROWS) + row
    use = 0
    for tile in range(low, high):
        column = (tile - first_tile_k) * T.BLOCK_N
        s = multiplied(GROUP, r, use, zero, T.SLICES, T)
        use += T.SLICES
        p = gl.exp2(s * scale_log2 - lse2[:, None])
        p = hidden_to_zero(p, row, tile * T.BLOCK_N, rows, keys, sizes, T)
        matrix = take_out(p.to(p_map.dtype), p_map, place, kept_row, column, T)
        dp = multiplied(GROUP, r, use, zero, T.SLICES_V, T)
        use += T.SLICES_V
        ds = matrix.load(LAYOUT).to(gl.float32) * (dp - own_delta[:, None])
        take_out(ds.to(ds_map.dtype), ds_map, place, kept_row, column, T)
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
    heads_q,
    group,
    first_head,
    first_tile_k,
    tiles_q,
    tiles_k,
    tiles_a_block,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    scale_log2,
    T: gl.constexpr,
):
    """Tiles of P and dS of 128 rows of one of the chunk's query heads. See weights.py for what is counted how."""
    counts = (first_tile_k, tiles_q, tiles_k, tiles_a_block)
    sizes = (seqlen_q, seqlen_k, window_left, window_right)
    STAGES: gl.constexpr = T.STAGES
    PANELS: gl.constexpr = T.BLOCK_N // SLICE
    a0 = gl.allocate_shared_memory(q_map.dtype, [STAGES] + q_map.block_shape, q_map.layout)
    a1 = gl.allocate_shared_memory(q_map.dtype, [STAGES] + q_map.block_shape, q_map.layout)
    b = gl.allocate_shared_memory(k_map.dtype, [STAGES] + k_map.block_shape, k_map.layout)
    out0 = gl.allocate_shared_memory(p_map.dtype, [PANELS] + p_map.block_shape, p_map.layout)
    out1 = gl.allocate_shared_memory(p_map.dtype, [PANELS] + p_map.block_shape, p_map.layout)
    r = ring((a0, a1, b), STAGES, GROUPS)
    maps = (p_map, ds_map)
    gl.warp_specialize(
        [
            (consumer, (0, maps, out0, r, lse, delta, counts, sizes, first_head, scale_log2, T)),
            (consumer, (1, maps, out1, r, lse, delta, counts, sizes, first_head, scale_log2, T)),
            (producer, ((q_map, k_map, v_map, do_map), r, counts, sizes, (heads_q, group, first_head), T)),
        ],
        [4, 1],
        [T.CONSUMER_REGISTERS, T.PRODUCER_REGISTERS],
    )
