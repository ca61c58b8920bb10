"""`gluon_matmul_row_pairs`: what the Hopper product for few rows by pairs of CTAs can run. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.matmul.claims import HOPPER_ROWS
from registry.plugins.gluon_matmul_row_pairs import host
from registry.plugins.gluon_matmul_row_pairs.cost import candidates
from registry.toolbox.designs import specialised

__all__ = ["candidates", "configs", "design_of"]

HAND_OVER = 512
"""Bytes that the hand-over to the warp groups takes."""
_AT_LAUNCH = {1: 232, 2: 168}
"""Registers of each thread before they are shared out, by the number of consumers."""


def configs(problem: Any) -> list[dict[str, Any]]:
    """Best first."""
    return candidates(problem, 4)


def design_of(config: Any) -> Design:
    high = 64 * config["CONSUMERS"]
    return specialised((high, config["TILE"], 64), config["STAGES"], groups=config["CONSUMERS"])


def _rule(problem: Any, config: Any) -> Iterable[Reason]:
    if not host.FEWEST <= problem.m <= host.MOST:
        allowed = f"{host.FEWEST} to {host.MOST} rows"
        yield Reason("range", "m", problem.m, allowed, "gluon_matmul_rows, gluon_matmul_ws, triton_matmul")
    elif not config["SWAP"] and host.rows_of(problem) > 64 * config["CONSUMERS"]:
        allowed = f"64 rows of wgmma for each of {host.rows_of(problem)}"
        yield Reason("config", "CONSUMERS", config["CONSUMERS"], allowed, "SWAP=True")
    if problem.n % 2:
        yield Reason("range", "n", problem.n, "an even number", "gluon_matmul_ws, triton_matmul")
    if config["STAGES"] < 2:  # a stage is waited for before the one before it is let go of
        yield Reason("config", "STAGES", config["STAGES"], ">= 2")


def _never(problem: Any) -> bool:
    """What `_rule` refuses with every config."""
    return bool(not host.FEWEST <= problem.m <= host.MOST or problem.n % 2)


def _shared_memory(problem: Any, config: Any) -> int:
    cfg = host.switches(problem, config)
    return (cfg.STAGES * cfg.STAGE + cfg.BEYOND + 1) * 1024 + HAND_OVER


def _registers(problem: Any, config: Any) -> int:
    """At launch; setmaxnreg only moves them around."""
    return 128 * (config["CONSUMERS"] + 1) * _AT_LAUNCH[config["CONSUMERS"]]


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(**HOPPER_ROWS, shared_memory=_shared_memory, registers=_registers, rule=_rule, never=_never)
    return [
        host.HOST.variant(
            "gluon_matmul_row_pairs",
            op="matmul",
            requires=requires,
            configs=configs,
            design=specialised((128, 160, 64), 5),
            design_of=design_of,
            summary="65 to 256 rows: clusters of two CTAs that share b's columns by multicast",
        )
    ]
