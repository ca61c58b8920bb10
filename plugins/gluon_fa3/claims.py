"""What every kernel of this folder claims: forward and backward, of dense tensors and of packed sequences."""

from __future__ import annotations

from typing import Any

CLAIMS: dict[str, Any] = dict(
    arch=("sm90",),
    dtypes=("float16", "bfloat16"),
    head_dim=(8, 256),
    head_dim_multiple=8,
    head_dim_v=(8, 256),
    head_dim_v_multiple=8,
    base_alignment=16,  # of a tensor map's address
    stride_alignment=16,  # and of each of its strides
    causal=True,
    window=True,
    softcap=True,
    gqa=True,
    lse=True,
    deterministic=True,
    toolchain={"triton": ">=3.6,<4"},
)
