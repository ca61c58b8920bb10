"""Attention over ragged batches where queries are few and keys are many: the keys are divided among all SMs.

The work is one line: every block of keys of every tile of every sequence, one after the other. Each program reads the
lengths, counts the line, and takes an equal share of it; nobody makes a list, and one launch serves all lengths. A
share begins and ends anywhere, so a tile's keys may lie in several shares: then each leaves what it has in the
workspace and counts itself in, and the last to arrive adds all of them up, in the order of their keys. So the result
does not depend on who was last, and nobody waits.
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
def _deposit(partials_ptr, tile, slot, acc_MV, odd_MV, max_M, sum_M, cfg: tl.constexpr):
    """Leave a part of a tile in a slot of the workspace: sums of values (even columns before odd), maxima, sums."""
    PADDED_V: tl.constexpr = cfg.PADDED_V
    SPAN: tl.constexpr = cfg.ROWS * (PADDED_V + 2)
    WIDTH: tl.constexpr = acc_MV.shape[1]
    m_M = tl.arange(0, cfg.BLOCK_M)
    there_M = tile.there_M & (m_M < cfg.ROWS)
    base = partials_ptr + slot.to(tl.int64) * SPAN
    at_MV = base + m_M[:, None] * PADDED_V + tl.arange(0, WIDTH)[None, :]
    tl.store(at_MV, acc_MV, mask=there_M[:, None])
    if cfg.PAIRED:
        tl.store(at_MV + WIDTH, odd_MV, mask=there_M[:, None])
    tl.store(base + cfg.ROWS * PADDED_V + m_M, max_M, mask=there_M)
    tl.store(base + cfg.ROWS * (PADDED_V + 1) + m_M, sum_M, mask=there_M)


@triton.jit
def _combine(partials_ptr, tile, first, last, cfg: tl.constexpr):
    """What the programs first..last left of a tile, as one. The first left its part as the last of its share."""
    ROWS: tl.constexpr = cfg.ROWS
    PADDED_V: tl.constexpr = cfg.PADDED_V
    SPAN: tl.constexpr = ROWS * (PADDED_V + 2)
    AT_ONCE: tl.constexpr = cfg.AT_ONCE
    m_M = tl.arange(0, ROWS)
    acc_MV = tl.zeros([ROWS, PADDED_V], tl.float32)
    max_M = tl.full([ROWS], float("-inf"), tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    for some in range(first, last + 1, AT_ONCE):
        program_P = some + tl.arange(0, AT_ONCE)
        slot_P = program_P * 2 + (program_P == first).to(tl.int32)
        base_PM = partials_ptr + (slot_P.to(tl.int64) * SPAN)[:, None] + m_M[None, :] * 0
        there_PM = (program_P <= last)[:, None] & tile.there_M[None, :]
        at_PM = base_PM + ROWS * PADDED_V + m_M[None, :]
        max_PM = tl.load(at_PM, mask=there_PM, other=float("-inf"), cache_modifier=".cg")
        sum_PM = tl.load(at_PM + ROWS, mask=there_PM, other=0.0, cache_modifier=".cg")
        at_PMV = (base_PM + m_M[None, :] * PADDED_V)[:, :, None] + tl.arange(0, PADDED_V)[None, None, :]
        part_PMV = tl.load(at_PMV, mask=there_PM[:, :, None], other=0.0, cache_modifier=".cg")
        new_max_M = tl.maximum(max_M, tl.max(max_PM, 0))
        finite_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
        rescale_M = tl.exp2(max_M - finite_M)
        weight_PM = tl.exp2(max_PM - finite_M[None, :])
        acc_MV = acc_MV * rescale_M[:, None] + tl.sum(part_PMV * weight_PM[:, :, None], 0)
        sum_M = sum_M * rescale_M + tl.sum(sum_PM * weight_PM, 0)
        max_M = new_max_M
    return acc_MV, max_M, sum_M


@triton.jit
def _store_whole(ptr, tile, row, head, x_MV, cfg: tl.constexpr):
    """The output, whose odd columns may follow the even ones."""
    v_V = tl.arange(0, cfg.PADDED_V)
    if cfg.PAIRED:
        v_V = v_V % (cfg.PADDED_V // 2) * 2 + v_V // (cfg.PADDED_V // 2)
    offsets_M = tile.token_M.to(tl.int64) * row + tile.head_M * head
    inside = tile.there_M[:, None] & (v_V < cfg.V)[None, :]
    tl.store(ptr + offsets_M[:, None] + v_V[None, :], x_MV.to(ptr.dtype.element_ty), mask=inside)


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
            first_row = work // heads_kv * BLOCK_M
            tile, rows = rows_of(first_row, head, sequence, slopes_ptr, BLOCK_M, cfg)
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

            if take == blocks:
                sink_M = load_sinks(sinks_ptr, tile, max_M, cfg)
                factor_M, lse_M = finish(max_M, sum_M, sink_M, cfg)
                if cfg.PER_HEAD:
                    factor_M *= tl.load(keys.v_scale_ptr)
                out_MV = acc_MV * factor_M[:, None]
                odd_MV *= factor_M[:, None]
                store_parts(out_ptr, tile, out_row * cfg.Q_UNIT, out_head * cfg.Q_UNIT, out_MV, odd_MV, cfg)
                if cfg.LSE:
                    tl.store(sums_at(lse_ptr, tile, total_q), lse_M, mask=tile.there_M)
            else:
                first = begin // share
                last = (begin + blocks - 1) // share
                slot = program * 2 + (program == first).to(tl.int32)
                _deposit(partials_ptr, tile, slot, acc_MV, odd_MV, max_M, sum_M, cfg)
                tl.debug_barrier()  # all of the part is written before the count says so
                if tl.atomic_add(counters_ptr + first, 1, sem="acq_rel", scope="gpu") == last - first:
                    tl.atomic_xchg(counters_ptr + first, 0, sem="relaxed", scope="gpu")
                    whole = rows_of(first_row, head, sequence, slopes_ptr, cfg.ROWS, cfg)[0]
                    sum_RV, max_R, sum_R = _combine(partials_ptr, whole, first, last, cfg)
                    sink_R = load_sinks(sinks_ptr, whole, max_R, cfg)
                    factor_R, lse_R = finish(max_R, sum_R, sink_R, cfg)
                    if cfg.PER_HEAD:
                        factor_R *= tl.load(keys.v_scale_ptr)
                    _store_whole(
                        out_ptr, whole, out_row * cfg.Q_UNIT, out_head * cfg.Q_UNIT, sum_RV * factor_R[:, None], cfg
                    )
                    if cfg.LSE:
                        tl.store(sums_at(lse_ptr, whole, total_q), lse_R, mask=whole.there_M)
            unit += take
