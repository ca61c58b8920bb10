"""Attention over ragged batches where queries are few and keys are many: the keys are divided among all SMs.

The work is one line: every block of keys of every tile of every sequence, one after the other. Each program reads the
lengths, counts the line, and takes an equal share of it; nobody makes a list, and one launch serves all lengths. A
share begins and ends anywhere, so a tile's keys may lie in several shares: then each leaves what it has in the
workspace and counts itself in, and the last to arrive adds all of them up, in the order of their keys. So the result
does not depend on who was last, and nobody waits.

Measured facts (NVIDIA H200, torch 2.11, triton 3.6, D128, one query a sequence, pages of 64, CUDA graphs; ten cells of
1 to 128 sequences, 1k to 131k keys, 32/8 and 64/8 heads, even and mixed; FlashAttention-3 is its paged decode with
metadata made before, in the same run):
- bf16, 16 rows by 64 keys, 4 warps, 2 programs an SM: 1.00 of FlashAttention-3 by geometric mean, least 0.92 (one
  sequence of 8k), best 1.20 (one of 1k: 9.3 us); 4.22 TB/s at 64 x 4,096 keys, where cuDNN's dense decode has 4.40.
- fp8 against bf16, the best config of each (measured while partial results were added up the slower way, below): 1.53
  at 1 GiB of bf16, 1.39-1.50 at 256 and 512 MiB, 1.17-1.33 for mixed lengths, nothing at 4 MiB. At 64 x 4,096: 1.09
  with values read byte by byte, 1.35 as pairs of columns, 1.53 with 2 warps and 4 programs an SM.
- Looking a page up in the loop that uses it left half the stages: see keys.look_up.
- Partial results added up as one tensor of three dimensions took some 8 us a tile: 0.96 of FlashAttention-3. So it is
  one after the other, several loads in flight.
- Conformance kit: right in 118 checks of 122. The other four were the first of processes that prefill.py's kernel had
  broken before, while the kit looked for a smaller failure of it.
"""

import triton
import triton.language as tl

from registry.plugins.triton_varlen.keys import Keys, Pages, Strides, check_pages, keys_of
from registry.plugins.triton_varlen.lengths import Lengths, check_lengths, read_sequence
from registry.plugins.triton_varlen.prefill import INTEGERS
from registry.plugins.triton_varlen.rows import load_queries, load_sinks, rows_of, store_parts, sums_at
from registry.plugins.triton_varlen.scores import Score, attend_all, finish, key_range


@triton.jit
def _work_of(b, lengths, score, cfg: tl.constexpr):
    """(sequence, first block of keys, blocks of keys, tiles of one key head) of sequence b, or of several.

    A tile has at least one block, so that each is somebody's and its output is written.
    """
    sequence = read_sequence(b, lengths, cfg)
    first = sequence.keys * 0
    if cfg.LEFT:
        first = tl.maximum(sequence.keys - sequence.queries - score.left, 0) // cfg.BLOCK_N
    blocks = tl.maximum(tl.cdiv(sequence.keys, cfg.BLOCK_N) - first, 1)
    return sequence, first, blocks, tl.cdiv(sequence.queries * cfg.GROUP, cfg.BLOCK_M)


@triton.jit
def _place(partials_ptr, slot, cfg: tl.constexpr):
    """(addresses of even columns' or all sums of values, of odd columns', of maxima, of sums) of a slot."""
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    PADDED_V: tl.constexpr = cfg.PADDED_V
    WIDTH: tl.constexpr = PADDED_V // 2 if cfg.PAIRED else PADDED_V
    m_M = tl.arange(0, BLOCK_M)
    base = partials_ptr + slot.to(tl.int64) * (BLOCK_M * (PADDED_V + 2))
    at_MV = base + m_M[:, None] * PADDED_V + tl.arange(0, WIDTH)[None, :]
    at_M = base + BLOCK_M * PADDED_V + m_M
    return at_MV, at_MV + WIDTH, at_M, at_M + BLOCK_M


