"""Parts of a tile whose keys were shared out: left in the workspace by those who have them, added up by who is last."""

import triton
import triton.language as tl


@triton.jit
def _slots(chunk, first, head, heads):
    """Each program has two: one for a tile that its share ends in, one for a tile that it begins in. `chunk` is
    which share of the keys it has; that of `first` ends in the tile."""
    return (chunk * heads + head) * 2 + (chunk == first).to(tl.int32)


@triton.jit
def leave(parts_ptr, sums_ptr, chunk, first, head, heads, tile, acc_MV, odd_MV, max_M, sum_M, cfg: tl.constexpr):
    """Leave a part of a tile: sums of values in one place, maxima and sums of probabilities in another."""
    WIDTH: tl.constexpr = cfg.PADDED_V // 2 if cfg.PAIRED else cfg.PADDED_V
    m_M = tl.arange(0, cfg.BLOCK_M)
    there_M = tile.there_M & (m_M < cfg.ROWS)
    slot = _slots(chunk, first, head, heads)
    at_M = sums_ptr + slot * (2 * cfg.ROWS) + m_M
    tl.store(at_M, max_M, mask=there_M)
    tl.store(at_M + cfg.ROWS, sum_M, mask=there_M)
    base = parts_ptr + slot.to(tl.int64) * (cfg.ROWS * cfg.PADDED_V)
    at_MV = base + (m_M[:, None] * cfg.PADDED_V + tl.arange(0, WIDTH)[None, :])
    tl.store(at_MV, acc_MV, mask=there_M[:, None])
    if cfg.PAIRED:
        tl.store(at_MV + WIDTH, odd_MV, mask=there_M[:, None])


@triton.jit
def add_up(parts_ptr, sums_ptr, first, last, head, heads, cfg: tl.constexpr):
    """(even columns or all of them, odd columns, maxima, sums) of what the chunks first..last left, in their order."""
    WIDTH: tl.constexpr = cfg.PADDED_V // 2 if cfg.PAIRED else cfg.PADDED_V
    ODD_WIDTH: tl.constexpr = WIDTH if cfg.PAIRED else 1
    ROWS: tl.constexpr = cfg.ROWS
    r_R = tl.arange(0, ROWS)
    # Parts in the middle: the compiler gives each thread all parts of its numbers, and adds them up without others.
    offsets_RPV = (r_R[:, None] * cfg.PADDED_V + tl.arange(0, WIDTH)[None, :])[:, None, :]
    acc_RV = tl.zeros([ROWS, WIDTH], tl.float32)
    odd_RV = tl.zeros([ROWS, ODD_WIDTH], tl.float32)
    max_R = tl.full([ROWS], float("-inf"), tl.float32)
    sum_R = tl.zeros([ROWS], tl.float32)
    for some in range(first, last + 1, cfg.AT_ONCE):
        chunk_P = some + tl.arange(0, cfg.AT_ONCE)
        there_P = chunk_P <= last
        slot_P = _slots(chunk_P, first, head, heads)
        at_RP = sums_ptr + (slot_P[None, :] * (2 * ROWS) + r_R[:, None])
        max_RP = tl.load(at_RP, mask=there_P[None, :], other=float("-inf"), cache_modifier=".cg")
        sum_RP = tl.load(at_RP + ROWS, mask=there_P[None, :], other=0.0, cache_modifier=".cg")
        at_RPV = (parts_ptr + slot_P.to(tl.int64) * (ROWS * cfg.PADDED_V))[None, :, None] + offsets_RPV
        part_RPV = tl.load(at_RPV, mask=there_P[None, :, None], other=0.0, cache_modifier=".cg")
        new_max_R = tl.maximum(max_R, tl.max(max_RP, 1))
        finite_R = tl.where(new_max_R == float("-inf"), 0.0, new_max_R)
        rescale_R = tl.exp2(max_R - finite_R)
        weight_RP = tl.exp2(max_RP - finite_R[:, None])
        sum_R = sum_R * rescale_R + tl.sum(sum_RP * weight_RP, 1)
        acc_RV = acc_RV * rescale_R[:, None] + tl.sum(part_RPV * weight_RP[:, :, None], 1)
        if cfg.PAIRED:
            part_RPV = tl.load(at_RPV + WIDTH, mask=there_P[None, :, None], other=0.0, cache_modifier=".cg")
            odd_RV = odd_RV * rescale_R[:, None] + tl.sum(part_RPV * weight_RP[:, :, None], 1)
        max_R = new_max_R
    return acc_RV, odd_RV, max_R, sum_R
