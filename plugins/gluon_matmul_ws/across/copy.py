"""A copy of the first factor: K in the order in which the second is multiplied, phase by phase (kernel.py)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.toolbox.call import Call
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import strides_of, turned

BLOCK = 64
"""Elements of K of a block; those beyond K are zero."""
HIGH = 16
"""Rows of the factor that a program copies."""
UNIT = 8
"""Elements of 16 bytes."""
_BLOCK, _HIGH, _UNIT = tl.constexpr(BLOCK), tl.constexpr(HIGH), tl.constexpr(UNIT)


@triton.jit(do_not_specialize=["M", "K", "from_z", "from_m", "from_k", "to_z", "line", "blocks", "pitch"])
def phased(
    source,
    made,
    M,
    K,
    from_z,
    from_m,
    from_k,
    to_z,
    line,
    blocks,
    pitch,
    CLASSES: tl.constexpr,
    ALONG: tl.constexpr,
    PDL: tl.constexpr,
):
    """A block of each class of K, of a few rows. ALONG: K is contiguous in the source, else the rows are."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    z = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) % blocks
    m = tl.program_id(0) // blocks * _HIGH + tl.arange(0, _HIGH)
    place = tl.arange(0, _BLOCK * CLASSES)
    k = block * (_BLOCK * CLASSES) + place
    if ALONG:
        at = m.to(tl.int64)[:, None] * from_m + k[None, :]
    else:
        at = m[:, None] + k.to(tl.int64)[None, :] * from_k
    x = tl.load(source + z * from_z + at, (m < M)[:, None] & (k < K)[None, :], other=0.0)
    x = x.reshape([_HIGH, _BLOCK, CLASSES]).permute((0, 2, 1)).reshape([_HIGH, _BLOCK * CLASSES])
    t = place // _BLOCK
    phase = CLASSES - 1 - (t * (pitch // (_UNIT // CLASSES))) % CLASSES
    to = (phase * blocks + block) * _BLOCK + place % _BLOCK
    tl.store(made + z * to_z + m.to(tl.int64)[:, None] * (line // _BLOCK * _BLOCK) + to[None, :], x, (m < M)[:, None])


def blocks_of(k: int, classes: int) -> int:
    """Of each class."""
    return -(-k // (BLOCK * classes))


def copy_of(factor: StandIn, classes: int) -> StandIn:
    """Where it will be: [M, K by phases], contiguous along K."""
    m, k = factor.shape[-2:]
    line = classes * blocks_of(k, classes) * BLOCK
    batch = factor.shape[:-2] if strides_of(factor)[0] else (1,) * (len(factor.shape) - 2)
    strides = (*(line * m,) * len(batch), line, 1)
    return StandIn((*batch, m, line), factor.dtype, strides, name=f"phased_{factor.name}")


def copying(factor: StandIn, to: StandIn, classes: int, pitch: int) -> Call:
    """The launch that fills the copy."""
    from_z, from_m, from_k = strides_of(factor)
    to_z, line, _ = strides_of(to)
    entries = to.shape[0] if len(to.shape) == 3 else 1
    m, k = factor.shape[-2:]
    arguments: dict[str, Any] = {
        "source": factor,
        "made": to,
        "M": m,
        "K": k,
        "from_z": from_z,
        "from_m": from_m,
        "from_k": from_k,
        "to_z": to_z,
        "line": line,
        "blocks": blocks_of(k, classes),
        "pitch": pitch,
    }
    grid = (arguments["blocks"] * triton.cdiv(m, HIGH), entries)
    switches = {"CLASSES": classes, "ALONG": not turned(factor), "PDL": True}
    return Call(phased, grid, arguments, switches, {"num_warps": 4, "launch_pdl": True})
