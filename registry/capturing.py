"""CUDA graph capture: what is cold must not be compiled or tuned inside it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from registry.errors import CaptureError

if TYPE_CHECKING:
    from registry.dispatch import Decision


def capturing() -> bool:
    """Whether the current CUDA stream is being captured."""
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def refuse_if_capturing(decision: Decision) -> None:
    """Raise CaptureError where a first launch, which may compile, would happen inside a capture."""
    if capturing() and decision.problem.target.arch != "cpu":
        raise CaptureError(
            f"{decision.variant} was never launched for {decision.problem.summary()}; a CUDA graph cannot capture a "
            f"first launch, which compiles. Call it once before the capture, or use registry.warm(...)"
        )
