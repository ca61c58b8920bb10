"""What gradients by way of memory begin with: delta of each row, then P and dS of each tile, which are kept.

Both are found as in ../query_pass.py. A head comes in slices of BLOCK_K columns, so its width costs no registers. What
is hidden from all rows of a tile is neither found nor written, and product.py does not read it.
"""

import triton
import triton.language as tl

from registry.plugins.triton_fa2.tiles import INTEGERS, key_ranges, load_lse2, load_tile, tanh, tile_offsets, visible

CHUNK_INTEGERS = [*INTEGERS, "first_head", "first_tile_k", "tiles_q", "tiles_k"]


@triton.jit(do_not_specialize=CHUNK_INTEGERS)
def row_deltas(
    out_ptr,
    do_ptr,
    dlse_ptr,
    delta_ptr,
    out_batch: tl.int64,
    out_head: tl.int64,
    out_row: tl.int64,
    do_batch: tl.int64,
    do_head: tl.int64,
    do_row: tl.int64,
    heads_q,
    seqlen_q,
    HEAD_DIM_V: tl.constexpr,
    PADDED_V: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    GRAD_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """rowsum(O * dO) - dlse of BLOCK_M rows."""
    blocks = tl.cdiv(seqlen_q, BLOCK_M)
    head_of_all = tl.program_id(0) // blocks
    batch = head_of_all // heads_q
    head = head_of_all - batch * heads_q
    first_row = (tl.program_id(0) - head_of_all * blocks) * BLOCK_M
    m_M, d_V = tl.arange(0, BLOCK_M), tl.arange(0, PADDED_V)
    rows_M = first_row + m_M
    out_ptr += (batch * out_batch + head * out_head + first_row * out_row) * STRIDE_UNIT
    do_ptr += (batch * do_batch + head * do_head + first_row * do_row) * STRIDE_UNIT
    out_offsets = tile_offsets(m_M[:, None], out_row * STRIDE_UNIT, d_V[None, :], out_row, True, WIDE)
    do_offsets = tile_offsets(m_M[:, None], do_row * STRIDE_UNIT, d_V[None, :], do_row, True, WIDE)
    out_MV = load_tile(out_ptr + out_offsets, rows_M[:, None], seqlen_q, d_V[None, :], True, HEAD_DIM_V, PADDED_V)
    do_MV = load_tile(do_ptr + do_offsets, rows_M[:, None], seqlen_q, d_V[None, :], True, HEAD_DIM_V, PADDED_V)
    delta_M = tl.sum(out_MV.to(tl.float32) * do_MV.to(tl.float32), 1)
    row_numbers = head_of_all.to(tl.int64) * seqlen_q + rows_M
    if GRAD_LSE:
        delta_M -= tl.load(dlse_ptr + row_numbers, mask=rows_M < seqlen_q, other=0.0)
    tl.store(delta_ptr + row_numbers, delta_M, mask=rows_M < seqlen_q)


@triton.jit
def _scores(
    a_ptr,
    a_row,
    rows_M,
    row_limit,
    b_ptr,
    b_row,
    keys_N,
    key_limit,
    ROWS_RAGGED: tl.constexpr,
    KEYS_RAGGED: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """a b^T of a tile, in slices of BLOCK_K columns."""
    m_M, n_N, d_K = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    a_pointers = a_ptr + tile_offsets(m_M[:, None], a_row, d_K[None, :], a_row, True, WIDE)
    bT_pointers = b_ptr + tile_offsets(n_N[None, :], b_row, d_K[:, None], b_row, True, WIDE)
    acc_MN = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for column in tl.range(0, COLUMNS, BLOCK_K):
        # As many columns as there are: the last slice may be narrower.
        FULL: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
        columns_K = column + d_K
        a_MK = load_tile(
            a_pointers + column, rows_M[:, None], row_limit, columns_K[None, :], ROWS_RAGGED, COLUMNS, FULL
        )
        bT_KN = load_tile(
            bT_pointers + column, keys_N[None, :], key_limit, columns_K[:, None], KEYS_RAGGED, COLUMNS, FULL
        )
        acc_MN = tl.dot(a_MK, bT_KN, acc_MN)
    return acc_MN


@triton.jit(do_not_specialize=CHUNK_INTEGERS)
def attention_weights(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    p_ptr,
    ds_ptr,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_row: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_row: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_row: tl.int64,
    do_batch: tl.int64,
    do_head: tl.int64,
    do_row: tl.int64,
    heads_q,
    group,
    first_head,
    first_tile_k,
    tiles_q,
    tiles_k,
    seqlen_q,
    seqlen_k,
    scale_log2,
    softcap_log2,
    window_left,
    window_right,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    ROWS_RAGGED: tl.constexpr,
    KEYS_RAGGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of P and dS, of one of the chunk's query heads: `first_head` counts them over all batches, and
    `first_tile_k` says where the chunk's keys begin."""
    program = tl.program_id(0)
    row_tile = program // tiles_k
    key_tile = program - row_tile * tiles_k
    in_chunk = row_tile // tiles_q
    row_tile -= in_chunk * tiles_q
    first_row, first_key = row_tile * BLOCK_M, (first_tile_k + key_tile) * BLOCK_N
    last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    start, _, _, end = key_ranges(
        first_row, last_row, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    if first_key < start or first_key >= end:
        return

    head_of_all = first_head + in_chunk
    batch = head_of_all // heads_q
    head = head_of_all - batch * heads_q
    head_kv = head // group
    rows_M, keys_N = first_row + tl.arange(0, BLOCK_M), first_key + tl.arange(0, BLOCK_N)
    row_numbers = head_of_all.to(tl.int64) * seqlen_q + rows_M
    lse2_M = load_lse2(lse_ptr + row_numbers, rows_M, seqlen_q, ROWS_RAGGED)
    delta_M = tl.load(delta_ptr + row_numbers, mask=rows_M < seqlen_q, other=0.0)

    scores_MN = _scores(
        q_ptr + (batch * q_batch + head * q_head + first_row * q_row) * STRIDE_UNIT,
        q_row * STRIDE_UNIT,
        rows_M,
        seqlen_q,
        k_ptr + (batch * k_batch + head_kv * k_head + first_key * k_row) * STRIDE_UNIT,
        k_row * STRIDE_UNIT,
        keys_N,
        seqlen_k,
        ROWS_RAGGED,
        KEYS_RAGGED,
        HEAD_DIM,
        WIDE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if SOFTCAP:
        bent_MN = tanh(scores_MN * scale_log2)
        p_MN = tl.exp2(bent_MN * softcap_log2 - lse2_M[:, None])
    else:
        p_MN = tl.exp2(scores_MN * scale_log2 - lse2_M[:, None])
    if HAS_LEFT or HAS_RIGHT or KEYS_RAGGED:
        seen_MN = visible(
            rows_M[:, None], keys_N[None, :], seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT
        )
        p_MN = tl.where(seen_MN, p_MN, 0.0)
    dp_MN = _scores(
        do_ptr + (batch * do_batch + head * do_head + first_row * do_row) * STRIDE_UNIT,
        do_row * STRIDE_UNIT,
        rows_M,
        seqlen_q,
        v_ptr + (batch * v_batch + head_kv * v_head + first_key * v_row) * STRIDE_UNIT,
        v_row * STRIDE_UNIT,
        keys_N,
        seqlen_k,
        ROWS_RAGGED,
        KEYS_RAGGED,
        HEAD_DIM_V,
        WIDE,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    ds_MN = p_MN * (dp_MN - delta_M[:, None])
    if SOFTCAP:
        ds_MN *= 1.0 - bent_MN * bent_MN

    # Memory of whole tiles: nothing is beyond its end.
    pitch = tiles_k.to(tl.int64) * BLOCK_N
    place = (in_chunk * tiles_q + row_tile) * BLOCK_M * pitch + key_tile * BLOCK_N
    m_M, n_N = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offsets_MN = tile_offsets(m_M[:, None], pitch, n_N[None, :], pitch, True, False)
    tl.store(p_ptr + place + offsets_MN, p_MN.to(p_ptr.dtype.element_ty))
    tl.store(ds_ptr + place + offsets_MN, ds_MN.to(ds_ptr.dtype.element_ty))
