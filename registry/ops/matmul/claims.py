"""What many products claim alike, for the `Requires` of a variant."""

from __future__ import annotations

from typing import Any

__all__ = ["EVERYTHING", "HOPPER_ROWS", "MAPS"]

MAPS: dict[str, Any] = dict(
    unit_inner_stride=False,
    base_alignment=16,  # of a tensor map's address
    stride_alignment=16,  # and of each of its strides
)
EVERYTHING: dict[str, Any] = dict(
    dtypes=("float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"),
    promoted=True,
    layouts=("nn", "nt", "tn", "tt"),
    batched=True,
    bias=True,
    out=True,
    deterministic=True,
    out_dtypes=("float16", "bfloat16", "float32", "int32"),
    activations=("relu", "gelu", "silu"),
    toolchain={"triton": ">=3.6,<4"},
)
"""All dtypes and layouts, and what is done to a result."""
HOPPER_ROWS: dict[str, Any] = dict(
    **MAPS,
    arch=("sm90",),
    dtypes=("float16", "bfloat16"),
    layouts=("nt",),
    deterministic=True,
    bias=True,
    activations=EVERYTHING["activations"],
    out_dtypes=("float16", "bfloat16"),
    toolchain={"triton": ">=3.6,<4"},
)
"""Products of 16 bits whose factors both lie along K, by Hopper's wgmma and tensor maps."""
