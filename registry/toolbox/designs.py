"""Traits that many kernels have alike, as the `Design` of a Variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from registry.contract.capability import Design

__all__ = ["MOST_ALONG_Y", "specialised", "tiled"]

MOST_ALONG_Y = 65_535
"""Blocks along the second dimension of a grid; along the first there may be 2^31 - 1."""


def specialised(
    tile: tuple[int, ...], stages: int, *, groups: int = 2, tasks: int = 2, persistent: bool = True
) -> Design:
    """Of a kernel in Gluon whose producer keeps a ring of so many stages full for warp groups that multiply."""
    return Design(
        warp_groups=groups,
        pipeline_stages=stages,
        warp_specialized=True,
        pipeline_tasks=tasks,
        tile=tile,
        persistent=persistent,
        dsl="gluon",
    )


def tiled(config: Mapping[str, Any], *, part: str = "", persistent: bool = False) -> Design:
    """Of a Triton kernel, by the names that its config has: BLOCK_M, BLOCK_N and perhaps BLOCK_K, num_warps and
    num_stages; or, of one `part` of several, such as "KEY": KEY_M, KEY_N, key_warps and key_stages."""
    tile, launch = part or "BLOCK", part.lower() or "num"
    return Design(
        warp_groups=max(1, config[f"{launch}_warps"] // 4),
        pipeline_stages=config[f"{launch}_stages"],
        tile=tuple(config[name] for name in (f"{tile}_M", f"{tile}_N", f"{tile}_K") if name in config),
        persistent=persistent,
    )
