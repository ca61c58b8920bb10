"""Attention of few queries over many keys where all sequences are as long: the keys are divided among all SMs.

As in split.py, the work is a line of blocks of keys, one tile after the other, and each program takes a share of it;
what shares leave of one tile is added up by who comes last, in the order of the keys. Here the host knows the lengths,
so it works the shares out, and a program asks memory for nothing before its queries and keys.

A line holds the tiles of some of the key heads: those of other lines lie beside them and are read at the same time,
which matters where memory holds the heads of a token side by side. Tiles of the same keys follow one another.

Measured facts (NVIDIA H200, torch 2.11, triton 3.6, bf16, CUDA graphs over rotated inputs, 24 shapes of 1 to 16 queries
over 520 to 130,001 keys, batches of 1 to 64, against the fastest of cuDNN's, torch's flash and, on 8, gluon_fa3):
- The best of four tiles a shape (some of today's were tried after, beside them, and are faster where said): 1.31 of it
  by geometric mean, least 0.81 (two sequences of 20,011 keys of one head: 104 parts of each are added up by
  one program; half as many, of 8 warps and one an SM, take 14.0 us instead of 16.6, cuDNN 13.4).
- 32/8 heads, D128, one query: 6.0 us at 1k (cuDNN 7.5), 68.1 at 16 x 4k (65.5), 251.8 at 64 x 4,099 (246.8); 128.1 at
  one sequence of 130,001 (127.3), 4.16 TB/s. A window of 1,024 over 5 x 8,000: 10.5 us, torch's flash kernel 42.3.
- 16 queries, 32/8 heads: 24.8 us at one sequence of 8,192 (torch's flash kernel 42.9).
- 64 rows at D128: 8 warps and one program an SM where few tiles are shared by all (24.8 us, 4 warps and two 44.2), 4
  warps and two programs where there are many (308 us at 24 x 12,001, 402 the other way), although their loop spills.
- 64 rows at D64 want 4 warps: 32.3 us at 12 x 3,001, 8 warps 48.2. 32 rows at D256 want 8, and keys by 64: 33.8 us at
  5 x 7,777 of one head, 4 warps and keys by 32 86.3.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.plugins.triton_varlen.keys import Pages, Strides, keys_of, keys_of_all
from registry.plugins.triton_varlen.lengths import Sequence
from registry.plugins.triton_varlen.parts import add_up, leave
from registry.plugins.triton_varlen.rows import Destination, load_queries, rows_of, write
from registry.plugins.triton_varlen.scores import Score, attend_all, key_range, nothing_yet
from registry.plugins.triton_varlen.split import _quotient

# Integer arguments that the compiler must not learn anything about: a kernel per length or stride would be too many.
INTEGERS = [
    *(f"{tensor}_{dim}" for tensor in ("q", "out", "k", "v") for dim in ("outer", "row", "head")),
    *("queries", "keys", "heads", "heads_in_line", "first_block", "blocks", "filling", "share"),
    *("total", "window_left", "window_right"),
]


@triton.jit(do_not_specialize=INTEGERS)
def split_dense(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
    counters_ptr,
    # Strides count units of Q_UNIT or K_UNIT elements: that is how the compiler knows by what they are divisible.
    q_outer: tl.int64,
    q_row: tl.int64,
    q_head: tl.int64,
    out_outer: tl.int64,
    out_row: tl.int64,
    out_head: tl.int64,
    k_outer: tl.int64,
    k_row: tl.int64,
    k_head: tl.int64,
    v_outer: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    queries,
    keys,
    heads,  # of queries
    heads_in_line,  # of keys
    first_block,
    blocks,
    filling,
    share,
    total,
    scale_log2,
    cap_log2,
    window_left,
    window_right,
    cfg: tl.constexpr,
):
    if cfg.PDL:
        gdc_wait()
        gdc_launch_dependents()
    score = Score(scale_log2, cap_log2, window_left, window_right)
    sequence = Sequence(0, queries, 0, keys)
    steps = Strides(k_outer, k_row, k_head, v_outer, v_row, v_head)
    all_keys = keys_of_all(k_ptr, v_ptr, k_ptr, v_ptr, steps, steps, Pages(k_ptr, 0, keys), cfg)
    line, chunk = tl.program_id(0), tl.program_id(1)
    lines, chunks = tl.num_programs(0), tl.num_programs(1)
    sums_ptr = parts_ptr + lines * chunks * (2 * cfg.ROWS * cfg.PADDED_V)  # behind the sums of values
    tiles = tl.cdiv(queries * cfg.GROUP, cfg.BLOCK_M)  # of a head
    unit = chunk * share
    stop = tl.minimum(unit + share, total)
    while unit < stop:
        number = _quotient(unit, filling + blocks)
        begin = number * (filling + blocks) + filling
        unit = tl.maximum(unit, begin)
        if unit < stop:
            take = tl.minimum(begin + blocks, stop) - unit
            among_heads = _quotient(number, tiles)
            b = _quotient(among_heads, heads_in_line)
            head = (among_heads - b * heads_in_line) * lines + line
            row = (number - among_heads * tiles) * cfg.BLOCK_M
            tile, rows = rows_of(row, head, sequence, q_ptr, cfg.BLOCK_M, cfg)
            here = keys_of(b, head, sequence, all_keys, cfg)
            n = (first_block + unit - begin) * cfg.BLOCK_N
            start, _, _, end = key_range(rows, keys, score, cfg)
            end = tl.minimum(n + take * cfg.BLOCK_N, end)
            n = tl.maximum(n, start)
            own_q_ptr = q_ptr + b * (q_outer * cfg.Q_UNIT)
            q_MD, rows = load_queries(own_q_ptr, tile, rows, q_row * cfg.Q_UNIT, q_head * cfg.Q_UNIT, cfg)
            acc_MV, odd_MV, max_M, sum_M = nothing_yet(cfg)
            acc_MV, odd_MV, max_M, sum_M = attend_all(
                n, end, q_MD, rows, here, score, acc_MV, odd_MV, max_M, sum_M, True, cfg
            )
            own_out_ptr, own_lse_ptr = out_ptr + b * (out_outer * cfg.Q_UNIT), lse_ptr
            if cfg.LSE:
                own_lse_ptr += b.to(tl.int64) * heads * queries
            steps_out = out_row * cfg.Q_UNIT, out_head * cfg.Q_UNIT
            results = Destination(own_out_ptr, own_lse_ptr, q_ptr, steps_out[0], steps_out[1], queries)
            if take < blocks:
                leave(parts_ptr, sums_ptr, chunk, unit == begin, line, chunks, tile, acc_MV, odd_MV, max_M, sum_M, cfg)
                tl.debug_barrier()  # all of the part is written before the count says so
                first, last = _quotient(begin, share), _quotient(begin + blocks - 1, share)
                counter = counters_ptr + first * lines + line
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last - first:
                    tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
                    few, _few_rows = rows_of(row, head, sequence, q_ptr, cfg.ROWS, cfg)
                    acc_RV, odd_RV, max_R, sum_R = add_up(parts_ptr, sums_ptr, first, last, line, chunks, cfg)
                    write(results, here, few, acc_RV, odd_RV, max_R, sum_R, cfg)
            else:
                write(results, here, tile, acc_MV, odd_MV, max_M, sum_M, cfg)
            unit += take
