"""Host side of products whose first factor has rows at odd distances: its maps, and the launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.ops.matmul.calls import MATMUL, VECTORS, out_of, strides_of
from registry.plugins.gluon_matmul_ws import host as whole_rows
from registry.plugins.gluon_matmul_ws.odd.copy import copy_of, copying
from registry.plugins.gluon_matmul_ws.odd.fragments import STEP, UNIT
from registry.toolbox import integers
from registry.toolbox.boxes import in_tiles
from registry.toolbox.call import Call, Host, Operands
from registry.toolbox.hopper import swizzled
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import tma_geometry
from registry.toolbox.tensor_maps import with_base

SLAB = 64
"""Elements of 128 bytes: what a box has of a row."""


@dataclasses.dataclass(frozen=True)
class OddSwitches(whole_rows.Switches):
    """Those of `gluon_matmul_ws`, and how the first factor arrives: see kernel.py."""

    A_FLAT: bool
    STEP: int  # elements of K of a block
    C_RUN: int  # elements of a row of C that one store may take


def odd(operand: StandIn) -> bool:
    """Whether its rows lie at distances that no tensor map can have."""
    _, (_, pitch, _) = tma_geometry(operand)
    return pitch % UNIT > 0


def flat_rows(operand: StandIn) -> int:
    """Rows of each matrix of a batch whose matrices are at a distance that no map can have, and that is read as one;
    else 0."""
    (entries, rows, _), (z, pitch, _) = tma_geometry(operand)
    return rows if entries > 1 and z % UNIT and z == rows * pitch else 0


def switches(problem: Any, config: Mapping[str, Any], given: Operands) -> OddSwitches:
    """What this config means for a problem."""
    first, _ = whole_rows.sides(config, given)
    found = dataclasses.replace(whole_rows.switches(problem, config, given), FEW=0, CUT=False, REGS=224, B_T=True)
    return OddSwitches(**found.__dict__, A_FLAT=flat_rows(first) > 0, STEP=STEP, C_RUN=run_of(out_of(problem, given)))


def run_of(out: StandIn) -> int:
    """Elements that lie side by side and aligned together in every row, up to 16 bytes."""
    z, row, column = strides_of(out)
    item = out.dtype.itemsize
    aligned = integers.gcd(16, out.alignment) // item
    return integers.gcd(z, row, out.shape[-1], max(1, aligned)) if column == 1 else 1


def _maps(operand: StandIn, rows: int) -> list[TensorDescriptor]:
    """Of rows s, s + 8, ... for each s; `rows` of the operand are in a block."""
    (entries, held, width), (z, pitch, _) = tma_geometry(operand)
    if flat_rows(operand):
        entries, held, z = 1, entries * held, UNIT
    block = [1, rows // UNIT, SLAB]
    layout = swizzled(block, operand.dtype)
    first = TensorDescriptor(operand, [entries, -(-held // UNIT), width], [z, UNIT * pitch, 1], block, layout)
    found = [first]
    for s in range(1, UNIT):
        own = -(-(held - s) // UNIT)  # rows s, s + UNIT, ...
        shape = [entries, own, s * pitch + width] if own > 0 else [entries, 1, 1]
        found.append(with_base(first, operand, shape=shape))
    return found


def _map_of_copy(copied: StandIn, rows: int) -> TensorDescriptor:
    """`rows` columns of the factor are in a block."""
    line, n = copied.shape[-2:]
    block = [1, rows, SLAB]
    entries = copied.shape[0] if len(copied.shape) == 3 else 1
    shape, strides = [entries, n, line], [n * line, line, 1]
    return TensorDescriptor(copied, shape, strides, block, swizzled(block, copied.dtype))


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    """The launches of this config: the second factor's copy, and the product."""
    from registry.plugins.gluon_matmul_ws.odd.kernel import matmul_odd

    first, second = whole_rows.sides(config, given)
    out, copied = out_of(problem, given), copy_of(second)
    cfg = switches(problem, config, given)
    a_maps = _maps(first, cfg.GM)
    b_desc = _map_of_copy(copied, cfg.N0)
    pairs = triton.cdiv(problem.k, 2 * cfg.STEP)  # of blocks; one beyond K is of zeros
    block = (cfg.EN, cfg.GM) if cfg.SWAP else (cfg.GM, cfg.EN)
    ctas, shared = whole_rows.divided(problem, cfg, given, (cfg.PARTS * cfg.GM, cfg.N0), pairs)
    arguments = {
        **shared,
        **{f"a{s}": one for s, one in enumerate(a_maps)},
        "b_desc": b_desc,
        "c_desc": in_tiles(out, *block) if cfg.TMA_STORE else b_desc,
        "pairs": pairs,
        "z_a": int(a_maps[0].shape[0] > 1),
        "z_b": int(b_desc.shape[0] > 1),
        "pitch": a_maps[0].strides[1] // UNIT,
        "rows": flat_rows(first),
    }
    product = Call(matmul_odd, (ctas,), arguments, {"cfg": cfg}, {"num_warps": 4, "launch_pdl": cfg.PDL})
    return [copying(second, copied), product]


HOST = Host(MATMUL, call, contiguous=VECTORS)
