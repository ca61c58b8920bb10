"""The key pass of the backward: dK and dV. query_pass.py says what both compute; it runs first and leaves delta."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from registry.plugins.triton_fa2.tiles import (
    INTEGERS,
    assign_tile,
    dot,
    dot_add,
    load_lse2,
    load_tile,
    query_ranges,
    store_tile,
    tanh,
    tile_offsets,
)


class _Traits(NamedTuple):
    """What the kernel was compiled for, as its steps ask for it."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    PADDED_V: Any
    SOFTCAP: Any
    HAS_LEFT: Any
    HAS_RIGHT: Any
    RAGGED: Any
    PRECISION: Any
    WANT_DK: Any
    WANT_DV: Any
    BLOCK_M: Any


@triton.jit
def _key_step(m, dk_ND, dv_NV, keys, queries, mask, scale_log2, softcap_log2, MASKED: tl.constexpr, cfg: tl.constexpr):
    """Scores are computed transposed, [N, M]: then P^T and dS^T are in registers as the next products want them."""
    k_ND, v_NV, keys_N = keys
    q_ptr, do_ptr, lse_ptr, delta_ptr, q_offsets_MD, do_offsets_MV, q_step, do_step = queries
    seqlen_q, seqlen_k, window_left, window_right = mask
    PADDED_D: tl.constexpr = k_ND.shape[1]
    rows_M = m + tl.arange(0, cfg.BLOCK_M)
    d_D, d_V = tl.arange(0, PADDED_D), tl.arange(0, cfg.PADDED_V)
    q_pointers = q_ptr + m * q_step + q_offsets_MD
    do_pointers = do_ptr + m * do_step + do_offsets_MV
    q_MD = load_tile(q_pointers, rows_M[:, None], seqlen_q, d_D[None, :], MASKED and cfg.RAGGED, cfg.HEAD_DIM, PADDED_D)
    lse2_M = load_lse2(lse_ptr + rows_M, rows_M, seqlen_q, MASKED and cfg.RAGGED)
    if MASKED and cfg.RAGGED:
        delta_M = tl.load(delta_ptr + rows_M, mask=rows_M < seqlen_q, other=0.0)
    else:
        delta_M = tl.load(delta_ptr + rows_M)
    scoresT_NM = dot(k_ND, tl.trans(q_MD), cfg.PRECISION)
    if cfg.SOFTCAP:
        bentT_NM = tanh(scoresT_NM * scale_log2)
        pT_NM = tl.exp2(bentT_NM * softcap_log2 - lse2_M[None, :])
    else:
        pT_NM = tl.exp2(scoresT_NM * scale_log2 - lse2_M[None, :])
    # Keys beyond the tensor need no mask here: each row of dK and dV is a key's own, and theirs are not stored.
    if MASKED and cfg.HAS_RIGHT:
        last_M = rows_M + (seqlen_k - seqlen_q + window_right)
        pT_NM = tl.where(keys_N[:, None] <= last_M[None, :], pT_NM, 0.0)
    if MASKED and cfg.HAS_LEFT:
        first_M = rows_M + (seqlen_k - seqlen_q - window_left)
        pT_NM = tl.where(keys_N[:, None] >= first_M[None, :], pT_NM, 0.0)
    do_MV = load_tile(
        do_pointers, rows_M[:, None], seqlen_q, d_V[None, :], MASKED and cfg.RAGGED, cfg.HEAD_DIM_V, cfg.PADDED_V
    )
    if cfg.WANT_DV:
        dv_NV = dot_add(pT_NM.to(do_MV.dtype), do_MV, dv_NV, cfg.PRECISION)
    if cfg.WANT_DK:
        dpT_NM = dot(v_NV, tl.trans(do_MV), cfg.PRECISION)
        dsT_NM = pT_NM * (dpT_NM - delta_M[None, :])
        if cfg.SOFTCAP:
            dsT_NM *= 1.0 - bentT_NM * bentT_NM
        dk_ND = dot_add(dsT_NM.to(q_MD.dtype), q_MD, dk_ND, cfg.PRECISION)
    return dk_ND, dv_NV


