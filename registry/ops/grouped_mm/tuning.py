"""grouped_mm for the tuner: how shapes are spelled, made and judged, and the grids of shapes worth measuring."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from registry.ops.grouped_mm.draws import EXPERTS, draw, ends_of, epilogue, float8
from registry.ops.grouped_mm.op import grouped_mm
from registry.ops.grouped_mm.oracle import bounds
from registry.ops.parts.cases import Case
from registry.ops.parts.judging import Expected, Tolerance
from registry.ops.parts.pieces import sample
from registry.ops.parts.product_workload import ProductWorkload
from registry.ops.parts.products import default_out_dtype
from registry.ops.parts.tuning import PLAIN, Tuning, fields
from registry.ops.parts.workload import Tensors, torch_dtype
from registry.ops.tensors import dtype_name

FIELDS = fields(
    "form e=groups m n k spread layout dtype out_dtype gather bias activation gated scaling ieee deterministic"
)


def defaults(shape: Mapping[str, Any]) -> dict[str, Any]:
    same = {"out_dtype": dtype_name(default_out_dtype(torch_dtype(shape.get("dtype", PLAIN["dtype"]))))}
    epilogue = {"gather": False, "bias": False, "activation": "", "gated": False, "scaling": ""}
    return {**PLAIN, **same, **epilogue, "form": "rows", "spread": "even", "layout": "nt"}


class GroupedMmWorkload(ProductWorkload):
    def make(self) -> Tensors:
        get = self.sizes.get
        groups, m, n, k = get("e", 8), get("m", 1024), get("n", 1024), get("k", 1024)
        form, layout, dtype = get("form", "rows"), get("layout", "nt"), torch_dtype(get("dtype", "bfloat16"))
        wide = 2 * n if get("gated") else n
        one, each = (), (groups,)
        found: Tensors = {
            "a": self.operand("a", (*(each if form == "batch" else one), m, k), layout[0], dtype),
            "b": self.operand("b", (*(one if form == "inner" else each), k, wide), layout[1], dtype),
        }
        if form != "batch":
            found["offs"] = self.offsets(groups, k if form == "inner" else m)
        if get("gather"):
            found["rows"] = self.chosen(m)
        if get("scaling"):
            found["scale_a"] = self.positive(tuple(found["a"].shape[:-1]))
            found["scale_b"] = self.positive((groups, wide))
        self.out_dtype = torch_dtype(str(get("out_dtype"))) if get("out_dtype") else None
        if get("bias"):
            found["bias"] = self.random((groups, wide), dtype if dtype.itemsize > 1 else torch.bfloat16)
        return found

    def offsets(self, groups: int, size: int) -> torch.Tensor:
        if self._generator is None:
            return torch.empty(groups, dtype=torch.int32, device="meta")
        ends = ends_of(self.sizes.get("spread", "even"), groups, size)
        return torch.tensor(ends, dtype=torch.int32, device=self.device)

    def chosen(self, count: int) -> torch.Tensor:
        if self._generator is None:
            return torch.empty(count, dtype=torch.int32, device="meta")
        found = torch.randint(0, count, (count,), device=self.device, generator=self._generator)
        return found.to(torch.int32)

    def arguments(self) -> dict[str, Any]:
        what = {"activation": self.sizes.get("activation") or None, "gated": self.sizes.get("gated", False)}
        return {**self.tensors, **what, "out_dtype": self.out_dtype}

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        extra = {name: tensors.get(name) for name in ("offs", "rows", "bias", "scale_a", "scale_b")}
        return launch(tensors["a"], tensors["b"], out_dtype=self.result_dtype, out=None, **extra)

    def rows_of(self, of_a: torch.Tensor, group: int, start: int, end: int) -> torch.Tensor:
        """What the rows of a group have of a, or of its scales."""
        if "offs" not in self.tensors:
            return of_a[group]
        return of_a[self.tensors["rows"][start:end].long()] if "rows" in self.tensors else of_a[start:end]

    def expected(self) -> list[Expected]:
        """Groups of the product, as many as the oracle has time for."""
        form, dtype = self.sizes.get("form", "rows"), self.result_dtype
        a, b, offs = self.tensors["a"], self.tensors["b"], self.tensors.get("offs")
        what = {"activation": self.sizes.get("activation") or None, "gated": self.sizes.get("gated", False)}
        groups = a.shape[0] if offs is None else offs.shape[0]
        size = a.shape[1] if form == "inner" else self.sizes.get("m", 1024)
        spans = [(0, size)] * groups if offs is None else bounds(offs, size)
        columns = b.shape[-1] // (2 if what["gated"] else 1)
        shape = (size, columns) if form == "rows" else (groups, a.shape[-2], columns)
        whole, bound, found = slice(None), Tolerance(self.tolerance()), []
        for g in sample(groups, self.op.flops(self.problem()) / groups, self.device):
            start, end = spans[g]
            of_group: dict[str, Any] = {n: self.tensors[n][g : g + 1] for n in ("bias", "scale_b") if n in self.tensors}
            if form == "inner":
                value = a[:, start:end].double() @ b[start:end].double()
                found.append(Expected("out", value, bound, dtype, (g, whole, whole), shape))
            elif end > start:
                left = self.rows_of(a, g, start, end)
                if "scale_a" in self.tensors:
                    of_group["scale_a"] = self.rows_of(self.tensors["scale_a"], g, start, end)[None]
                value = grouped_mm.reference(left[None], b[g : g + 1], **of_group, **what)[0]
                place = (g, whole) if form == "batch" else (slice(start, end),)
                found.append(Expected("out", value, bound, dtype, place, shape))
        if form == "rows" and (left_over := size - (spans[-1][1] if spans else 0)):
            zeros = torch.zeros(left_over, columns, dtype=torch.float64, device=a.device)
            found.append(Expected("out", zeros, bound, dtype, (slice(size - left_over, size),), shape))
        return found


# --- grids --------------------------------------------------------------------------------------------------------


def quick(op: str) -> list[Case]:
    """A few minutes' worth: one shape of each kind."""
    sizes = ((8, 8192, 14336, 4096), (64, 16384, 1408, 2048), (128, 64, 1536, 4096))
    found = [Case.of(op, e=e, m=m, n=n, k=k, spread="random") for e, m, n, k in sizes]
    return [*found, Case.of(op, form="inner", layout="tn", e=8, m=4096, n=14336, k=8192, spread="random")]


