"""What a kernel's arguments are where they are neither tensors nor fixed numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from registry.toolbox.launch import StandIn

__all__ = ["Kept", "PerCall", "Zeroes", "memory"]


@dataclass(frozen=True)
class PerCall:
    """A float argument: what the call passes as `name`, times `factor`."""

    name: str
    factor: float = 1.0


COUNTER_WORDS = 32  # a cache line for each counter


class Zeroes(StandIn):
    """int32 zeroes for one launch, which leaves them at zero: see registry.toolbox.counters."""

    def __init__(self, count: int) -> None:
        super().__init__((count,), "int32", name="counters")


class Kept(StandIn):
    """Memory that outlives a launch: `find` gives it, of the first tensor of a call."""

    def __init__(self, shape: tuple[int, ...], dtype: str, name: str, find: Callable[[Any], Any]) -> None:
        super().__init__(shape, dtype, name=name)
        self.find = find


def memory(one: StandIn) -> Callable[[Any], Any]:
    """What gives a launch on its first tensor's device the memory that this stands for."""
    from registry.toolbox.counters import zeroed
    from registry.toolbox.outputs import allocator

    if isinstance(one, Kept):
        return one.find
    return zeroed(one.shape[0]) if isinstance(one, Zeroes) else allocator(one.shape, one.dtype, one.strides)
