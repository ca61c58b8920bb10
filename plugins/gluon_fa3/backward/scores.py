"""The arithmetic between the matrix products, in base 2. Where gradients of keys are wanted, scores are transposed: rows
are keys, columns are queries.

P = 2^(S scale log2(e) - LSE log2(e)); dS = P (dP - delta). A query that sees no key, or is past the end, has LSE = +inf,
which makes its P and dS exactly zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from registry.plugins.gluon_fa3.softmax import keep_band, keep_up_to

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
def mask_keys(x, first_key, first_query, keys, queries, extent, T: gl.constexpr):
    """Rows are keys: hide the keys first_key + keys from those of the queries first_query + queries that may not see them.

    Under a uniform branch: only blocks at an edge of the mask pay. As in softmax.mask_block, a lane's part of the columns
    joins the limit, so that the rest are immediates.
    """
    seqlen_q, seqlen_k, left, right = extent
    N: gl.constexpr = x.shape[0]
    M: gl.constexpr = x.shape[1]
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
            x = keep_band(x, first[:, None] - lane, last[:, None] - lane, fixed)
        else:
            x = keep_from(x, first[:, None] - lane, fixed)
    return x


@gluon.jit
def mask_queries(x, first_query, first_key, queries, keys, extent, T: gl.constexpr):
    """Rows are queries: hide from them those of the keys first_key + keys that they may not see; as `mask_keys`."""
    seqlen_q, seqlen_k, left, right = extent
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    level = first_query + (seqlen_k - seqlen_q) - first_key  # the column of the key that is level with first_query
    edge = (level + right < N - 1) | (first_key + N > seqlen_k)
    if T.mask == "band":
        edge = edge | (level + (M - 1) - left > 0)
    if edge:
        lane = (keys & 6)[None, :]
        fixed = (keys & -7)[None, :]
        last = gl.minimum(level + queries + right, seqlen_k - 1 - first_key)
        if T.mask == "band":
            x = keep_band(x, (level + queries - left)[:, None] - lane, last[:, None] - lane, fixed)
        else:
            x = keep_up_to(x, last[:, None] - lane, fixed)
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
