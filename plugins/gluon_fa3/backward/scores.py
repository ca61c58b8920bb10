"""The arithmetic between the matrix products, on transposed scores: rows are keys, columns are queries. Base 2.

P = 2^(S scale log2(e) - LSE log2(e)); dS = P (dP - delta). A query that sees no key, or is past the end, has LSE = +inf,
which makes its P and dS exactly zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.softmax import keep_band

# A query before a key's first one gets -inf: two instructions an element, as in softmax.py.
_KEEP_FROM = gl.constexpr("{ .reg .pred p; setp.gt.s32 p, $2, $3; selp.f32 $0, 0fFF800000, $1, p; }")
_RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")
NOBODY = gl.constexpr(1 << 30)  # a key past the end: its first query


@gluon.jit
def keep_from(x, first, queries):
    """-inf where queries < first."""
    return gl.inline_asm_elementwise(
        _KEEP_FROM, "=f,f,r,r", [x, first, queries], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def mask_exponents(x, first_key, first_query, keys, queries, extent, T: gl.constexpr):
    """Hide the keys first_key + keys from those of the queries first_query + queries that may not see them.

    Under a uniform branch: only blocks at an edge of the mask pay. As in softmax.mask_block, a lane's part of the columns
    joins the limit, so that the rest are immediates.
    """
    seqlen_q, seqlen_k, left, right = extent
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
    own = first_key - (seqlen_k - seqlen_q) - first_query  # the query, from first_query on, that is level with first_key
    edge = (own + (N - 1) - right > 0) | (first_key + N > seqlen_k)
    if T.mask == "band":
        edge = edge | (own + left < M - 1)
    if edge:
        lane = (queries & 6)[None, :]
        fixed = (queries & -7)[None, :]
        first = gl.where(first_key + keys < seqlen_k, own + keys - right, NOBODY)
        if T.mask == "band":
            last = own + keys + left
            x = keep_band(x, first[:, None] - lane, last[:, None] - lane, fixed)
        else:
            x = keep_from(x, first[:, None] - lane, fixed)
    return x


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
