"""From products to probabilities: scale, cap, alibi, masks, sinks, and one step of the streaming softmax.

Shape suffixes, here and in the kernels: M rows and N keys of a tile, D head dim of q and k, V head dim of v.
Everything is in powers of two: `scale_log2` is the scale times log2(e).

Query i of a sequence looks at key i + keys - queries, its diagonal (bottom-right alignment). Two bounds around it
describe every mask; causal attention is a right bound of 0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from registry.plugins.triton_varlen.keys import load_block, load_scales, locate, look_up, no_page, unpair, widen
from registry.toolbox.arithmetic import to_tf32


class Score(NamedTuple):
    """Numbers of the call. With a cap, product * scale_log2 is the argument of tanh and cap_log2 its factor."""

    scale_log2: Any
    cap_log2: Any
    left: Any
    right: Any


class Rows(NamedTuple):
    """The rows of a tile: their diagonals and alibi slopes (times log2(e)), and the diagonals of the first and last."""

    diagonal_M: Any
    slope_M: Any
    first: Any
    last: Any
    unit_M: Any
    """What products with quantised keys are to be multiplied by: see in_half."""


@triton.jit
def dot(a, b, acc, TF32: tl.constexpr):
    """acc + a @ b. float32 is rounded to tf32 first, where that is what runs."""
    if TF32:
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, acc, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def product(a, b, TF32: tl.constexpr):
    """a @ b, likewise."""
    if TF32:
        a, b = to_tf32(a), to_tf32(b)
    return tl.dot(a, b, input_precision="tf32" if TF32 else "ieee")


@triton.jit
def tanh(x):
    # 1 - 2 / (e^2x + 1) saturates to 1 and -1 by itself: e^2x may overflow to infinity or vanish.
    return 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0)


@triton.jit
def visible(diagonals, keys, end, score, cfg: tl.constexpr):
    """Which of these keys rows with these diagonals see; one comes as [:, None], the other as [None, :]."""
    seen = keys < end
    if cfg.RIGHT:
        seen &= keys <= diagonals + score.right
    if cfg.LEFT:
        seen &= keys >= diagonals - score.left
    return seen


@triton.jit
def biased(scores, diagonals, slopes, keys):
    """Alibi: the further a key from the diagonal, the lower its score."""
    return scores - slopes * tl.abs(diagonals - keys).to(tl.float32)


@triton.jit
def key_range(rows, end, score, cfg: tl.constexpr):
    """(start, inner_start, inner_end, end): keys outside start..end are hidden from all of these rows, never visited;
    blocks inside inner_start..inner_end are seen whole by each of them, and need no mask."""
    start = end * 0
    inner_start = end * 0
    inner_end = end
    if cfg.RIGHT:
        inner_end = tl.minimum(end, rows.first + score.right + 1)
        end = tl.maximum(tl.minimum(end, rows.last + score.right + 1), 0)
    if cfg.LEFT:
        start = tl.maximum(rows.first - score.left, 0) // cfg.BLOCK_N * cfg.BLOCK_N
        inner_start = tl.cdiv(tl.maximum(rows.last - score.left, 0), cfg.BLOCK_N) * cfg.BLOCK_N
    inner_end = tl.maximum(inner_end, 0) // cfg.BLOCK_N * cfg.BLOCK_N
    inner_start = tl.minimum(inner_start, tl.cdiv(end, cfg.BLOCK_N) * cfg.BLOCK_N)
    inner_end = tl.maximum(inner_end, inner_start)
    return start, inner_start, inner_end, end


@triton.jit
def probabilities(products, diagonals, slopes, lse2, keys, end, score, MASKED: tl.constexpr, cfg: tl.constexpr):
    """(P, tanh of capped scores) of the backward passes, where the log-sum-exp is known. Per-row arguments come as
    [:, None] and keys as [None, :], or the other way round for transposed products."""
    bent = products * score.scale_log2
    if cfg.CAP:
        bent = tanh(bent)
        exponents = bent * score.cap_log2
    else:
        exponents = bent
    if cfg.ALIBI:
        exponents = biased(exponents, diagonals, slopes, keys)
    p = tl.exp2(exponents - lse2)
    if MASKED:
        p = tl.where(visible(diagonals, keys, end, score, cfg), p, 0.0)
    return p, bent


@triton.jit
def to_powers_of_two(lse):
    """A row without keys has -inf; +inf makes its P exactly 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def weights(p_MN, q_MD, cfg: tl.constexpr):
    """P in the dtype that values are multiplied in."""
    if cfg.PER_KEY:
        return p_MN  # scales have a range that 16 bits have not, or not with enough digits: tf32 has both
    else:
        return p_MN.to(q_MD.dtype)


