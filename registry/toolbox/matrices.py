"""Matrices as stand-ins: their strides, and what TMA can make of them."""

from __future__ import annotations

from typing import Any

from registry.toolbox.launch import StandIn

__all__ = ["split_n", "strides_of", "tma_can_store", "tma_geometry", "turned"]


def strides_of(operand: StandIn) -> tuple[int, int, int]:
    """Of batch, row and column; a matrix is its own batch."""
    z, row, column = (0, *operand.strides)[-3:]
    return z, row, column


def split_n(width: int) -> tuple[int, int]:
    """Columns of a tile as one or two powers of two: 192 -> (128, 64)."""
    first = 1 << (width.bit_length() - 1)
    return first, width - first


def turned(operand: Any) -> bool:
    """Whether an operand is contiguous along its second-last dimension rather than its last."""
    return bool(operand.shape[-1] != 1 and operand.strides[-1] != 1)


def tma_geometry(operand: StandIn) -> tuple[list[int], list[int]]:
    """Shape and strides [batch, rows, columns] for a tensor map: columns contiguous, one entry of a broadcast batch.
    Strides of extents of 1 are free."""
    z, outer, inner = strides_of(operand)
    rows, columns = operand.shape[-2:]
    if turned(operand):
        rows, columns, outer = columns, rows, inner
    unit = 16 // operand.dtype.itemsize
    outer = outer if rows > 1 else -(-columns // unit) * unit
    entries = operand.shape[0] if len(operand.shape) == 3 and z else 1
    z = z if entries > 1 else -(-rows * outer // unit) * unit
    return [entries, rows, columns], [z, outer, 1]


def tma_can_store(out: StandIn) -> bool:
    """Unit inner stride, everything else a multiple of 16 bytes, the row too: TMA stores whole units of 16 bytes, so a
    row that ends inside one would be written past its end."""
    size = out.dtype.itemsize
    if out.strides[-1] != 1 or out.alignment % 16 or out.shape[-1] * size % 16:
        return False
    outer = zip(out.shape[:-1], out.strides[:-1], strict=True)
    return all(extent == 1 or stride * size % 16 == 0 for extent, stride in outer)
