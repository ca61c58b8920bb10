"""The conformance kit's knowledge of matmul: axes, memory orders, and what a product is held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.ops.matmul.op import matmul
from registry.ops.parts.judging import Expected, Yardstick
from registry.ops.parts.kit import Sample, Spec, stored, unclaimed
from registry.ops.parts.memory import Strides
from registry.ops.parts.op_checks import backend, off, opcheck, random, usual_dtype
from registry.ops.parts.product_kit import (
    LAYOUTS,
    LOOSE,
    Places,
    ProductKit,
    away_from_zero,
    loose_strides,
    matrix_strides,
    unpromoted,
    wanted_out_dtype,
)
from registry.ops.parts.products import FP8, activate
from registry.ops.parts.rounding import as_multiplied, floor_of, of_one_sign, rounded_to, sum_eps
from registry.ops.parts.sizes import Size

SMALL = [
    (128, 128, 128),
    (77, 129, 100),
    (1, 1, 1),
    (1, 256, 300),
    (300, 1, 77),
    (129, 64, 1),
    (16, 24, 500),
    (256, 192, 64),
]
LARGE = [(1000, 1001, 999), (2048, 1024, 1536), (8, 4096, 2048), (2049, 128, 4096)]
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "float8_e4m3fn", "float8_e5m2")


class MatmulKit(ProductKit):
    call = matmul
    self_explaining = ("dtype", "memory", "layout", "activation")
    claims = (
        "dtype",
        "dtype_b",
        "out_dtype",
        "batch",
        "layout",
        "bias",
        "activation",
        "scaling",
        "out",
        "ieee",
        "deterministic",
    )

    def axes(self, requires: Requires, size: Size) -> dict[str, list[Any]]:
        return {
            "dtype": list(requires.dtypes),
            "dtype_b": ["", *requires.dtypes_b],
            "out_dtype": ["", *(name for name in requires.out_dtypes if name != "int8")],
            "sizes": [*SMALL, *(LARGE if size.large else [])],
            "batch": [0, 3, 2] if requires.batched else [0],
            "shared": ["", "a", "b"] if requires.batched else [""],
            "layout": [layout for layout in LAYOUTS if layout in requires.layouts],
            "memory": self.memory(requires),
            "base_alignment": [requires.base_alignment],
            "bias": ["", "plain", "float32", *LOOSE] if requires.bias else [""],
            "activation": ["", *requires.activations],
            "scaling": ["", *requires.scaling],
            "scales": ["", *LOOSE] if "rowwise" in requires.scaling else [""],
            "out": ["", "dense", "rows", "transposed", "turned"] if requires.out else [""],
            "beside": ["", "offset"] if requires.bias or requires.scaling or requires.out else [""],
            "ieee": [True, False] if requires.ieee else [False],
            "deterministic": [False, True] if requires.deterministic else [False],
        }

    def pinned(self) -> Sequence[Spec]:
        return (
            {"sizes": (77, 129, 100), "bias": "plain", "activation": "gelu"},
            {"sizes": (77, 129, 100), "batch": 3, "shared": "b", "bias": "plain"},
            {"sizes": (256, 192, 64), "bias": "plain", "activation": "silu", "scaling": "rowwise"},
            {"sizes": (1, 256, 300), "layout": "nt"},
            {"layout": "tt", "batch": 3},
            {"dtype": "int8", "out_dtype": "", "out": "transposed"},
            {"dtype": "int8", "out_dtype": "", "batch": 3, "layout": "tn"},
            {"dtype": "int8", "scaling": "scalar", "activation": "relu", "bias": "plain"},
            {"dtype": "int8", "scaling": "rowwise", "activation": "gelu", "bias": ""},
        )

    def crowded(self, size: Size) -> Sequence[Spec]:
        """Several tiles in each direction; on a GPU the large sizes are that."""
        plain: Spec = {"batch": 0, "shared": "", "memory": "dense"}
        if size.large:  # with a sum of float8 that has to leave the tensor cores' adders
            return ({**plain, "sizes": (384, 512, 4096), "dtype": "float8_e4m3fn", "layout": "nt"},)
        several = [(300, 400, size.long), (size.long, 150, 40), *([(size.far, 40, size.far)] if size.far else [])]
        return tuple({**plain, "sizes": sizes} for sizes in several)

    def has_batches(self, requires: Requires) -> bool:
        return bool(requires.batched)

    def ends(self, requires: Requires, size: Size) -> dict[str, Spec]:
        """More products at once than a kernel may hold in a table."""
        plain: Spec = {"shared": "", "memory": "dense", "scales": "", "out": ""}
        return {"many products": {**plain, "batch": 70, "sizes": (16, 24, 40)}} if requires.batched else {}

    def outside(self, requires: Requires) -> dict[str, Spec]:
        found = unclaimed(
            requires,
            DTYPES,
            ("batch", requires.batched, {"batch": 3}),
            ("bias", requires.bias, {"bias": "plain"}),
            ("out", requires.out, {"out": "dense"}),
        )
        unfused = [a for a in ("relu", "gelu", "silu") if a not in requires.activations]
        found |= {f"{a} after the product": {"activation": a} for a in unfused}
        found |= {f"{s} scales": {"scaling": s} for s in ("scalar", "rowwise") if s not in requires.scaling}
        found |= {layout: {"layout": layout} for layout in LAYOUTS if layout not in requires.layouts}
        found |= unpromoted(requires)
        floats = [dtype for dtype in requires.dtypes if dtype.startswith(("float", "bfloat"))]
        if floats and not requires.out_dtypes:
            found["out_dtype"] = {"dtype": floats[0], "out_dtype": "float64" if floats[0] != "float64" else "float32"}
        return found

    def sensible(self, spec: Spec) -> bool:
        """Leaves out what the op refuses to anyone, or leaves open: integers out of floats, gelu of integers."""
        dtype, dtype_b = spec["dtype"], spec["dtype_b"] or spec["dtype"]
        fp8 = {str(t).removeprefix("torch.") for t in FP8}
        if dtype_b != dtype and not {dtype, dtype_b} <= fp8:
            return False
        if (spec["shared"] and not spec["batch"]) or (spec["scales"] and spec["scaling"] != "rowwise"):
            return False
        if "turned" in (spec["memory"], spec["out"]) and (not spec["batch"] or spec["shared"]):
            return False
        out = wanted_out_dtype(spec)
        if out in (torch.int8, torch.int32):
            plain = spec["activation"] in ("", "relu") and spec["bias"] != "float32"
            return dtype == "int8" and plain and not spec["scaling"]
        return True

    def make(self, spec: Spec, device: torch.device, seed: int) -> Sample:
        m, n, k = spec["sizes"]
        dtype, out_dtype = getattr(torch, spec["dtype"]), wanted_out_dtype(spec)
        dtype_b = getattr(torch, spec["dtype_b"] or spec["dtype"])
        layout, batch = spec["layout"], spec["batch"]
        arenas = Places(device, spec["beside"])
        place, beside = arenas.put, arenas.put_beside

        shift = max(spec["base_alignment"], dtype.itemsize) if spec["memory"] == "offset" else 0
        letters = "ss" if layout == "strided" else layout
        a = place(
            "a", *matrix_strides(m, k, batch, letters[0], spec["memory"], dtype, spec["shared"] == "a"), dtype, shift
        )
        b = place(
            "b",
            *matrix_strides(k, n, batch, letters[1], spec["memory"], dtype_b, spec["shared"] == "b"),
            dtype_b,
            shift,
        )
        arguments: dict[str, Any] = {"activation": spec["activation"] or None, "out_dtype": out_dtype}
        if spec["bias"]:
            kind = torch.float32 if spec["bias"] == "float32" else out_dtype
            arguments["bias"] = beside("bias", (n,), loose_strides((n,), spec["bias"]), kind)
        if spec["scaling"]:
            for name, length, step in (("scale_a", m, 2), ("scale_b", n, 3)):
                shape: Strides = (length,) if spec["scaling"] == "rowwise" else ()
                arguments[name] = beside(name, shape, loose_strides(shape, spec["scales"], step), torch.float32)
        written = {}
        if spec["out"]:
            shape = (batch, m, n) if batch else (m, n)
            letter, pad = ("t", "dense") if spec["out"] == "transposed" else ("n", spec["out"])
            arguments["out"] = beside("out", *matrix_strides(m, n, batch, letter, pad, out_dtype), out_dtype)
            assert arguments["out"].shape == shape
            written["out"] = arguments["out"]
        if device.type != "meta":
            _fill(a, b, arguments, torch.Generator(device).manual_seed(seed), 9 if out_dtype is torch.float16 else 128)
        launch = {name: arguments.get(name) for name in ("bias", "scale_a", "scale_b", "out")} | {
            "out_dtype": out_dtype
        }
        return Sample((a, b), arguments, launch, arenas, written)

    def expected(self, sample: Sample) -> list[Expected]:
        a, b = sample.tensors
        arguments, out_dtype = sample.arguments, sample.launch_arguments["out_dtype"]
        given: dict[str, Any] = {n: arguments.get(n) for n in ("bias", "activation", "scale_a", "scale_b")}
        want = matmul.reference(a, b, **given)
        wide = [as_multiplied(t, t.dtype) for t in (a, b)]
        model, natural = wide[0] @ wide[1], wide[0].abs() @ wide[1].abs()
        if given["scale_a"] is not None:
            factors = given["scale_a"].reshape(-1, 1) * given["scale_b"]
            model, natural = model * factors, natural * factors.abs()
        model = rounded_to(model, out_dtype)
        if given["bias"] is not None:
            model = rounded_to(model.to(natural.dtype) + given["bias"], out_dtype)
        if given["activation"]:
            model = rounded_to(activate(model.to(natural.dtype), given["activation"]), out_dtype)
        exact = out_dtype in (torch.int8, torch.int32)
        slack = 0.0 if exact else 2 * sum_eps(a.dtype) * math.sqrt(float(natural.double().square().mean()))
        return [Expected("out", want, Yardstick(model, slack, floor_of(out_dtype, a.dtype)), out_dtype)]


def _fill(a: torch.Tensor, b: torch.Tensor, arguments: dict[str, Any], generator: torch.Generator, reach: int) -> None:
    """Random values; those of int8 over its whole range, or as far as sums of their products can be held; those of
    float8 so that no sum cancels."""

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=a.device, generator=generator)

    for tensor in (a, b, arguments.get("bias")):
        if tensor is not None:
            memory = stored(tensor)
            shape = tuple(memory.shape)
            values = normal(shape)
            if tensor.dtype in FP8:
                values = of_one_sign(values, -1 if tensor is a else -2)
            if tensor.dtype is torch.int8:
                values = torch.randint(-reach, reach, shape, device=a.device, generator=generator)
                if reach > 96:  # a few sums that grow beyond what float32 holds, along as few as 1,400 terms
                    lines = values[..., :8, :] if tensor is a else values[..., :, :8]
                    lines.copy_(torch.randint(96, reach, tuple(lines.shape), device=a.device, generator=generator))
            elif tensor.dtype is torch.int32:
                ends = torch.randint(-1, 2, shape, device=a.device, generator=generator)
                values = (values * 1000).round().long() + ends * 2**31  # where sums with them go around, too
            memory.copy_(values)
    for name in ("scale_a", "scale_b"):
        if name in arguments:
            memory = stored(arguments[name])
            memory.copy_(away_from_zero(normal(tuple(memory.shape))))


# --- once, whatever the variant ---------------------------------------------------------------------------------------


def boundary(device: torch.device) -> list[str]:
    dtype = usual_dtype(device)
    calls = []
    for grad in (False, True):
        for batch in ((), (3,)):
            a, b = random(device, *batch, 48, 32, grad=grad), random(device, *batch, 32, 16, grad=grad)
            for bias in (None, random(device, 16, grad=grad)):
                calls.append((a, b, bias, "" if grad else "relu", dtype, None, None, None))
    return opcheck(torch.ops.registry.matmul.default, calls)


def compiled_calls(device: torch.device) -> list[str]:
    found = []
    compiled = torch.compile(
        lambda a, b: matmul(a, b, activation="relu"), fullgraph=True, dynamic=True, backend=backend(device)
    )
    for rows in (32, 48):
        a, b = random(device, rows, 64), random(device, 64, 16)
        found += off("out", compiled(a, b), matmul(a, b, activation="relu"))
    return found


def empty_products(device: torch.device) -> list[str]:
    """A sum over nothing is zero, and still gets its bias."""
    found = []
    bias = torch.full((3,), 2.0, device=device, dtype=usual_dtype(device))
    for m, k in ((0, 4), (4, 0), (0, 0)):
        a, b = (torch.ones(shape, device=device, dtype=usual_dtype(device)) for shape in ((m, k), (k, 3)))
        for given, value in ((None, 0.0), (bias, 2.0)):
            result = matmul(a, b, bias=given)
            if result.shape != (m, 3) or (k == 0 and bool((result != value).any())):
                found.append(f"m={m} k={k}: {tuple(result.shape)}, {result.flatten()[:3].tolist()}")
    return found


MatmulKit.checks = {"opcheck": boundary, "torch.compile": compiled_calls, "empty tensors": empty_products}
BY_OP = {"matmul": MatmulKit()}
