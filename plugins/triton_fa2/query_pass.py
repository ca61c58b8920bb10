"""FlashAttention-2, backward, in plain Triton: two passes, no atomics, the same bits on every run.

With S = scale q k^T (capped and masked), P = exp(S - lse), O = P V:
    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)        dQ = scale dS K        dK = scale dS^T Q
where delta = rowsum(O * dO) - dlse is what the softmax's normalisation and the log-sum-exp hand back to every score.

The query pass owns a tile of queries and walks over keys: it finds delta on its way, leaves it for the next pass, and
writes dQ. The key pass owns a tile of keys and walks over queries, over all query heads that share it: dK and dV. Both
recompute P from lse. That is 7 matrix products where one pass with atomics needs 5, in exchange for determinism.

Measured facts (NVIDIA H200, as in forward.py; 2.5 times the forward's operations are counted for both):
- Over torch's flash backward, first config: geometric mean 1.39 at D64, 1.26 at D128, 1.07 at D256 (16k full: 0.96).
- dK and dV in separate kernels (8 products) beat both in one at D256, where their accumulators fill the registers:
  key passes of 306 against 218 TFLOPS, full 16k. At D128 they lose.
- Unserialised wgmma: the query pass at D128 causal 16k went from 492 to 638.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from registry.plugins.triton_fa2.tiles import (
    INTEGERS,
    assign_tile,
    dot,
    dot_add,
    key_ranges,
    load_lse2,
    load_tile,
    store_tile,
    tanh,
    tile_offsets,
    visible,
)


class _Traits(NamedTuple):
    """What the kernel was compiled for, as its steps ask for it."""

    HEAD_DIM: Any
    HEAD_DIM_V: Any
    SOFTCAP: Any
    HAS_LEFT: Any
    HAS_RIGHT: Any
    RAGGED: Any
    PRECISION: Any
    BLOCK_N: Any


@triton.jit
def _query_step(n, dq_MD, queries, keys, mask, scale_log2, softcap_log2, MASKED: tl.constexpr, cfg: tl.constexpr):
    """dQ of these queries by the keys n .. n + BLOCK_N."""
    q_MD, do_MV, lse2_M, delta_M, rows_M = queries
    k_ptr, v_ptr, k_offsets_ND, vT_offsets_VN, k_step, v_step = keys
    seqlen_q, seqlen_k, window_left, window_right = mask
    PADDED_D: tl.constexpr = q_MD.shape[1]
    PADDED_V: tl.constexpr = do_MV.shape[1]
    keys_N = n + tl.arange(0, cfg.BLOCK_N)
    d_D, d_V = tl.arange(0, PADDED_D), tl.arange(0, PADDED_V)
    k_pointers = k_ptr + n * k_step + k_offsets_ND
    v_pointers = v_ptr + n * v_step + vT_offsets_VN
    k_ND = load_tile(k_pointers, keys_N[:, None], seqlen_k, d_D[None, :], MASKED and cfg.RAGGED, cfg.HEAD_DIM, PADDED_D)
    scores_MN = dot(q_MD, tl.trans(k_ND), cfg.PRECISION)
    vT_VN = load_tile(
        v_pointers, keys_N[None, :], seqlen_k, d_V[:, None], MASKED and cfg.RAGGED, cfg.HEAD_DIM_V, PADDED_V
    )
    dp_MN = dot(do_MV, vT_VN, cfg.PRECISION)
    if cfg.SOFTCAP:
        bent_MN = tanh(scores_MN * scale_log2)
        p_MN = tl.exp2(bent_MN * softcap_log2 - lse2_M[:, None])
    else:
        p_MN = tl.exp2(scores_MN * scale_log2 - lse2_M[:, None])
    if MASKED:
        seen_MN = visible(
            rows_M[:, None], keys_N[None, :], seqlen_q, seqlen_k, window_left, window_right, cfg.HAS_LEFT, cfg.HAS_RIGHT
        )
        p_MN = tl.where(seen_MN, p_MN, 0.0)
    ds_MN = p_MN * (dp_MN - delta_M[:, None])
    if cfg.SOFTCAP:
        ds_MN *= 1.0 - bent_MN * bent_MN
    return dot_add(ds_MN.to(k_ND.dtype), k_ND, dq_MD, cfg.PRECISION)


@triton.jit(do_not_specialize=INTEGERS)
def query_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    dq_ptr,
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
    out_batch: tl.int64,
    out_head: tl.int64,
    out_row: tl.int64,
    out_col: tl.int64,
    do_batch: tl.int64,
    do_head: tl.int64,
    do_row: tl.int64,
    do_col: tl.int64,
    dq_batch: tl.int64,
    dq_head: tl.int64,
    dq_row: tl.int64,
    heads_q,
    group,
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
    GRAD_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dQ and delta of BLOCK_M rows of one query head."""
    tile, head_of_all = assign_tile(tl.cdiv(seqlen_q, BLOCK_M), heads, heads_per_section, HAS_RIGHT and not HAS_LEFT)
    batch = head_of_all // heads_q
    head = head_of_all - batch * heads_q
    head_kv = head // group
    first_row = tile * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    rows_M = first_row + tl.arange(0, BLOCK_M)

    q_ptr += (batch * q_batch + head * q_head + first_row * q_row) * STRIDE_UNIT
    k_ptr += (batch * k_batch + head_kv * k_head) * STRIDE_UNIT
    v_ptr += (batch * v_batch + head_kv * v_head) * STRIDE_UNIT
    out_ptr += (batch * out_batch + head * out_head + first_row * out_row) * STRIDE_UNIT
    do_ptr += (batch * do_batch + head * do_head + first_row * do_row) * STRIDE_UNIT
    dq_ptr += (batch * dq_batch + head * dq_head + first_row * dq_row) * STRIDE_UNIT
    row_numbers = head_of_all.to(tl.int64) * seqlen_q + rows_M
    m_M, n_N = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d_D, d_V = tl.arange(0, PADDED_D), tl.arange(0, PADDED_V)

    # 1. What this tile of queries brings along: q, dO, lse and delta = rowsum(O * dO) - dlse.
    q_offsets = tile_offsets(m_M[:, None], q_row * STRIDE_UNIT, d_D[None, :], q_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE)
    do_offsets = tile_offsets(
        m_M[:, None], do_row * STRIDE_UNIT, d_V[None, :], do_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE
    )
    out_offsets = tile_offsets(
        m_M[:, None], out_row * STRIDE_UNIT, d_V[None, :], out_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE
    )
    do_MV = load_tile(do_ptr + do_offsets, rows_M[:, None], seqlen_q, d_V[None, :], True, HEAD_DIM_V, PADDED_V)
    out_MV = load_tile(out_ptr + out_offsets, rows_M[:, None], seqlen_q, d_V[None, :], True, HEAD_DIM_V, PADDED_V)
    delta_M = tl.sum(out_MV.to(tl.float32) * do_MV.to(tl.float32), 1)
    if GRAD_LSE:
        delta_M -= tl.load(dlse_ptr + row_numbers, mask=rows_M < seqlen_q, other=0.0)
    tl.store(delta_ptr + row_numbers, delta_M, mask=rows_M < seqlen_q)
    lse2_M = load_lse2(lse_ptr + row_numbers, rows_M, seqlen_q, True)
    q_MD = load_tile(q_ptr + q_offsets, rows_M[:, None], seqlen_q, d_D[None, :], True, HEAD_DIM, PADDED_D)

    # 2. The keys, as in the forward pass.
    k_offsets = tile_offsets(n_N[:, None], k_row * STRIDE_UNIT, d_D[None, :], k_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE)
    vT_offsets = tile_offsets(n_N[None, :], v_row * STRIDE_UNIT, d_V[:, None], v_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE)
    start, inner_start, inner_end, end = key_ranges(
        first_row, last_row, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    dq_MD = tl.zeros([BLOCK_M, PADDED_D], tl.float32)
    cfg: tl.constexpr = _Traits(HEAD_DIM, HEAD_DIM_V, SOFTCAP, HAS_LEFT, HAS_RIGHT, RAGGED, PRECISION, BLOCK_N)
    queries = q_MD, do_MV, lse2_M, delta_M, rows_M
    keys = k_ptr, v_ptr, k_offsets, vT_offsets, k_row * STRIDE_UNIT, v_row * STRIDE_UNIT
    mask = seqlen_q, seqlen_k, window_left, window_right
    for block in tl.range(0, (inner_end - inner_start) // BLOCK_N):
        n = inner_start + block * BLOCK_N
        dq_MD = _query_step(n, dq_MD, queries, keys, mask, scale_log2, softcap_log2, False, cfg)
    if HAS_LEFT:
        for block in tl.range(0, (inner_start - start) // BLOCK_N):
            n = start + block * BLOCK_N
            dq_MD = _query_step(n, dq_MD, queries, keys, mask, scale_log2, softcap_log2, True, cfg)
    if HAS_RIGHT or RAGGED:
        for n in tl.range(inner_end, end, BLOCK_N):
            dq_MD = _query_step(n, dq_MD, queries, keys, mask, scale_log2, softcap_log2, True, cfg)

    dq_offsets = tile_offsets(m_M[:, None], dq_row * STRIDE_UNIT, d_D[None, :], dq_row, True, WIDE)
    dq_MD = (dq_MD * scale).to(dq_ptr.dtype.element_ty)
    store_tile(dq_ptr + dq_offsets, dq_MD, rows_M[:, None], seqlen_q, d_D[None, :], HEAD_DIM, PADDED_D)
