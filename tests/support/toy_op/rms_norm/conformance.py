"""rms_norm for the conformance kit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.ops.parts.judging import Expected, Yardstick
from registry.ops.parts.kit import Kit, Results, Sample, Spec, dense_complaints
from registry.ops.parts.memory import Arena, Slot, dense_strides
from registry.ops.parts.op_checks import off, random
from registry.ops.parts.rounding import floor_of
from registry.ops.parts.sizes import Size
from registry.ops.rms_norm.op import rms_norm


def rows_are_independent(device: torch.device) -> list[str]:
    x = random(device, 4, 32)
    return off("the first row", rms_norm(x)[:1], rms_norm(x[:1]))


class RmsNormKit(Kit):
    claims = ("dtype", "hidden", "weight", "deterministic")
    checks = {"rows are independent": rows_are_independent}

    def axes(self, requires: Requires, size: Size) -> dict[str, list[Any]]:
        low, high = requires.hidden
        return {
            "dtype": list(requires.dtypes),
            "rows": list(size.lengths),
            "hidden": [d for d in (64, 1, 100, 1000) if low <= d <= high],
            "weight": [False, True] if requires.weight else [False],
            "deterministic": [False, True] if requires.deterministic else [False],
        }

    def outside(self, requires: Requires) -> dict[str, Spec]:
        return {"hidden above": {"hidden": requires.hidden[1] + 1}}

    def make(self, spec: Spec, device: torch.device, seed: int) -> Sample:
        dtype, shapes = getattr(torch, spec["dtype"]), {"x": (spec["rows"], spec["hidden"])}
        if spec["weight"]:
            shapes["weight"] = (spec["hidden"],)
        arenas = {n: Arena({n: Slot(shape, dense_strides(shape))}, dtype, device) for n, shape in shapes.items()}
        tensors = {name: arena.views[name] for name, arena in arenas.items()}
        if device.type != "meta":
            generator = torch.Generator(device).manual_seed(seed)
            for tensor in tensors.values():
                tensor.copy_(torch.randn(tensor.shape, device=device, generator=generator))
        given = {"weight": tensors.get("weight")}
        return Sample((tensors["x"],), given, {**given, "eps": 1e-6}, arenas)

    def launch(self, launch: Callable[..., Any], sample: Sample) -> Results:
        return {"out": launch(*sample.tensors, **sample.launch_arguments)}

    def front_door(self, variant: str, sample: Sample) -> Results:
        return {"out": rms_norm(*sample.tensors, **sample.arguments, variant=variant)}

    def expected(self, sample: Sample) -> list[Expected]:
        (x,) = sample.tensors
        want = rms_norm.reference(x, **sample.arguments)
        return [Expected("out", want, Yardstick(want.to(x.dtype), floor=floor_of(x.dtype)), x.dtype)]

    def form(self, sample: Sample, results: Results) -> list[str]:
        return dense_complaints(results, sample)


BY_OP = {"rms_norm": RmsNormKit()}