@triton.jit
def attend(n, page, q_MD, rows, keys, score, acc_MV, odd_MV, max_M, sum_M, MASKED: tl.constexpr, cfg: tl.constexpr):
    """One step of the streaming softmax: the keys n .. n + BLOCK_N, in the page that was looked up."""
    strides = keys.strides
    scale_strides = keys.scale_strides
    keys_N = n + tl.arange(0, cfg.BLOCK_N)
    page, place = locate(n, page, keys, cfg)
    k_ND = load_block(
        keys.k_ptr, n, page, place, strides.k_outer, strides.k_row, keys.end, MASKED, cfg.D, cfg.PADDED_D, cfg
    )
    scores_MN = product(q_MD, tl.trans(widen(k_ND, q_MD.dtype, cfg)), cfg.TF32)
    # A positive scale can be applied to the maximum instead of each score: one FMA a score below.
    factor = score.scale_log2
    if cfg.PER_HEAD or cfg.PER_KEY:
        scores_MN *= rows.unit_M[:, None]
    if cfg.PER_KEY:
        k_scale_N = load_scales(
            keys.k_scale_ptr, n, page, place, scale_strides.k_outer, scale_strides.k_row, keys.end, cfg
        )
        scores_MN *= k_scale_N[None, :]
    if cfg.CAP:
        scores_MN = tanh(scores_MN * factor) * score.cap_log2
        factor = 1.0
    elif cfg.SIGNED or cfg.ALIBI:
        scores_MN *= factor
        factor = 1.0
    if cfg.ALIBI:
        scores_MN = biased(scores_MN, rows.diagonal_M[:, None], rows.slope_M[:, None], keys_N[None, :])
    if MASKED:
        seen_MN = visible(rows.diagonal_M[:, None], keys_N[None, :], keys.end, score, cfg)
        scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
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
    DIVIDED: tl.constexpr = 2 if cfg.PAIRED else 1
    V: tl.constexpr = cfg.V // DIVIDED
    PADDED_V: tl.constexpr = cfg.PADDED_V // DIVIDED
    v_NV = load_block(keys.v_ptr, n, page, place, strides.v_outer, strides.v_row, keys.end, MASKED, V, PADDED_V, cfg)
    if cfg.PER_KEY:
        v_scale_N = load_scales(
            keys.v_scale_ptr, n, page, place, scale_strides.v_outer, scale_strides.v_row, keys.end, cfg
        )
        p_MN *= v_scale_N[None, :]
    p_MN = weights(p_MN, q_MD, cfg)
    if cfg.PAIRED:
        even_NV, odd_NV = unpair(v_NV, p_MN.dtype, cfg)
        acc_MV = dot(p_MN, even_NV, acc_MV, cfg.TF32)
        odd_MV = dot(p_MN, odd_NV, odd_MV * rescale_M[:, None], cfg.TF32)
    else:
        acc_MV = dot(p_MN, widen(v_NV, p_MN.dtype, cfg), acc_MV, cfg.TF32)
    return acc_MV, odd_MV, new_max_M, sum_M


