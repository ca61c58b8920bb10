"""The masks of FlashAttention's functions, and what they mean."""

from __future__ import annotations

import torch
from ragged import starts

B, S, HEADS, KV_HEADS, D = 3, 4, 4, 2, 16
MASKS = [
    {},
    {"causal": True},
    {"window_size": (2, 1)},
    {"window_size": (3, 0), "causal": True},
    {"window_size": (-1, 2)},
    {"softcap": 2.0},
    {"softmax_scale": 0.3},
]


def ours(mask):
    """The same mask in the words of the oracle."""
    left, right = mask.get("window_size", (-1, -1))
    return {
        "causal": mask.get("causal", False),
        "window": None if left == right == -1 else (left, right),
        "softcap": mask.get("softcap", 0.0),
        "scale": mask.get("softmax_scale"),
    }


def packed(t):
    return t.flatten(0, 1)


def even(count, length):
    return starts([length] * count)


def close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
