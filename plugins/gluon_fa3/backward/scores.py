"""The arithmetic between the matrix products, in base 2. For gradients of keys, scores are transposed: rows are keys.

P = 2^(S scale log2(e) - LSE log2(e)); dS = P (dP - delta). A query that sees no key, or is past the end, has LSE =
+inf, which makes its P and dS exactly zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# As in softmax.py, two and three instructions an element. P is masked, not the exponents: then nothing that a cap needs
# has to wait in registers across the branch.
_KEEP_FROM = gl.constexpr("{ .reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, 0f00000000, $1, p; }")
_KEEP_UP_TO = gl.constexpr("{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, 0f00000000, $1, p; }")
_KEEP_BAND = gl.constexpr(
    "{ .reg .pred p; setp.lt.s32 p, $3, $4; setp.gt.or.s32 p, $2, $4, p; selp.f32 $0, 0f00000000, $1, p; }"
)
_RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")
NOBODY = gl.constexpr(1 << 30)  # a key past the end: its first query


@gluon.jit
def _keep(ASM: gl.constexpr, p, limit, columns):
    """Zero on one side of the limit."""
    return gl.inline_asm_elementwise(ASM, "=f,f,r,r", [p, limit, columns], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _keep_band(p, first, last, columns):
    """Zero outside first <= columns <= last."""
    return gl.inline_asm_elementwise(
        _KEEP_BAND, "=f,f,r,r,r", [p, first, last, columns], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def mask_keys(p, first_key, first_query, keys, queries, extent, T: gl.constexpr):
    """Rows are keys: hide first_key + keys from those of first_query + queries that may not see them.

    Under a uniform branch: only blocks at an edge of the mask pay. As in softmax.mask_block, a lane's part of the
    columns joins the limit, so that the rest are immediates.
    """
    seqlen_q, seqlen_k, left, right = extent
    N: gl.constexpr = p.shape[0]
    M: gl.constexpr = p.shape[1]
    level = first_key - (seqlen_k - seqlen_q) - first_query  # the column of the query that is level with first_key
    edge = (level + (N - 1) - right > 0) | (first_key + N > seqlen_k)
    if T.mask == "band":
        edge = edge | (level + left < M - 1)
    if edge:
        lane = (queries & 6)[None, :]
        fixed = (queries & -7)[None, :]
        first = gl.where(first_key + keys < seqlen_k, level + keys - right, NOBODY)
        if T.mask == "band":
            last = level + keys + left
            p = _keep_band(p, first[:, None] - lane, last[:, None] - lane, fixed)
        else:
            p = _keep(_KEEP_FROM, p, first[:, None] - lane, fixed)
    return p


@gluon.jit
def mask_queries(p, first_query, first_key, queries, keys, extent, T: gl.constexpr):
    """Rows are queries: hide from first_query + queries those of first_key + keys that they may not see."""
    seqlen_q, seqlen_k, left, right = extent
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    level = first_query + (seqlen_k - seqlen_q) - first_key  # the column of the key that is level with first_query
    edge = (level + right < N - 1) | (first_key + N > seqlen_k)
    if T.mask == "band":
        edge = edge | (level + (M - 1) - left > 0)
    if edge:
        lane = (keys & 6)[None, :]
        fixed = (keys & -7)[None, :]
        last = gl.minimum(level + queries + right, seqlen_k - 1 - first_key)
        if T.mask == "band":
            p = _keep_band(p, (level + queries - left)[:, None] - lane, last[:, None] - lane, fixed)
        else:
            p = _keep(_KEEP_UP_TO, p, last[:, None] - lane, fixed)
    return p


@gluon.jit
def exponents(s, scale, cap, T: gl.constexpr):
    """Scores in base 2, and, with a cap, the tanh that they were bent by. cap * tanh(x / cap) by way of exp2."""
    if T.softcap:
        grown = gl.exp2(s * scale) + 1.0
        bent = 1.0 - 2.0 * gl.inline_asm_elementwise(
            _RECIPROCAL, "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1
        )
        return bent * cap, bent
    else:
        return s * scale, s
