"""`triton_matmul`: what the pointer product can run, with which configs. kernel.py says how, host.py launches it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import triton

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.matmul.calls import MATMUL, int32_reasons, out_of, strides_of
from registry.ops.matmul.claims import EVERYTHING
from registry.plugins.triton_matmul import host
from registry.plugins.triton_matmul.tiles import config_of, ranked
from registry.toolbox.designs import tiled


def _facts(problem) -> dict[str, Any]:
    """`host.memory_facts` of a Problem."""
    given = MATMUL.operands(problem)
    return {**host.memory_facts(given, out_of(problem, given)), **given}


def cp_async_rule(problem, config) -> Iterable[Reason]:
    """Ampere and Ada pipeline through cp.async, which moves at least 4 contiguous bytes: see kernel.py."""
    facts = _facts(problem)
    for name, unit, run, limit, columns in (
        ("a", "A_UNIT", "A_RUN", "M_RUN", "k"),
        ("b", "B_UNIT", "B_RUN", "N_RUN", "n"),
    ):
        strides, base, item = strides_of(facts[name]), facts[name].alignment, facts[name].dtype.itemsize
        elements = facts[run]
        along = facts[unit]
        if along == ("m" if name == "a" else "n"):  # the ragged edge of this dimension is masked
            elements = min(elements, facts[limit])
        if elements * item >= 4:
            continue
        turn = f"store {name} with its other dimension contiguous ({name}.mT.contiguous().mT)"
        if not along:
            field, got, fix = "stride", strides[1:], f"call .contiguous() on {name}, or {turn}"
        elif base < 4:
            field, got, fix = (
                "base_alignment",
                base,
                f"call .contiguous() or .clone() on {name}, so that it starts aligned",
            )
        elif facts[run] * item < 4:
            outer = strides[1] if along == columns else strides[2]
            outer = outer if outer * item % 4 else strides[0]
            field, got = "stride", outer
            fix = f"pad {name}'s rows: its stride of {outer * item} bytes is no multiple of 4, or {turn}"
        else:
            edge = problem.m if name == "a" else problem.n
            field, got, fix = along, edge, f"pad {along} to a multiple of {4 // item}, or {turn}"
        yield Reason(
            code="cp_async",
            field=field,
            got=got,
            allowed="a contiguous run of at least 4 bytes",
            fix=f"{fix}, or a config with num_stages=1",
            operand=name,
        )


def _itemsize(problem) -> int:
    return getattr(torch, problem.dtype).itemsize


def _narrow(problem) -> int:
    """Bytes of the shorter of the two operands' contiguous runs."""
    a_unit, a_run, b_unit, b_run = host.runs_of(MATMUL.operands(problem))
    a = min(a_run, math.gcd(problem.m, 16) if a_unit == "m" else 16) if a_unit else 1
    b = min(b_run, math.gcd(problem.n, 16) if b_unit == "n" else 16) if b_unit else 1
    return min(a, b) * _itemsize(problem)


def _rule(problem, config) -> Iterable[Reason]:
    sm = problem.target.sm
    if config["num_stages"] > 1 and 80 <= sm < 90:
        yield from cp_async_rule(problem, config)
    if problem.dtype.startswith("float8") and 0 < sm < 89:
        yield Reason("arch", "dtype", problem.dtype, "sm89 or newer for fp8", fix="upcast the operands to float16")
    if problem.dtype != (problem.dtype_b or problem.dtype):
        yield Reason("dtype_b", "dtype_b", problem.dtype_b, problem.dtype, fix="cast b to the dtype of a")
    yield from int32_reasons(problem)


def _registers(problem, config) -> int:
    """The accumulators plus 48 per thread for addresses and operands in flight."""
    return config["BLOCK_M"] * config["BLOCK_N"] + config["num_warps"] * 32 * 48


