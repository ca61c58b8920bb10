"""`triton_gemv`: products of at most 4 rows or columns. kernel.py says how, host.py launches it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.matmul.calls import MATMUL, int32_reasons
from registry.ops.matmul.claims import EVERYTHING
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


def _never(problem: Any) -> bool:
    """What `_rule` refuses with every config."""
    return bool(min(problem.m, problem.n) > MOST)


def _shared_memory(problem: Any, config: Any) -> int:
    """Bytes: what adding across warps takes, and shifting; or x on its way to the threads that want it."""
    side, width = host.sides(MATMUL.operands(problem)), config["WIDTH"]
    if side.along_k:
        return 4 * max(width * config["num_warps"], config["DEPTH"])
    return 4 * width * max(config["num_warps"], side.unit)


def _registers(problem: Any, config: Any) -> int:
    """As many as a thread can have, where it has many units of b: this is no kernel for which there are too few."""
    return config["num_warps"] * 32 * 255


FEW = 1024
"""Tiles whose arrivals are counted."""
MOST_SPLITS = 128
MOST_CONFIGS = 6


def _along_k(side: host.Sides, sms: int) -> Iterator[tuple[int, int, int, int]]:
    """Columns, units of K, warps and ranges of K, best first, where b is contiguous along K."""
    units = -(-side.k // side.unit)
    tiles = host.tiles_of(side, 4)
    programs = tiles * side.batch
    if units <= 32:  # a warp has several columns
        narrow = ((8, 16, 4, 1), (8, 32, 4, 1), (4, 32, 4, 1))
        wide = (16, 16, 4, 1)
        if programs > 8 * sms:
            yield from (wide, *narrow[1::-1], narrow[2])
        else:
            yield from (*(narrow if side.rows == 1 else narrow[::-1]), wide)
    elif units <= 128:
        few, whole = ((4, 64, 2, 1), (4, 32, 4, 1)), ((4, 128, 4, 1),) if units > 64 else ()
        if programs > 4 * sms:
            yield from ((8, 32, 4, 1), *few, *whole, (8, 64, 2, 1))
        else:
            yield from (*whole, *(few if units > 48 else few[::-1]), (8, 32, 4, 1), (8, 64, 2, 1))
    elif side.shift and programs > 4 * sms:  # x is shifted, for as many columns as there are
        yield from ((8, 32, 4, 1), (8, 32, 2, 1), (16, 32, 4, 1), (4, 64, 2, 1))
    elif programs < 4 * sms:
        split = 4 * sms // programs
        one, long, thin = (4, 128, 4, 1), (4, 256, 8, 1), (2, 256, 8, 1)
        if not side.shift:
            yield from (long, one, thin)
        elif programs > sms:
            short = (4, 64, 2, 1)
            yield from (short, one, thin, long) if units <= 256 else (one, thin, short, long)
        else:
            yield from (thin, long, one)
        yield from ((4, 128, 4, split), (4, 64, 2, split))
    else:
        few, many = (4, 128, 4, 1), (8, 128, 4, 1)
        first = (many, few) if programs > 20 * sms else (few, many)
        yield from (*first, (8, 64, 2, 1), (8, 32, 4, 1), (4, 64, 2, 1), (4, 256, 8, 1))


def _along_n(side: host.Sides, sms: int) -> Iterator[tuple[int, int, int, int]]:
    """Columns, passes, warps and ranges of K, best first, where b is contiguous along N."""
    deep = 8 if side.rows <= 2 else 4
    for width, passes, warps in ((64, deep, 2), (64, 4, 2), (128, deep, 4), (32, deep, 2)):
        together = host.pass_of(side, width, warps)
        while passes > 1 and passes * together >= 2 * side.k:
            passes //= 2
        blocks = -(-side.k // (passes * together))
        tiles = host.tiles_of(side, width) * side.batch
        split = min(24 * sms // (warps * tiles), -(-blocks // 2)) if blocks > 4 else 1
        several = [split]
        if passes == 4 and width == 64 and split > 1:
            several.insert(0 if side.rows > 2 and 4 * tiles > sms else 1, -(-split // 3))  # sums cost more
        yield from ((width, passes, warps, split) for split in several)


def configs(problem: Any) -> list[dict[str, int]]:
    """Best first. With more rows and columns than `_rule` lets through there is but one, for it to refuse."""
    if min(problem.m, problem.n) > MOST:
        return [config_of(4, 32, 4)]
    side = host.sides(MATMUL.operands(problem))
    found = []
    for width, deep, warps, split in (_along_k if side.along_k else _along_n)(side, problem.target.sm_count or 108):
        if side.unit == 16:  # int8, of which a unit takes twice the registers once it is wide
            width, deep = (max(1, width // 2), deep) if side.along_k else (width, max(1, deep // 2))
        depth = deep * (side.unit if side.along_k else host.pass_of(side, width, warps))
        counted = host.tiles_of(side, width) * side.batch <= FEW
        split = max(1, min(split, MOST_SPLITS, -(-side.k // depth))) if counted else 1
        found.append(config_of(width, depth, warps, split))
    return [config for at, config in enumerate(found) if config not in found[:at]][:MOST_CONFIGS]


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm80+",),
        **EVERYTHING | {"dtypes": ("float16", "bfloat16", "float32", "int8"), "promoted": False},
        unit_inner_stride=False,
        ieee=True,
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
        never=_never,
    )
    return [
        host.HOST.variant(
            "triton_gemv",
            op="matmul",
            requires=requires,
            configs=configs,
            design=Design(tile=(4, 128, 32)),
            design_of=lambda config: Design(warp_groups=max(config["num_warps"] // 4, 1)),
            summary="at most 4 rows or columns: multiply-adds, one pass over the long operand, any pitch",
        )
    ]
