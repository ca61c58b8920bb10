"""The conformance kit's knowledge of grouped_mm: axes, sizes of groups, and what a product is held against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.errors import InvalidArgument
from registry.ops.grouped_mm.draws import SPREADS, ends_of
from registry.ops.grouped_mm.offsets import OFFSETS
from registry.ops.grouped_mm.op import grouped_mm
from registry.ops.grouped_mm.oracle import bounds
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
    (3, 128, 128, 128),
    (4, 77, 129, 100),
    (2, 1, 1, 1),
    (1, 33, 40, 48),
    (9, 300, 64, 77),
    (16, 24, 136, 64),
    (5, 129, 24, 256),
]
"""Groups, rows, columns, inner size."""
LARGE = [(8, 1000, 1001, 999), (64, 700, 512, 1024), (256, 512, 768, 512), (3, 4097, 1024, 320)]
DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
LOUD = 20.0
"""What the weights are multiplied with before some activations: exp(x) of such sums is beyond float32."""
EPILOGUE = ("gather", "bias", "activation", "gated", "scaling")


class GroupedMmKit(ProductKit):
    call = grouped_mm
    self_explaining = ("dtype", "memory", "layout", "activation", "form", "spread")
    claims = ("dtype", "out_dtype", "form", "layout", "out", "ieee", "deterministic", *EPILOGUE)

    def axes(self, requires: Requires, size: Size) -> dict[str, list[Any]]:
        return {
            "dtype": list(requires.dtypes),
            "out_dtype": ["", *requires.out_dtypes],
            "form": list(requires.forms),
            "sizes": [*SMALL, *(LARGE if size.large else [])],
            "spread": [*SPREADS, *(["lying"] if size.large else [])],
            "layout": [layout for layout in LAYOUTS if layout in requires.layouts],
            "memory": self.memory(requires),
            "base_alignment": [requires.base_alignment],
            "gather": ["", "int32", "int64", "int64 of many"] if requires.gather else [""],
            "bias": ["", "plain", "float32", "rows", *LOOSE, "16 bits", "float64"] if requires.bias else [""],
            "activation": ["", *requires.activations],
            "gated": [False, True] if requires.gated else [False],
            "loud": [False, True] if requires.activations else [False],
            "scaling": ["", *requires.scaling],
            "scales": ["", *LOOSE] if requires.scaling else [""],
            "out": ["", "dense", "rows", "transposed"] if requires.out else [""],
            "beside": ["", "offset"],
            "ieee": [True, False] if requires.ieee else [False],
            "deterministic": [False, True] if requires.deterministic else [False],
        }

    def pinned(self) -> Sequence[Spec]:
        swiglu = {"activation": "silu", "gated": True}
        return (
            {"sizes": (5, 129, 24, 256), "spread": "empty", "form": "rows", "layout": "nt", **swiglu},
            {
                "sizes": (5, 129, 24, 256),
                "spread": "short",
                "form": "rows",
                "bias": "plain",
                **swiglu,
                "gather": "int64",
            },
            {"sizes": (9, 300, 64, 77), "spread": "empty", "form": "inner", "layout": "tn"},
            {"sizes": (16, 24, 136, 64), "spread": "one", "form": "rows", "layout": "nt"},
            {"gather": "int64 of many", "scaling": "rowwise", "form": "rows"},
            *({"activation": "silu", "gated": gated, "loud": True} for gated in (False, True)),
            {**swiglu, "sizes": (64, 700, 512, 1024), "form": "rows", "gather": "int64", "scaling": "rowwise"},
        )

    def crowded(self, size: Size) -> Sequence[Spec]:
        if not size.large:
            return ({"sizes": (2, size.far, 40, 48), "form": "rows", "spread": "random"},) if size.far else ()
        plain: Spec = {"gather": "", "scaling": "", "out": "", "memory": "dense", "spread": "random"}
        return (
            {**plain, "sizes": (64, 5000, 1032, 128), "form": "rows", "layout": "nt", "gated": False},
            {**plain, "sizes": (200, 5000, 520, 200), "form": "rows", "layout": "nn", "gated": True},
            {**plain, "sizes": (48, 640, 648, 5000), "form": "inner", "layout": "tn"},
            {**plain, "sizes": (3, 300, 256, 4096), "form": "rows", "layout": "nt", "dtype": "float8_e4m3fn"},
        )

    def has_batches(self, requires: Requires) -> bool:
        return True

    def ends(self, requires: Requires, size: Size) -> dict[str, Spec]:
        """More groups than a kernel may look at with one warp."""
        if size.large:  # whose sizes have many
            return {}
        many: Spec = {"memory": "dense", "scales": "", "sizes": (70, 70 if size.slow else 150, 24, 40), "loud": False}
        found = {"many groups": {**many, "spread": "even", "gather": "", "form": requires.forms[0]}}
        axes = self.axes(requires, size)
        all_at_once = {name: axes[name][-1] for name in ("gather", "gated", "scaling")}
        if "rows" in requires.forms and any(all_at_once.values()):
            found["many groups, gathered and scaled"] = {**many, "spread": "random", "form": "rows", **all_at_once}
        return found

    def outside(self, requires: Requires) -> dict[str, Spec]:
        found = unclaimed(
            requires,
            DTYPES,
            ("bias", requires.bias, {"bias": "plain", "form": "rows"}),
            ("gather", requires.gather, {"gather": "int32", "form": "rows"}),
            ("gated", requires.gated, {"gated": True, "form": "rows"}),
            ("scales", requires.scaling, {"scaling": "rowwise", "form": "rows"}),
            ("out", requires.out, {"out": "dense"}),
            ("row stride", "odd" in self.memory(requires), {"memory": "odd", "sizes": SMALL[0]}),
        )
        found |= {form: {"form": form} for form in ("rows", "batch", "inner") if form not in requires.forms}
        found |= {layout: {"layout": layout} for layout in LAYOUTS if layout not in requires.layouts}
        return found | unpromoted(requires)

    def sensible(self, spec: Spec) -> bool:
        """Leaves out what the op refuses to anyone, and spreads that make no difference."""
        if spec["form"] == "inner" and any(spec[name] for name in EPILOGUE):
            return False
        if spec["scales"] and not spec["scaling"]:
            return False
        half = wanted_out_dtype(spec) is torch.float16  # which cannot hold a product of two such sums
        if spec["loud"] and (
            not spec["activation"] or (spec["gated"] and half) or getattr(torch, spec["dtype"]) in FP8
        ):
            return False
        return spec["form"] == "rows" or (not spec["gather"] and (spec["form"] == "inner" or spec["spread"] == "even"))

    def varies(self, spec: Spec) -> bool:
        """The order of groups is all that a seed changes of where they end: of one size, it changes nothing."""
        return bool(spec["form"] == "batch" or spec["spread"] != "even")

    def make(self, spec: Spec, device: torch.device, seed: int) -> Sample:
        groups, m, n, k = spec["sizes"]
        dtype, out_dtype, form = getattr(torch, spec["dtype"]), wanted_out_dtype(spec), spec["form"]
        arenas = Places(device, spec["beside"])
        place, beside = arenas.put, arenas.put_beside

        def vectors(name: str, shape: Strides, kind: torch.dtype, style: str) -> torch.Tensor:
            return beside(name, shape, (shape[-1] + 8, 1) if style == "rows" else loose_strides(shape, style), kind)

        shift = max(spec["base_alignment"], dtype.itemsize) if spec["memory"] == "offset" else 0
        letters = "ss" if spec["layout"] == "strided" else spec["layout"]
        wide = 2 * n if spec["gated"] else n
        gather, _, many = spec["gather"].partition(" of ")
        source = 2 * m + 3 if many else m // 2 + 1 if gather else m
        of_a, of_b = groups if form == "batch" else 0, 0 if form == "inner" else groups
        a = place("a", *matrix_strides(source, k, of_a, letters[0], spec["memory"], dtype), dtype, shift)
        b = place("b", *matrix_strides(k, wide, of_b, letters[1], spec["memory"], dtype), dtype, shift)
        given: dict[str, Any] = dict.fromkeys(("offs", "rows", "bias", "scale_a", "scale_b", "out"))
        apart = (2, 3) if spec["memory"] == "rows" else (1, 1)  # columns of larger matrices
        if form != "batch":
            given["offs"] = beside("offs", (groups,), apart[:1], torch.int32)
        if gather:
            given["rows"] = beside("rows", (m,), apart[1:], getattr(torch, gather))
        if spec["bias"]:
            given["bias"] = vectors("bias", (groups, wide), _bias_dtype(spec["bias"], out_dtype), spec["bias"])
        if spec["scaling"]:
            given["scale_a"] = vectors("scale_a", tuple(a.shape[:-1]), torch.float32, spec["scales"])
            given["scale_b"] = vectors("scale_b", (groups, wide), torch.float32, spec["scales"])
        written = {}
        if spec["out"]:
            letter, pad = ("t", "dense") if spec["out"] == "transposed" else ("n", spec["out"])
            several = 0 if form == "rows" else groups
            given["out"] = beside("out", *matrix_strides(m, n, several, letter, pad, out_dtype), out_dtype)
            written["out"] = given["out"]
        if device.type != "meta":
            _fill(a, b, given, spec, seed)
        arguments = {name: value for name, value in given.items() if value is not None}
        arguments |= {"activation": spec["activation"] or None, "gated": spec["gated"], "out_dtype": out_dtype}
        return Sample((a, b), arguments, {**given, "out_dtype": out_dtype}, arenas, written)

    def expected(self, sample: Sample) -> list[Expected]:
        a, b = sample.tensors
        given = {**sample.launch_arguments, "count": sample.tensors[0].shape[0]}
        if given["rows"] is not None:
            given["count"] = given["rows"].shape[0]
        out_dtype = given["out_dtype"]
        activation, gated = sample.arguments["activation"] or "", sample.arguments["gated"]
        groups: dict[str, Any] = {"offs": given["offs"], "rows": given["rows"]}
        more = {name: given[name] for name in ("bias", "scale_a", "scale_b")}
        want = grouped_mm.reference(a, b, **groups, **more, activation=activation, gated=gated)
        wide = [as_multiplied(t, t.dtype) for t in (a, b)]
        kind = wide[0].dtype
        model = grouped_mm.reference(*wide, **groups, dtype=kind)
        natural = grouped_mm.reference(wide[0].abs(), wide[1].abs(), **groups, dtype=kind)
        if given["scale_a"] is not None:
            factors = _of_rows(given, given["scale_a"], None).unsqueeze(-1) * _of_rows(given, None, given["scale_b"])
            model, natural = model * factors, natural * factors.abs()
        model = rounded_to(model, out_dtype)
        if given["bias"] is not None:
            model = rounded_to(model.to(kind) + _of_rows(given, None, given["bias"].to(kind)), out_dtype)
        if gated:
            gate, up = model.to(kind).chunk(2, -1)
            model = rounded_to(activate(gate, activation) * up, out_dtype)
            left, right = natural.chunk(2, -1)
            natural = left * up.abs() + right * gate.abs()
        elif activation:
            model = rounded_to(activate(model.to(kind), activation), out_dtype)
        slack = 2 * sum_eps(a.dtype) * math.sqrt(float(natural.double().square().mean()))
        return [Expected("out", want, Yardstick(model, slack, floor_of(out_dtype, a.dtype)), out_dtype)]


def _bias_dtype(bias: str, out_dtype: torch.dtype) -> torch.dtype:
    """The result's, where none is named: "16 bits" is one of those that the result is not of."""
    if bias == "16 bits":
        return torch.bfloat16 if out_dtype is torch.float16 else torch.float16
    return {"float32": torch.float32, "float64": torch.float64}.get(bias, out_dtype)