def tiny(op: str) -> list[Case]:
    """Shapes that a CPU finishes at once: for trying the tool out and for its tests."""
    return [Case.of(op, e=4, m=m, n=64, k=64, dtype="float32", spread=s) for m in (16, 128) for s in ("even", "empty")]


def moe(op: str) -> list[Case]:
    """The expert layers of published models: up and gate, down; few tokens to many; even, random, skewed, empty."""
    found = []
    for one in EXPERTS:
        for tokens in (4, 32, 256, 2048, 8192):
            sizes: dict[str, Any] = {"e": one.groups, "m": tokens * one.chosen}
            for spread in ("even", "random") if tokens < 256 else ("even", "random", "skewed", "empty"):
                found.append(Case.of(op, n=2 * one.inner, k=one.hidden, spread=spread, **sizes))
            found.append(Case.of(op, n=one.hidden, k=one.inner, spread="random", **sizes))
    return found


def fused(op: str) -> list[Case]:
    """Gate and up with what follows them, and the gather of rows before."""
    found = []
    for one in EXPERTS:
        for tokens in (32, 512, 4096):
            sizes: dict[str, Any] = {
                "e": one.groups,
                "m": tokens * one.chosen,
                "n": one.inner,
                "k": one.hidden,
                "spread": "random",
            }
            swiglu: dict[str, Any] = {"activation": "silu", "gated": True}
            found += [Case.of(op, **sizes, **swiglu), Case.of(op, **sizes, **swiglu, gather=True)]
    return found


def gradients(op: str) -> list[Case]:
    """The backward of an expert layer: of the rows, and of the weights."""
    found = []
    for one in EXPERTS:
        for tokens in (2048, 8192):
            m = tokens * one.chosen
            found.append(Case.of(op, e=one.groups, m=m, n=one.hidden, k=one.inner, layout="nn", spread="random"))
            sizes: dict[str, Any] = {"m": one.hidden, "n": one.inner, "k": m}
            found.append(Case.of(op, form="inner", e=one.groups, layout="tn", spread="random", **sizes))
    return found


def fp8(op: str) -> list[Case]:
    """Expert layers quantised to fp8, with a scale for each token and each output channel."""
    kind: dict[str, Any] = {"dtype": "float8_e4m3fn", "scaling": "rowwise", "spread": "random"}
    return [
        Case.of(op, e=one.groups, m=tokens * one.chosen, n=2 * one.inner, k=one.hidden, **kind)
        for one in EXPERTS
        for tokens in (32, 512, 4096)
    ]


def products(problem: Any, shape: Mapping[str, Any]) -> Counter[tuple[int, int, int]]:
    """One for each group that has anything: how long they are is on the device, but a shape says how it was drawn."""
    m, n, k, groups = problem.m, problem.n, problem.k, problem.groups
    if problem.form == "batch":
        return Counter({(m, n, k): groups})
    ends = ends_of(shape["spread"], groups, k if problem.form == "inner" else m)
    long = [max(end - begin, 0) for begin, end in pairwise([0, *ends])]
    if problem.form == "inner":
        return Counter((m, n, one) for one in long)
    return Counter((one, n, k) for one in long if one)


BY_OP = {
    "grouped_mm": Tuning(
        FIELDS,
        defaults,
        GroupedMmWorkload,
        {"quick": quick, "tiny": tiny, "moe": moe, "fused": fused, "gradients": gradients, "fp8": fp8},
        draws={"random": draw, "float8": float8, "epilogue": epilogue},
        apart=({"dtype": "float8_e4m3fn"},),
        order=("form", "pitch", "each", "groups", "m", "n", "k", "layout", "dtype"),
        leading=("m", "n", "k"),
        over="each",
        panels=("form", "dtype"),
        products=products,
    )
}
