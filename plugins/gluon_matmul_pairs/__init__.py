"""`gluon_matmul_pairs`: what the Hopper product by pairs of CTAs can run, with which configs. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.plugins.gluon_matmul_pairs import host
from registry.plugins.gluon_matmul_pairs.cost import candidates, config

__all__ = ["candidates", "config", "configs", "design_of"]

HAND_OVER = 512
"""Bytes that the hand-over to the warp groups takes."""
MOST = 6
"""Configs that are worth measuring."""
FEW = 128
"""Rows for which one CTA of a pair would have nothing to do, or both little; half of it with ranges of K."""


def configs(problem: Any) -> list[dict[str, Any]]:
    """Best first."""
    return candidates(problem)[:MOST]


def design_of(config: Any) -> Design:
    return Design(
        warp_groups=2,
        pipeline_stages=config["STAGES"],
        warp_specialized=True,
        pipeline_tasks=2,
        persistent=True,
        tile=(config["HIGH"], config["WIDTH"], 64),
        dsl="gluon",
    )


def _rule(problem: Any, config: Any) -> Iterable[Reason]:
    few = FEW // 2 if config["WAYS"] > 1 else FEW
    if problem.m <= few:
        yield Reason("range", "m", problem.m, f"more than {few} rows", "gluon_matmul_row_pairs, gluon_matmul_rows")
    if host.exact(problem) and (config["SWAP"] or config["WAYS"] > 1):
        yield Reason(
            "config", "SWAP, TURNS or WAYS", True, "none of them for 8-bit floats", "config(high, width, pair)"
        )
    if problem.scaling and not host.exact(problem):
        yield Reason("scaling", "scaling", problem.scaling, "8-bit floats", "gluon_matmul_ws, triton_matmul")
    if problem.n % 8:
        yield Reason("range", "n", problem.n, "a multiple of 8: TMA stores", "gluon_matmul_ws, triton_matmul")


def _shared_memory(problem: Any, config: Any) -> int:
    cfg = host.switches(problem, config)
    return (cfg.RINGS * cfg.STAGES * cfg.STAGE + 1 + cfg.UNITS * cfg.STORES * cfg.PIECE // 4) * 1024 + HAND_OVER


def _registers(problem: Any, config: Any) -> int:
    """168 a thread at launch; setmaxnreg only moves them around."""
    return 384 * 168


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm90",),
        dtypes=("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        scaling=("scalar", "rowwise"),
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
            summary="more than 128 rows, or few and a long K: clusters of two CTAs that share a factor by multicast",
        )
    ]
