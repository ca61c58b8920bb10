"""FlashAttention-2, forward, in plain Triton. Read it top to bottom; docs/learn.md explains it line by line.

One program computes BLOCK_M rows of the output of one head. It keeps its query tile, walks over the keys in blocks of
BLOCK_N and carries three running values per row: the largest score so far, the sum of exponentials below it, and the
weighted sum of values. The matrix of probabilities exists one tile at a time, in registers, and is never stored.

Measured facts (NVIDIA H200, torch 2.11, triton 3.6, bf16, 16k tokens, hidden 2048; benchmarks/results/h200):
- Over torch's flash kernel, first config: geometric mean 1.39 at D64, 1.36 at D128, 1.51 at D256 (18 cells, none
  under 1.20).
- A loop from a run-time lower bound, or a masked loop before the unmasked one, made ptxas serialise every wgmma
  (C7515). D256 full 16k: 371 TFLOPS, and 517 with loops that count from 0, unmasked first (one config, two runs).
- A window of 1,024 at 16k costs 8% (D64) and 10% (D128) of full attention.
- Heads over 256, 4k (wide_heads.txt): 249 TFLOPS at 512 and 226 at 576/512, full (256: 508). Scores are found
  once for each half of the values, and 128 rows with all of 512 columns leave room for 32 keys at a time.
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
    TAIL: Any
    CHUNKS: Any
    SOFTCAP: Any
    HAS_LEFT: Any
    HAS_RIGHT: Any
    RAGGED: Any
    PRECISION: Any
    BLOCK_N: Any


@triton.jit
def _attend(
    n, acc_MV, max_M, sum_M, queries, keys, mask, scale_log2, softcap_log2, MASKED: tl.constexpr, cfg: tl.constexpr
):
    """One step of the streaming softmax: the keys n .. n + BLOCK_N."""
    q_MD, tail_q_MD, rows_M = queries
    k_ptr, v_ptr, kT_offsets_DN, tail_offsets_DN, v_offsets_NV, first_v, k_step, v_step = keys
    seqlen_q, seqlen_k, window_left, window_right = mask
    PADDED_D: tl.constexpr = q_MD.shape[1]
    PADDED_V: tl.constexpr = acc_MV.shape[1]
    keys_N = n + tl.arange(0, cfg.BLOCK_N)
    d_D, d_V = tl.arange(0, PADDED_D), first_v + tl.arange(0, PADDED_V)
    # The base moves as one 64-bit scalar (strides are int64); the tile's own offsets are loop-invariant.
    k_pointers = k_ptr + n * k_step + kT_offsets_DN
    kT_DN = load_tile(
        k_pointers, keys_N[None, :], seqlen_k, d_D[:, None], MASKED and cfg.RAGGED, cfg.HEAD_DIM, PADDED_D
    )
    scores_MN = dot(q_MD, kT_DN, cfg.PRECISION)
    if cfg.TAIL:
        d_T = PADDED_D + tl.arange(0, cfg.TAIL)
        k_pointers = k_ptr + n * k_step + tail_offsets_DN
        WIDTH: tl.constexpr = PADDED_D + cfg.TAIL
        kT_DN = load_tile(
            k_pointers, keys_N[None, :], seqlen_k, d_T[:, None], MASKED and cfg.RAGGED, cfg.HEAD_DIM, WIDTH
        )
        scores_MN = dot_add(tail_q_MD, kT_DN, scores_MN, cfg.PRECISION)
    if cfg.SOFTCAP:
        # From here on the scores are in units of log2(e), as scale_log2 would have made them.
        scores_MN = tanh(scores_MN * scale_log2) * softcap_log2
        factor = 1.0
    else:
        factor = scale_log2
    if MASKED:
        seen_MN = visible(
            rows_M[:, None], keys_N[None, :], seqlen_q, seqlen_k, window_left, window_right, cfg.HAS_LEFT, cfg.HAS_RIGHT
        )
        scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
    # The scale is positive, so the maximum can be scaled instead of each score: one FMA per score below.
    new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * factor)
    if MASKED:
        # A row that has seen no key yet would subtract -inf from -inf.
        finite_max_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    else:
        finite_max_M = new_max_M
    p_MN = tl.exp2(scores_MN * factor - finite_max_M[:, None])
    rescale_M = tl.exp2(max_M - finite_max_M)
    sum_M = sum_M * rescale_M + tl.sum(p_MN, 1)
    acc_MV = acc_MV * rescale_M[:, None]
    v_pointers = v_ptr + n * v_step + v_offsets_NV
    WIDTH_V: tl.constexpr = PADDED_V * cfg.CHUNKS
    v_NV = load_tile(
        v_pointers, keys_N[:, None], seqlen_k, d_V[None, :], MASKED and cfg.RAGGED, cfg.HEAD_DIM_V, WIDTH_V
    )
    acc_MV = dot_add(p_MN.to(v_NV.dtype), v_NV, acc_MV, cfg.PRECISION)
    return acc_MV, new_max_M, sum_M


@triton.jit(do_not_specialize=INTEGERS)
def attention_forward(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    # Strides count units of STRIDE_UNIT elements: that is how the compiler knows by what they are divisible.
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
    heads_q,
    group,
    heads,
    heads_per_section,
    seqlen_q,
    seqlen_k,
    scale_log2,
    softcap_log2,
    window_left,
    window_right,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_D: tl.constexpr,
    PADDED_V: tl.constexpr,
    TAIL: tl.constexpr,
    CHUNKS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    UNIT_COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    RAGGED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
    LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # 1. Which tile is ours. A grouped query head reads the keys of head // group: nothing is expanded.
    tile, head_of_all = assign_tile(tl.cdiv(seqlen_q, BLOCK_M), heads, heads_per_section, HAS_RIGHT and not HAS_LEFT)
    batch = head_of_all // heads_q
    head = head_of_all - batch * heads_q
    head_kv = head // group
    first_row = tile * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, seqlen_q) - 1
    rows_M = first_row + tl.arange(0, BLOCK_M)

    # 2. Where it lies. Strides are int64, so these products are too: a tensor may hold more than 2^31 elements.
    q_ptr += (batch * q_batch + head * q_head + first_row * q_row) * STRIDE_UNIT
    k_ptr += (batch * k_batch + head_kv * k_head) * STRIDE_UNIT
    v_ptr += (batch * v_batch + head_kv * v_head) * STRIDE_UNIT
    m_M, n_N = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    first_v = 0
    if CHUNKS > 1:  # the columns of the values are shared out: each program finds the same scores for some of them
        first_v = tl.program_id(1) * PADDED_V
    d_D, d_V = tl.arange(0, PADDED_D), first_v + tl.arange(0, PADDED_V)
    q_offsets = tile_offsets(m_M[:, None], q_row * STRIDE_UNIT, d_D[None, :], q_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE)
    kT_offsets = tile_offsets(n_N[None, :], k_row * STRIDE_UNIT, d_D[:, None], k_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE)
    v_offsets = tile_offsets(n_N[:, None], v_row * STRIDE_UNIT, d_V[None, :], v_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE)
    q_MD = load_tile(q_ptr + q_offsets, rows_M[:, None], seqlen_q, d_D[None, :], True, HEAD_DIM, PADDED_D)
    if NEGATE:  # a negative scale, made positive
        q_MD = -q_MD
    tail_q_MD, tail_offsets = q_MD, kT_offsets
    if TAIL:  # tiles are powers of two wide: what a head has beyond one is a tile of its own
        d_T = PADDED_D + tl.arange(0, TAIL)
        q_offsets = tile_offsets(
            m_M[:, None], q_row * STRIDE_UNIT, d_T[None, :], q_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE
        )
        tail_offsets = tile_offsets(
            n_N[None, :], k_row * STRIDE_UNIT, d_T[:, None], k_col * STRIDE_UNIT, UNIT_COLUMNS, WIDE
        )
        WIDTH: tl.constexpr = PADDED_D + TAIL
        tail_q_MD = load_tile(q_ptr + q_offsets, rows_M[:, None], seqlen_q, d_T[None, :], True, HEAD_DIM, WIDTH)
        if NEGATE:
            tail_q_MD = -tail_q_MD

    # 3. The keys: three loops, so that only blocks on an edge of the mask pay for it.
    start, inner_start, inner_end, end = key_ranges(
        first_row, last_row, seqlen_q, seqlen_k, window_left, window_right, HAS_LEFT, HAS_RIGHT, BLOCK_N
    )
    cfg: tl.constexpr = _Traits(
        HEAD_DIM, HEAD_DIM_V, TAIL, CHUNKS, SOFTCAP, HAS_LEFT, HAS_RIGHT, RAGGED, PRECISION, BLOCK_N
    )
    queries, mask = (q_MD, tail_q_MD, rows_M), (seqlen_q, seqlen_k, window_left, window_right)
    keys = k_ptr, v_ptr, kT_offsets, tail_offsets, v_offsets, first_v, k_row * STRIDE_UNIT, v_row * STRIDE_UNIT
    acc_MV = tl.zeros([BLOCK_M, PADDED_V], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    for block in tl.range(0, (inner_end - inner_start) // BLOCK_N):
        n = inner_start + block * BLOCK_N
        acc_MV, max_M, sum_M = _attend(
            n, acc_MV, max_M, sum_M, queries, keys, mask, scale_log2, softcap_log2, False, cfg
        )
    if HAS_LEFT:
        for block in tl.range(0, (inner_start - start) // BLOCK_N):
            n = start + block * BLOCK_N
            acc_MV, max_M, sum_M = _attend(
                n, acc_MV, max_M, sum_M, queries, keys, mask, scale_log2, softcap_log2, True, cfg
            )
    if HAS_RIGHT or RAGGED:
        for n in tl.range(inner_end, end, BLOCK_N):
            acc_MV, max_M, sum_M = _attend(
                n, acc_MV, max_M, sum_M, queries, keys, mask, scale_log2, softcap_log2, True, cfg
            )

    # 4. Normalise once, at the end. A row that saw no key has sum 0: its output is 0 and its log-sum-exp is -inf.
    out_MV = acc_MV / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
    out_ptr += (batch * out_batch + head * out_head + first_row * out_row) * STRIDE_UNIT
    out_offsets = tile_offsets(m_M[:, None], out_row * STRIDE_UNIT, d_V[None, :], out_row, True, WIDE)
    out_MV = out_MV.to(out_ptr.dtype.element_ty)
    store_tile(out_ptr + out_offsets, out_MV, rows_M[:, None], seqlen_q, d_V[None, :], HEAD_DIM_V, PADDED_V * CHUNKS)
    if LSE:
        lse_M = (max_M + tl.log2(sum_M)) * 0.6931471805599453  # to natural logarithms
        lse_M = tl.where(sum_M == 0.0, float("-inf"), lse_M)
        tl.store(lse_ptr + head_of_all.to(tl.int64) * seqlen_q + rows_M, lse_M, mask=rows_M < seqlen_q)