def _of_rows(given: dict[str, Any], of_a: torch.Tensor | None, of_group: torch.Tensor | None) -> torch.Tensor:
    """What belongs to a row of a, or to a group, for each row of the result; zero for rows of no group."""
    rows, offs = given["rows"], given["offs"]
    if of_a is not None:
        return of_a if rows is None else of_a[rows.long().clamp(0, of_a.shape[0] - 1)]
    assert of_group is not None
    if offs is None:
        return of_group.unsqueeze(1)
    count = given["count"]
    found = of_group.new_zeros(count, of_group.shape[1])
    for g, (start, end) in enumerate(bounds(offs, count)):
        found[start:end] = of_group[g]
    return found


def _fill(a: torch.Tensor, b: torch.Tensor, given: dict[str, Any], spec: Spec, seed: int) -> None:
    generator = torch.Generator(a.device).manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=a.device, generator=generator)

    for tensor in (a, b, given["bias"]):
        if tensor is not None:
            memory = stored(tensor)
            values = normal(tuple(memory.shape))
            memory.copy_(of_one_sign(values, -1 if tensor is a else -2) if tensor.dtype in FP8 else values)
    if spec["loud"]:
        stored(b).mul_(LOUD)
    groups, m, _, k = spec["sizes"]
    for name in ("scale_a", "scale_b"):  # so that half of a gated product can be float16
        if given[name] is not None:
            memory = stored(given[name])
            memory.copy_(away_from_zero(normal(tuple(memory.shape))) * k**-0.25)
    if given["offs"] is not None:
        given["offs"].copy_(torch.tensor(_ends(spec["spread"], groups, k if spec["form"] == "inner" else m, seed)))
    if given["rows"] is not None:
        lying = spec["spread"] == "lying"
        low, high = (-3, a.shape[0] + 3) if lying else (0, a.shape[0])
        given["rows"].copy_(torch.randint(low, high, (m,), device=a.device, generator=generator))


