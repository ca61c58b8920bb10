"""LSE and delta as terms of the matrix products.

A thread's part of the scores lies in so many columns that LSE and delta, one value a query each, took it two loads of
shared memory for every four scores, in turn behind the matrix products' own reads. Instead, the products subtract them:

    S - LSE / scale = K Q^T - 1 (a + b + c)^T    dP - delta = V dO^T - 1 (d + e + f)^T

with each value as three bfloat16 terms, 24 bits of it, and a product of 16 columns more. sums.py writes the terms. A
query past the end, or that sees no key and has no sink, has so large an LSE that its P is zero, and is finite, for its
terms are multiplied by 0 where delta is meant. A cap bends the scores before LSE is taken off: then both are loaded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from registry.toolbox.hopper import as_matrix, viewed

LSE, DELTA = gl.constexpr(0), gl.constexpr(3)  # the first column of its terms
COLUMNS = gl.constexpr(16)
STATS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def minus_ones(FIRST: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """[ROWS, COLUMNS]: -1 in three columns, 0 elsewhere."""
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    row = gl.where((column >= FIRST) & (column < FIRST + 3), -1.0, 0.0).to(gl.bfloat16)
    return row[None, :].broadcast_to(ROWS, COLUMNS)


@gluon.jit
def issue_product(a, b, FIRST: gl.constexpr, stats_tile, zero, T: gl.constexpr):
    """a b^T, less the terms from column FIRST on if they are folded; then it counts as two products when waited for."""
    ROWS: gl.constexpr = zero.shape[0]
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=zero.type.layout, k_width=2)
    if T.folded:
        terms = as_matrix(stats_tile, T.block_m, COLUMNS).permute((1, 0))
        x = warpgroup_mma(minus_ones(FIRST, ROWS, OPERAND), terms, zero, use_acc=False, is_async=True)
        return warpgroup_mma(a, b.permute((1, 0)), x, is_async=True)
    else:
        return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def lse_of(stats_tile, scores, T: gl.constexpr):
    """For each column of `scores`; 0 if it is folded."""
    M: gl.constexpr = T.block_m
    if T.folded:
        return 0.0
    else:
        return viewed(stats_tile, [2, M], STATS).index(0).load(gl.SliceLayout(0, scores.type.layout))


@gluon.jit
def less_delta(dp, stats_tile, T: gl.constexpr):
    """dP - delta."""
    M: gl.constexpr = T.block_m
    if T.folded:
        return dp
    else:
        return dp - viewed(stats_tile, [2, M], STATS).index(1).load(gl.SliceLayout(0, dp.type.layout))[None, :]
