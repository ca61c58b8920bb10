"""Arithmetic for kernels in Triton or Gluon, where the plain way is wrong or slow.

Tensor cores take the upper 19 bits of a float32 and drop the rest. cuBLAS rounds its operands before, Triton does not,
so that a plain `tl.dot` of float32 has 2.7 times the error of torch's product, and fails the conformance suite::

    if PRECISION == "tf32":
        a, b = to_tf32(a), to_tf32(b)
    acc = tl.dot(a, b, acc, input_precision=PRECISION)
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

__all__ = ["activate", "gelu", "to_tf32"]


@triton.jit
def to_tf32(x):
    """float32 rounded to the nearest tf32; other dtypes as they are."""
    if x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)  # a NaN of many ones would become a zero
    return x


@triton.jit
def activate(x, NAME: tl.constexpr):
    """An activation of `registry.matmul` by its name; "" is none."""
    if NAME == "relu":
        x = tl.maximum(x, 0, propagate_nan=tl.PropagateNan.ALL)  # as torch.relu
    elif NAME == "gelu":
        x = gelu(x)
    elif NAME == "silu":
        x = x / (1.0 + tl.exp2(x * -1.4426950408889634))
    return x


@triton.jit
def gelu(x):
    """x * Phi(x), as torch's exact gelu, to 1.2e-7 where torch in float32 is off by 1.1e-6.

    1 - Phi(y) = 2^P(y), y >= 0: P is fitted to a relative error of 1e-6 for y in 0..7 and falls on beyond, so the small
    results of large negative x keep their digits, which 1 + erf(x) would cancel. It is one special function and
    15 instructions; P over a rational argument took two and 23."""
    y = tl.minimum(tl.abs(x), 14.0)  # beyond, nothing is left of it; and no infinity times zero
    p = -5.73450842e-09 * y + 2.15684992e-07
    p = p * y - 3.38793211e-06
    p = p * y + 2.72261459e-05
    p = p * y - 8.7353932e-05
    p = p * y - 0.000462577853
    p = p * y + 0.00762082636
    p = p * y - 0.053002581
    p = p * y - 0.458984405
    p = p * y - 1.1511426
    rest = tl.exp2(p * y - 0.999998987)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - y * rest
