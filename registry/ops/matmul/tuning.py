"""Matmul for the tuner: how shapes are spelled, made and judged, and the grids of shapes worth measuring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from registry.ops.matmul.draws import DRAWS, of_a_model
from registry.ops.matmul.op import matmul
from registry.ops.parts.cases import Case
from registry.ops.parts.judging import Expected, Tolerance
from registry.ops.parts.pieces import piece_bytes, sample
from registry.ops.parts.product_workload import ProductWorkload
from registry.ops.parts.products import default_out_dtype
from registry.ops.parts.tuning import PLAIN, Tuning, fields
from registry.ops.parts.workload import Tensors, torch_dtype
from registry.ops.tensors import dtype_name

FIELDS = fields("m n k b=batch layout dtype dtype_b out_dtype bias activation scaling ieee deterministic")


def defaults(shape: Mapping[str, Any]) -> dict[str, Any]:
    dtype = shape.get("dtype", PLAIN["dtype"])
    same = {"dtype_b": dtype, "out_dtype": dtype_name(default_out_dtype(torch_dtype(dtype)))}
    return {**PLAIN, **same, "b": 1, "layout": "nn", "bias": False, "activation": "", "scaling": ""}


class MatmulWorkload(ProductWorkload):
    def make(self) -> Tensors:
        get = self.sizes.get
        m, n, k, batch = get("m", 1024), get("n", 1024), get("k", 1024), get("b", 1)
        dtype = torch_dtype(get("dtype", "bfloat16"))
        layout, several = get("layout", "nn"), (batch,) * (batch > 1)
        dtype_b = torch_dtype(get("dtype_b", get("dtype", "bfloat16")))
        found = {
            "a": self.operand("a", (*several, m, k), layout[0], dtype),
            "b": self.operand("b", (*several, k, n), layout[1], dtype_b),
        }
        scaling = get("scaling", "")
        if scaling:
            vector = scaling == "rowwise"
            found["scale_a"] = self.positive((m,) if vector else ())
            found["scale_b"] = self.positive((n,) if vector else ())
        self.out_dtype = torch_dtype(str(get("out_dtype"))) if get("out_dtype") else None
        if get("bias", False):
            whole = dtype is torch.int8 and (self.out_dtype or torch.int32) is torch.int32
            found["bias"] = self.random((n,), torch.int8 if whole else dtype if dtype.itemsize > 1 else torch.bfloat16)
        return found

    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, "activation": self.sizes.get("activation") or None, "out_dtype": self.out_dtype}

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        extra = {name: tensors.get(name) for name in ("bias", "scale_a", "scale_b")}
        return launch(tensors["a"], tensors["b"], out_dtype=self.result_dtype, out=None, **extra)

    def expected(self) -> list[Expected]:
        """Rows of the product, as many at a time as fit in memory."""
        a, b = self.tensors["a"], self.tensors["b"]
        batches = range(a.shape[0]) if a.dim() == 3 else [None]
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        step = max(1, min(m, max(128, piece_bytes(self.device) // (16 * (n + k)))))
        pieces = [(i, slice(r, min(m, r + step))) for i in batches for r in range(0, m, step)]
        scale_a, scale_b = self.tensors.get("scale_a"), self.tensors.get("scale_b")
        options: dict[str, Any] = {"bias": self.tensors.get("bias"), "activation": self.sizes.get("activation") or None}
        exact = not self.result_dtype.is_floating_point
        bound, shape = Tolerance(self.tolerance()), (*a.shape[:-1], n)
        found = []
        for i, rows in (pieces[c] for c in sample(len(pieces), 2.0 * step * n * k, self.device)):
            scale = scale_a[rows] if scale_a is not None and scale_a.dim() else scale_a
            left, right = (a[rows], b) if i is None else (a[i, rows], b[i])
            value = matmul.reference(left, right, scale_a=scale, scale_b=scale_b, **options)
            value = value.round().to(self.result_dtype) if exact else value
            found.append(Expected("out", value, bound, self.result_dtype, (rows,) if i is None else (i, rows), shape))
        return found


# --- grids --------------------------------------------------------------------------------------------------------


def quick(op: str) -> list[Case]:
    """A few minutes' worth: one shape of each kind."""
    sizes = ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192), (16, 4096, 4096), (4096, 14336, 4096))
    return [Case.of(op, m=m, n=n, k=k) for m, n, k in sizes]


def tiny(op: str) -> list[Case]:
    """Shapes that a CPU finishes at once: for trying the tool out and for its tests."""
    return [Case.of(op, m=m, n=64, k=64, dtype="float32", layout=layout) for m in (16, 128) for layout in ("nn", "nt")]


def llm(op: str) -> list[Case]:
    """The linear layers of decoder models: fused QKV, output, gate and up, down; few, some and many tokens."""
    layers = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (8192, 10240), (8192, 57344), (28672, 8192))
    tokens = (1, 16, 32, 64, 128, 256, 1024, 4096, 16384)
    return [Case.of(op, m=m, n=n, k=k, layout="nt") for k, n in layers for m in tokens]


_LAYERS = ((4096, 6144), (4096, 28672), (14336, 4096), (8192, 8192))


def fp8(op: str) -> list[Case]:
    """Linear layers quantised to fp8, as servers run them: a scale for each token and output channel, or for all."""
    kind: dict[str, Any] = {"dtype": "float8_e4m3fn", "layout": "nt"}
    tokens = (1, 16, 64, 128, 512, 2048, 8192)
    scalings = ("rowwise", "scalar")
    return [Case.of(op, m=m, n=n, k=k, scaling=s, **kind) for k, n in _LAYERS for m in tokens for s in scalings]


def fused(op: str) -> list[Case]:
    """The first layers of MLPs, with the bias and the activation that follow them."""
    tokens = (16, 128, 512, 2048, 8192)
    first: dict[str, Any] = {"layout": "nt", "bias": True}
    found = [Case.of(op, m=m, n=4 * k, k=k, activation="gelu", **first) for k in (1024, 4096) for m in tokens]
    found += [Case.of(op, m=m, n=14336, k=4096, layout="nt", activation="silu") for m in tokens]
    return found + [Case.of(op, m=m, n=4096, k=4096, activation="relu", **first) for m in tokens]


def squares(op: str) -> list[Case]:
    """Square products, in the layouts of a forward and of both gradients, and sizes that no tile divides."""
    plain = [Case.of(op, m=s, n=s, k=s, layout=t) for s in (512, 1024, 2048, 4096, 8192) for t in ("nn", "nt", "tn")]
    return plain + [Case.of(op, m=s, n=s, k=s) for s in (1000, 3000, 5000, 16384)]


BY_OP = {
    "matmul": Tuning(
        FIELDS,
        defaults,
        MatmulWorkload,
        {"quick": quick, "tiny": tiny, "llm": llm, "squares": squares, "fp8": fp8, "fused": fused},
        draws=DRAWS,
        of_a_model=of_a_model,
        order=("pitch", "m", "n", "k", "layout", "dtype", "batch", "elements"),
        leading=("m", "n", "k"),
        over="m",
        panels=("dtype", "layout"),
        as_measured=("batch", "ieee"),
        apart=({"dtype": "int8"}, {"dtype": "float8_e4m3fn"}, {"batch": "2.."}, {"dtype": "float32"}),
        products=lambda p, shape: {(p.m, p.n, p.k): p.batch},
    )
}