@triton.jit
def _deposit(partials_ptr, tile, slot, acc_MV, odd_MV, max_M, sum_M, cfg: tl.constexpr):
    """Leave a part of a tile in a slot of the workspace."""
    at_MV, at_odd_MV, at_max_M, at_sum_M = _place(partials_ptr, slot, cfg)
    tl.store(at_MV, acc_MV, mask=tile.there_M[:, None])
    if cfg.PAIRED:
        tl.store(at_odd_MV, odd_MV, mask=tile.there_M[:, None])
    tl.store(at_max_M, max_M, mask=tile.there_M)
    tl.store(at_sum_M, sum_M, mask=tile.there_M)


@triton.jit
def _combine(partials_ptr, tile, first, last, acc_MV, odd_MV, max_M, sum_M, cfg: tl.constexpr):
    """What the programs first..last left of a tile, as one. The first left its part as the last of its share."""
    AT_ONCE: tl.constexpr = cfg.AT_ONCE
    acc_MV = tl.zeros_like(acc_MV)
    odd_MV = tl.zeros_like(odd_MV)
    max_M = tl.full(max_M.shape, float("-inf"), tl.float32)
    sum_M = tl.zeros_like(sum_M)
    for some in range(first, last + 1, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            program = some + i
            slot = program * 2 + (program == first).to(tl.int32)
            at_MV, at_odd_MV, at_max_M, at_sum_M = _place(partials_ptr, slot, cfg)
            there_M = tile.there_M & (program <= last)
            part_max_M = tl.load(at_max_M, mask=there_M, other=float("-inf"), cache_modifier=".cg")
            part_sum_M = tl.load(at_sum_M, mask=there_M, other=0.0, cache_modifier=".cg")
            new_max_M = tl.maximum(max_M, part_max_M)
            finite_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
            rescale_M = tl.exp2(max_M - finite_M)
            weight_M = tl.exp2(part_max_M - finite_M)
            part_MV = tl.load(at_MV, mask=there_M[:, None], other=0.0, cache_modifier=".cg")
            acc_MV = acc_MV * rescale_M[:, None] + part_MV * weight_M[:, None]
            if cfg.PAIRED:
                part_MV = tl.load(at_odd_MV, mask=there_M[:, None], other=0.0, cache_modifier=".cg")
                odd_MV = odd_MV * rescale_M[:, None] + part_MV * weight_M[:, None]
            sum_M = sum_M * rescale_M + part_sum_M * weight_M
            max_M = new_max_M
    return acc_MV, odd_MV, max_M, sum_M


@triton.jit(do_not_specialize=INTEGERS)
def split(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    partials_ptr,
    counters_ptr,
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
    least_share,
    scale_log2,
    cap_log2,
    window_left,
    window_right,
    cfg: tl.constexpr,
):
    BLOCK_M: tl.constexpr = cfg.BLOCK_M
    DIVIDED: tl.constexpr = 2 if cfg.PAIRED else 1
    WIDTH: tl.constexpr = cfg.PADDED_V // DIVIDED
    ODD_WIDTH: tl.constexpr = WIDTH if cfg.PAIRED else 1
    lengths = Lengths(cu_q_ptr, cu_k_ptr, used_ptr, batch, total_q, room)
    score = Score(scale_log2, cap_log2, window_left, window_right)
    program = tl.program_id(0)
    if cfg.COMPLAIN and program == tl.num_programs(0) - 1:
        check_lengths(lengths, most_q, most_k, complaints_ptr, cfg)

    # 1. How long the line is, and our share of it: from unit on, up to stop.
    sequences = batch
    if cfg.FEW:
        sequences = cfg.CHUNK  # no loop, and lengths are read once for both
    total = 0
    for first in range(0, sequences, cfg.CHUNK):
        _, _, blocks_B, tiles_B = _work_of(first + tl.arange(0, cfg.CHUNK), lengths, score, cfg)
        total += tl.sum(blocks_B * tiles_B, 0) * heads_kv
    share = tl.maximum(tl.cdiv(total, tl.num_programs(0)), least_share)
    unit = program * share
    stop = tl.minimum(unit + share, total)

    # 2. The sequence that it begins in, and the units of those before.
    b = 0
    before = 0
    counted = 0
    for first in range(0, sequences, cfg.CHUNK):
        b_B = first + tl.arange(0, cfg.CHUNK)
        _, _, blocks_B, tiles_B = _work_of(b_B, lengths, score, cfg)
        units_B = blocks_B * tiles_B * heads_kv
        ends_B = counted + tl.cumsum(units_B, 0)
        passed_B = (ends_B <= unit) & (b_B < batch)
        b += tl.sum(passed_B.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed_B, ends_B, 0), 0))
        counted += tl.sum(units_B, 0)

    # 3. Tile after tile.
    if cfg.PAIRED:
        v_ptr = v_ptr.to(tl.pointer_type(tl.uint16))
    all_keys = Keys(
        k_ptr,
        v_ptr,
        k_scale_ptr,
        v_scale_ptr,
        Strides(
            k_outer * cfg.K_UNIT,
            k_row * cfg.K_UNIT,
            k_head * cfg.K_UNIT,
            v_outer * (cfg.K_UNIT // DIVIDED),
            v_row * (cfg.K_UNIT // DIVIDED),
            v_head * (cfg.K_UNIT // DIVIDED),
        ),
        Strides(k_scale_outer, k_scale_row, k_scale_head, v_scale_outer, v_scale_row, v_scale_head),
        Pages(table_ptr, table_row, pages),
        0,
    )
    while unit < stop:
        sequence, first_block, blocks, tiles = _work_of(b, lengths, score, cfg)
        units = blocks * tiles * heads_kv
        if unit >= before + units:
            before += units
            b += 1
        else:
            work = (unit - before) // blocks
            begin = before + work * blocks
            take = tl.minimum(begin + blocks, stop) - unit
            head = work % heads_kv
            tile, rows = rows_of(work // heads_kv * BLOCK_M, head, sequence, slopes_ptr, BLOCK_M, cfg)
            keys = keys_of(b, head, sequence, all_keys, cfg)
            q_MD, rows = load_queries(q_ptr, tile, rows, q_row * cfg.Q_UNIT, q_head * cfg.Q_UNIT, cfg)
            factor = scale_log2
            if cfg.PER_HEAD:
                factor *= tl.load(keys.k_scale_ptr)
            score_here = Score(factor, cap_log2, window_left, window_right)

            n = (first_block + unit - begin) * cfg.BLOCK_N
            if cfg.COMPLAIN and cfg.PAGE > 0 and head == 0:
                check_pages(keys, n, n + take * cfg.BLOCK_N, 0, 1, complaints_ptr, cfg)
            start, _, _, end = key_range(rows, sequence.keys, score, cfg)
            end = tl.minimum(n + take * cfg.BLOCK_N, end)
            n = tl.maximum(n, start)
            acc_MV = tl.zeros([BLOCK_M, WIDTH], tl.float32)
            odd_MV = tl.zeros([BLOCK_M, ODD_WIDTH], tl.float32)
            max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
            sum_M = tl.zeros([BLOCK_M], tl.float32)
            count = tl.cdiv(end - n, cfg.BLOCK_N)
            acc_MV, odd_MV, max_M, sum_M = attend_all(
                n, count, q_MD, rows, keys, score_here, acc_MV, odd_MV, max_M, sum_M, True, cfg
            )

            complete = take == blocks
            if not complete:
                first = begin // share
                last = (begin + blocks - 1) // share
                slot = program * 2 + (program == first).to(tl.int32)
                _deposit(partials_ptr, tile, slot, acc_MV, odd_MV, max_M, sum_M, cfg)
                tl.debug_barrier()  # all of the part is written before the count says so
                complete = tl.atomic_add(counters_ptr + first, 1, sem="acq_rel", scope="gpu") == last - first
                if complete:
                    tl.atomic_xchg(counters_ptr + first, 0, sem="relaxed", scope="gpu")
                    acc_MV, odd_MV, max_M, sum_M = _combine(
                        partials_ptr, tile, first, last, acc_MV, odd_MV, max_M, sum_M, cfg
                    )
            if complete:
                factor_M, lse_M = finish(max_M, sum_M, load_sinks(sinks_ptr, tile, max_M, cfg), cfg)
                if cfg.PER_HEAD:
                    factor_M *= tl.load(keys.v_scale_ptr)
                out_MV = acc_MV * factor_M[:, None]
                odd_MV *= factor_M[:, None]
                store_parts(out_ptr, tile, out_row * cfg.Q_UNIT, out_head * cfg.Q_UNIT, out_MV, odd_MV, cfg)
                if cfg.LSE:
                    tl.store(sums_at(lse_ptr, tile, total_q), lse_M, mask=tile.there_M)
            unit += take
