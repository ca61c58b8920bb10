"""What shapes of attention for the tuner have alike: their masks, and how near results must come."""

from __future__ import annotations

from typing import Any

from registry.ops.parts.judging import Tolerance
from registry.ops.parts.workload import Workload

BACKWARD_FACTOR = 2.5
LSE_TOLERANCE = {"float64": 1e-6, "float32": 1e-3}


class MaskedWorkload(Workload):
    outputs: tuple[str, ...] = ("out", "lse")
    passes = 1
    """The oracle's work, in forwards."""

    @property
    def scale(self) -> float:
        raise NotImplementedError

    def mask(self) -> dict[str, Any]:
        get = self.sizes.get
        return {"causal": get("causal", False), "window": get("window"), "softcap": get("softcap", 0.0)}

    def lse_bound(self) -> Tolerance:
        bound = LSE_TOLERANCE.get(self.sizes.get("dtype", "bfloat16"), 2e-2)
        return Tolerance(max(bound, 1e-2) if self.device.type == "cuda" else bound, absolute=True)


class OfGradients(MaskedWorkload):
    """Goes before the workload of the forward among the bases of the backward's."""

    passes = 3

    def front_door(self) -> dict[str, Any]:
        return {**self.arguments(), "scale": self.scale}

    def tolerance(self) -> float:
        return BACKWARD_FACTOR * super().tolerance()
