"""A copy of the first factor: K in the order in which the second is multiplied, phase by phase (kernel.py)."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.toolbox.call import Call
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import strides_of, turned

HIGH = 16
"""Rows of the factor that a program copies."""
UNIT = 8
"""Elements of 16 bytes."""
_HIGH, _UNIT = tl.constexpr(HIGH), tl.constexpr(UNIT)


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
    BLOCK: tl.constexpr,
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
    place = tl.arange(0, BLOCK * CLASSES)
    k = block * (BLOCK * CLASSES) + place
    if ALONG:
        at = m.to(tl.int64)[:, None] * from_m + k[None, :]
    else:
        at = m[:, None] + k.to(tl.int64)[None, :] * from_k
    x = tl.load(source + z * from_z + at, (m < M)[:, None] & (k < K)[None, :], other=0.0)
    x = x.reshape([_HIGH, BLOCK, CLASSES]).permute((0, 2, 1)).reshape([_HIGH, BLOCK * CLASSES])
    t = place // BLOCK
    phase = CLASSES - 1 - (t * (pitch // (_UNIT // CLASSES))) % CLASSES
    to = (phase * blocks + block) * BLOCK + place % BLOCK
    tl.store(made + z * to_z + m.to(tl.int64)[:, None] * (line // BLOCK * BLOCK) + to[None, :], x, (m < M)[:, None])


def blocks_of(k: int, block: int, classes: int) -> int:
    """Of each class, of so many elements of K; those beyond K are zero."""
    return -(-k // (block * classes))


def copy_of(factor: StandIn, block: int, classes: int) -> StandIn:
    """Where it will be: [M, K by phases], contiguous along K."""
    m, k = factor.shape[-2:]
    line = classes * blocks_of(k, block, classes) * block
    batch = factor.shape[:-2] if strides_of(factor)[0] else (1,) * (len(factor.shape) - 2)
    strides = (*(line * m,) * len(batch), line, 1)
    return StandIn((*batch, m, line), factor.dtype, strides, name=f"phased_{factor.name}")


def copying(factor: StandIn, to: StandIn, block: int, classes: int, pitch: int) -> Call:
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
        "blocks": blocks_of(k, block, classes),
        "pitch": pitch,
    }
    grid = (arguments["blocks"] * triton.cdiv(m, HIGH), entries)
    switches = {"BLOCK": block, "CLASSES": classes, "ALONG": not turned(factor), "PDL": True}
    return Call(phased, grid, arguments, switches, {"num_warps": 4, "launch_pdl": True})
