"""The arithmetic between the two matrix products, in base 2 and in registers.

Running maxima are lazy (registry/ops/attention/lazy_maxima.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.ops.attention.lazy_maxima import risen

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)

# gl.where with integer compares costs about 330 instructions per 64x128 block; these cost two and three per element.
_KEEP_UP_TO = gl.constexpr("{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p; }")
_KEEP_BAND = gl.constexpr(
    "{ .reg .pred p; setp.lt.s32 p, $3, $4; setp.gt.or.s32 p, $2, $4, p; selp.f32 $0, 0fFF800000, $1, p; }"
)
_RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")
_PACK = {"bf16": "cvt.rn.bf16x2.f32 $0, $2, $1;", "fp16": "cvt.rn.f16x2.f32 $0, $2, $1;"}


@gluon.constexpr_function
def _pack_asm(dtype):
    return _PACK[dtype]


@gluon.jit
def keep_up_to(s, last, keys):
    """-inf where keys > last."""
    return gl.inline_asm_elementwise(_KEEP_UP_TO, "=f,f,r,r", [s, last, keys], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def keep_band(s, first, last, keys):
    """-inf outside first <= keys <= last."""
    return gl.inline_asm_elementwise(
        _KEEP_BAND, "=f,f,r,r,r", [s, first, last, keys], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def mask_block(s, row, block, rows, keys, extent, T: gl.constexpr):
    """Hide the keys of `block` that rows row + rows may not see.

    A thread's columns are 2 (lane % 4) + {0, 1} + 8 i. Split into the lane's part, which joins the limit, and the rest,
    which is then an immediate: whole columns would sit in a register each, all through the main loop.
    """
    seqlen_q, seqlen_k, left, right = extent
    start = block * T.block_n
    lane = (keys & 6)[None, :]
    fixed = (keys & -7)[None, :]
    if T.mask == "tail":
        s = keep_up_to(s, seqlen_k - 1 - start - lane, fixed)
    elif T.mask == "diagonal" or T.mask == "shifted":
        s = keep_up_to(s, (row + (seqlen_k - seqlen_q) - start + rows)[:, None] - lane, fixed)
    elif T.mask == "band":
        own = row + (seqlen_k - seqlen_q) - start + rows
        last = gl.minimum(own + right, seqlen_k - 1 - start)
        s = keep_band(s, (own - left)[:, None] - lane, last[:, None] - lane, fixed)
    return s


@gluon.jit
def mask_if_edge(s, row, block, rows, keys, extent, T: gl.constexpr):
    """`mask_block` where some of a group's rows may not see some key of the block: one uniform branch."""
    seqlen_q, seqlen_k, left, right = extent
    own = row + (seqlen_k - seqlen_q)
    start = block * T.block_n
    above = start + T.block_n - 1 > gl.minimum(own + right, seqlen_k - 1)
    if above | (start < own + (T.rows - 1) - left):
        s = mask_block(s, row, block, rows, keys, extent, T)
    return s


@gluon.jit
def score(s, scale, cap, T: gl.constexpr):
    """Scores in base 2, unless they are left for `softmax` to scale. Softcap: cap * tanh(x / cap) by way of exp2."""
    if T.score == "softcap":
        grown = gl.exp2(s * scale) + 1.0
        s = cap - 2.0 * cap * gl.inline_asm_elementwise(
            _RECIPROCAL, "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1
        )
    elif T.score == "scaled":
        s = s * scale
    return s


@gluon.jit
def partial_sums(p, T: gl.constexpr):
    """Row sums over each thread's own columns; the sum across the four lanes of a row waits until the end."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], T.block_n // 8, 4, 2]), 3), 1)


@gluon.jit
def highest(s, T: gl.constexpr):
    """Each row's maximum."""
    if T.written:  # in eight chains a row, not one
        ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        eight = gl.max(s.reshape([s.shape[0], T.block_n // 32, 4, 4, 2]), 1)
        return gl.convert_layout(gl.max(gl.max(gl.max(eight, 3), 1), 1), ROW)
    else:
        return gl.max(s, 1)


@gluon.jit
def softmax(s, m, sums, scale, T: gl.constexpr):
    """One online step: probabilities, the factor for what was accumulated before, the new maxima and sums."""
    if T.score == "plain":
        m_new = risen(m, highest(s, T) * scale)
        p = gl.exp2(s * scale - m_new[:, None])
    else:
        m_new = risen(m, highest(s, T))
        p = gl.exp2(s - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    own = partial_sums(p, T)
    sums = sums * gl.convert_layout(alpha, gl.SliceLayout(1, own.type.layout))[:, None] + own
    return p, alpha, m_new, sums


@gluon.jit
def with_sinks(m, total, sinks):
    """(maxima, sums) of rows of which each has one more key, without a value, and what that makes of the values'
    weights. A sink far above all scores leaves none of them; a row that saw no key has the sink alone."""
    sinks = sinks.to(gl.float32) * LOG2E
    highest = gl.where(m >= sinks, m, sinks)  # NaN where the sink is
    kept = gl.exp2(m - highest)
    return highest, total * kept + gl.where(sinks == highest, 1.0, gl.exp2(sinks - highest)), kept


@gluon.jit
def pack(p, T: gl.constexpr):
    """[M, N] fp32 -> [M, N / 2] i32 of pairs: 16-bit values carried around a loop would cost two PRMT per pair."""
    low, high = p.reshape([p.shape[0], p.shape[1] // 2, 2]).split()
    return gl.inline_asm_elementwise(_pack_asm(T.dtype), "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack(pairs, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The pairs as register operand A of the second product; costs no instruction."""
    low = (pairs & 0xFFFF).to(gl.int16).to(DTYPE, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)
    return gl.convert_layout(
        gl.join(low, high).reshape([pairs.shape[0], 2 * pairs.shape[1]]), LAYOUT, assert_trivial=True
    )