@triton.jit(do_not_specialize=INTEGERS)
def key_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    q_batch: tl.int64,
    q_head: tl.int64,
    q_row: tl.int64,
    q_col: tl.int64,
    k_batch: tl.int64,
    k_head: tl.int64,
    k_row: tl.int64,
    k_col: tl.int64,
    v_batch: tl.int64,
    v_head: tl.int64,
    v_row: tl.int64,
    v_col: tl.int64,
    do_batch: tl.int64,
    do_head: tl.int64,
    do_row: tl.int64,
    do_col: tl.int64,
    dk_batch: tl.int64,
    dk_head: tl.int64,
    dk_row: tl.int64,
    dv_batch: tl.int64,
    dv_head: tl.int64,
    dv_row: tl.int64,
    heads_kv,
    heads,
    heads_per_section,
    seqlen_q,
    seqlen_k,
    scale,
    scale_log2,
    softcap_log2,
    window_left,
    window_right,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_V: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    UNIT_COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    RAGGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dK and dV of BLOCK_N rows of one key head."""
    tile, head_of_all = assign_tile(tl.cdiv(seqlen_k, BLOCK_N), heads, heads_per_section, HAS_LEFT and not HAS_RIGHT)
    batch = head_of_all // heads_kv
    head_kv = head_of_all - batch * heads_kv
    first_key = tile * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, seqlen_k) - 1
    keys_N = first_key + tl.arange(0, BLOCK_N)

    q_ptr += batch * q_batch * STRIDE_UNIT
    do_ptr += batch * do_batch * STRIDE_UNIT
    k_ptr += (batch * k_batch + head_kv * k_head + first_key * k_row) * STRIDE_UNIT
    v_ptr += (batch * v_batch + head_kv * v_head + first_key * v_row) * STRIDE_UNIT
    dk_ptr += (batch * dk_batch + head_kv * dk_head + first_key * dk_row) * STRIDE_UNIT
    dv_ptr += (batch * dv_batch + head_kv * dv_head + first_key * dv_row) * STRIDE_UNIT
    m_M, n_N = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d_D, d_V = tl.arange(0, PADDED_D), tl.arange(0, PADDED_V)
    k_offsets = tile_offsets(n_N[:, None], k_row * STRIDE_UNIT, d_D[None, :], k_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE)
    v_offsets = tile_offsets(n_N[:, None], v_row * STRIDE_UNIT, d_V[None, :], v_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE)
    q_offsets = tile_offsets(m_M[:, None], q_row * STRIDE_UNIT, d_D[None, :], q_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE)
    do_offsets = tile_offsets(
        m_M[:, None], do_row * STRIDE_UNIT, d_V[None, :], do_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE
    )
    k_ND = load_tile(k_ptr + k_offsets, keys_N[:, None], seqlen_k, d_D[None, :], True, HEAD_DIM, PADDED_D)
    v_NV = load_tile(v_ptr + v_offsets, keys_N[:, None], seqlen_k, d_V[None, :], True, HEAD_DIM_V, PADDED_V)

    start, inner_start, inner_end, end = query_ranges(
        first_key, last_key, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_M
    )
    dk_ND = tl.zeros([BLOCK_N, PADDED_D if WANT_DK else 1], tl.float32)
    dv_NV = tl.zeros([BLOCK_N, PADDED_V if WANT_DV else 1], tl.float32)
    cfg: tl.constexpr = _Traits(
        HEAD_DIM, HEAD_DIM_V, PADDED_V, SOFTCAP, HAS_LEFT, HAS_RIGHT, RAGGED, PRECISION, WANT_DK, WANT_DV, BLOCK_M
    )
    keys, mask = (k_ND, v_NV, keys_N), (seqlen_q, seqlen_k, window_left, window_right)
    for member in range(GROUP):  # every query head that reads this key head
        head = head_kv * GROUP + member
        q_head_ptr = q_ptr + head * q_head * STRIDE_UNIT
        do_head_ptr = do_ptr + head * do_head * STRIDE_UNIT
        lse_head_ptr = lse_ptr + (batch * heads_kv * GROUP + head).to(tl.int64) * seqlen_q
        delta_head_ptr = delta_ptr + (batch * heads_kv * GROUP + head).to(tl.int64) * seqlen_q
        queries = (
            q_head_ptr,
            do_head_ptr,
            lse_head_ptr,
            delta_head_ptr,
            q_offsets,
            do_offsets,
            q_row * STRIDE_UNIT,
            do_row * STRIDE_UNIT,
        )
        for block in tl.range(0, (inner_end - inner_start) // BLOCK_M):
            m = inner_start + block * BLOCK_M
            dk_ND, dv_NV = _key_step(m, dk_ND, dv_NV, keys, queries, mask, scale_log2, softcap_log2, False, cfg)
        if HAS_RIGHT:
            for block in tl.range(0, (inner_start - start) // BLOCK_M):
                m = start + block * BLOCK_M
                dk_ND, dv_NV = _key_step(m, dk_ND, dv_NV, keys, queries, mask, scale_log2, softcap_log2, True, cfg)
        if HAS_LEFT or RAGGED:
            for m in tl.range(inner_end, end, BLOCK_M):
                dk_ND, dv_NV = _key_step(m, dk_ND, dv_NV, keys, queries, mask, scale_log2, softcap_log2, True, cfg)

    if WANT_DK:
        dk_offsets = tile_offsets(n_N[:, None], dk_row * STRIDE_UNIT, d_D[None, :], dk_row, True, WIDE)
        dk_ND = (dk_ND * scale).to(dk_ptr.dtype.element_ty)
        store_tile(dk_ptr + dk_offsets, dk_ND, keys_N[:, None], seqlen_k, d_D[None, :], HEAD_DIM, PADDED_D)
    if WANT_DV:
        dv_offsets = tile_offsets(n_N[:, None], dv_row * STRIDE_UNIT, d_V[None, :], dv_row, True, WIDE)
        dv_NV = dv_NV.to(dv_ptr.dtype.element_ty)
        store_tile(dv_ptr + dv_offsets, dv_NV, keys_N[:, None], seqlen_k, d_V[None, :], HEAD_DIM_V, PADDED_V)
