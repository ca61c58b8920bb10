"""`triton_grouped`: what the grouped products can run, with which configs. kernel.py says how, host.py launches it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.grouped_mm.calls import GROUPED_MM, halves_reasons
from registry.plugins.triton_grouped import host
from registry.toolbox.designs import tiled
from registry.toolbox.matrices import turned


def _itemsize(problem: Any) -> int:
    return int(getattr(torch, problem.dtype).itemsize)


def _by_pointers(problem: Any, tma: bool) -> Iterable[tuple[str, bool]]:
    """Operands that come through pointers, and whether 16 bytes of them can come at a time."""
    given = GROUPED_MM.operands(problem)
    a, b = given["a"], given["b"]
    if problem.form == "inner" and not tma:  # a group starts anywhere along K
        yield "a", turned(a) and host.wide(a, problem.m)
        yield "b", not turned(b) and host.wide(b, problem.n)
    elif problem.form != "inner":  # ... or along the rows
        if not host.a_by_tma(problem, a, tma):
            yield "a", not turned(a) and host.wide(a, problem.k)
        if not tma:
            yield "b", host.wide(b, problem.k if turned(b) else problem.n)


def _rule(problem: Any, config: Any) -> Iterable[Reason]:
    sm, tma, given = problem.target.sm, config["TMA"], GROUPED_MM.operands(problem)
    if problem.dtype.startswith("float8") and 0 < sm < 89:
        yield Reason("arch", "dtype", problem.dtype, "sm89 or newer for fp8", fix="upcast the operands to float16")
    if tma and 0 < sm < 90:
        yield Reason("arch", "arch", problem.target.arch, "sm90 or newer for a config with TMA")
    if tma and problem.form == "inner" and problem.layout != "tn":
        allowed = "tn for a config with TMA, which starts at multiples of 16 bytes"
        yield Reason("layout", "layout", problem.layout, allowed, "a.mT.contiguous().mT, and b contiguous")
    yield from halves_reasons(problem) if tma else ()
    for name in ("a", "b") if tma else ():
        if not host.aligned(given[name]):
            allowed = "a base and strides of multiples of 16 bytes, for a config with TMA"
            yield Reason("alignment", "stride_alignment", given[name].strides, allowed, f"pad {name}", name)
    for name, fits in _by_pointers(problem, tma) if config["num_stages"] > 1 else ():
        if not fits:
            allowed = "reads of 16 bytes, for a config with several stages"
            fix = f"store {name} aligned, with its inner size contiguous; or a config with num_stages=1"
            yield Reason("alignment", "layout", problem.layout, allowed, fix, name)


def _shared_memory(problem: Any, config: Any) -> int:
    """The ring of blocks and its barriers, the staging of C, and what finds a tile's group. C is turned around where
    the ring was, unless TMA stores it or the ring is already being filled for the next tile."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    stage = (m + n * (2 if problem.gated else 1)) * k * _itemsize(problem)
    ring = config["num_stages"] * (stage + 32)
    if problem.dtype == "float32":  # rounded where the launch has no maps for it: operands go back
        ring += stage
    staging = m * n * max(2, getattr(torch, problem.out_dtype).itemsize)
    apart = config["TMA"] and (config["FLATTEN"] or problem.form != "rows")
    return (ring + staging if apart else max(ring, staging)) + 4096


def _registers(problem: Any, config: Any) -> int:
    """The accumulators plus 48 per thread for addresses and the epilogue."""
    accumulators = 2 if problem.gated else 1
    return accumulators * config["BLOCK_M"] * config["BLOCK_N"] + config["num_warps"] * 32 * 48


def config_of(
    m: int, n: int, k: int, warps: int, stages: int, tma: bool, group: int = 8, flatten: bool | None = None
) -> dict[str, Any]:
    return {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "GROUP": group,
        "TMA": tma,
        "FLATTEN": tma if flatten is None else flatten,
        "num_warps": warps,
        "num_stages": stages,
    }


def configs(problem: Any) -> list[dict[str, Any]]:
    """Best first: tiles about as high as a group has rows, on average; the last ones are legal for any memory."""
    bk = 128 // _itemsize(problem) if problem.target.sm >= 90 else 64 // _itemsize(problem)
    high = problem.m if problem.form == "inner" else problem.each
    hopper = problem.target.sm >= 90
    if high <= 16:
        shapes = [(16, 128, 2 * bk, 4, 4), (16, 128, bk, 4, 6), (16, 64, 2 * bk, 4, 5)]
    elif high <= 32:
        shapes = [(32, 128, bk, 4, 5), (32, 64, 2 * bk, 4, 4), (32, 256, bk, 8, 4)]
    elif high <= 64 or not hopper:
        shapes = [(64, 128, bk, 4, 4), (64, 256, bk, 8, 3), (64, 64, bk, 4, 4)]
    else:
        shapes = [(128, 256, bk, 8, 3), (128, 128, bk, 8, 4), (64, 256, bk, 4, 4), (64, 128, bk, 4, 4)]
    if not hopper and high > 64:
        shapes = [(128, 128, bk, 8, 3), *shapes]
    if problem.gated:  # two accumulators, two tiles of B
        shapes = [(m, max(n // 2, 32), k, w, s) for m, n, k, w, s in shapes]
    if _itemsize(problem) != 2:
        shapes = [one for one in shapes if one[0] * one[1] <= 128 * 128]
    # (a flattened loop would set the second accumulator to zero inside, and wgmma wait for that)
    found = [config_of(*one, tma=True, flatten=not problem.gated) for one in shapes] if hopper else []
    found += [config_of(*one[:4], min(one[4], 4), tma=False) for one in shapes[:2]]
    low = min(64, max(16, 1 << (high - 1).bit_length()))
    return [*found, config_of(low, 64, 32, 4, 1, tma=False)]


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm80+",),
        dtypes=("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"),
        promoted=True,
        out_dtypes=("float16", "bfloat16", "float32"),
        forms=("rows", "batch", "inner"),
        layouts=("nn", "nt", "tn", "tt"),
        unit_inner_stride=False,
        gather=True,
        bias=True,
        activations=("relu", "gelu", "silu"),
        gated=True,
        scaling=("rowwise",),
        out=True,
        deterministic=True,
        toolchain={"triton": ">=3.6,<4"},
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    return [
        host.HOST.variant(
            "triton_grouped",
            op="grouped_mm",
            requires=requires,
            configs=configs,
            design=Design(warp_groups=2, pipeline_stages=3, tile=(128, 256, 64), persistent=True),
            design_of=partial(tiled, persistent=True),
            summary="persistent over all groups, tiles found on the device; TMA where memory allows it",
        )
    ]
