"""The three products that gradients by way of memory end with: dQ = dS K, dK = dS^T Q, dV = P^T dO."""

import triton
import triton.language as tl

from registry.plugins.triton_fa2.stored.weights import CHUNK_INTEGERS
from registry.plugins.triton_fa2.tiles import key_ranges, load_tile, query_ranges, store_tile, tile_offsets

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
    """acc + W x over `start` .. `end`, which are keys; or with W^T, over rows."""
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
    sums_ptr,
    x_batch: tl.int64,
    x_head: tl.int64,
    x_row: tl.int64,
    to_batch: tl.int64,
    to_head: tl.int64,
    to_row: tl.int64,
    heads_to,
    group,
    first_head,
    first_tile_k,
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
    ADDS: tl.constexpr,
    KEEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUTER: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """factor W x of OUTER rows and BLOCK_COLUMNS of their columns; or W^T x of OUTER keys, added up over the GROUP
    query heads that share them. `first_head` counts the heads of what is written over all batches.

    Where a chunk holds some of the keys, sums over keys go on from chunk to chunk in float32: `sums_ptr` has them of
    the chunk before (ADDS), or takes them for the next (KEEPS).
    """
    PARTS: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    tiles = tiles_k * (BLOCK_N // OUTER) if BY_KEYS else tiles_q * (BLOCK_M // OUTER)
    # The parts of a tile beside each other: they read the same W. Of a head's tiles the longest first.
    program = tl.program_id(0) // PARTS
    part = tl.program_id(0) - program * PARTS
    in_chunk = program // tiles
    tile = program - in_chunk * tiles
    if HAS_RIGHT and not HAS_LEFT and not BY_KEYS:
        tile = tiles - 1 - tile
    columns_C = part * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    head_of_all = first_head + in_chunk
    batch = head_of_all // heads_to
    head = head_of_all - batch * heads_to
    first_key = first_tile_k * BLOCK_N
    pitch = tiles_k.to(tl.int64) * BLOCK_N
    rows_kept = tiles_q * BLOCK_M
    x_ptr += batch * x_batch * STRIDE_UNIT
    r_R = tl.arange(0, OUTER)
    acc_RC = tl.zeros([OUTER, BLOCK_COLUMNS], tl.float32)
    if BY_KEYS:
        first = first_key + tile * OUTER
        last = tl.minimum(first + OUTER, seqlen_k) - 1
        start, _, _, end = query_ranges(
            first, last, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M
        )
        for member in range(GROUP):
            in_group = in_chunk * GROUP + member
            acc_RC = _products(
                acc_RC,
                w_ptr + in_group * rows_kept * pitch + tile * OUTER,
                x_ptr + (head * GROUP + member) * x_head * STRIDE_UNIT,
                x_row * STRIDE_UNIT,
                columns_C,
                start,
                end,
                seqlen_q,
                pitch,
                BY_KEYS,
                RAGGED,
                COLUMNS,
                PARTS * BLOCK_COLUMNS,
                WIDE,
                INNER,
            )
    else:
        first = tile * OUTER
        last = tl.minimum(first + OUTER, seqlen_q) - 1
        start, _, _, end = key_ranges(
            first, last, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N
        )
        sums_ptr += (in_chunk * rows_kept + first).to(tl.int64) * (PARTS * BLOCK_COLUMNS)
        sums_offsets = r_R[:, None] * (PARTS * BLOCK_COLUMNS) + columns_C[None, :]
        if ADDS:
            acc_RC = tl.load(sums_ptr + sums_offsets)
        acc_RC = _products(
            acc_RC,
            w_ptr + (in_chunk * rows_kept + first) * pitch - first_key,
            x_ptr + head // group * x_head * STRIDE_UNIT,
            x_row * STRIDE_UNIT,
            columns_C,
            tl.maximum(start, first_key),
            tl.minimum(end, first_key + tiles_k * BLOCK_N),
            seqlen_k,
            pitch,
            BY_KEYS,
            RAGGED,
            COLUMNS,
            PARTS * BLOCK_COLUMNS,
            WIDE,
            INNER,
        )
    if KEEPS:
        tl.store(sums_ptr + sums_offsets, acc_RC)
    else:
        to_ptr += (batch * to_batch + head * to_head + first * to_row) * STRIDE_UNIT
        offsets = tile_offsets(r_R[:, None], to_row * STRIDE_UNIT, columns_C[None, :], to_row, True, WIDE)
        to_RC = (acc_RC * factor).to(to_ptr.dtype.element_ty)
        rows_R = (first + r_R)[:, None]
        store_tile(to_ptr + offsets, to_RC, rows_R, last + 1, columns_C[None, :], COLUMNS, PARTS * BLOCK_COLUMNS)
