"""Host side of the warp-specialised grouped product: the compile-time switches of a kernel, and its launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton

from registry.ops.grouped_mm.calls import GROUPED_MM, VECTORS, out_of
from registry.ops.grouped_mm.offsets import OFFSETS
from registry.toolbox.boxes import in_tiles
from registry.toolbox.call import Call, Host, Operands
from registry.toolbox.matrices import split_n, strides_of, tma_can_store, turned


@dataclass(frozen=True)
class GroupedSwitches:
    """Compile-time switches of one kernel. Tile facts and schedule: see kernel.py."""

    PARTS: int  # consumers that share a tile
    GM: int  # rows of a consumer
    N0: int
    N1: int
    COLUMNS: int  # of the result, in a tile
    BK: int
    STAGES: int
    STORES: int  # buffers of C for each consumer
    EN: int  # columns of such a buffer
    GROUP: int
    EP: int  # a power of two above the number of groups, 128 or more
    PDL: bool
    B_T: bool
    TMA_STORE: bool
    GATED: bool
    BIAS: bool
    ACT: str


def halves(problem: Any, wide: int) -> tuple[int, int]:
    """Columns of b in a tile of so many, as the two parts that it comes in."""
    return (wide // 2, wide // 2) if problem.gated else split_n(wide)


def parts_of(config: Mapping[str, Any]) -> int:
    """Consumers that share a tile."""
    return 2 if config["MODE"] == "coop" else 1


def columns_at_once(columns: int, item: int) -> int:
    """Columns of a tile that are stored together, of elements of so many bytes."""
    return min(128 // item, columns)


def entries(groups: int) -> int:
    """Of the table of groups: a power of two."""
    return max(1 << groups.bit_length(), 128)


def switches(problem: Any, config: Mapping[str, Any], given: Operands) -> GroupedSwitches:
    """What this config means for a problem; BLOCK_N counts columns of b, so a gated tile has half as many."""
    parts, wide, out = parts_of(config), config["BLOCK_N"], out_of(problem, given)
    n0, n1 = halves(problem, wide)
    return GroupedSwitches(
        PARTS=parts,
        GM=config["BLOCK_M"] // parts,
        N0=n0,
        N1=n1,
        COLUMNS=n0 if problem.gated else wide,
        BK=config["BLOCK_K"],
        STAGES=config["STAGES"],
        STORES=config["STORES"],
        EN=columns_at_once(n1 or n0, out.dtype.itemsize),
        GROUP=config["GROUP"],
        EP=entries(problem.groups),
        PDL=True,
        B_T=turned(given["b"]),
        TMA_STORE=tma_can_store(out),
        GATED=problem.gated,
        BIAS=problem.bias,
        ACT=problem.activation,
    )


def call(problem: Any, config: Mapping[str, Any], given: Operands, scale: float) -> list[Call]:
    """The launch of this config."""
    from registry.plugins.gluon_grouped.kernel import grouped_ws

    a, b, out, cfg = given["a"], given["b"], out_of(problem, given), switches(problem, config, given)
    a_desc, b_desc = in_tiles(a, cfg.GM, cfg.BK), in_tiles(b, cfg.BK, cfg.N0)
    arguments = {
        "a_desc": a_desc,
        "b0_desc": b_desc,
        "b1_desc": in_tiles(b, cfg.BK, cfg.N1 or cfg.N0),
        "c_desc": in_tiles(out, cfg.GM, cfg.EN) if cfg.TMA_STORE else a_desc,
        "c_ptr": out,
        "offs_ptr": given["offs"],
        "word_ptr": OFFSETS.argument,
        "bias_ptr": given.get("bias", out),
        "E": problem.groups,
        "T": problem.m,
        "N": problem.n,
        "blocks": triton.cdiv(problem.k, cfg.BK),
        "g_b": int(b_desc.shape[0] > 1),
        "scm": strides_of(out)[1],
        "scn": strides_of(out)[2],
        "s_bias": b.shape[-1],
    }
    most = (triton.cdiv(problem.m, cfg.PARTS * cfg.GM) + problem.groups) * triton.cdiv(problem.n, cfg.COLUMNS)
    options = {"num_warps": 4, "launch_pdl": cfg.PDL}
    return [Call(grouped_ws, (min(most, problem.target.sm_count or 132),), arguments, {"cfg": cfg}, options)]


HOST = Host(GROUPED_MM, call, contiguous=VECTORS)
