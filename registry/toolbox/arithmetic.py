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
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def gelu(x):
    """x * Phi(x), as torch's exact gelu, in half the instructions that tl.erf takes.

    1 - Phi(y) = t P(t) exp(-y^2 / 2) with t = 1 / (1 + 0.36 y), y >= 0: P is fitted to a relative error of 9e-7, so
    the small results of large negative x keep their digits, which 1 + erf(x) would cancel."""
    y = tl.minimum(tl.abs(x), 14.0)  # beyond, nothing is left of it; and no infinity times zero
    t = 1.0 / (0.36 * y + 1.0)
    p = 0.047059479300628856 * t - 0.17977571411780768
    p = p * t + 0.18096910739506228
    p = p * t + 0.026538898439048636
    p = p * t + 0.13972307115475804
    p = p * t + 0.14177176136852168
    p = p * t + 0.14371309420278064
    rest = p * t * tl.exp2(y * y * -0.7213475204444817)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - y * rest
