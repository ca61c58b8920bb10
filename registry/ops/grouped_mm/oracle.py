"""The grouped product by its definition: a loop over the groups, whose sizes it reads."""

from __future__ import annotations

import torch

from registry.ops.parts.products import activate


def bounds(offs: torch.Tensor, size: int) -> list[tuple[int, int]]:
    """Where each group starts and ends: offsets clamped to what is there, and none before the one before it."""
    ends, found = [min(max(int(end), 0), size) for end in offs.tolist()], []
    last = 0
    for end in ends:
        found.append((last, max(last, end)))
        last = found[-1][1]
    return found


def finish(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    gated: bool,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """One group's product, [M, N] or [E, M, N], with what follows it."""
    if scale_a is not None and scale_b is not None:
        x = x * scale_a.to(x.dtype).unsqueeze(-1) * scale_b.to(x.dtype).unsqueeze(-2)
    if bias is not None:
        x = x + bias.to(x.dtype).unsqueeze(-2)
    if not gated:
        return activate(x, activation)
    gate, up = x.chunk(2, -1)
    return activate(gate, activation) * up
