"""Online softmax in Gluon whose maxima are lazy: what is subtracted from a row's scores, and what a change of it costs.

Maxima start at a finite LOWEST, so that a row that sees no key needs no special case: exp2(-inf - LOWEST) is 0, its sum
stays 0, and its output and LSE come out as 0 and -inf.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOWEST = gl.constexpr(-1e30)
SLACK = gl.constexpr(8.0)  # by how much scores may exceed what is subtracted: probabilities reach 2^8, well in fp16


@gluon.jit
def risen(m, highest):
    """What to subtract. Any number near the true maximum will do, since it cancels out: this one rises by more than
    SLACK or not at all, which leaves nearly all blocks but a row's first with nothing to rescale."""
    return gl.where(highest > m + SLACK, highest, m)


@gluon.constexpr_function
def _rescale_asm(count):
    """`count` values of an accumulator, times their factors unless all of the warp's are 1. A thread's values lie in
    two rows, two of the first and two of the second by turns."""
    factor = [f"${2 * count + i}" for i in range(count)]
    lines = ["{ .reg .pred p;", f"setp.neu.f32 p, {factor[0]}, 0f3F800000;"]
    lines += [
        f"setp.neu.or.f32 p, {factor[2]}, 0f3F800000, p;",
        "vote.sync.any.pred p, p, 0xffffffff;",
        "@!p bra SAME;",
    ]
    lines += [f"mul.f32 ${i}, ${i}, {factor[i]};" for i in range(count)]
    return " ".join([*lines, "SAME: }"])


@gluon.constexpr_function
def _rescale_operands(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(acc, alpha):
    """acc * alpha, row by row, behind a branch that a warp takes as one."""
    COUNT: gl.constexpr = min(acc.shape[0] * acc.shape[1] // 128, 64)
    factors = gl.full(acc.shape, 1.0, gl.float32, layout=acc.type.layout) * alpha[:, None]
    return gl.inline_asm_elementwise(
        _rescale_asm(COUNT), _rescale_operands(COUNT), [acc, factors], dtype=gl.float32, is_pure=True, pack=COUNT
    )