def _ends(spread: str, groups: int, size: int, seed: int) -> list[int]:
    """The same sizes in another order from seed to seed: offsets are values, which a launch must not keep."""
    ends = ends_of(spread, groups, size)
    if spread == "lying":
        return ends
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    first = seed % groups
    return list(itertools.accumulate([*sizes[first:], *sizes[:first]]))


# --- once, whatever the variant ---------------------------------------------------------------------------------------


def _operands(device: torch.device, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, b = random(device, 48, 32, grad=grad), random(device, 3, 32, 16, grad=grad)
    return a, b, torch.tensor([7, 7, 40], dtype=torch.int32, device=device)


def boundary(device: torch.device) -> list[str]:
    dtype, calls = usual_dtype(device), []
    rows = torch.arange(47, -1, -1, device=device)
    for grad in (False, True):
        a, b, offs = _operands(device, grad)
        fused = ("", False) if grad else ("silu", True)
        given = (None if grad else rows, random(device, 3, 16, grad=grad))
        calls.append((a, b, offs, *given, *fused, dtype, None, None, None))
    return opcheck(torch.ops.registry.grouped_mm.default, calls)


def compiled_calls(device: torch.device) -> list[str]:
    found = []
    call = lambda a, b, offs: grouped_mm(a, b, offs=offs, activation="silu", gated=True)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend(device))
    for count in (48, 40):
        a, b, offs = _operands(device)
        found += off("out", compiled(a[:count], b, offs), call(a[:count], b, offs))
    return found