@triton.jit
def in_half(q_MD):
    """(q in float16 and at most 2 in each row, what its rows are to be multiplied by).

    8-bit keys and values are exact in float16, and converted to it by half the instructions that bfloat16 takes.
    """
    # The power of two below the largest, and one over it, by their exponents: quotients would be 300 instructions.
    largest_M = tl.minimum(tl.maximum(tl.max(tl.abs(q_MD.to(tl.float32)), 1), 1e-30), 1e38)
    unit_M = largest_M.to(tl.int32, bitcast=True) & 0x7F800000
    q_MD = q_MD.to(tl.float32) * (0x7F000000 - unit_M).to(tl.float32, bitcast=True)[:, None]
    return q_MD.to(tl.float16), unit_M.to(tl.float32, bitcast=True)


@triton.jit
def nothing_yet(cfg: tl.constexpr):
    """(sums of values, or of their even columns, odd columns, maxima, sums) before any key."""
    WIDTH: tl.constexpr = cfg.PADDED_V // 2 if cfg.PAIRED else cfg.PADDED_V
    ODD_WIDTH: tl.constexpr = WIDTH if cfg.PAIRED else 1
    M: tl.constexpr = cfg.BLOCK_M
    acc_MV = tl.zeros([M, WIDTH], tl.float32)
    odd_MV = tl.zeros([M, ODD_WIDTH], tl.float32)
    return acc_MV, odd_MV, tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32)


@triton.jit
def attend_from(
    n,
    end,
    page,
    q_MD,
    rows,
    keys,
    score,
    acc_MV,
    odd_MV,
    max_M,
    sum_M,
    MASKED: tl.constexpr,
    MISSING: tl.constexpr,
    cfg: tl.constexpr,
):
    """All steps from key n on, in the page that was looked up, up to `end`; and whether a page was missing, if that is
    asked for."""
    missing = no_page(page, keys)
    for block in tl.range(0, tl.cdiv(end - n, cfg.BLOCK_N)):
        here = n + block * cfg.BLOCK_N
        next_page = look_up(here + cfg.BLOCK_N, keys, cfg)
        acc_MV, odd_MV, max_M, sum_M = attend(
            here, page, q_MD, rows, keys, score, acc_MV, odd_MV, max_M, sum_M, MASKED, cfg
        )
        page = next_page
        if MISSING:
            missing |= no_page(page, keys)
    return acc_MV, odd_MV, max_M, sum_M, missing


@triton.jit
def attend_all(n, end, q_MD, rows, keys, score, acc_MV, odd_MV, max_M, sum_M, MASKED: tl.constexpr, cfg: tl.constexpr):
    """The same where pages are checked elsewhere."""
    page = look_up(n, keys, cfg)
    acc_MV, odd_MV, max_M, sum_M, _missing = attend_from(
        n, end, page, q_MD, rows, keys, score, acc_MV, odd_MV, max_M, sum_M, MASKED, False, cfg
    )
    return acc_MV, odd_MV, max_M, sum_M


@triton.jit
def finish(max_M, sum_M, sink_M, cfg: tl.constexpr):
    """(what sums of values are to be multiplied by, log-sum-exp). A row that saw no key gives 0 and -inf, or the sink
    that it has."""
    factor_M = 1.0
    if cfg.SINKS:
        whole_M = tl.maximum(max_M, sink_M)
        finite_M = tl.where(whole_M == float("-inf"), 0.0, whole_M)
        factor_M = tl.exp2(max_M - finite_M)
        sum_M = sum_M * factor_M + tl.exp2(sink_M - finite_M)
        max_M = whole_M
    lse_M = (max_M + tl.log2(sum_M)) * 0.6931471805599453  # to natural logarithms
    return factor_M / tl.where(sum_M == 0.0, 1.0, sum_M), tl.where(sum_M == 0.0, float("-inf"), lse_M)
