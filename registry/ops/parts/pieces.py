"""An oracle in pieces that fit in memory, and a sample of them where the whole would take too long.

A sample always has the first piece and the last, and every element is still held to be finite.
"""

from __future__ import annotations

import random

import torch

PIECE_BYTES = {"cuda": 2 << 30, "cpu": 128 << 20}


def piece_bytes(device: torch.device) -> int:
    """Memory that one piece may take."""
    return PIECE_BYTES.get(device.type, 128 << 20)


def flops_limit(device: torch.device) -> float:
    """Work that the oracle may take for one case: about half a second."""
    if device.type != "cuda":
        return 4e9
    return 2e12 if torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0)) else 2e11


def sample(count: int, flops_each: float, device: torch.device) -> list[int]:
    """Which of `count` pieces to look at: all that can be afforded, the first and the last among them."""
    affordable = max(1, int(flops_limit(device) / flops_each))
    if affordable >= count:
        return list(range(count))
    ends = [0, count - 1][:affordable]
    return sorted({*ends, *random.Random(count).sample(range(count), affordable - len(ends))})
