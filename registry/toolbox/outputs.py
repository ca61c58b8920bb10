"""Outputs of bound launches: their geometry is worked out once, and each call only asks for the memory.

`torch.empty` spends more time in its dispatcher than in the allocator. torch.compile's generated code allocates through
a function that goes straight there, and so does this one, where nobody is watching: under a dispatch mode (a memory
checker, say), and where several GPUs make the current device a question, it is torch's usual call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["allocator", "dense"]

_modes = torch._C._len_torch_dispatch_stack


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def allocator(
    shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function of one tensor that returns uninitialised memory of this geometry on that tensor's device.

    In `prepare`::

        new_out = allocator((problem.m, problem.n), torch.bfloat16)
        ...
        out = new_out(a)  # in the launch
    """
    shape = tuple(shape)
    strides = dense(shape) if strides is None else tuple(strides)

    def usual(like: torch.Tensor) -> torch.Tensor:
        return like.new_empty_strided(shape, strides, dtype=dtype)

    direct = _direct()
    if direct is None or torch.cuda.device_count() != 1:
        return usual

    def straight(like: torch.Tensor) -> torch.Tensor:
        return direct(shape, strides, dtype) if like.is_cuda and not _modes() else usual(like)  # type: ignore[no-any-return]

    return straight


def _direct() -> Callable[..., Any] | None:
    """torch's allocation for generated code, on the current CUDA device; None where this torch has none."""
    try:
        from torch._C._dynamo import guards
    except ImportError:
        return None
    return getattr(guards, "_empty_strided_cuda", None)
