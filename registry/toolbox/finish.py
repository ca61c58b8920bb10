"""What is done to finished accumulators of wgmma in registers, in float32: bias and activation.

A kernel's `cfg` says what there is: UNITS of 64 rows by WIDTH columns, BIAS, ACT; with SWAP columns of the product are
rows of the accumulators. A thread has two neighbouring columns of each eight (registry.toolbox.wgmma). Columns of the
product mostly lie across: each lane of a warp loads the bias of two of 64 columns, before the product, and hands it to
those that need it (shfl). With SWAP a thread has two of them for each 64 rows::

    held = bias_of((bias_ptr, columns), high, wide, cfg)  # the corner of the accumulators, before they are computed
    four = finished(acc, unit, eight, held, cfg)  # in place of wgmma.four_of, as they are stored

Accumulators are finished as they are stored, for all at once spill registers.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from registry.toolbox.activations import activate_as
from registry.toolbox.wgmma import four_of, lanes

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
    KIND: gl.constexpr = gl.bfloat16  # or float16: of what is stored, 4 bytes a thread
    left, right = activate_as(left, ACT, KIND), activate_as(right, ACT, KIND)
    return left, right, activate_as(low_left, ACT, KIND), activate_as(low_right, ACT, KIND)
