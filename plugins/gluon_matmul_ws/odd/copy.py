"""A copy of the second factor: K in the order in which the first is multiplied (fragments.py), in 128-byte lines."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from registry.plugins.gluon_matmul_ws.odd.fragments import STEP
from registry.toolbox.call import Call
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import strides_of, turned

LINE = 64
"""Elements that hold a block of K; the last are zero."""
HIGH = 32
"""Columns of the factor that a block copies."""
_STEP, _LINE, _HIGH = tl.constexpr(STEP), tl.constexpr(LINE), tl.constexpr(HIGH)


@triton.jit(do_not_specialize=["N", "K", "from_z", "from_n", "from_k", "to_z", "to_n", "blocks"])
def ordered(source, made, N, K, from_z, from_n, from_k, to_z, to_n, blocks, ALONG: tl.constexpr, PDL: tl.constexpr):
    """A block of K of each column. ALONG: K is contiguous in the source, else the columns are."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    z = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) % blocks
    n = tl.program_id(0) // blocks * _HIGH + tl.arange(0, _HIGH)
    place = tl.arange(0, _LINE)
    k = block * _STEP + place
    there = (n < N)[:, None] & ((place < _STEP) & (k < K))[None, :]
    if ALONG:
        at = n.to(tl.int64)[:, None] * from_n + k[None, :]
    else:
        at = n[:, None] + k.to(tl.int64)[None, :] * from_k
    x = tl.load(source + z * from_z + at, there, other=0.0)
    x = x.reshape([_HIGH, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([_HIGH, _LINE])
    line = block * _LINE + place
    tl.store(
        made + z * (to_z // 8 * 8) + n.to(tl.int64)[:, None] * (to_n // 8 * 8) + line[None, :], x, (n < N)[:, None]
    )


def copy_of(factor: StandIn) -> StandIn:
    """Where it will be: [K in whole lines, N], contiguous along K."""
    k, n = factor.shape[-2:]
    line = -(-k // STEP) * LINE
    z = strides_of(factor)[0]
    batch = factor.shape[:-2] if z else (1,) * (len(factor.shape) - 2)
    strides = (*(line * n,) * len(batch), 1, line)
    return StandIn((*batch, line, n), factor.dtype, strides, name=f"ordered_{factor.name}")


def copying(factor: StandIn, to: StandIn) -> Call:
    """The launch that fills the copy."""
    from_z, from_k, from_n = strides_of(factor)
    to_z, _, to_n = strides_of(to)
    entries = to.shape[0] if len(to.shape) == 3 else 1
    k, n = factor.shape[-2:]
    arguments: dict[str, Any] = {
        "source": factor,
        "made": to,
        "N": n,
        "K": k,
        "from_z": from_z,
        "from_n": from_n,
        "from_k": from_k,
        "to_z": to_z,
        "to_n": to_n,
        "blocks": triton.cdiv(k, STEP),
    }
    grid = (arguments["blocks"] * triton.cdiv(n, HIGH), entries)
    return Call(ordered, grid, arguments, {"ALONG": turned(factor), "PDL": True}, {"num_warps": 4, "launch_pdl": True})
