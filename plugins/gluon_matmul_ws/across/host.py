"""Host side of products whose second factor has rows at odd distances across K: its maps, and the launches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.ops.matmul.calls import MATMUL, VECTORS, out_of
from registry.plugins.gluon_matmul_ws import host as whole_rows
from registry.plugins.gluon_matmul_ws.across.copy import UNIT, blocks_of, copy_of, copying
from registry.plugins.gluon_matmul_ws.odd.host import run_of
from registry.toolbox import integers
from registry.toolbox.boxes import in_tiles
from registry.toolbox.call import Call, Host, Operands
from registry.toolbox.hopper import swizzled
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import tma_geometry, turned
from registry.toolbox.tensor_maps import with_base

LOST = 8
"""Columns of a tile that another one stores: see kernel.py."""
LINE = 64
"""Elements of 128 bytes."""


@dataclasses.dataclass(frozen=True)
class AcrossSwitches(whole_rows.Switches):
    """Those of `gluon_matmul_ws`, and how the second factor arrives: see kernel.py."""

    CLASSES: int  # of K
    C_RUN: int  # elements of a row of C that one store may take


def classes_of(operand: StandIn) -> int:
    """Every so manieth row lies at a distance that tensor maps can have."""
    _, (_, pitch, _) = tma_geometry(operand)
    return UNIT // integers.gcd(UNIT, pitch)


def switches(problem: Any, config: Mapping[str, Any], given: Operands) -> AcrossSwitches:
    """What this config means for a problem."""
    first, second = whole_rows.sides(config, given)
    found = whole_rows.switches(problem, config, given)
    found = dataclasses.replace(found, FEW=0, CUT=False, A_T=in_place(first), B_T=False, TMA_STORE=False, REGS=232)
    return AcrossSwitches(**found.__dict__, CLASSES=classes_of(second), C_RUN=run_of(out_of(problem, given)))


def in_place(first: StandIn) -> bool:
    """Whether the first factor is read where it is: across K, in rows of a line or more, at distances of whole units.
    (Boxes of shorter rows take longer than a copy.)"""
    shape, strides = tma_geometry(first)
    return turned(first) and shape[2] >= LINE and not any(stride % UNIT for stride in strides[:2])


def _maps(operand: StandIn, columns: int, k: int, turns: list[int]) -> list[TensorDescriptor]:
    """Of the rows of each class of K, in the order of their turns; always eight."""
    (entries, held, width), (z, pitch, _) = tma_geometry(operand)
    classes = len(turns)
    block = [1, k, columns]
    first = TensorDescriptor(
        operand, [entries, held, width], [z, classes * pitch, 1], block, swizzled(block, operand.dtype)
    )
    found = []
    for t in turns:
        own = -(-(held - t) // classes)  # rows t, t + classes, ...
        shape = [entries, own, t * pitch + width] if own > 0 else [entries, 1, 1]
        found.append(with_base(first, operand, shape=shape))
    return found + found[:1] * (UNIT - classes)


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    """The launches of this config: the first factor's copy, unless it is read in place, and the product."""
    from registry.plugins.gluon_matmul_ws.across.kernel import matmul_across

    first, second = whole_rows.sides(config, given)
    cfg = switches(problem, config, given)
    read = first if cfg.A_T else copy_of(first, cfg.BK, cfg.CLASSES)
    _, (_, pitch, _) = tma_geometry(second)
    turns = [(cfg.CLASSES - 1 - phase) * (pitch // (UNIT // cfg.CLASSES)) % cfg.CLASSES for phase in range(cfg.CLASSES)]
    b_maps = _maps(second, cfg.N0, cfg.BK, turns)
    a_maps = _maps(read, cfg.GM, cfg.BK, turns) if cfg.A_T else [in_tiles(read, cfg.GM, cfg.BK)] * UNIT
    per_phase = blocks_of(problem.k, cfg.BK, cfg.CLASSES)
    tile = (cfg.PARTS * cfg.GM, cfg.N0 - LOST)
    ctas, shared = whole_rows.divided(problem, cfg, given, tile, per_phase * cfg.CLASSES)
    arguments = {
        **shared,
        **{f"a{phase}": one for phase, one in enumerate(a_maps)},
        **{f"b{phase}": one for phase, one in enumerate(b_maps)},
        "per_phase": per_phase,
        "z_a": int(a_maps[0].shape[0] > 1),
        "z_b": int(b_maps[0].shape[0] > 1),
        "a_pitch": tma_geometry(read)[1][1],
        "pitch": pitch,
    }
    product = Call(matmul_across, (ctas,), arguments, {"cfg": cfg}, {"num_warps": 4, "launch_pdl": cfg.PDL})
    return [product] if cfg.A_T else [copying(first, read, cfg.BK, cfg.CLASSES, pitch), product]


HOST = Host(MATMUL, call, contiguous=VECTORS)
