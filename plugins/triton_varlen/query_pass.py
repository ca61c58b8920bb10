"""Gradients over packed sequences, first pass: dQ of a tile of rows, and the delta that the key pass needs.

With S = scale q k^T (capped, biased and masked), P = exp(S - lse), O = P V:
    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)        dQ = scale dS K        dK = scale dS^T Q
where delta = rowsum(O * dO) - dlse is what the softmax's normalisation and the log-sum-exp hand back to every score.
A sink is a score without a value: its gradient is -sum(P_sink * delta). That is a sum of few large terms, in which the
rounding of O to 16 bits would show; so where there are sinks, this pass then leaves rowsum(P * dP) - dlse as delta, all
in float32. An O in float32 knows delta better than P and dP do, which come from products in tf32.
Where float32 is multiplied as tf32, delta takes dO as dP does: else dP - delta would not vanish where P is 1.

Every output is written by one program, in a fixed order: no atomics, the same bits on every run.

Measured facts (as in prefill.py; both passes against FlashAttention-3's backward, which uses atomics here):
- 0.40-0.71 of it at D128, 0.54-1.02 at D64, 0.36-0.59 at D256. Best cells: 287 TFLOPS at D128, 285 at D64, 231 at D256
  (4 x 4,096 tokens, causal, 2.5 times the forward's operations).
- D128, key pass: 64 rows by 128 keys 287 TFLOPS with the query pass, 32 by 128 261, 64 by 64 199; with 64
  rows instead of 128 in the query pass both take 40% longer.
"""

import triton
import triton.language as tl

from registry.plugins.triton_varlen.keys import Keys, Pages, Strides, keys_of, load_block
from registry.plugins.triton_varlen.lengths import Lengths, assign_query_tile, check_lengths, read_sequence
from registry.plugins.triton_varlen.prefill import INTEGERS
from registry.plugins.triton_varlen.rows import load_rows, rows_of, store_rows, sums_at
from registry.plugins.triton_varlen.scores import Score, dot, key_range, probabilities, product, to_powers_of_two
from registry.toolbox.arithmetic import to_tf32


@triton.jit
def _step(n, q_MD, do_MV, lse2_M, delta_M, rows, keys, score, dq_MD, sum_M, MASKED: tl.constexpr, cfg: tl.constexpr):
    strides = keys.strides
    keys_N = n + tl.arange(0, cfg.BLOCK_N)
    page = (n * 0).to(tl.int64)
    k_ND = load_block(
        keys.k_ptr, n, page, n, strides.k_outer, strides.k_row, keys.end, MASKED, cfg.D, cfg.PADDED_D, cfg
    )
    products_MN = product(q_MD, tl.trans(k_ND), cfg.TF32)
    v_NV = load_block(
        keys.v_ptr, n, page, n, strides.v_outer, strides.v_row, keys.end, MASKED, cfg.V, cfg.PADDED_V, cfg
    )
    dp_MN = product(do_MV, tl.trans(v_NV), cfg.TF32)
    p_MN, bent_MN = probabilities(
        products_MN,
        rows.diagonal_M[:, None],
        rows.slope_M[:, None],
        lse2_M[:, None],
        keys_N[None, :],
        keys.end,
        score,
        MASKED,
        cfg,
    )
    if cfg.SINKS and k_ND.dtype != tl.float32:
        sum_M += tl.sum(p_MN * dp_MN, 1)
    ds_MN = p_MN * (dp_MN - delta_M[:, None])
    if cfg.CAP:
        ds_MN *= 1.0 - bent_MN * bent_MN
    return dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD, cfg.TF32), sum_M


