"""Operands that wgmma cannot read as they lie: 8-bit and 32-bit ones are copied to where K is contiguous."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.toolbox.call import Call
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import strides_of, turned

BLOCK = 64


@triton.jit(do_not_specialize=["S", "F", "from_z", "to_z"])
def turn(
    from_ptr,
    to_ptr,
    S,
    F,
    from_z,
    from_s,
    to_z,
    to_f,
    BLOCK: tl.constexpr,
    S_RUN: tl.constexpr,
    F_RUN: tl.constexpr,  # what divides the sizes
    PDL: tl.constexpr,
):
    """to[z, f, s] = from[z, s, f], both contiguous along their last dimension."""
    S = S // S_RUN * S_RUN
    F = F // F_RUN * F_RUN
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tiles = tl.cdiv(F, BLOCK)
    s = tl.program_id(0) // tiles * BLOCK + tl.arange(0, BLOCK)
    f = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    z = tl.program_id(1).to(tl.int64)
    inside = (s < S)[:, None] & (f < F)[None, :]
    x = tl.load(from_ptr + z * from_z + s.to(tl.int64)[:, None] * from_s + f[None, :], mask=inside)
    tl.store(to_ptr + z * to_z + f.to(tl.int64)[:, None] * to_f + s[None, :], tl.trans(x), mask=tl.trans(inside))


def along_k(operand: StandIn, last: bool) -> StandIn:
    """The operand itself, or where its copy will be; `last` says that K is its last dimension."""
    if operand.dtype.itemsize == 2 or turned(operand) != last:
        return operand
    rows, columns = operand.shape[-2:]
    unit = 16 // operand.dtype.itemsize
    pitch = -(-(columns if last else rows) // unit) * unit
    batch = (pitch * (rows if last else columns) if strides_of(operand)[0] else 0,)[: len(operand.shape) - 2]
    strides = (*batch, pitch, 1) if last else (*batch, 1, pitch)
    return StandIn(operand.shape, operand.dtype, strides, name=f"turned_{operand.name}")


def copying(operand: StandIn, copy: StandIn, pdl: bool) -> Call:
    """The launch that fills the copy."""
    (from_z, *of), (to_z, *to) = strides_of(operand), strides_of(copy)
    fast = 0 if turned(operand) else 1  # dimension
    slow_size, fast_size = operand.shape[-2:][1 - fast], operand.shape[-2:][fast]
    arguments = {
        "from_ptr": operand,
        "to_ptr": copy,
        "S": slow_size,
        "F": fast_size,
        "from_z": from_z,
        "from_s": of[1 - fast],
        "to_z": to_z,
        "to_f": to[fast],
    }
    grid = (triton.cdiv(slow_size, BLOCK) * triton.cdiv(fast_size, BLOCK), operand.shape[0] if from_z else 1)
    runs = {"S_RUN": math.gcd(slow_size, 16), "F_RUN": math.gcd(fast_size, 16)}
    return Call(turn, grid, arguments, {"BLOCK": BLOCK, "PDL": pdl, **runs}, {"num_warps": 8, "launch_pdl": pdl})
