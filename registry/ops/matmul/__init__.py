"""Matmul with a fused epilogue. See op.py for what is promised."""

from registry.ops.matmul.op import Matmul, matmul

__all__ = ["Matmul", "matmul"]
