"""`gluon_matmul_ws`: what the warp-specialised Hopper product can run, with which configs. kernel.py says how."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.matmul.calls import int32_reasons
from registry.ops.matmul.claims import EVERYTHING, MAPS
from registry.plugins.gluon_matmul_ws import host, padded
from registry.plugins.gluon_matmul_ws.across import variant as across
from registry.plugins.gluon_matmul_ws.cost import itemsize
from registry.plugins.gluon_matmul_ws.odd import variant as odd
from registry.plugins.gluon_matmul_ws.tiles import HAND_OVER, candidates, config
from registry.toolbox.designs import MOST_ALONG_Y, specialised
from registry.toolbox.matrices import split_n

__all__ = ["candidates", "config", "configs", "design_of"]


def configs(problem) -> list[dict[str, Any]]:
    """Best first."""
    return candidates(problem, 4)


def design_of(config) -> Design:
    return specialised((config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]), config["STAGES"])


def _rule(problem, config) -> Iterable[Reason]:
    if config["STAGES"] < 2 or config["STORES"] < 1:  # a stage is waited for before the one before it is let go of
        yield Reason("config", "STAGES", (config["STAGES"], config["STORES"]), ">= 2, and STORES >= 1")
    if problem.n == 1 and itemsize(problem.dtype) != 2:
        yield Reason("n", "n", 1, "2 columns or more, or a 16-bit dtype", "pad b with a column of zeros", "b")
    if problem.batch > MOST_ALONG_Y and itemsize(problem.dtype) != 2:  # such operands may be turned (turn.py)
        yield Reason("range", "batch", problem.batch, f"at most {MOST_ALONG_Y}: the copy's grid ends there")
    if host.swapped(config) and (min(problem.m, problem.k) == 1 or config["SPLIT"] > 1):
        yield Reason("config", "SWAP", True, "False for one row, a K of 1, or SPLIT > 1", "SWAP=False")
    if config["SPLIT"] > 1 and (config["MODE"] != "coop" or split_n(config["BLOCK_N"])[1]):
        yield Reason("config", "SPLIT", config["SPLIT"], "1, except for cooperative tiles of 2^n columns", "SPLIT=1")
    if host.split_k(config) != 1 and (config["MODE"] != "coop" or config["SPLIT"] > 1):
        yield Reason("config", "SPLIT_K", host.split_k(config), "1, except for cooperative tiles", "SPLIT_K=1")
    if host.split_k(config) > -(-problem.k // (config["BLOCK_K"] * (2 if problem.dtype == "float32" else 1))):
        yield Reason("config", "SPLIT_K", host.split_k(config), "ranges of a block of K (float32: two)", "SPLIT_K=1")
    yield from int32_reasons(problem)


def _shared_memory(problem, config) -> int:
    """The ring, the buffers of C, and what the barriers (float32 may need more) and the hand-over to the warp groups
    take."""
    ring = config["STAGES"] * (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * itemsize(problem.dtype)
    size = itemsize(problem.out_dtype)
    buffers = 2 * config["STORES"] * host.rows_of_each(config) * host.columns_at_once(config, size) * size
    return ring + buffers + (24 if problem.dtype == "float32" else 16) * config["STAGES"] + HAND_OVER


def _registers(problem, config) -> int:
    """168 a thread at launch, for 288 threads rounded to three warp groups; setmaxnreg only moves them around."""
    return 384 * 168


@hookimpl
def registry_variants() -> list[Variant]:
    requires = Requires(
        arch=("sm90",),
        **MAPS,
        **EVERYTHING,
        scaling=("scalar", "rowwise"),
        shared_memory=_shared_memory,
        registers=_registers,
        rule=_rule,
    )
    product = host.HOST.variant(
        "gluon_matmul_ws",
        op="matmul",
        requires=requires,
        configs=configs,
        design=specialised((128, 256, 64), 4),
        design_of=design_of,
        summary="TMA producer, two consumer warp groups, overlapped TMA stores",
    )
    return [product, padded.variant_of(product), odd.variant_of(product), across.variant_of(product)]
