"""A toy op: what a folder of registry/ops/ has to hold, and no more. tests/ops/test_toy_op.py puts it there."""

from registry.ops.rms_norm.op import rms_norm

__all__ = ["rms_norm"]
