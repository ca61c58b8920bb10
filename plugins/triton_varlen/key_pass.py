"""Gradients over packed sequences, second pass: dK and dV of a tile of keys, over the rows of all heads that share it.

Rows are (query, head) pairs as everywhere, so one loop goes over a group's heads together.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from registry.plugins.triton_varlen.lengths import Lengths, assign_key_tile, read_sequence
from registry.plugins.triton_varlen.prefill import INTEGERS
from registry.plugins.triton_varlen.scores import Score, dot, probabilities, product, to_powers_of_two


class Queries(NamedTuple):
    """The rows of one key head of one sequence; strides in elements."""

    q_ptr: Any
    do_ptr: Any
    lse_ptr: Any
    delta_ptr: Any
    q_row: Any
    q_head: Any
    do_row: Any
    do_head: Any
    total_q: Any
    count: Any
    shift: Any


@triton.jit
def _load_rows(
    ptr, m, row, head, count, MASKED: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr, cfg: tl.constexpr
):
    """[M, columns] of rows m .. m + BLOCK_M. Where a tile holds whole queries its offsets do not change with m."""
    GROUP: tl.constexpr = cfg.GROUP
    m_M = tl.arange(0, cfg.BLOCK_M)
    d_D = tl.arange(0, PADDED)
    if cfg.BLOCK_M % GROUP == 0 and not cfg.WIDE:
        offsets_M = m_M // GROUP * row.to(tl.int32) + m_M % GROUP * head.to(tl.int32)
        pointers = ptr + m // GROUP * row + (offsets_M[:, None] + d_D[None, :])
    else:
        pointers = ptr + ((m + m_M) // GROUP * row + (m + m_M) % GROUP * head)[:, None] + d_D[None, :]
    inside = (m + m_M < count)[:, None]
    if MASKED and COLUMNS < PADDED:
        return tl.load(pointers, mask=inside & (d_D < COLUMNS)[None, :], other=0.0)
    if MASKED:
        return tl.load(pointers, mask=inside, other=0.0)
    if COLUMNS < PADDED:
        return tl.load(pointers, mask=(d_D < COLUMNS)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_sums(ptr, m, queries, other, MASKED: tl.constexpr, cfg: tl.constexpr):
    """[M] of a row sum [heads, tokens]."""
    GROUP: tl.constexpr = cfg.GROUP
    row_M = m + tl.arange(0, cfg.BLOCK_M)
    pointers = ptr + row_M % GROUP * queries.total_q + row_M // GROUP
    if MASKED:
        return tl.load(pointers, mask=row_M < queries.count, other=other)
    return tl.load(pointers)


@triton.jit
def _step(
    m, k_ND, v_NV, keys_N, end, queries, slopes_ptr, score, dk_ND, dv_NV, MASKED: tl.constexpr, cfg: tl.constexpr
):
    """Products are computed transposed, [N, M]: then P^T and dS^T are in registers as the next products want them."""
    GROUP: tl.constexpr = cfg.GROUP
    row_M = m + tl.arange(0, cfg.BLOCK_M)
    q_MD = _load_rows(queries.q_ptr, m, queries.q_row, queries.q_head, queries.count, MASKED, cfg.D, cfg.PADDED_D, cfg)
    lse2_M = to_powers_of_two(_load_sums(queries.lse_ptr, m, queries, float("-inf"), MASKED, cfg))
    delta_M = _load_sums(queries.delta_ptr, m, queries, 0.0, MASKED, cfg)
    slope_M = delta_M
    if cfg.ALIBI:
        slope_M = tl.load(slopes_ptr + row_M % GROUP).to(tl.float32) * 1.4426950408889634
    productsT_NM = product(k_ND, tl.trans(q_MD), cfg.TF32)
    pT_NM, bentT_NM = probabilities(
        productsT_NM,
        (row_M // GROUP + queries.shift)[None, :],
        slope_M[None, :],
        lse2_M[None, :],
        keys_N[:, None],
        end,
        score,
        MASKED,
        cfg,
    )
    do_MV = _load_rows(
        queries.do_ptr, m, queries.do_row, queries.do_head, queries.count, MASKED, cfg.V, cfg.PADDED_V, cfg
    )
    if cfg.WANT_DV:
        dv_NV = dot(pT_NM.to(do_MV.dtype), do_MV, dv_NV, cfg.TF32)
    if cfg.WANT_DK:
        dpT_NM = product(v_NV, tl.trans(do_MV), cfg.TF32)
        dsT_NM = pT_NM * (dpT_NM - delta_M[None, :])
        if cfg.CAP:
            dsT_NM *= 1.0 - bentT_NM * bentT_NM
        dk_ND = dot(dsT_NM.to(q_MD.dtype), q_MD, dk_ND, cfg.TF32)
    return dk_ND, dv_NV


@triton.jit
def _row_range(first_key, last_key, queries, score, cfg: tl.constexpr):
    """(start, inner_start, inner_end, end): which rows see any of these keys, and which blocks of rows see them all."""
    start = first_key * 0
    inner_start = first_key * 0
    end = queries.count
    inner_end = queries.count
    if cfg.RIGHT:
        first = tl.maximum(first_key - queries.shift - score.right, 0) * cfg.GROUP
        start = tl.minimum(first, end) // cfg.BLOCK_M * cfg.BLOCK_M
        first = tl.maximum(last_key - queries.shift - score.right, 0) * cfg.GROUP
        inner_start = tl.cdiv(tl.minimum(first, end), cfg.BLOCK_M) * cfg.BLOCK_M
    if cfg.LEFT:
        end = tl.minimum(end, tl.maximum(last_key - queries.shift + score.left + 1, 0) * cfg.GROUP)
        inner_end = tl.minimum(inner_end, tl.maximum(first_key - queries.shift + score.left + 1, 0) * cfg.GROUP)
    inner_end = inner_end // cfg.BLOCK_M * cfg.BLOCK_M
    inner_start = tl.minimum(inner_start, tl.cdiv(end, cfg.BLOCK_M) * cfg.BLOCK_M)
    return start, inner_start, tl.maximum(inner_end, inner_start), end


@triton.jit(do_not_specialize=INTEGERS)
def key_pass(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    cu_q_ptr,
    cu_k_ptr,
    slopes_ptr,
    q_row: tl.int64,
    q_head: tl.int64,
    do_row: tl.int64,
    do_head: tl.int64,
    k_row: tl.int64,
    k_head: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    dk_row: tl.int64,
    dk_head: tl.int64,
    dv_row: tl.int64,
    dv_head: tl.int64,
    batch,
    total_q,
    room,
    heads_kv,
    heads_together,
    slots,
    scale,
    scale_log2,
    cap_log2,
    window_left,
    window_right,
    cfg: tl.constexpr,
):
    BLOCK_N: tl.constexpr = cfg.BLOCK_N
    DK_WIDTH: tl.constexpr = cfg.PADDED_D if cfg.WANT_DK else 1
    DV_WIDTH: tl.constexpr = cfg.PADDED_V if cfg.WANT_DV else 1
    lengths = Lengths(cu_q_ptr, cu_k_ptr, cu_k_ptr, batch, total_q, room)
    b, number, head = assign_key_tile(slots, heads_kv, heads_together, lengths, cfg)
    sequence = read_sequence(b, lengths, cfg)
    first_key = number * BLOCK_N
    if first_key >= sequence.keys:
        return
    keys_N = first_key + tl.arange(0, BLOCK_N)
    last_key = tl.minimum(first_key + BLOCK_N, sequence.keys) - 1

    # 1. The keys and values of this tile.
    inside_N = keys_N < sequence.keys
    d_D = tl.arange(0, cfg.PADDED_D)
    d_V = tl.arange(0, cfg.PADDED_V)
    in_D = inside_N[:, None] & (d_D < cfg.D)[None, :]
    in_V = inside_N[:, None] & (d_V < cfg.V)[None, :]
    token_N = (sequence.k_start + keys_N).to(tl.int64)[:, None]
    k_ptr += head * (k_head * cfg.K_UNIT)
    v_ptr += head * (v_head * cfg.K_UNIT)
    k_ND = tl.load(k_ptr + token_N * (k_row * cfg.K_UNIT) + d_D[None, :], mask=in_D, other=0.0)
    v_NV = tl.load(v_ptr + token_N * (v_row * cfg.K_UNIT) + d_V[None, :], mask=in_V, other=0.0)

    # 2. The rows that see them.
    first_head = head * cfg.GROUP
    sums = first_head.to(tl.int64) * total_q + sequence.q_start
    queries = Queries(
        q_ptr + (sequence.q_start * q_row + first_head * q_head) * cfg.Q_UNIT,
        do_ptr + (sequence.q_start * do_row + first_head * do_head) * cfg.Q_UNIT,
        lse_ptr + sums,
        delta_ptr + sums,
        q_row * cfg.Q_UNIT,
        q_head * cfg.Q_UNIT,
        do_row * cfg.Q_UNIT,
        do_head * cfg.Q_UNIT,
        total_q,
        sequence.queries * cfg.GROUP,
        sequence.keys - sequence.queries,
    )
    if cfg.ALIBI:
        slopes_ptr += first_head
    score = Score(scale_log2, cap_log2, window_left, window_right)
    start, inner_start, inner_end, end = _row_range(first_key, last_key, queries, score, cfg)
    dk_ND = tl.zeros([BLOCK_N, DK_WIDTH], tl.float32)
    dv_NV = tl.zeros([BLOCK_N, DV_WIDTH], tl.float32)
    # Keys beyond the last need no mask: each row of dK and dV is a key's own, and theirs are not stored.
    for block in tl.range(0, (inner_end - inner_start) // cfg.BLOCK_M):
        m = inner_start + block * cfg.BLOCK_M
        dk_ND, dv_NV = _step(m, k_ND, v_NV, keys_N, sequence.keys, queries, slopes_ptr, score, dk_ND, dv_NV, False, cfg)
    if cfg.RIGHT:
        for block in tl.range(0, (inner_start - start) // cfg.BLOCK_M):
            m = start + block * cfg.BLOCK_M
            dk_ND, dv_NV = _step(
                m, k_ND, v_NV, keys_N, sequence.keys, queries, slopes_ptr, score, dk_ND, dv_NV, True, cfg
            )
    for block in tl.range(0, tl.cdiv(end - inner_end, cfg.BLOCK_M)):
        m = inner_end + block * cfg.BLOCK_M
        dk_ND, dv_NV = _step(m, k_ND, v_NV, keys_N, sequence.keys, queries, slopes_ptr, score, dk_ND, dv_NV, True, cfg)

    # 3. What they add up to.
    if cfg.WANT_DK:
        dk_ptr += head * (dk_head * cfg.K_UNIT)
        dk_ND = (dk_ND * scale).to(dk_ptr.dtype.element_ty)
        tl.store(dk_ptr + token_N * (dk_row * cfg.K_UNIT) + d_D[None, :], dk_ND, mask=in_D)
    if cfg.WANT_DV:
        dv_ptr += head * (dv_head * cfg.K_UNIT)
        tl.store(dv_ptr + token_N * (dv_row * cfg.K_UNIT) + d_V[None, :], dv_NV.to(dv_ptr.dtype.element_ty), mask=in_V)
