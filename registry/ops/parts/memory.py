"""Memory that tells on a kernel: operands between guard bands, outputs that start as NaN, allocations that are watched.

All of it is filled with bytes of 0xff, which is NaN in every floating dtype. A kernel that reads beyond an operand or
leaves an output unwritten computes NaN; one that writes where it should not changes bytes that are compared afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

GUARD_BYTES = 32 * 1024
POISON = 0xFF

Strides = tuple[int, ...]


def dense_strides(shape: Sequence[int], order: Sequence[int] | None = None) -> Strides:
    """Strides without gaps; `order` lists the dimensions from the innermost out (default: the last is innermost)."""
    strides, step = [0] * len(shape), 1
    for dim in order if order is not None else range(len(shape) - 1, -1, -1):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of storage a view spans."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def copied(value: Any) -> Any:
    """A tensor elsewhere in memory with the same values and strides, overlapping ones too; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    whole = value.as_strided((extent(value.shape, value.stride()),), (1,), value.storage_offset()).clone()
    return whole.as_strided(value.shape, value.stride(), 0)


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies inside an arena, in elements."""

    shape: tuple[int, ...]
    strides: Strides
    offset: int = 0


class Arena:
    """One storage that holds one or more views between two guard bands, all of it poisoned until a view is filled."""

    def __init__(
        self, slots: Mapping[str, Slot], dtype: torch.dtype, device: torch.device, shift_bytes: int = 0
    ) -> None:
        lead = (GUARD_BYTES + shift_bytes) // dtype.itemsize
        need = max(slot.offset + extent(slot.shape, slot.strides) for slot in slots.values())
        self.raw = poisoned(lead + need + GUARD_BYTES // dtype.itemsize, dtype, device)
        self.views = {
            name: self.raw.as_strided(slot.shape, slot.strides, lead + slot.offset) for name, slot in slots.items()
        }
        self._before: torch.Tensor | None = None
        self._version = 0

    def freeze(self) -> None:
        """Remember every byte, as it has to be after the call."""
        self._before, self._version = self.raw.clone(), self.raw._version

    def was_written(self) -> bool:
        """Whether torch wrote to it since it was frozen, whatever; kernels of others do not say so."""
        return self.raw._version != self._version

    def changed(self, written: torch.Tensor | None = None) -> bool:
        """Whether any byte differs from when it was frozen; those of the view `written` may."""
        assert self._before is not None
        if written is not None:
            self._before.as_strided(written.shape, written.stride(), written.storage_offset()).copy_(written)
        return not torch.equal(self.raw.view(torch.uint8), self._before.view(torch.uint8))


def poisoned(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor of NaN (of -1 for integers)."""
    raw = torch.empty(max(count, 1), dtype=dtype, device=device)
    if raw.device.type != "meta":
        raw.view(torch.uint8).fill_(POISON)
    return raw


_aten = torch.ops.aten
_ALLOCATORS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_permuted.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    )
)


_FILLERS = frozenset(
    (
        _aten.zeros.default,
        _aten.zeros_like.default,
        _aten.new_zeros.default,
        _aten.ones.default,
        _aten.ones_like.default,
        _aten.new_ones.default,
        _aten.full.default,
        _aten.full_like.default,
        _aten.new_full.default,
    )
)


class WatchedAllocations(TorchDispatchMode):
    """Inside the block, what torch.empty and torch.zeros and their kin return lies between guard bands; where nothing
    was to be written into it, it is poisoned."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[torch.Tensor, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _ALLOCATORS and func not in _FILLERS:
            return result
        if type(result) is not torch.Tensor or result.device.type == "meta" or not result.numel():
            return result
        guarded = self._guarded(result)
        return guarded.copy_(result) if func in _FILLERS else guarded

    def _guarded(self, plain: torch.Tensor) -> torch.Tensor:
        lead = GUARD_BYTES // plain.element_size()
        need = extent(plain.shape, plain.stride())
        raw = poisoned(lead + need + lead, plain.dtype, plain.device)
        self._made.append((raw, lead, lead + need))
        return raw.as_strided(plain.shape, plain.stride(), lead)

    def overruns(self) -> int:
        """How many of the watched allocations were written outside of their bounds."""
        count = 0
        for raw, first, last in self._made:
            bands = (raw[:first].view(torch.uint8), raw[last:].view(torch.uint8))
            count += any(bool((band != POISON).any()) for band in bands)
        return count


def stir(tensors: Sequence[torch.Tensor]) -> None:
    """Leave NaN in freed blocks of these sizes, which allocators below Python hand out next."""
    blocks = [poisoned(t.numel(), t.dtype, t.device) for t in tensors for _ in range(2)]
    del blocks


@contextlib.contextmanager
def conditions(*, deterministic: bool = False, ieee: bool | None = None) -> Iterator[None]:
    """torch's global switches as one problem asks for them. `ieee=None` leaves the float32 precision alone."""
    before = torch.get_deterministic_debug_mode()
    try:
        # The same switch as `use_deterministic_algorithms`, which imports torch's compiler besides: 1.7 seconds.
        torch.set_deterministic_debug_mode("error" if deterministic else "default")
        with contextlib.nullcontext() if ieee is None else _float32(ieee):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


@contextlib.contextmanager
def _float32(ieee: bool) -> Iterator[None]:
    """In full precision or rounded, by torch's older way to ask, whose getter compiled graphs call. That raises where
    somebody asked for something else by the newer one."""
    backends: Any = torch.backends
    newer = backends.cuda.matmul, backends.mkldnn.matmul
    precisions = [one.fp32_precision for one in newer]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None
    torch.set_float32_matmul_precision("highest" if ieee else "high")
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for one, precision in zip(newer, precisions, strict=True):
            if one.fp32_precision != precision:
                one.fp32_precision = precision
