"""`gluon_matmul_pairs`: what the Hopper product by pairs of CTAs can run, with which configs. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.plugins.gluon_matmul_pairs import host

HAND_OVER = 512
"""Bytes that the hand-over to the warp groups takes."""

_ROOM, _DEEPEST = 231_424, 8
"""Bytes of shared memory for the ring and the buffers of C, and the most stages."""
_TILES = (
    (256, 192, 1.00),
    (256, 160, 0.99),
    (256, 128, 0.98),
    (256, 96, 0.93),
    (128, 256, 0.99),
    (128, 224, 0.98),
    (128, 192, 0.96),
    (128, 160, 0.94),
    (128, 128, 0.92),
    (128, 96, 0.85),
)
"""Rows, columns, and a guess at the speed against the fastest, where the chip is full."""


def config(high: int, width: int, pair: int, group: int = 8, stages: int = 0, stores: int = 0) -> dict[str, Any]:
    stores = stores or (1 if high == 256 else 2)
    room = _ROOM - 1024 - high * stores * host.piece(width) * 2
    stages = stages or min(_DEEPEST, room // ((high + width) * 128))
    return {"BLOCK_M": high, "BLOCK_N": width, "STAGES": stages, "STORES": stores, "PAIR": pair, "GROUP": group}


def candidates(problem: Any) -> list[dict[str, Any]]:
    """Best first."""
    found = []
    for high, width, speed in _TILES:
        for pair in (2, 1):
            one = config(high, width, pair, 4 if pair == 2 else 8)
            rows, columns = host.pairs(problem, one)
            rounds = -(-rows * columns // ((problem.target.sm_count or 132) // 2))
            found.append((rounds * high * width / speed * (1.0 if pair == 2 else 1.001), len(found), one))
    return [one for _, _, one in sorted(found)]


def configs(problem: Any) -> list[dict[str, Any]]:
    """Best first."""
    return candidates(problem)[:4]


def design_of(config: Any) -> Design:
    return Design(
        warp_groups=2,
        pipeline_stages=config["STAGES"],
        warp_specialized=True,
        pipeline_tasks=2,
        persistent=True,
        tile=(config["BLOCK_M"], config["BLOCK_N"], 64),
        dsl="gluon",
    )


def _rule(problem: Any, config: Any) -> Iterable[Reason]:
    if problem.n % 8:
        yield Reason("range", "n", problem.n, "a multiple of 8: TMA stores", "gluon_matmul_ws, triton_matmul")


def _shared_memory(problem: Any, config: Any) -> int:
    cfg = host.switches(problem, config)
    return (cfg.STAGES * cfg.STAGE + 1 + cfg.UNITS * cfg.STORES * cfg.PIECE // 4) * 1024 + HAND_OVER


def _registers(problem: Any, config: Any) -> int:
    """168 a thread at launch; setmaxnreg only moves them around."""
    return 384 * 168


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm90",),
        dtypes=("float16", "bfloat16"),
        layouts=("nt",),
        unit_inner_stride=False,
        base_alignment=16,  # of a tensor map's address
        stride_alignment=16,  # and of each of its strides
        deterministic=True,
        out_dtypes=("float16", "bfloat16"),
        toolchain={"triton": ">=3.6,<4"},
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    return [
        Variant(
            "gluon_matmul_pairs",
            op="matmul",
            run=host.HOST.run,
            requires=requires,
            configs=configs,
            builds=host.HOST.builds,
            prepare=host.HOST.prepare,
            design=Design(
                warp_groups=2,
                pipeline_stages=3,
                warp_specialized=True,
                pipeline_tasks=2,
                tile=(256, 192, 64),
                persistent=True,
                dsl="gluon",
            ),
            design_of=design_of,
            summary="clusters of two CTAs that share a factor by multicast, tiles of up to 256 x 192",
        )
    ]
