"""Host side of Gluon kernels for Hopper: matrices in boxes that land as wgmma reads them."""

from __future__ import annotations

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from registry.toolbox.hopper import swizzled
from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import tma_geometry, turned
from registry.toolbox.tensor_maps import with_base


def eights(number: int) -> int:
    """The next multiple of 8. `triton.cdiv` takes ten times as long, and a decision asks often."""
    return 8 * -(-number // 8)


def in_tiles(operand: StandIn, rows: int, columns: int) -> TensorDescriptor:
    """[batch, rows, columns], columns contiguous; a batch that shares its elements has one entry."""
    shape, strides = tma_geometry(operand)
    block = [1, columns, rows] if turned(operand) else [1, rows, columns]
    return TensorDescriptor(operand, shape, strides, block, swizzled(block, operand.dtype))


def in_boxes(operand: StandIn, rows: int, columns: int = 64) -> TensorDescriptor:
    """Of one matrix, boxes of so many rows, whatever power of two Triton takes them for; 0: of eight. For wgmma of any
    multiple of 8 columns."""
    shape, strides = tma_geometry(operand)
    block = [8, columns]
    found = TensorDescriptor(operand, shape[1:], strides[1:], block, swizzled(block, operand.dtype))
    return with_base(found, operand, box_rows=rows)
