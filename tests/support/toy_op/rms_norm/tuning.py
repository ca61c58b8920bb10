"""rms_norm for the tuner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from registry.ops.parts.cases import Case
from registry.ops.parts.judging import Expected, Tolerance
from registry.ops.parts.tuning import PLAIN, Tuning
from registry.ops.parts.workload import Tensors, Workload, torch_dtype
from registry.ops.rms_norm.op import rms_norm

FIELDS = {"rows": "rows", "hidden": "hidden", "dtype": "dtype", "weight": "weight", "deterministic": "deterministic"}


def defaults(shape: Mapping[str, Any]) -> dict[str, Any]:
    return {**PLAIN, "weight": False}


class RmsNormWorkload(Workload):
    def make(self) -> Tensors:
        dtype, sizes = torch_dtype(self.sizes.get("dtype", "bfloat16")), self.sizes
        rows, hidden = sizes.get("rows", 1024), sizes.get("hidden", 1024)
        weight = self.random((hidden,), dtype) if sizes.get("weight") else None
        return {"x": self.random((rows, hidden), dtype), "weight": weight}

    def arguments(self) -> dict[str, Any]:
        return dict(self.tensors)

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        return launch(tensors["x"], eps=1e-6, weight=tensors["weight"])

    def expected(self) -> list[Expected]:
        want = rms_norm.reference(**self.tensors)
        return [Expected("out", want, Tolerance(self.tolerance()), self.tensors["x"].dtype)]


def quick(op: str) -> list[Case]:
    return [Case.of(op, rows=rows, hidden=4096, weight=True) for rows in (16, 4096)]


def tiny(op: str) -> list[Case]:
    return [Case.of(op, rows=rows, hidden=64, dtype="float32", weight=w) for rows in (8, 32) for w in (False, True)]


BY_OP = {"rms_norm": Tuning(FIELDS, defaults, RmsNormWorkload, {"quick": quick, "tiny": tiny}, leading=("rows",))}
