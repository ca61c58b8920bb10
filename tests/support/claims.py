"""What several of tests/support/kernels claim alike."""

from __future__ import annotations

from typing import Any

HEADS: dict[str, Any] = dict(head_dim=(16, 32), head_dim_multiple=8, head_dim_v=(16, 32), head_dim_v_multiple=8)


def claimed(flags: str) -> dict[str, Any]:
    """On a CPU, in a fixed order and in full precision, and what else is named."""
    return {"arch": ("cpu",), **dict.fromkeys((*flags.split(), "deterministic", "ieee"), True)}
