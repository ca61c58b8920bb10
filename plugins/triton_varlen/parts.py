"""Parts of a tile whose keys were shared out: left in the workspace by those who have them, added up by who is last."""

import triton
import triton.language as tl


@triton.jit
def _slot(chunk, head, chunks):
    """Where a program leaves what it has. Each has two slots: the second is for the tile that its share ends in, the
    first for the one that it begins in. Slots of one head's chunks follow one another, so that whoever adds them up
    steps by a constant."""
    return (head * chunks + chunk) * 2


@triton.jit
def leave(parts_ptr, sums_ptr, chunk, begins, head, chunks, tile, acc_MV, odd_MV, max_M, sum_M, cfg: tl.constexpr):
    """Leave a part of a tile: sums of values in one place, maxima and sums of probabilities in another. `chunk` says
    which share of the keys this is, `begins` whether the tile begins in it."""
    WIDTH: tl.constexpr = cfg.PADDED_V // 2 if cfg.PAIRED else cfg.PADDED_V
    m_M = tl.arange(0, cfg.BLOCK_M)
    there_M = tile.there_M & (m_M < cfg.ROWS)
    slot = _slot(chunk, head, chunks) + begins.to(tl.int32)
    at_M = sums_ptr + slot * (2 * cfg.ROWS) + m_M
    tl.store(at_M, max_M, mask=there_M)
    tl.store(at_M + cfg.ROWS, sum_M, mask=there_M)
    base = parts_ptr + slot.to(tl.int64) * (cfg.ROWS * cfg.PADDED_V)
    at_MV = base + (m_M[:, None] * cfg.PADDED_V + tl.arange(0, WIDTH)[None, :])
    tl.store(at_MV, acc_MV, mask=there_M[:, None])
    if cfg.PAIRED:
        tl.store(at_MV + WIDTH, odd_MV, mask=there_M[:, None])


@triton.jit
def add_up(parts_ptr, sums_ptr, first, last, head, chunks, cfg: tl.constexpr):
    """(even columns or all of them, odd columns, maxima, sums) of what the chunks first..last left, in their order."""
    WIDTH: tl.constexpr = cfg.PADDED_V // 2 if cfg.PAIRED else cfg.PADDED_V
    ODD_WIDTH: tl.constexpr = WIDTH if cfg.PAIRED else 1
    ROWS: tl.constexpr = cfg.ROWS
    r_R = tl.arange(0, ROWS)
    # Parts in the middle: the compiler gives each thread all parts of its numbers, and adds them up without others.
    p_P = tl.arange(0, cfg.AT_ONCE)
    offsets_RV = r_R[:, None] * cfg.PADDED_V + tl.arange(0, WIDTH)[None, :]
    acc_RV = tl.zeros([ROWS, WIDTH], tl.float32)
    odd_RV = tl.zeros([ROWS, ODD_WIDTH], tl.float32)
    max_R = tl.full([ROWS], float("-inf"), tl.float32)
    sum_R = tl.zeros([ROWS], tl.float32)
    for some in range(first, last + 1, cfg.AT_ONCE):
        there_P = p_P <= last - some
        slot = _slot(some, head, chunks)
        place_P = p_P * 2 + ((p_P == 0) & (some == first)).to(tl.int32)
        at_RP = (sums_ptr + slot * (2 * ROWS) + r_R)[:, None] + (place_P * (2 * ROWS))[None, :]
        max_RP = tl.load(at_RP, mask=there_P[None, :], other=float("-inf"), cache_modifier=".cg")
        sum_RP = tl.load(at_RP + ROWS, mask=there_P[None, :], other=0.0, cache_modifier=".cg")
        at_RV = parts_ptr + slot.to(tl.int64) * (ROWS * cfg.PADDED_V) + offsets_RV
        at_RPV = at_RV[:, None, :] + (place_P * (ROWS * cfg.PADDED_V))[None, :, None]
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
