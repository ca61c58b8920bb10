"""Attention over ragged batches where queries are few and keys are many: the keys are divided among all SMs.

The work is one line: every block of keys of every tile of every sequence, one after the other; before each tile comes
what it costs to begin and end one. Each program reads the lengths, counts the line, and takes an equal share of it, for
one key head; nobody makes a list, and one launch serves all lengths. A share begins and ends anywhere, so a tile's keys
may lie in several shares: then each leaves what it has in the workspace and counts itself in, and the last to arrive
adds all of them up, in the order of their keys. So the result does not depend on who was last, and nobody waits.

Measured facts (NVIDIA H200, torch 2.11, triton 3.6, D128, one query a sequence, pages of 64, CUDA graphs of 8 to 100
launches; docs/measured/ragged.md has the figures and what they were measured against):
- bf16, 16 rows by 64 keys, 4 warps, 3 stages, 2 programs an SM: 1.095 of the faster of FlashAttention-3 and XQA by
  geometric mean of 15 cells, least 0.99 (16 sequences of 4k keys); 4.40 TB/s at 64 x 4k; one sequence of 1k 6.7 us.
- What a share costs besides its bytes is instructions, each dependent on the last, by one warp a scheduler: of 2,341
  330 went (quotients without signs, no branches before the first load, parts at constant steps), and ptxas no longer
  waits for the page before it asks for the queries. With parts added up twice as many at once (four times as many
  spilled: 134 us became 169) and three stages instead of four, one sequence of 1k took 6.7 us instead of 7.6, one of
  8k 12.2 instead of 14.6, 16 x 4k 67.2 instead of 68.6: 1.05 over 15 cells.
- Where three programs fit an SM and two are launched for it, some get three and others one: 134 us became 164.
- Equal tiles in equal fractions: 73.4 us at 16 x 4k became 70.0, fp8 49.2 became 42.7. Whole tiles instead, where
  there are more tiles than programs, lost: 250.6 at 64 x 4k became 252.8.
- One program an SM lost: 6 stages of 64 keys 0.92, 7 stages 0.91, 3 of 128 keys 0.87 of two, over 12 cells.
- Programs with equal shares end far apart, by their SM: at 64 x 4k from 200 to 247 us, half of them by 239; at 16
  sequences of mixed lengths from 24 to 34, half by 28. Putting an eighth of each share aside, in pieces that programs
  claim when they are done, lost all the same: 246.7 us at 64 x 4k became 252.7, 69.4 at 16 x 4k 75.3.
- One sequence of 1k, when it took 7.6 us: shares were known after 0.9 us, parts left at 4.6, added up at 7.0.
- Parts added up in a loop with copies ahead (a third more instructions) took 1 to 2 us more almost everywhere. Asking
  for the page table's lines before the lengths are there: 7.7 us at 1k became 9.4.
- An overhead of 3 blocks a tile: 38.7 us became 35.3 where 16 lengths differ.
- Taking pairs of 8-bit values apart by byte permutations: 156 us at 64 x 4k became 142.
- Tried and lost: slices of keys for a warp each (0.88 of FlashAttention-3 where this had 1.06: adding them up takes 5
  us), two to five shares a program slot (0.99 to 0.91), prefetching the next sequence to L2 (252 us at 64 x 4k became
  256), 8 warps (0.75), 32 keys a block with four programs an SM (0.76).
- Looking a page up in the loop that uses it left half the stages: see keys.look_up.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.plugins.triton_varlen.keys import Pages, Strides, keys_of, keys_of_all, look_up, tell_of_pages
from registry.plugins.triton_varlen.lengths import Lengths, check_lengths, read_sequence
from registry.plugins.triton_varlen.parts import add_up, leave
from registry.plugins.triton_varlen.prefill import INTEGERS
from registry.plugins.triton_varlen.rows import Destination, load_queries, rows_of, write
from registry.plugins.triton_varlen.scores import Score, attend_from, key_range, nothing_yet


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
def _quotient(x, y):
    """x // y of numbers that are not negative: the compiler need not look at signs."""
    return (x.to(tl.uint32) // y.to(tl.uint32)).to(tl.int32)


@triton.jit
def _even(blocks, tiles, chunks, least_share):
    """(overhead, share) where all tiles have so many blocks: the same fraction of one tile for each program, if that
    takes hardly longer than an equal share; else no share. So none begins a second tile. Tiles are filled up with
    overhead to a multiple of the fraction.
    """
    equal = tl.maximum(_quotient(blocks * tiles + chunks - 1, chunks), least_share)
    programs = tl.maximum(_quotient(chunks, tl.maximum(tiles, 1)), 1)
    fraction = tl.maximum(_quotient(blocks + programs - 1, programs), least_share)
    pays = (tiles > 1) & (tiles <= chunks) & (fraction * 8 <= equal * 9)
    return tl.where(pays, _quotient(blocks + fraction - 1, fraction) * fraction - blocks, 0), tl.where(
        pays, fraction, 0
    )


@triton.jit
def _start_of(chunk, share, longer):
    return chunk * share + tl.minimum(chunk, longer)


@triton.jit
def _chunk_of(unit, share, longer):
    """Whose share a unit is in."""
    front = longer * (share + 1)  # the longer ones come first
    in_front = unit < front
    units = tl.where(in_front, unit, unit - front)
    return _quotient(units, tl.where(in_front, share + 1, share)) + tl.where(in_front, 0, longer)


@triton.jit(do_not_specialize=INTEGERS)
def split(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
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
    overhead,
    checker,
    scale_log2,
    cap_log2,
    window_left,
    window_right,
    cfg: tl.constexpr,
):
    if cfg.PDL:
        gdc_wait()
        gdc_launch_dependents()
    lengths = Lengths(cu_q_ptr, cu_k_ptr, used_ptr, batch, total_q, room)
    score = Score(scale_log2, cap_log2, window_left, window_right)
    # Programs that follow one another read the same keys' heads, which lie side by side.
    head, chunk = tl.program_id(0), tl.program_id(1)
    chunks = tl.num_programs(1)
    if cfg.COMPLAIN and head + chunk * heads_kv == checker:
        check_lengths(lengths, most_q, most_k, complaints_ptr, cfg)

    # 1. How long the line is, and our share of it: from unit on, up to stop.
    sequences = batch
    if cfg.FEW:
        sequences = cfg.CHUNK  # no loop, and lengths are read once for both
    total = 0
    number_of_tiles = 0
    longest = 0
    for first in range(0, sequences, cfg.CHUNK):
        _, _, blocks_B, tiles_B = _work_of(first + tl.arange(0, cfg.CHUNK), lengths, score, cfg)
        total += tl.sum(blocks_B * tiles_B, 0)
        number_of_tiles += tl.sum(tiles_B, 0)
        longest = tl.maximum(longest, tl.max(tl.where(tiles_B > 0, blocks_B, 0), 0))
    # No branches here: they would keep the compiler from preparing what follows while it waits for the lengths.
    filling, fraction = _even(longest, number_of_tiles, chunks, least_share)
    even = (total == longest * number_of_tiles) & (fraction > 0)  # shares are equal enough if blocks alone count
    overhead = tl.where(total == longest * number_of_tiles, filling, overhead)
    total += overhead * number_of_tiles
    equal = _quotient(total, chunks)
    share = tl.where(even, fraction, tl.maximum(equal, least_share))
    longer = tl.where(even | (equal < least_share), 0, total - equal * chunks)  # so many chunks have one more
    unit = _start_of(chunk, share, longer)
    stop = tl.minimum(_start_of(chunk + 1, share, longer), total)

    # 2. The sequence that it begins in, and the units of those before.
    b = 0
    before = 0
    counted = 0
    for first in range(0, sequences, cfg.CHUNK):
        b_B = first + tl.arange(0, cfg.CHUNK)
        _, _, blocks_B, tiles_B = _work_of(b_B, lengths, score, cfg)
        units_B = (blocks_B + overhead) * tiles_B
        ends_B = counted + tl.cumsum(units_B, 0)
        passed_B = (ends_B <= unit) & (b_B < batch)
        b += tl.sum(passed_B.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(passed_B, ends_B, 0), 0))
        counted += tl.sum(units_B, 0)

    # 3. Tile after tile.
    scale_strides = Strides(k_scale_outer, k_scale_row, k_scale_head, v_scale_outer, v_scale_row, v_scale_head)
    steps = Strides(k_outer, k_row, k_head, v_outer, v_row, v_head)
    pages = Pages(table_ptr, table_row, pages)
    all_keys = keys_of_all(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, steps, scale_strides, pages, cfg)
    sums_ptr = parts_ptr + chunks * heads_kv * (2 * cfg.ROWS * cfg.PADDED_V)  # behind the sums of values
    results = Destination(out_ptr, lse_ptr, sinks_ptr, out_row * cfg.Q_UNIT, out_head * cfg.Q_UNIT, total_q)
    while unit < stop:
        sequence, first_block, blocks, tiles = _work_of(b, lengths, score, cfg)
        units = (blocks + overhead) * tiles
        if unit >= before + units:
            before += units
            b += 1
        else:
            number = 0
            if tiles > 1:
                number = _quotient(unit - before, blocks + overhead)
            begin = before + number * (blocks + overhead) + overhead
            unit = tl.maximum(unit, begin)
            if unit < stop:
                take = tl.minimum(begin + blocks, stop) - unit
                tile, rows = rows_of(number * cfg.BLOCK_M, head, sequence, slopes_ptr, cfg.BLOCK_M, cfg)
                keys = keys_of(b, head, sequence, all_keys, cfg)
                n = (first_block + unit - begin) * cfg.BLOCK_N
                start, _, _, end = key_range(rows, sequence.keys, score, cfg)
                end = tl.minimum(n + take * cfg.BLOCK_N, end)
                n = tl.maximum(n, start)
                page = look_up(n, keys, cfg)
                q_MD, rows = load_queries(q_ptr, tile, rows, q_row * cfg.Q_UNIT, q_head * cfg.Q_UNIT, cfg)
                factor = scale_log2
                if cfg.PER_HEAD:
                    factor *= tl.load(keys.k_scale_ptr)
                score_here = Score(factor, cap_log2, window_left, window_right)

                acc_MV, odd_MV, max_M, sum_M = nothing_yet(cfg)
                acc_MV, odd_MV, max_M, sum_M, missing = attend_from(
                    n, end, page, q_MD, rows, keys, score_here, acc_MV, odd_MV, max_M, sum_M, True, True, cfg
                )
                if cfg.COMPLAIN and cfg.PAGE > 0:
                    tell_of_pages(missing, complaints_ptr, cfg)
                if take < blocks:
                    leave(
                        parts_ptr, sums_ptr, chunk, unit == begin, head, chunks, tile, acc_MV, odd_MV, max_M, sum_M, cfg
                    )
                    tl.debug_barrier()  # all of the part is written before the count says so
                    first = _chunk_of(begin, share, longer)
                    last = _chunk_of(begin + blocks - 1, share, longer)
                    counter = counters_ptr + first * heads_kv + head
                    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == last - first:
                        tl.atomic_xchg(counter, 0, sem="relaxed", scope="gpu")
                        few, _few_rows = rows_of(number * cfg.BLOCK_M, head, sequence, slopes_ptr, cfg.ROWS, cfg)
                        acc_RV, odd_RV, max_R, sum_R = add_up(parts_ptr, sums_ptr, first, last, head, chunks, cfg)
                        write(results, keys, few, acc_RV, odd_RV, max_R, sum_R, cfg)
                else:
                    write(results, keys, tile, acc_MV, odd_MV, max_M, sum_M, cfg)
                unit += take
