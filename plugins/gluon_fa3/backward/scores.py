"""The arithmetic between the matrix products, in base 2. For gradients of keys, scores are transposed: rows are keys.

P = 2^(S scale log2(e) - LSE log2(e)); dS = P (dP - delta). A query past the end, or without a key and a sink, has
LSE = +inf, which makes its P and dS exactly zero; so has one of a sequence without keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")
NOBODY = gl.constexpr(1 << 30)  # a key past the end: its first query


@gluon.constexpr_function
def _keep_asm(test, hidden):
    """As in softmax.py, two and three instructions an element."""
    return f"{{ .reg .pred p; {test} selp.f32 $0, {hidden}, $1, p; }}"


@gluon.jit
def keep_from(x, first, columns, HIDDEN: gl.constexpr):
    """HIDDEN where columns < first."""
    ASM: gl.constexpr = _keep_asm("setp.gt.s32 p, $2, $3;", HIDDEN)
    return gl.inline_asm_elementwise(ASM, "=f,f,r,r", [x, first, columns], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def keep_up_to(x, last, columns, HIDDEN: gl.constexpr):
    """HIDDEN where columns > last."""
    ASM: gl.constexpr = _keep_asm("setp.lt.s32 p, $2, $3;", HIDDEN)
    return gl.inline_asm_elementwise(ASM, "=f,f,r,r", [x, last, columns], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def keep_band(x, first, last, columns, HIDDEN: gl.constexpr):
    """HIDDEN outside first <= columns <= last."""
    ASM: gl.constexpr = _keep_asm("setp.lt.s32 p, $3, $4; setp.gt.or.s32 p, $2, $4, p;", HIDDEN)
    return gl.inline_asm_elementwise(
        ASM, "=f,f,r,r,r", [x, first, last, columns], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def mask_keys(x, first_key, first_query, keys, queries, extent, HIDDEN: gl.constexpr, T: gl.constexpr):
    """Rows are keys: hide first_key + keys from those of first_query + queries that may not see them.

    Under a uniform branch: only blocks at an edge of the mask pay. As in softmax.mask_block, a lane's part of the
    columns joins the limit, so that the rest are immediates.
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
        first = gl.where(keys < seqlen_k - first_key, keys + (level - right), NOBODY)
        if T.mask == "band":
            last = level + keys + left
            x = keep_band(x, first[:, None] - lane, last[:, None] - lane, fixed, HIDDEN)
        else:
            x = keep_from(x, first[:, None] - lane, fixed, HIDDEN)
    return x


@gluon.jit
def mask_queries(x, first_query, first_key, queries, keys, extent, HIDDEN: gl.constexpr, T: gl.constexpr):
    """Rows are queries: hide from first_query + queries those of first_key + keys that they may not see."""
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
            x = keep_band(x, (level + queries - left)[:, None] - lane, last[:, None] - lane, fixed, HIDDEN)
        else:
            x = keep_up_to(x, last[:, None] - lane, fixed, HIDDEN)
    return x


@gluon.jit
def hide(x, AT: gl.constexpr, row, column, rows, columns, extent, T: gl.constexpr):
    """Mask exponents, or with a cap P: then the tanh need not wait in registers across the branch of the mask."""
    if T.mask != "none" and ("probabilities" if T.softcap else "exponents") == AT:
        HIDDEN: gl.constexpr = "0f00000000" if T.softcap else "0fFF800000"
        if T.of_queries:
            x = mask_queries(x, row, column, rows, columns, extent, HIDDEN, T)
        else:
            x = mask_keys(x, row, column, rows, columns, extent, HIDDEN, T)
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
