"""`gluon_matmul_ws`: what the warp-specialised Hopper product can run, with which configs. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.matmul.calls import MATMUL, int32_reasons
from registry.plugins.gluon_matmul_ws import host

# Measured facts: see kernel.py. Speed of one tile shape against the fastest, where the chip is full.
_TILES = (
    ("coop", 128, 128, 6, 1.00),
    ("coop", 128, 256, 4, 0.99),
    ("coop", 128, 192, 4, 0.97),
    ("coop", 128, 320, 3, 0.95),
    ("pingpong", 128, 128, 4, 0.965),
    ("coop", 256, 128, 3, 0.95),
    ("pingpong", 64, 256, 4, 0.92),
    ("pingpong", 64, 128, 8, 0.82),
    ("coop", 128, 64, 6, 0.80),
)
_TILES_8BIT = (
    ("coop", 128, 192, 4, 1.00),
    ("coop", 128, 128, 4, 0.975),
    ("coop", 128, 64, 6, 0.79),
    ("pingpong", 64, 128, 6, 0.65),
)

_EPILOGUE = {"gelu": 1.5e-4, "silu": 0.3e-4}
"""Microseconds for an element of a tile."""


def _itemsize(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def config(
    mode: str,
    m: int,
    n: int,
    stages: int,
    k: int = 64,
    group: int = 8,
    split: int = 1,
    split_k: int = 1,
    stores: int = 2,
) -> dict[str, Any]:
    return {
        "MODE": mode,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_K": k,
        "STAGES": stages,
        "STORES": stores,
        "GROUP": group,
        "SPLIT": split,
        "SPLIT_K": split_k,
    }


def candidates(problem, most: int = 8) -> list[dict[str, Any]]:
    """Every tile worth trying, best first by `_microseconds`."""
    size, count = _itemsize(problem.dtype), problem.target.sm_count or 132
    blocks = -(-problem.k * size // 128)
    found = []
    for mode, m, n, stages, speed in _TILES if size > 1 else _TILES_8BIT:
        tiles = -(-problem.m // m) * -(-problem.n // n) * problem.batch
        for split, split_k in _splits(mode, n, tiles, blocks, count):
            cost = _microseconds(m, n, tiles, blocks, split, split_k, count, speed)
            rounds = -(-tiles // count)
            shown = (
                rounds if mode == "coop" else 2 + rounds / 4
            )  # ping-pong hides most, but the last, by half the warps
            cost += shown * m * n * _EPILOGUE.get(problem.activation, 0.0)
            cost *= 2.0 if m > 64 >= problem.m or n > 64 >= problem.n else 1.0  # a tile that is mostly padding
            found.append((cost, config(mode, m, n, stages, 128 // size, split=split, split_k=split_k)))
    found.sort(key=lambda pair: pair[0])
    return [entry for _, entry in found[:most]]


def _splits(mode: str, n: int, tiles: int, blocks: int, count: int) -> Iterable[tuple[int, int]]:
    """(SPLIT, SPLIT_K): of the columns of the last round, or of K where the tiles do not fill the chip."""
    yield 1, 1
    if mode == "coop":
        rest = tiles % count
        if tiles > count and rest and not host.split_n(n)[1]:
            yield from ((split, 1) for split in (2, 4) if n // split >= 64 and -(-rest * split // count) < split)
        ways = (2, 3, 4, 6, 8, 12, 16, 24, 32)
        yield from ((1, split_k) for split_k in ways if tiles * split_k <= count and split_k * 4 <= blocks)


def _microseconds(m, n, tiles, blocks, split, split_k, count, speed) -> float:
    """A guess at a config's time on an H200: rounds over the chip times the time of a tile at full speed, and for
    split-K what writing, counting and adding up cost."""
    block = m * n * 2.4e-5 / speed
    if split_k > 1:
        return -(-blocks // split_k) * block + 5 + (2 + split_k) * m * n * 1e-4
    whole = -(-tiles // count) if split == 1 else tiles // count
    narrow = m * n // split * 2.4e-5 / (0.965 if n // split >= 128 else 0.7)
    tail = 0 if split == 1 else -(-(tiles % count) * split // count) * narrow * (1.0 if split == 2 else 1.35)
    return blocks * (whole * block + tail)


def configs(problem) -> list[dict[str, Any]]:
    """Best first."""
    return candidates(problem, 4)


def design_of(config) -> Design:
    return Design(
        warp_groups=2,
        pipeline_stages=config["STAGES"],
        warp_specialized=True,
        pipeline_tasks=2,
        persistent=True,
        tile=(config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]),
        dsl="gluon",
    )


def _rule(problem, config) -> Iterable[Reason]:
    if config["SPLIT"] > 1 and (config["MODE"] != "coop" or host.split_n(config["BLOCK_N"])[1]):
        yield Reason("config", "SPLIT", config["SPLIT"], "1, except for cooperative tiles of 2^n columns", "SPLIT=1")
    if host.split_k(config) != 1 and (config["MODE"] != "coop" or config["SPLIT"] > 1):
        yield Reason("config", "SPLIT_K", host.split_k(config), "1, except for cooperative tiles", "SPLIT_K=1")
    if host.split_k(config) > -(-problem.k // config["BLOCK_K"]):
        yield Reason("config", "SPLIT_K", host.split_k(config), "at most one range for each block of K", "SPLIT_K=1")
    yield from int32_reasons(problem)


def _shared_memory(problem, config) -> int:
    """The ring, the buffers of C, and what the barriers (float32 may need more) and the hand-over to the warp groups
    take."""
    ring = config["STAGES"] * (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * _itemsize(problem.dtype)
    cfg = host.switches(problem, config, MATMUL.operands(problem))
    buffers = 2 * cfg.STORES * cfg.GM * cfg.EN * _itemsize(problem.out_dtype)
    return ring + buffers + (24 if problem.dtype == "float32" else 16) * cfg.STAGES + HAND_OVER


HAND_OVER = 256


def _registers(problem, config) -> int:
    """168 a thread at launch, for 288 threads rounded to three warp groups; setmaxnreg only moves them around."""
    return 384 * 168


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm90",),
        dtypes=("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"),
        layouts=("nn", "nt", "tn", "tt"),
        unit_inner_stride=False,
        base_alignment=16,  # of a tensor map's address
        stride_alignment=16,  # and of each of its strides
        batched=True,
        bias=True,
        out=True,
        deterministic=True,
        out_dtypes=("float16", "bfloat16", "float32", "int32"),
        activations=("relu", "gelu", "silu"),
        scaling=("scalar", "rowwise"),
        toolchain={"triton": ">=3.6,<4"},
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    return [
        Variant(
            "gluon_matmul_ws",
            op="matmul",
            run=host.HOST.run,
            requires=requires,
            configs=configs,
            builds=host.HOST.builds,
            prepare=host.HOST.prepare,
            design=Design(
                warp_groups=2,
                pipeline_stages=4,
                warp_specialized=True,
                pipeline_tasks=2,
                tile=(128, 256, 64),
                persistent=True,
                dsl="gluon",
            ),
            design_of=design_of,
            summary="TMA producer, two consumer warp groups, overlapped TMA stores",
        )
    ]
