"""Attention by way of memory on Hopper, the first of two kernels: probabilities, by pieces.py. For heads over 256, of
which no block can hold all of O: what finds the scores anew for each part of it computes a third more.

item       128 rows of a head and all keys that they see, drawn from a counter: the rows that see most first
tile       their probabilities of 128 keys, against what is subtracted of a row by then (lazy_maxima.py), which is kept
           beside them: it may rise later. At the end 1 / sum of each row, and its LSE
ring       slices of 64 columns of K. Q's rows stay in shared memory while keys pass, all but their first two slices,
           which are in registers (HELD) and come there by way of P's place
producer   draws items, brings their rows and slices in the order in which they are used
consumer   S = Q K^T, in turns | P, to shared memory and from there to memory

Measured facts. NVIDIA H200, torch 2.11, triton 3.6.0, bf16, 2 x 16 heads of 4k, TFLOPS of this kernel and of the second
(stored_forward.txt); beside them what dispatch has of both in all, and gluon_fa3_wide:

                       this   second   both   gluon_fa3_wide      causal: both   gluon_fa3_wide
    320                 601      522    560              635               486              573
    384                 643      728    648              474               586              447
    448                 656      654    635              452               546              425
    512                 606      733    619              488               581              478
    576, values of 512  545      733    595              443               530              424

helped, TFLOPS of this kernel
  two slices of Q in registers  512: 473 -> 610, 576: 362 -> 546 448: 494 -> 656, 384: 620 ->
                                643: two stages more, and a quarter fewer reads of Q
  turns of part of a product    at all: a group that waits for the other's whole turn, while the ring is full of slices
                                that it has not read, waits forever
  how large a part              512, six stages: 1, 2, 3, 4, 5 slices 577, 605, 610, 606, 612; causal 511, 526, 526,
                                540, 545; 576, five stages: 1 to 4 slices 546, 546, 545, 522
did not
  any of it at 320              whose values are one tile of gluon_fa3_wide: 560 of 635
  few rows, or few tiles        a row's keys are one block's: 26 or 53 queries, or some 50 tiles: 0.65 to 0.95
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.ops.attention.lazy_maxima import LOWEST, risen
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
from registry.toolbox.hopper import (
    as_matrix,
    barriers,
    group_barrier,
    init_barriers,
    release_slot,
    ring,
    store_wait,
    viewed,
    wait_slot_full,
)

LN_2 = gl.constexpr(0.6931471805599453)
SIZES = "heads_q group first_head first_tile_q tiles_q tiles_k items seqlen_q seqlen_k window_left window_right"


@gluon.jit
def item_at(item, counts, sizes, T: gl.constexpr):
    """(head in the chunk, row in the chunk, row, first tile of keys, behind the last), of what some of the rows see."""
    first_tile_q, tiles_q, tiles_k, _ = counts
    head = item // tiles_q
    tile = item - head * tiles_q
    if T.HAS_RIGHT and not T.HAS_LEFT:  # the longest first
        tile = tiles_q - 1 - tile
    row = (first_tile_q + tile) * (GROUPS * ROWS)
    low, high = tiles_seen(row, sizes[1] - sizes[0], 0, tiles_k, sizes, T)
    return head, (head * tiles_q + tile) * (GROUPS * ROWS), row, low, high


@gluon.jit
def producer(maps, r, q_rows, q_held, messages, counter, counts, sizes, heads, T: gl.constexpr):
    q_map, k_map = maps
    heads_q, group, first_head = heads
    items = counts[3]
    item = gl.program_id(0)
    use = 0
    turn = 0
    number = 0  # of items with something to do
    while item < items:
        in_chunk, _, row, low, high = item_at(item, counts, sizes, T)
        batch = (first_head + in_chunk) // heads_q
        head = first_head + in_chunk - batch * heads_q
        for tile in range(low, high):
            if tile == low:
                load_rows(q_map, q_rows, number, (batch, head), row, T.HELD, T.SLICES - T.HELD)
                if T.HELD:
                    load_rows(q_map, q_held, number, (batch, head), row, 0, T.HELD, True)
            where = (batch, head // group)
            load_slices(maps, r, use, (batch, head), row, where, tile * T.BLOCK_N, T.SLICES, T)
            use += T.SLICES
        number += (low < high).to(gl.int32)
        item = announce_drawn(messages, turn, counter, items)
        turn += 1


@gluon.jit
def consumer(
    GROUP: gl.constexpr,
    p_map,
    place,
    r,
    q_rows,
    q_held,
    turns,
    messages,
    kept,
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
    Q_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    HELD: gl.constexpr = T.HELD
    references, inverses, lse = kept
    _, tiles_q, tiles_k, items = counts
    seqlen_q = sizes[0]
    scale_log2, softcap_log2 = scales
    rows = gl.arange(0, ROWS, layout=ROW)
    keys = gl.arange(0, T.BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    zero = gl.full([ROWS, T.BLOCK_N], 0.0, gl.float32, layout=LAYOUT)
    pitch = items * (GROUPS * ROWS)  # of references: rows of the chunk
    item = gl.program_id(0)
    use = 0
    turn = 0
    number = 0
    own = 0
    while item < items:
        in_chunk, kept_row, row, low, high = item_at(item, counts, sizes, T)
        row += GROUP * ROWS
        kept_row += GROUP * ROWS
        m = gl.full([ROWS], LOWEST, gl.float32, layout=ROW)
        total = gl.full([ROWS], 0.0, gl.float32, layout=ROW)
        held = ()
        if T.HELD:
            if low < high:
                wait_slot_full(q_held, 0, number)
            for c in gl.static_range(HELD):
                held = held + (as_matrix(q_held[0].index(GROUP * HELD + c), ROWS, SLICE).load(Q_LAYOUT),)
        for tile in range(low, high):
            if tile == low:
                wait_slot_full(q_rows, 0, number)
            s = multiplied(GROUP, r, q_rows, held, turns, own, use, zero, T.SLICES, T)
            use += T.SLICES
            own += gl.cdiv(T.SLICES, T.TURN)
            if tile == high - 1:
                release_slot(q_rows, 0)
            if T.SOFTCAP:
                s = bent_to_one(s * scale_log2) * softcap_log2
            else:
                s = s * scale_log2
            s = hidden(s, row, tile * T.BLOCK_N, rows, keys, sizes, float("-inf"), T)
            before = m
            m = risen(before, gl.max(s, 1))
            p = gl.exp2(s - m[:, None])
            total = total * gl.exp2(before - m) + gl.sum(p, 1)
            gl.store(references + tile * pitch + kept_row + rows, m)
            at = kept_at(kept_row, tile * T.BLOCK_N, tiles_k * T.BLOCK_N)
            take_out(p.to(p_map.dtype), p_map, place, at, T)
        if T.HELD and low < high:  # P's place is where what is held of the next rows comes
            store_wait(0)
            group_barrier()
            release_slot(q_held, 0)
        number += (low < high).to(gl.int32)
        gl.store(inverses + kept_row + rows, 1.0 / gl.maximum(total, 1e-30))  # a row that saw no key: 0 * 1e30
        if T.LSE:
            numbers = (first_head + in_chunk).to(gl.int64) * seqlen_q + row + rows
            gl.store(lse + numbers, (m + gl.log2(total)) * LN_2, mask=row + rows < seqlen_q)
        item = learn_drawn(messages, turn, 4)
        turn += 1
    store_wait(0)


@gluon.jit
def place_of(GROUP: gl.constexpr, out, p_map, T: gl.constexpr):
    """A group's share of the memory by way of which P leaves, as boxes of P's map."""
    KEYS: gl.constexpr = T.BLOCK_N
    PANELS: gl.constexpr = KEYS // SLICE
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, KEYS], out.dtype)
    BOX: gl.constexpr = p_map.layout
    own = viewed(out, [GROUPS, ROWS, KEYS], LAYOUT).index(GROUP)
    return viewed(own, [PANELS, ROWS, SLICE], BOX)


@gluon.jit(do_not_specialize=SIZES.split())
def specialised_scores(
    q_map,
    k_map,
    p_map,
    references,
    inverses,
    lse,
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
    scale_log2,
    softcap_log2,
    T: gl.constexpr,
):
    """Probabilities of some tiles of rows of some heads. With a cap, scores * scale_log2 is 2 / ln(2) of the argument
    of tanh."""
    counts = (first_tile_q, tiles_q, tiles_k, items)
    sizes = (seqlen_q, seqlen_k, window_left, window_right)
    scales = (scale_log2, softcap_log2)
    kept = (references, inverses, lse)
    PANELS: gl.constexpr = T.BLOCK_N // SLICE
    b = gl.allocate_shared_memory(k_map.dtype, [T.STAGES] + k_map.block_shape, k_map.layout)
    q = gl.allocate_shared_memory(q_map.dtype, [(T.SLICES - T.HELD) * GROUPS] + q_map.block_shape, q_map.layout)
    out = gl.allocate_shared_memory(q_map.dtype, [PANELS * GROUPS] + q_map.block_shape, q_map.layout)
    r = ring((b, b), T.STAGES, GROUPS)
    turns = barriers(GROUPS)
    init_barriers(turns, 1)
    rows = ring(q, 1, GROUPS)
    if T.HELD:
        held = ring(out, 1, GROUPS)
    else:
        held = rows
    out0, out1 = place_of(0, out, p_map, T), place_of(1, out, p_map, T)
    messages = messages_for(GROUPS)
    heads = (heads_q, group, first_head)
    gl.warp_specialize(
        [
            (consumer, (0, p_map, out0, r, rows, held, turns, messages, kept, counts, sizes, first_head, scales, T)),
            (consumer, (1, p_map, out1, r, rows, held, turns, messages, kept, counts, sizes, first_head, scales, T)),
            (producer, ((q_map, k_map), r, rows, held, messages, counter.to(gl.int64), counts, sizes, heads, T)),
        ],
        [4, 1],
        [T.CONSUMER_REGISTERS, T.PRODUCER_REGISTERS],
    )
