"""Lines of 64 elements, as wgmma takes its first factor from registers, each shifted to its first element.

A line begins at any of the first 8 elements that its box brought, so 56 are there in any case, a block of K. Of each
line a thread takes 16 elements that lie side by side, and what it lacks at their end from the thread after it. So it
multiplies K in an order of its own, in which the other factor is copied (copy.py).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

STEP = 56
"""Elements of K of a block."""
UNIT = 8
"""Elements of 16 bytes. Every so manieth row lies at a distance that tensor maps can have."""
UNITS: gl.constexpr = gl.constexpr(UNIT)
WORDS: gl.constexpr = gl.constexpr(8)
"""Of a thread's part of a line; two elements each."""
QUAD: gl.constexpr = gl.constexpr(4)
"""Threads that share a line."""


@gluon.constexpr_function
def _held(rows):
    """Words of lines as wgmma's threads hold them: two lines of each 16 for a quad, 8 words of each for a thread."""
    more = [[64 << i, 0] for i in range((rows // 64).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *more],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[rows, 32],
    )


@gluon.jit
def _split(x, COUNT: gl.constexpr):
    """[lines, QUAD, COUNT] -> COUNT tensors [lines, QUAD]."""
    if COUNT == 1:
        return (x.reshape([x.shape[0], QUAD]),)
    else:
        lo, hi = x.reshape([x.shape[0], QUAD, 2, COUNT // 2]).permute((0, 1, 3, 2)).split()
        return _split(lo, COUNT // 2) + _split(hi, COUNT // 2)


@gluon.jit
def _pair(word, dtype: gl.constexpr):
    """A word's two elements."""
    lo = word.to(gl.int16).to(dtype, bitcast=True)
    hi = (word >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(lo, hi).reshape([word.shape[0], 1, 2 * QUAD])


@gluon.jit
def _pairs(words, FIRST: gl.constexpr, COUNT: gl.constexpr, dtype: gl.constexpr):
    """Words' elements, [lines, COUNT, elements of a quad]."""
    if COUNT == 1:
        return _pair(words[FIRST], dtype)
    else:
        lo = _pairs(words, FIRST, COUNT // 2, dtype)
        hi = _pairs(words, FIRST + COUNT // 2, COUNT // 2, dtype)
        return gl.join(lo, hi).permute((0, 3, 1, 2)).reshape([lo.shape[0], COUNT, 2 * QUAD])


@gluon.jit
def _next_lane(word):
    return gl.inline_asm_elementwise(
        "shfl.sync.down.b32 $0, $1, 1, 31, 0xffffffff;", "=r,r", [word], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _funnel(low, high, bits):
    return gl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, bits], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _shifted(x, begin):
    """The 8 words from element `begin` on, of a thread's and the first ones of the next."""
    x = x + (_next_lane(x[0]), _next_lane(x[1]), _next_lane(x[2]), _next_lane(x[3]))
    by_two = (begin & 4) != 0
    y = ()
    for i in gl.static_range(WORDS + 2):
        y = y + (gl.where(by_two, x[i + 2], x[i]),)
    by_one = (begin & 2) != 0
    x = ()
    for i in gl.static_range(WORDS + 1):
        x = x + (gl.where(by_one, y[i + 1], y[i]),)
    bits = (begin & 1) * 16
    y = ()
    for i in gl.static_range(WORDS):
        y = y + (_funnel(x[i], x[i + 1], bits),)
    return y


@gluon.jit
def begins(outer, pitch, ROWS: gl.constexpr):
    """Which of the first 8 elements of its box each line begins at, for `fragment`: of ROWS from `outer` on, of which
    every UNIT-th lie side by side."""
    held: gl.constexpr = _held(ROWS)
    line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, held))
    return ((outer + line // (ROWS // UNITS)) * pitch) & 7


@gluon.jit
def fragment(words, begin, acc: gl.constexpr, dtype: gl.constexpr):
    """Lines in shared memory (as words) -> the first factor of wgmma, in registers."""
    ROWS: gl.constexpr = words.shape[0]
    held: gl.constexpr = _held(ROWS)
    x = words.load(held)
    parts = _split(x.reshape([ROWS, QUAD, WORDS]), WORDS)
    like: gl.constexpr = parts[0].type.layout
    begin = gl.convert_layout(begin[:, None], like, assert_trivial=True)
    y = _shifted(parts, begin)
    last = gl.arange(0, QUAD, layout=gl.SliceLayout(0, like))[None, :] == QUAD - 1
    z = (y[0], y[1], y[2], y[3])
    for i in gl.static_range(4, WORDS):
        z = z + (gl.where(last, 0, y[i]),)
    factor = _pairs(z, 0, WORDS, dtype).reshape([ROWS, 64])
    layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc, k_width=2)
    return gl.convert_layout(factor, layout, assert_trivial=True)
