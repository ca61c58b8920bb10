"""The three products that gradients of wide heads end with: dQ = dS K, dK = dS^T Q, dV = P^T dO."""

import triton
import triton.language as tl

from registry.plugins.triton_fa2.tiles import key_ranges, load_tile, query_ranges, store_tile, tile_offsets
from registry.plugins.triton_fa2.wide.weights import CHUNK_INTEGERS

PRODUCT_INTEGERS = [
    *CHUNK_INTEGERS,
    *(f"{tensor}_{dim}" for tensor in ("x", "to") for dim in ("batch", "head", "row")),
    "heads_to",
]


@triton.jit
def _products(
    acc_RC,
    w_ptr,
    x_ptr,
    x_row,
    columns_C,
    start,
    end,
    limit,
    pitch,
    BY_KEYS: tl.constexpr,
    RAGGED: tl.constexpr,
    COLUMNS: tl.constexpr,
    FULL: tl.constexpr,
    WIDE: tl.constexpr,
    INNER: tl.constexpr,
):
    """acc + W x over `start` .. `end`, which are keys, or with W^T rows."""
    OUTER: tl.constexpr = acc_RC.shape[0]
    r_R, i_I = tl.arange(0, OUTER), tl.arange(0, INNER)
    x_offsets = tile_offsets(i_I[:, None], x_row, columns_C[None, :], x_row, True, WIDE)
    for inner in tl.range(start, end, INNER):
        x_pointers = x_ptr + inner * x_row + x_offsets
        x_IC = load_tile(x_pointers, (inner + i_I)[:, None], limit, columns_C[None, :], RAGGED, COLUMNS, FULL)
        if BY_KEYS:
            w_offsets = tile_offsets(i_I[:, None], pitch, r_R[None, :], pitch, True, False)
            w_IR = tl.load(w_ptr + inner * pitch + w_offsets)
            acc_RC = tl.dot(tl.trans(w_IR), x_IC, acc_RC)
        else:
            w_offsets = tile_offsets(r_R[:, None], pitch, i_I[None, :], pitch, True, False)
            w_RI = tl.load(w_ptr + inner + w_offsets)
            acc_RC = tl.dot(w_RI, x_IC, acc_RC)
    return acc_RC


@triton.jit(do_not_specialize=PRODUCT_INTEGERS)
def weighted_sums(
    w_ptr,
    x_ptr,
    to_ptr,
    x_batch: tl.int64,
    x_head: tl.int64,
    x_row: tl.int64,
    to_batch: tl.int64,
    to_head: tl.int64,
    to_row: tl.int64,
    heads_to,
    group,
    first_head,
    tiles_q,
    tiles_k,
    seqlen_q,
    seqlen_k,
    factor,
    window_left,
    window_right,
    COLUMNS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    RAGGED: tl.constexpr,
    BY_KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """factor W x, of a tile's rows and BLOCK_COLUMNS of their columns; or W^T x of its keys, added up over the GROUP
    query heads that share them. `first_head` counts the heads of what is written over all batches."""
    PARTS: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    OUTER: tl.constexpr = BLOCK_N if BY_KEYS else BLOCK_M
    tiles = tiles_k if BY_KEYS else tiles_q
    # The parts of a tile beside each other: they read the same W. Of a head's tiles the longest first.
    program = tl.program_id(0) // PARTS
    part = tl.program_id(0) - program * PARTS
    in_chunk = program // tiles
    tile = program - in_chunk * tiles
    if HAS_RIGHT and not HAS_LEFT and not BY_KEYS:
        tile = tiles - 1 - tile
    first = tile * OUTER
    columns_C = part * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    head_of_all = first_head + in_chunk
    batch = head_of_all // heads_to
    head = head_of_all - batch * heads_to
    pitch = tiles_k.to(tl.int64) * BLOCK_N
    x_ptr += batch * x_batch * STRIDE_UNIT
    acc_RC = tl.zeros([OUTER, BLOCK_COLUMNS], tl.float32)
    if BY_KEYS:
        last = tl.minimum(first + OUTER, seqlen_k) - 1
        start, _, _, end = query_ranges(
            first, last, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M
        )
        limit = seqlen_q
        for member in range(GROUP):
            in_group = in_chunk * GROUP + member
            acc_RC = _products(
                acc_RC,
                w_ptr + in_group * tiles_q * BLOCK_M * pitch + first,
                x_ptr + (head * GROUP + member) * x_head * STRIDE_UNIT,
                x_row * STRIDE_UNIT,
                columns_C,
                start,
                end,
                limit,
                pitch,
                BY_KEYS,
                RAGGED,
                COLUMNS,
                PARTS * BLOCK_COLUMNS,
                WIDE,
                INNER,
            )
    else:
        last = tl.minimum(first + OUTER, seqlen_q) - 1
        start, _, _, end = key_ranges(
            first, last, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N
        )
        limit = seqlen_k
        acc_RC = _products(
            acc_RC,
            w_ptr + (in_chunk * tiles_q * BLOCK_M + first) * pitch,
            x_ptr + head // group * x_head * STRIDE_UNIT,
            x_row * STRIDE_UNIT,
            columns_C,
            start,
            end,
            limit,
            pitch,
            BY_KEYS,
            RAGGED,
            COLUMNS,
            PARTS * BLOCK_COLUMNS,
            WIDE,
            INNER,
        )

    to_ptr += (batch * to_batch + head * to_head + first * to_row) * STRIDE_UNIT
    r_R = tl.arange(0, OUTER)
    to_offsets = tile_offsets(r_R[:, None], to_row * STRIDE_UNIT, columns_C[None, :], to_row, True, WIDE)
    to_RC = (acc_RC * factor).to(to_ptr.dtype.element_ty)
    store_tile(
        to_ptr + to_offsets, to_RC, (first + r_R)[:, None], last + 1, columns_C[None, :], COLUMNS, PARTS * BLOCK_COLUMNS
    )
