"""`gluon_matmul_pairs`: what the Hopper product by pairs of CTAs can run, with which configs. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.matmul.claims import HOPPER_ROWS
from registry.plugins.gluon_matmul_pairs import host
from registry.plugins.gluon_matmul_pairs.cost import candidates, config
from registry.toolbox.designs import specialised

__all__ = ["candidates", "config", "configs", "design_of"]

HAND_OVER = 512
"""Bytes that the hand-over to the warp groups takes."""
MOST = 6
"""Configs that are worth measuring."""
FEW = 128
"""Rows for which one CTA of a pair would have nothing to do, or both little; half of it with ranges of K."""


def configs(problem: Any) -> list[dict[str, Any]]:
    """Best first."""
    return candidates(problem, MOST)


def design_of(config: Any) -> Design:
    return specialised((config["HIGH"], config["WIDTH"], 64), config["STAGES"])


def _rule(problem: Any, config: Any) -> Iterable[Reason]:
    few = FEW // 2 if config["WAYS"] > 1 else FEW
    if problem.m <= few:
        yield Reason("range", "m", problem.m, f"more than {few} rows", "gluon_matmul_row_pairs, gluon_matmul_rows")
    if host.exact(problem) and (config["SWAP"] or config["TURNS"] or config["WAYS"] > 1):
        allowed = "no SWAP, TURNS or WAYS for 8-bit floats"
        yield Reason("config", "config", dict(config), allowed, "config(128, 128, 2)")
    if config["STAGES"] < 2:  # a stage is waited for before the one before it is let go of
        yield Reason("config", "STAGES", config["STAGES"], ">= 2")
    if config["WAYS"] > 1:
        full, rest = host.rounds(problem, config)
        if not rest:
            yield Reason("config", "WAYS", config["WAYS"], "1 where tiles fill all rounds", "WAYS=1")
        if full and not config["STORES"]:
            yield Reason("config", "STORES", 0, ">= 1 where some tiles have no ranges", "config(..., full=True)")
    if problem.scaling and not host.exact(problem):
        yield Reason("scaling", "scaling", problem.scaling, "8-bit floats", "gluon_matmul_ws, triton_matmul")
    if problem.n % 8:
        yield Reason("range", "n", problem.n, "a multiple of 8: TMA stores", "gluon_matmul_ws, triton_matmul")


def _never(problem: Any) -> bool:
    """What `_rule` refuses with every config."""
    return bool(problem.m <= FEW // 2 or problem.n % 8 or (problem.scaling and not host.exact(problem)))


def _shared_memory(problem: Any, config: Any) -> int:
    cfg = host.switches(problem, config)
    return (cfg.STAGES * cfg.STAGE + 1 + cfg.CONSUMERS * cfg.UNITS * cfg.STORES * cfg.PIECE // 8) * 1024 + HAND_OVER


def _registers(problem: Any, config: Any) -> int:
    """168 a thread at launch; setmaxnreg only moves them around."""
    return 512 * 128 if host.consumers_of(config) == 3 else 384 * 168


@hookimpl
def registry_variants() -> list[Variant]:
    dtypes = (*HOPPER_ROWS["dtypes"], "float8_e4m3fn", "float8_e5m2")
    claims = {**HOPPER_ROWS, "dtypes": dtypes, "promoted": True, "scaling": ("scalar", "rowwise")}
    requires = Requires(**claims, shared_memory=_shared_memory, registers=_registers, rule=_rule, never=_never)
    return [
        host.HOST.variant(
            "gluon_matmul_pairs",
            op="matmul",
            requires=requires,
            configs=configs,
            design=specialised((256, 192, 64), 3),
            design_of=design_of,
            summary="more than 128 rows, or few and a long K: clusters of two CTAs that share a factor by multicast",
        )
    ]
