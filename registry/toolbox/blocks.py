"""Host side of plain Triton kernels that move blocks of matrices by tensor maps."""

from __future__ import annotations

from triton.tools.tensor_descriptor import TensorDescriptor

from registry.toolbox.launch import StandIn
from registry.toolbox.matrices import tma_geometry, turned
from registry.toolbox.tensor_maps import rounded_to_tf32


def in_blocks(operand: StandIn, rows: int, columns: int, tf32: bool = False) -> TensorDescriptor:
    """[rows, columns], or [batch, rows, columns] where there are several, columns contiguous; float32 may arrive as
    tf32."""
    shape, strides = tma_geometry(operand)
    block = [columns, rows] if turned(operand) else [rows, columns]
    if shape[0] > 1:
        found = TensorDescriptor(operand, shape, strides, [1, *block])
    else:
        found = TensorDescriptor(operand, shape[1:], strides[1:], block)
    return rounded_to_tf32(found) if tf32 else found
