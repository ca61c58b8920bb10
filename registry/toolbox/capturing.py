"""CUDA graph capture: what is cold must not be compiled or tuned inside it."""

from __future__ import annotations

import sys


def capturing() -> bool:
    """Whether the current CUDA stream is being captured."""
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