def _shared_memory(problem, config) -> int:
    """Bytes of dynamic shared memory: the buffers between memory and the matrix units (wgmma reads a block that it
    has not yet released, mma.sync has it in registers), or what turning C around takes, if that is more."""
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    stage = (m + n) * config["BLOCK_K"] * _itemsize(problem)
    wgmma = problem.target.sm >= 90 and m >= 64 and not problem.ieee
    if wgmma and problem.dtype == "float32":  # B is put back after it was rounded
        ring = stage * (config["num_stages"] - 1) + n * config["BLOCK_K"] * 4
    else:
        ring = stage * max(config["num_stages"] - (not wgmma), 1)
    ring += 16 if wgmma and problem.target.sm >= 100 else 0
    out = 4 if config["SPLIT"] > 1 else max(2, getattr(torch, problem.out_dtype).itemsize)
    return max(ring, m * n * out if ring < m * n * 4 else 0)


def split_of(problem, bm: int, bn: int, bk: int) -> int:
    """Ranges of K that fill the chip once, each at least four blocks long."""
    tiles = -(-problem.m // bm) * -(-problem.n // bn) * (problem.batch or 1)
    want = (problem.target.sm_count or 108) // max(tiles, 1)
    return max(1, min(want, -(-problem.k // bk) // 4, 32))


# Few rows (or columns): memory decides. For at most so many rows and at most so many columns an SM, the shape measured
# best (see kernel.py): columns of a tile, blocks of K, warps, stages. Then what comes next for that number of rows.
_THIN = (
    (
        16,
        {32: (64, 4, 4, 4), 64: (64, 2, 4, 6), 128: (128, 2, 4, 4), 256: (128, 1, 4, 4), 512: (64, 4, 4, 4)},
        ((128, 2, 4, 4), (64, 4, 4, 4), (64, 4, 4, 3), (128, 1, 4, 4)),
    ),
    (
        32,
        {32: (32, 4, 4, 4), 64: (64, 4, 4, 4), 128: (128, 1, 4, 6), 256: (64, 4, 4, 3), 512: (64, 4, 4, 3)},
        ((64, 4, 4, 3), (64, 2, 4, 4), (128, 1, 4, 4)),
    ),
    (
        64,
        {32: (32, 4, 4, 4), 64: (64, 2, 4, 4), 128: (64, 2, 4, 3), 256: (64, 2, 4, 3), 512: (128, 1, 4, 4)},
        ((64, 2, 4, 3), (128, 1, 4, 4), (64, 1, 4, 4)),
    ),
)


def _thin(rows: int, columns: int, bk: int, sms: int) -> list[tuple[int, int, int, int, int]]:
    """Shapes (rows, columns and K of a tile, warps, stages) for at most 64 rows."""
    most, first, others = next(entry for entry in _THIN if rows <= entry[0])
    each = next((width for width in first if columns <= width * sms), 512)
    shapes = dict.fromkeys((first[each], *others))  # each once
    return [(most, width, blocks * bk, warps, stages) for width, blocks, warps, stages in shapes]


def configs(problem) -> list[dict[str, int]]:
    """Best first. The single-stage ones, legal wherever cp.async is not, come last, but first where its copies would be
    shorter than 16 bytes (see kernel.py)."""
    item, shortest = _itemsize(problem), _narrow(problem)
    bk = 64 // item * 2 if problem.target.sm >= 90 else 64 // item  # 128 or 64 bytes of K per block
    m, n = problem.m, problem.n
    if problem.target.sm >= 90 and item == 2:
        return ranked(problem, shortest)
    if long := problem.k >= 16 * max(m, n) and max(m, n) <= 512 and min(m, n) > 16:  # all the work is along K
        shapes = [
            (16, 32, 4 * bk, 4, 4),
            (32, 64, 2 * bk, 4, 4),
            (64, 64, bk if problem.k % (2 * bk) else 2 * bk, 4, 4),
        ]
        shapes = shapes[0 if m * n <= 64 * 64 else 1 if m * n <= 128 * 128 else 2 :]
    elif min(m, n) <= 64:
        shapes = _thin(min(m, n), max(m, n), bk, problem.target.sm_count or 108)
        shapes = shapes[1:] if problem.ieee else shapes  # the deep rings cost registers, which it has none to spare
        shapes = shapes if m <= n else [(y, x, *rest) for x, y, *rest in shapes]
    elif problem.target.sm >= 90:
        shapes = [(128, 256, bk, 8, 3), (128, 128, bk, 8, 4), (64, 128, bk, 4, 4)]
        tiles = -(-m // 64) * -(-n // 64) * (problem.batch or 1)
        if 2 * tiles > (problem.target.sm_count or 108) >= tiles:  # they fill the chip, once
            shapes.insert(1, (64, 64, 2 * bk, 4, 4))
        shapes = shapes if problem.layout[1] == "n" else shapes[1:]  # 128 x 256 is slow where b is contiguous along K
    else:
        shapes = [(128, 128, bk, 4, 3), (128, 64, bk, 4, 3), (64, 64, bk, 4, 4)]
    if (
        problem.m > 64 < problem.n
        and not long
        and (
            problem.k % bk
            or problem.activation
            or problem.ieee
            or shortest < 16
            or (item == 1 and problem.target.sm < 90)
        )
    ):
        shapes = shapes[1:]  # the largest tile would spill in its tail, its epilogue or its loads
    narrow = shortest if problem.target.sm >= 90 else 16  # (the rule below is measured on Hopper)
    if narrow < 8:
        shapes = []  # copies of one element or two: not worth a pipeline
    whole = [
        s for s in shapes if s[2] <= bk or problem.k % s[2] == 0
    ]  # the rest of a long block is 3 to 14 times slower
    shapes = whole or [(x, y, bk, *rest) for x, y, _, *rest in shapes[-1:]]
    few = 2 * -(-m // 64) * -(-n // 128) * (problem.batch or 1) <= (problem.target.sm_count or 108)
    if problem.target.sm >= 90 and min(m, n) > 64 and few and not long:
        shapes.sort(key=lambda s: s[:2] != (64, 128))  # split-K of it is 1.2 to 1.4 times as fast as of larger tiles
    if problem.dtype == "float32" or item == 1:
        shapes = [s for s in shapes if s[0] * s[1] <= 128 * 128]
    tf32 = problem.dtype == "float32" and not problem.ieee
    if tf32 and problem.target.sm < 90:
        shapes = [s for s in shapes if s[:2] != (128, 64)]  # spills
    wide = 8 if tf32 and problem.target.sm >= 100 else 4  # so do four warps there
    shapes = [(bm, bn, k, max(warps, wide), stages) for bm, bn, k, warps, stages in shapes]
    bm, bn = (min(64, max(16, triton.next_power_of_2(x))) for x in (m, n))
    last = 64 // max(item, 2) if shortest < 4 else 2 * bk if bm < 64 else bk
    last = min(last, max(64 // max(item, 2), triton.next_power_of_2(problem.k)))  # no blocks that K does not fill
    single = [(bm, bn, last, wide, 1)]
    if 4 <= narrow < 16:
        if item == 1:  # longer blocks of K spill
            single = [(bm, bn, bk // 2 if bm == 64 else bk, wide, 1)]
        else:
            single = [*dict.fromkeys((*single, (64, 64, bk, wide, 1), (64, 64, bk // 2, wide, 1)))]
        shapes, single = single + shapes, []
    found, rest = (
        [config_of(*shape, split=split_of(problem, *shape[:3])) for shape in some] for some in (shapes, single)
    )
    found += [{**found[0], "SPLIT": 1}] if found and found[0]["SPLIT"] > 1 else []
    return found + rest


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm80+",),
        **EVERYTHING,
        scaling=("scalar", "rowwise"),
        unit_inner_stride=False,
        ieee=True,
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    return [
        host.HOST.variant(
            "triton_matmul",
            op="matmul",
            requires=requires,
            configs=configs,
            design=Design(warp_groups=2, pipeline_stages=3, tile=(128, 256, 64)),
            design_of=tiled,
            summary="pointer loads, software pipeline, deterministic split-K; any strides, any shape",
        )
    ]
