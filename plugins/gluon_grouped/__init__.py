"""`gluon_grouped_ws`: what the warp-specialised grouped product can run, with which configs. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.grouped_mm.calls import halves_reasons
from registry.plugins.gluon_grouped import host
from registry.toolbox.designs import specialised

HAND_OVER = 1024
"""Bytes that barriers, reductions and the hand-over to the warp groups take."""


def config_of(mode: str, m: int, n: int, stages: int, stores: int = 2, group: int = 8) -> dict[str, Any]:
    return {"MODE": mode, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "STAGES": stages, "STORES": stores, "GROUP": group}


# Mode, rows, columns, and the most stages that any number of groups leaves room for, with two buffers of C or with one.
_HIGH = (("coop", 128, 256, 4), ("coop", 128, 192, 4), ("pingpong", 64, 256, 4), ("coop", 128, 128, 6))
_LOW = (("pingpong", 64, 128, 8), ("pingpong", 64, 256, 4), ("coop", 128, 256, 4))


def configs(problem: Any) -> list[dict[str, Any]]:
    """Best first: high tiles where groups have rows for them, on average."""
    tiles = _HIGH if problem.each > 96 else _LOW
    even = [tile for tile in tiles if not problem.gated or tile[2] & (tile[2] - 1) == 0]  # halves are powers of two
    return [_fitting(problem, *tile) for tile in even]


def _fitting(problem: Any, mode: str, m: int, n: int, stages: int) -> dict[str, Any]:
    """Many groups take memory from the ring: one buffer of C less is better than a stage less."""
    tries = [config_of(mode, m, n, count, stores) for count in (stages, stages - 1) for stores in (2, 1)]
    room = problem.target.shared_memory
    return next((one for one in tries if _shared_memory(problem, one) <= room), tries[-1])


def _rule(problem: Any, config: Any) -> Iterable[Reason]:
    yield from halves_reasons(problem)
    if config["STAGES"] < 2 or config["STORES"] < 1:  # a stage is waited for before the one before it is let go of
        yield Reason("config", "STAGES", (config["STAGES"], config["STORES"]), ">= 2, and STORES >= 1")
    for fact in problem.operands:
        if any(n > 1 and not stride for n, stride in zip(fact.shape[-2:], fact.strides[-2:], strict=True)):
            yield Reason(
                "stride", "stride", 0, "rows apart from each other", f"call .contiguous() on {fact.name}", fact.name
            )


def _shared_memory(problem: Any, config: Any) -> int:
    """The ring, the buffers of C, and the table of groups."""
    stages, size = config["STAGES"], int(getattr(torch, problem.out_dtype).itemsize)
    ring = stages * (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * 2
    first, second = host.halves(problem, config["BLOCK_N"])
    rows, columns = config["BLOCK_M"] // host.parts_of(config), host.columns_at_once(second or first, size)
    buffers = 2 * config["STORES"] * rows * columns * size
    return ring + buffers + 8 * host.entries(problem.groups) + 16 * stages + HAND_OVER


def _registers(problem: Any, config: Any) -> int:
    """168 a thread at launch, for 288 threads rounded to three warp groups; setmaxnreg only moves them around."""
    return 384 * 168


def design_of(config: Any) -> Design:
    return specialised((config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]), config["STAGES"])


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm90",),
        dtypes=("float16", "bfloat16"),
        out_dtypes=("float16", "bfloat16", "float32"),
        forms=("rows",),
        layouts=("nn", "nt"),  # groups of rows start anywhere, boxes at multiples of 16 bytes
        unit_inner_stride=False,
        base_alignment=16,  # of a tensor map's address
        stride_alignment=16,  # and of each of its strides
        bias=True,
        activations=("relu", "gelu", "silu"),
        gated=True,
        out=True,
        deterministic=True,
        toolchain={"triton": ">=3.6,<4"},
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    return [
        host.HOST.variant(
            "gluon_grouped_ws",
            op="grouped_mm",
            requires=requires,
            configs=configs,
            design=design_of(config_of("coop", 128, 256, 4)),
            design_of=design_of,
            summary="TMA producer that walks the groups, two consumer warp groups",
        )
    ]