@triton.jit(do_not_specialize=INTEGERS)
def query_pass(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    delta_ptr,
    dq_ptr,
    complaints_ptr,
    cu_q_ptr,
    cu_k_ptr,
    slopes_ptr,
    q_row: tl.int64,
    q_head: tl.int64,
    out_row: tl.int64,
    out_head: tl.int64,
    do_row: tl.int64,
    do_head: tl.int64,
    dq_row: tl.int64,
    dq_head: tl.int64,
    k_row: tl.int64,
    k_head: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    batch,
    total_q,
    room,
    most_q,
    most_k,
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
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    PADDED_D: tl.constexpr = cfg.PADDED_D
    lengths = Lengths(cu_q_ptr, cu_k_ptr, cu_k_ptr, batch, total_q, room)
    b, number, head = assign_query_tile(slots, heads_kv, heads_together, lengths, cfg)
    if cfg.COMPLAIN and tl.program_id(0) == 0:
        check_lengths(lengths, most_q, most_k, complaints_ptr, cfg)
    sequence = read_sequence(b, lengths, cfg)
    tiles = tl.cdiv(sequence.queries * cfg.GROUP, BLOCK_M)
    if cfg.RIGHT and not cfg.LEFT:  # the longest tile of a sequence first
        number = tiles - 1 - number
    if (number < 0) | (number >= tiles):
        return

    # 1. What this tile of rows brings along: q, dO, lse, and delta.
    tile, rows = rows_of(number * BLOCK_M, head, sequence, slopes_ptr, BLOCK_M, cfg)
    do_MV = load_rows(do_ptr, tile, do_row * cfg.Q_UNIT, do_head * cfg.Q_UNIT, cfg.V, cfg.PADDED_V, cfg)
    out_MV = load_rows(out_ptr, tile, out_row * cfg.Q_UNIT, out_head * cfg.Q_UNIT, cfg.V, cfg.PADDED_V, cfg)
    if cfg.TF32:
        do_MV = to_tf32(do_MV)
    delta_M = tl.sum(out_MV.to(tl.float32) * do_MV.to(tl.float32), 1)
    sum_M = delta_M * 0.0
    if cfg.GRAD_LSE:
        dlse_M = tl.load(sums_at(dlse_ptr, tile, total_q), mask=tile.there_M, other=0.0)
        delta_M -= dlse_M
        sum_M -= dlse_M
    lse_M = tl.load(sums_at(lse_ptr, tile, total_q), mask=tile.there_M, other=float("-inf"))
    lse2_M = to_powers_of_two(lse_M)
    q_MD = load_rows(q_ptr, tile, q_row * cfg.Q_UNIT, q_head * cfg.Q_UNIT, cfg.D, PADDED_D, cfg)

    # 2. The keys, as in the forward pass.
    strides = Strides(0, k_row * cfg.K_UNIT, k_head * cfg.K_UNIT, 0, v_row * cfg.K_UNIT, v_head * cfg.K_UNIT)
    keys = Keys(k_ptr, v_ptr, cu_k_ptr, cu_k_ptr, strides, strides, Pages(cu_k_ptr, 0, 1), 0)
    keys = keys_of(b, head, sequence, keys, cfg)
    score = Score(scale_log2, cap_log2, window_left, window_right)
    start, inner_start, inner_end, end = key_range(rows, sequence.keys, score, cfg)
    dq_MD = tl.zeros([BLOCK_M, PADDED_D], tl.float32)
    for block in tl.range(0, (inner_end - inner_start) // cfg.BLOCK_N):
        n = inner_start + block * cfg.BLOCK_N
        dq_MD, sum_M = _step(n, q_MD, do_MV, lse2_M, delta_M, rows, keys, score, dq_MD, sum_M, False, cfg)
    if cfg.LEFT:
        for block in tl.range(0, (inner_start - start) // cfg.BLOCK_N):
            n = start + block * cfg.BLOCK_N
            dq_MD, sum_M = _step(n, q_MD, do_MV, lse2_M, delta_M, rows, keys, score, dq_MD, sum_M, True, cfg)
    for block in tl.range(0, tl.cdiv(end - inner_end, cfg.BLOCK_N)):
        n = inner_end + block * cfg.BLOCK_N
        dq_MD, sum_M = _step(n, q_MD, do_MV, lse2_M, delta_M, rows, keys, score, dq_MD, sum_M, True, cfg)
    if cfg.SINKS and q_MD.dtype != tl.float32:
        delta_M = sum_M
    tl.store(sums_at(delta_ptr, tile, total_q), delta_M, mask=tile.there_M)
    store_rows(dq_ptr, tile, dq_row * cfg.Q_UNIT, dq_head * cfg.Q_UNIT, dq_MD * scale, cfg.D, PADDED_D, cfg)