def gradients(device: torch.device) -> list[str]:
    """Of each form, against autograd through the definition."""
    found = []
    for form in ("rows", "batch", "inner"):
        a, b, offs = _operands(device, grad=True)
        a = random(device, 3, 20, 32, grad=True) if form == "batch" else a
        if form == "inner":
            b = random(device, 32, 16, grad=True)
            offs = torch.tensor([9, 9, 32], dtype=torch.int32, device=device)
        given: dict[str, Any] = {"offs": None if form == "batch" else offs}
        if form != "inner":
            given |= {"bias": random(device, 3, 16, grad=True), "activation": "silu", "gated": True}
        inputs = [t for t in (a, b, given.get("bias")) if t is not None]
        out, want = grouped_mm(a, b, **given), grouped_mm.reference(a, b, **given)
        weight = torch.randn_like(want)
        for name, mine, theirs in zip(
            ("a", "b", "bias"),
            torch.autograd.grad((out * weight).sum(), inputs),
            torch.autograd.grad((want * weight).sum(), inputs),
            strict=False,
        ):
            found += off(f"{form}: gradient of {name}", mine, theirs)
    return found


def offsets_that_lie(device: torch.device) -> list[str]:
    a, b, _ = _operands(device)
    offs = torch.tensor([100, -5, 20], dtype=torch.int32, device=device)
    if device.type == "cuda":
        OFFSETS.taken()
        found = off("out", grouped_mm(a, b, offs=offs), grouped_mm.reference(a, b, offs=offs))
        return found if OFFSETS.taken() else [*found, "nothing was said of offsets beyond the rows"]
    try:
        grouped_mm(a, b, offs=offs)
    except InvalidArgument as error:
        return [] if "offs[0]" in str(error) else [f"another error: {error}"]
    return ["offsets beyond the rows were taken"]


def empty_products(device: torch.device) -> list[str]:
    """No rows, no groups, or nothing to sum over: zeros, which still get their bias."""
    found, dtype = [], usual_dtype(device)
    for rows, inner, groups in ((0, 4, 2), (5, 0, 2), (5, 4, 0)):
        a, b = (
            torch.ones(rows, inner, device=device, dtype=dtype),
            torch.ones(groups, inner, 3, device=device, dtype=dtype),
        )
        offs = torch.full((groups,), min(rows, 4), device=device, dtype=torch.int32)
        bias = torch.full((groups, 3), 2.0, device=device, dtype=dtype)
        result = grouped_mm(a, b, offs=offs, bias=bias)
        want = [2.0 if r < 4 and groups and inner == 0 else 0.0 for r in range(rows)]
        if result.shape != (rows, 3) or result[:, 0].tolist() != want:
            found.append(f"{rows} rows, inner size {inner}, {groups} groups: {result.tolist()}")
    return found


GroupedMmKit.checks = {
    "opcheck": boundary,
    "torch.compile": compiled_calls,
    "gradients": gradients,
    "offsets that lie": offsets_that_lie,
    "empty tensors": empty_products,
}
BY_OP = {"grouped_mm": GroupedMmKit()}
