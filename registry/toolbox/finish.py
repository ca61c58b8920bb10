"""What is done to finished accumulators of wgmma in registers, in float32: bias and activation.

A kernel's `cfg` says what there is: UNITS of 64 rows by WIDTH columns, BIAS, ACT; with SWAP columns of the product are
rows of the accumulators. A thread has two neighbouring columns of each eight (registry.toolbox.wgmma). Columns of the
product mostly lie across: each lane of a warp loads the bias of two of 64 columns, before the product, and hands it to
those that need it (shfl). With SWAP a thread has two of them for each 64 rows::

    held = bias_of((bias_ptr, columns), high, wide, cfg)  # the corner of the accumulators, before they are computed
    four = finished(acc, unit, eight, held, cfg)  # in place of wgmma.four_of, as they are stored

Accumulators are finished as they are stored, for all at once spill registers. Instructions are few, 12 a number for
gelu and 5 for silu: their code is longer than a kernel's other, and is fetched once a tile.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon

from registry.toolbox.arithmetic import activate
from registry.toolbox.wgmma import four_of, lanes

_EXP2: gl.constexpr = gl.constexpr("ex2.approx.ftz.f32 $0, $1;")
_SILU: gl.constexpr = gl.constexpr("""{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B; // - log2(e)
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 t, t;
        mul.f32 $0, $1, t;
    }""")
_FROM_LANE: gl.constexpr = gl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 31, -1;")


@gluon.jit
def _from_lane(value, lane):
    """What another lane of the same warp has."""
    return gl.inline_asm_elementwise(_FROM_LANE, "=f,f,r", [value, lane], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def bias_of(bias, high, wide, cfg: gl.constexpr):
    """What this thread keeps of the bias for accumulators whose corner is at (high, wide)."""
    bias_ptr, columns = bias  # of C
    thread = lanes()
    held = ()
    if cfg.BIAS and cfg.SWAP:
        UNITS: gl.constexpr = cfg.UNITS
        first = high + thread // 32 * 16 + thread % 32 // 4
        for eight in gl.static_range(2 * UNITS):
            at = first + eight // 2 * 64 + eight % 2 * 8
            held = held + (gl.load(bias_ptr + at, mask=at < columns, other=0.0).to(gl.float32),)
    elif cfg.BIAS:
        GROUPS: gl.constexpr = (cfg.WIDTH + 63) // 64
        for group in gl.static_range(GROUPS):
            at = wide + group * 64 + thread % 32 * 2
            for beside in gl.static_range(2):
                held = held + (gl.load(bias_ptr + at + beside, mask=at < columns, other=0.0).to(gl.float32),)
    return held


@gluon.jit
def finished(acc, unit: gl.constexpr, eight: gl.constexpr, held, cfg: gl.constexpr):
    """Two columns of two rows of the accumulators, with what `bias_of` kept, and activated."""
    left, right, low_left, low_right = four_of(acc, unit * (cfg.WIDTH // 8) + eight)
    if cfg.BIAS and cfg.SWAP:
        left, right = left + held[2 * unit], right + held[2 * unit]
        low_left, low_right = low_left + held[2 * unit + 1], low_right + held[2 * unit + 1]
    elif cfg.BIAS:
        lane = lanes() % 4 + eight % 8 * 4
        one, other = _from_lane(held[eight // 8 * 2], lane), _from_lane(held[eight // 8 * 2 + 1], lane)
        left, right, low_left, low_right = left + one, right + other, low_left + one, low_right + other
    ACT: gl.constexpr = cfg.ACT
    return _activated(left, ACT), _activated(right, ACT), _activated(low_left, ACT), _activated(low_right, ACT)


@gluon.jit
def _activated(x, ACT: gl.constexpr):
    """As `arithmetic.activate`, for results of 16 bits: half of the instructions."""
    if ACT == "silu":
        x = gl.inline_asm_elementwise(_SILU, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    elif ACT == "gelu":
        y = gl.minimum(gl.abs(x), 14.0)  # beyond, nothing is left of it; and no infinity times zero
        rest = gl.inline_asm_elementwise(_EXP2, "=f,f", [log2_tail(y)], dtype=gl.float32, is_pure=True, pack=1)
        x = gl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - y * rest
    else:
        x = activate(x, ACT)
    return x


@triton.jit
def log2_tail(y):
    """log2(1 - Phi(y)), for gelu of 16 bits: 1 - Phi(y) to 8e-6 of it for y in 0..6.5, to 1e-10 beyond, where it falls
    on. With the exponential this is half of what `arithmetic.gelu` takes, whose digits are for float32, and one special
    function, not two: an SM has those for 16 lanes a cycle."""
    p = -1.75778056e-06 * y + 5.99366787e-05
    p = p * y - 0.000916363902
    p = p * y + 0.00844739034
    p = p * y - 0.053824515
    p = p * y - 0.458615688
    p = p * y - 1.15118018
    return p * y - 1.00000387
