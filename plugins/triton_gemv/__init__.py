"""`triton_gemv`: products of at most 4 rows or columns. kernel.py says how, host.py launches it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.matmul.calls import MATMUL, int32_reasons
from registry.plugins.triton_gemv import host
from registry.plugins.triton_gemv.host import MOST


def config_of(width: int, depth: int, warps: int, split: int = 1) -> dict[str, int]:
    return {"WIDTH": width, "DEPTH": depth, "SPLIT": split, "num_warps": warps}


def _rule(problem: Any, config: Any) -> Iterable[Reason]:
    if min(problem.m, problem.n) > MOST:
        name = "m" if problem.m <= problem.n else "n"
        yield Reason("few", name, getattr(problem, name), f"at most {MOST} rows or columns")
    if problem.dtype != (problem.dtype_b or problem.dtype):
        yield Reason("dtype_b", "dtype_b", problem.dtype_b, problem.dtype, fix="cast b to the dtype of a")
    yield from int32_reasons(problem)


def _shared_memory(problem: Any, config: Any) -> int:
    """Bytes: what adding across warps takes, and shifting; or x on its way to the threads that want it."""
    side, width = host.sides(MATMUL.operands(problem)), config["WIDTH"]
    if side.along_k:
        return max(4 * width * config["num_warps"], config["DEPTH"] * 16 // side.unit)
    return 4 * width * max(config["num_warps"], side.unit)


def _registers(problem: Any, config: Any) -> int:
    """As many as a thread can have, where it has many units of b: this is no kernel for which there are too few."""
    return config["num_warps"] * 32 * 255


# columns, K of a block (of units of 16 bytes; passes where b lies along N), warps
_ALONG_K = ((4, 128, 4), (8, 128, 4), (4, 64, 2), (8, 32, 4), (4, 256, 8), (32, 4, 4))
_ALONG_N = ((128, 4, 4), (64, 4, 2), (256, 4, 8), (128, 8, 4), (32, 4, 2))
FEW = 1024
"""Tiles whose arrivals are counted."""


def configs(problem: Any) -> list[dict[str, int]]:
    """Best first."""
    side = host.sides(MATMUL.operands(problem))
    sms = problem.target.sm_count or 108
    found = []
    for width, deep, warps in _ALONG_K if side.along_k else _ALONG_N:
        if side.unit == 16:  # int8, of which a unit takes twice the registers once it is wide
            width, deep = (max(1, width // 2), deep) if side.along_k else (width, max(1, deep // 2))
        depth = deep * (side.unit if side.along_k else host.pass_of(side, width, warps))
        tiles = host.tiles_of(side, width) * side.batch
        split = max(1, min(64, 32 * sms // (warps * tiles), -(-side.k // depth)))
        found.append(config_of(width, depth, warps, split if tiles <= FEW else 1))
    return found


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm80+",),
        dtypes=("float16", "bfloat16", "float32", "int8"),
        layouts=("nn", "nt", "tn", "tt"),
        unit_inner_stride=False,
        batched=True,
        bias=True,
        out=True,
        deterministic=True,
        ieee=True,
        out_dtypes=("float16", "bfloat16", "float32", "int32"),
        activations=("relu", "gelu", "silu"),
        toolchain={"triton": ">=3.6,<4"},
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    return [
        Variant(
            "triton_gemv",
            op="matmul",
            run=host.HOST.run,
            requires=requires,
            configs=configs,
            builds=host.HOST.builds,
            prepare=host.HOST.prepare,
            design=Design(tile=(4, 128, 32)),
            design_of=lambda config: Design(warp_groups=max(config["num_warps"] // 4, 1)),
            summary="at most 4 rows or columns: multiply-adds, one pass over the long operand, any pitch",
        )
    ]
