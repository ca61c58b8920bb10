"""Triton's interpreter as its kernels need it: to be imported in a process that has TRITON_INTERPRET=1."""

from __future__ import annotations

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _scalar_index(tensor, scope, patch=interpreter._patch_lang_tensor):
    """triton 3.6 makes an int of a one-element array by int(), which numpy 2.4 refuses."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _dot(self, a, b, *rest, dot=interpreter.InterpreterBuilder.create_dot):
    """It also multiplies the bit patterns of bfloat16."""
    a, b = (
        interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if x.dtype.scalar == tl.bfloat16
        else x
        for x in (a, b)
    )
    return dot(self, a, b, *rest)


interpreter._patch_lang_tensor = _scalar_index
interpreter.InterpreterBuilder.create_dot = _dot
