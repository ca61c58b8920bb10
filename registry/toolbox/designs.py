"""Traits that many kernels have alike, as the `Design` of a Variant."""

from __future__ import annotations

from registry.contract.capability import Design

__all__ = ["specialised"]


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
