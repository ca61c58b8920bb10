"""What the kernels for rows at odd distances (odd, across) claim of a config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from registry import Reason
from registry.plugins.gluon_matmul_ws.host import rows_of_each
from registry.toolbox.matrices import split_n

HAND_OVER = 1024
"""Bytes that barriers and the hand-over to the warp groups take."""


def of_config(config: Any, *blocks: int) -> Iterator[Reason]:
    """Reasons against what none of these kernels can be; `blocks`: what one may have of K, as copies are laid out."""
    if config["BLOCK_K"] not in blocks:
        yield Reason("config", "BLOCK_K", config["BLOCK_K"], blocks, f"BLOCK_K={blocks[0]}")
    if config["STAGES"] < 2 or config["STORES"] < 1:  # a stage is waited for before the one before it is let go of
        yield Reason("config", "STAGES", (config["STAGES"], config["STORES"]), ">= 2, and STORES >= 1")
    if split_n(config["BLOCK_N"])[1] or config["SPLIT"] > 1:
        yield Reason("config", "BLOCK_N", config["BLOCK_N"], "a power of two, and SPLIT=1")


def shared_memory(problem: Any, config: Any) -> int:
    """The ring, the buffers of C, and what barriers and the hand-over take."""
    ring = config["STAGES"] * (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * 2
    size = 4 if problem.out_dtype == "float32" else 2
    columns = min(128 // size, config["BLOCK_N"])
    return ring + 2 * config["STORES"] * rows_of_each(config) * columns * size + 16 * config["STAGES"] + HAND_OVER
