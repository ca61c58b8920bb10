"""Activations in Gluon, with as many digits as results keep: for 16 bits 11 instructions a number for gelu and 5 for
silu, where `registry.toolbox.arithmetic` takes 15 and 9.

They are most of the code of a tile's end, which is fetched once a tile. In 23 instructions gelu of 3497 x 1536 x 576
took gluon_matmul_pairs 24.9 us on an H200; in 12 it takes 17.7.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
import triton.experimental.gluon.language as gl
import triton.language as tl
from triton.experimental import gluon

from registry.toolbox.arithmetic import activate

__all__ = ["activate_as", "log2_tail"]

_SILU: gl.constexpr = gl.constexpr("""{
        .reg .f32 t;
        mul.f32 t, $1, 0fBFB8AA3B; // - log2(e)
        ex2.approx.ftz.f32 t, t;
        add.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 t, t;
        mul.f32 $0, $1, t;
    }""")


@gluon.jit
def activate_as(x, NAME: gl.constexpr, kind: gl.constexpr):
    """As `arithmetic.activate`, of a float32 that will be rounded to `kind`."""
    SHORT: gl.constexpr = kind.primitive_bitwidth == 16
    if SHORT and NAME == "silu":
        x = gl.inline_asm_elementwise(_SILU, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    elif SHORT and NAME == "gelu":
        y = gl.minimum(gl.abs(x), 14.0)  # beyond, nothing is left of it; and no infinity times zero
        x = gl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - y * gl.exp2(log2_tail(y))
    else:
        x = activate(x, NAME)
    return x


@triton.jit
def log2_tail(y):
    """log2(1 - Phi(y)), y >= 0: 1 - Phi(y) to 8e-6 of it for y in 0..6.5, to 1e-10 beyond, where it falls on."""
    p = -1.75778056e-06 * y + 5.99366787e-05
    p = p * y - 0.000916363902
    p = p * y + 0.00844739034
    p = p * y - 0.053824515
    p = p * y - 0.458615688
    p = p * y - 1.15118018
    return p * y - 1.00000387
