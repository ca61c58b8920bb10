"""`gluon_matmul_rows`: what the Hopper product for few rows can run, with which configs. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.matmul.claims import HOPPER_ROWS
from registry.plugins.gluon_matmul_rows import host
from registry.plugins.gluon_matmul_rows.cost import candidates
from registry.toolbox.designs import specialised

__all__ = ["candidates", "configs", "design_of"]

HAND_OVER = 512
"""Bytes that the hand-over to the warp groups and the broadcast of a counter take."""


def configs(problem) -> list[dict[str, Any]]:
    """Best first."""
    return candidates(problem, 4)


def design_of(config) -> Design:
    high = 64 * config["CONSUMERS"] * config["UNITS"]
    return specialised((high, config["TILE"], 64), config["STAGES"], groups=config["CONSUMERS"])


def _rule(problem, config) -> Iterable[Reason]:
    if problem.m > host.MOST:
        yield Reason("range", "m", problem.m, f"up to {host.MOST} rows", "gluon_matmul_ws, triton_matmul")
    if problem.n % 2:
        yield Reason("range", "n", problem.n, "an even number", "gluon_matmul_ws, triton_matmul")
    high = 64 * config["CONSUMERS"] * config["UNITS"]
    if not config["SWAP"] and problem.m > high:
        yield Reason(
            "config", "CONSUMERS", config["CONSUMERS"], f"64 rows of wgmma for each of {problem.m}", "SWAP=True"
        )
    if config["SPLIT"] > -(-problem.k // 64):
        yield Reason("config", "SPLIT", config["SPLIT"], "ranges of a block of K", "SPLIT=1")
    if config["STAGES"] < 2:  # a stage is waited for before the one before it is let go of
        yield Reason("config", "STAGES", config["STAGES"], ">= 2")


def _never(problem) -> bool:
    """What `_rule` refuses with every config."""
    return bool(problem.m > host.MOST or problem.n % 2)


def _shared_memory(problem, config) -> int:
    cfg = host.switches(problem, config)
    return (cfg.STAGES * cfg.STAGE + cfg.BEYOND) * 1024 + 16 * cfg.STAGES + HAND_OVER


def _registers(problem, config) -> int:
    """At launch; setmaxnreg only moves them around."""
    return 128 * (config["CONSUMERS"] + 1) * host.AT_LAUNCH[config["CONSUMERS"]]


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(**HOPPER_ROWS, shared_memory=_shared_memory, registers=_registers, rule=_rule, never=_never)
    return [
        host.HOST.variant(
            "gluon_matmul_rows",
            op="matmul",
            requires=requires,
            configs=configs,
            design=specialised((128, 200, 64), 5),
            design_of=design_of,
            summary="few rows: wgmma of any multiple of 8 columns, K split among CTAs, one launch",
        )
    ]
