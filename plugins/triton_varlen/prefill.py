"""Attention over ragged batches, forward: one program computes one tile of rows over all keys that they see.

For training and for prompts, where queries are many and tiles fill the GPU by themselves. Where they do not, the keys
have to be divided too: split.py.

Measured facts (NVIDIA H200, torch 2.11, triton 3.6, bf16, causal, CUDA graphs; the best config of each cell against
FlashAttention-3's kernel for packed sequences in the same run):
- Packed, 4 x 4,096 and 16 x 2,048 tokens, uniform, lognormal and one long among short: 0.72-0.79 of it at D128 with
  32/8 heads (one cell 0.74 at 471 TFLOPS), 0.56-0.84 with 16/16, 0.72-1.03 at D64 with 32/32, 0.51-0.71 at D256.
- 64 rows and 4 warps beat 128 rows and 8 warps in all packed cells at D64 and D128 (D64 by 22-46%), not over pages
  of 16 (4 x 512 queries, 16,384 keys: 1,557 against 1,247 us; pages of 64: 1,078 and 1,097, FlashAttention-3 843).
- D256: blocks of 64 keys 420 TFLOPS, of 32 keys 294 (4 x 4,096 tokens), although both spill outside the loop.
- Conformance kit: wrong in 16 checks of 109, two of them by an illegal memory access, all with 8-bit keys and values
  (scales by tensor or head), queries of 16 bits, and a tile of V, or half of it, narrower than K's swizzle. The machine
  code took V's address from a register that held something else (configs.value_width). Since V is as wide as K's
  swizzle, all passed.
"""

import triton
import triton.language as tl

from registry.plugins.triton_varlen.keys import Pages, Strides, check_pages, keys_of, keys_of_all
from registry.plugins.triton_varlen.lengths import Lengths, assign_query_tile, check_lengths, read_sequence
from registry.plugins.triton_varlen.rows import Destination, load_queries, rows_of, write
from registry.plugins.triton_varlen.scores import Score, attend_all, key_range, nothing_yet

# Integer arguments that the compiler must not learn anything about: a kernel per length or stride would be too many.
INTEGERS = [
    *(f"{tensor}_{dim}" for tensor in ("q", "out", "do", "dq") for dim in ("row", "head")),
    *(f"{tensor}_{dim}" for tensor in ("k", "v", "dk", "dv", "k_scale", "v_scale") for dim in ("outer", "row", "head")),
    *(
        "table_row",
        "pages",
        "batch",
        "total_q",
        "room",
        "most_q",
        "most_k",
        "heads_kv",
        "heads_together",
        "slots",
        "least_share",
        "overhead",
        "checker",
        "window_left",
        "window_right",
    ),
]


@triton.jit(do_not_specialize=INTEGERS)
def prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    complaints_ptr,
    cu_q_ptr,
    cu_k_ptr,
    used_ptr,
    table_ptr,
    sinks_ptr,
    slopes_ptr,
    k_scale_ptr,
    v_scale_ptr,
    # Strides count units of Q_UNIT or K_UNIT elements: that is how the compiler knows by what they are divisible.
    q_row: tl.int64,
    q_head: tl.int64,
    out_row: tl.int64,
    out_head: tl.int64,
    k_outer: tl.int64,
    k_row: tl.int64,
    k_head: tl.int64,
    v_outer: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    k_scale_outer: tl.int64,
    k_scale_row: tl.int64,
    k_scale_head: tl.int64,
    v_scale_outer: tl.int64,
    v_scale_row: tl.int64,
    v_scale_head: tl.int64,
    table_row: tl.int64,
    pages,
    batch,
    total_q,
    room,
    most_q,
    most_k,
    heads_kv,
    heads_together,
    slots,
    scale_log2,
    cap_log2,
    window_left,
    window_right,
    cfg: tl.constexpr,
):
    # 1. Which tile is ours. Sequences that are shorter than their slots leave programs without rows.
    lengths = Lengths(cu_q_ptr, cu_k_ptr, used_ptr, batch, total_q, room)
    b, number, head = assign_query_tile(slots, heads_kv, heads_together, lengths, cfg)
    if cfg.COMPLAIN and tl.program_id(0) == 0:
        check_lengths(lengths, most_q, most_k, complaints_ptr, cfg)
    sequence = read_sequence(b, lengths, cfg)
    tiles = tl.cdiv(sequence.queries * cfg.GROUP, cfg.BLOCK_M)
    if cfg.RIGHT and not cfg.LEFT:  # the longest tile of a sequence first
        number = tiles - 1 - number
    if (number < 0) | (number >= tiles):
        return

    # 2. Where it lies.
    scale_strides = Strides(k_scale_outer, k_scale_row, k_scale_head, v_scale_outer, v_scale_row, v_scale_head)
    steps = Strides(k_outer, k_row, k_head, v_outer, v_row, v_head)
    pages = Pages(table_ptr, table_row, pages)
    keys = keys_of_all(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, steps, scale_strides, pages, cfg)
    keys = keys_of(b, head, sequence, keys, cfg)
    tile, rows = rows_of(number * cfg.BLOCK_M, head, sequence, slopes_ptr, cfg.BLOCK_M, cfg)
    q_MD, rows = load_queries(q_ptr, tile, rows, q_row * cfg.Q_UNIT, q_head * cfg.Q_UNIT, cfg)
    if cfg.PER_HEAD:
        scale_log2 *= tl.load(keys.k_scale_ptr)
    score = Score(scale_log2, cap_log2, window_left, window_right)

    # 3. The keys: three loops, so that only blocks on an edge of the mask pay for it.
    start, inner_start, inner_end, end = key_range(rows, sequence.keys, score, cfg)
    if cfg.COMPLAIN and cfg.PAGE > 0 and head == 0:
        check_pages(keys, start, end, number, tiles, complaints_ptr, cfg)
    acc_MV, odd_MV, max_M, sum_M = nothing_yet(cfg)
    acc_MV, odd_MV, max_M, sum_M = attend_all(
        inner_start, inner_end, q_MD, rows, keys, score, acc_MV, odd_MV, max_M, sum_M, False, cfg
    )
    if cfg.LEFT:
        acc_MV, odd_MV, max_M, sum_M = attend_all(
            start, inner_start, q_MD, rows, keys, score, acc_MV, odd_MV, max_M, sum_M, True, cfg
        )
    acc_MV, odd_MV, max_M, sum_M = attend_all(
        inner_end, end, q_MD, rows, keys, score, acc_MV, odd_MV, max_M, sum_M, True, cfg
    )
    results = Destination(out_ptr, lse_ptr, sinks_ptr, out_row * cfg.Q_UNIT, out_head * cfg.Q_UNIT, total_q)
    write(results, keys, tile, acc_MV, odd_MV, max_M, sum_M, cfg)
