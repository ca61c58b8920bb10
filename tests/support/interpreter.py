"""Triton's interpreter, mended as the conformance kit mends it: to be imported where TRITON_INTERPRET=1."""

from typing import Any

import torch

from registry.testing import interpreted

assert not interpreted.mend()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1.0))


def gradient_config(rows: int, keys: int, split: bool, stages: int = 2) -> dict[str, Any]:
    """Of both passes of attention's gradients: tiles of so many queries and keys in the one, turned in the other."""
    query = {"QUERY_M": rows, "QUERY_N": keys, "query_warps": 4, "query_stages": stages}
    return query | {"KEY_M": keys, "KEY_N": rows, "key_warps": 4, "key_stages": stages, "KEY_SPLIT": split}
