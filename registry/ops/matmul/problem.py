"""The matmul question: its fields, how each is judged, and how torch.matmul's shapes become two or three dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from registry.contract.problem import OperandFact, Problem, derived_flag, fact, query
from registry.contract.target import Target
from registry.errors import InvalidArgument
from registry.ops.matmul.arguments import DTYPES, OUT_DTYPES
from registry.ops.matmul.likeness import coordinates
from registry.ops.parts.products import (
    ACTIVATIONS,
    FP8_NAMES,
    LAYOUTS,
    alignment,
    check_activation,
    contiguous_rows,
    layout_letter,
    made_up,
    named_out_dtype,
    pitch_of,
    same_dtype,
)
from registry.ops.tensors import check_sizes, dtype_name, ieee_flag, known_dtype


@dataclass(frozen=True, kw_only=True)
class MatmulProblem(Problem):
    """a @ b with its epilogue, for one call, over matrices [M, K] and [K, N] or batches of them."""

    op: ClassVar[str] = "matmul"
    derived_kinds: ClassVar[Mapping[str, str]] = {"elements": "int", "pitch": "int"}
    known_values: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dtype": tuple(sorted(map(dtype_name, DTYPES))),
        "dtype_b": tuple(sorted(map(dtype_name, DTYPES))),
        "out_dtype": tuple(sorted(map(dtype_name, OUT_DTYPES))),
        "layout": (*LAYOUTS, "strided"),
        "activation": ("", *ACTIVATIONS),
        "scaling": ("", "scalar", "rowwise"),
    }

    m: int = fact()
    n: int = fact()
    k: int = fact()
    batch: int = fact(1)
    dtype_b: str = query(same_dtype, claim="dtypes_b", unclaimed=())
    out_dtype: str = query(same_dtype, claim="out_dtypes", unclaimed=())
    layout: str = query("member", claim="layouts", default="nn", fix=contiguous_rows)
    bias: bool = query("flag", claim="bias", default=False)
    activation: str = query("optional_member", claim="activations", default="")
    scaling: str = query("optional_member", claim="scaling", default="")
    out: bool = query("flag", claim="out", default=False)
    ieee: bool = ieee_flag()
    batched: bool = derived_flag("batched")
    promoted: bool = derived_flag("promoted", dtypes=FP8_NAMES)
    """float8: sums leave the tensor cores' own adders for float32 every 128 values of K at the latest."""
    operands: tuple[OperandFact, ...] = query(alignment, claim="base_alignment", default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "batched", self.batch != 1)
        object.__setattr__(self, "promoted", self.dtype in FP8_NAMES)

    def result_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {"out": ((*(self.batch,) * self.batched, self.m, self.n), self.out_dtype)}

    def likeness(self) -> dict[str, float]:
        return coordinates(self)

    def derived_facts(self) -> dict[str, Any]:
        return {"elements": self.batch * self.m * self.n, "pitch": self.pitch}

    @property
    def pitch(self) -> int:
        return pitch_of(self.n, self.out_dtype, [one.stride_alignment for one in self.operands])

    @classmethod
    def of_shape(
        cls,
        target: Target,
        *,
        dtype: str = "bfloat16",
        m: int = 1024,
        n: int = 1024,
        k: int = 1024,
        b: int = 1,
        layout: str = "nn",
        dtype_b: str | None = None,
        out_dtype: str | None = None,
        bias: bool = False,
        activation: str = "",
        scaling: str = "",
        ieee: bool = False,
        deterministic: bool = False,
    ) -> MatmulProblem:
        """The problem of freshly allocated matrices of these sizes: what `kreg explain` and the tuner ask about."""
        torch_dtype = known_dtype("dtype", dtype, DTYPES)
        known_dtype("dtype_b", dtype_b or dtype, DTYPES)
        check_sizes(m=m, n=n, k=k, b=b)
        if layout not in LAYOUTS:
            raise InvalidArgument("layout", repr(layout), ", ".join(LAYOUTS))
        several = (b,) * (b != 1)
        operands = (
            made_up("a", (*several, m, k), layout[0], torch_dtype),
            replace(made_up("b", (*several, k, n), layout[1], torch_dtype), dtype=dtype_b or dtype),
        )
        return cls(
            target=target,
            dtype=dtype,
            m=m,
            n=n,
            k=k,
            batch=b,
            dtype_b=dtype_b or dtype,
            layout="".join(map(layout_letter, operands)),
            bias=bias,
            out_dtype=named_out_dtype(out_dtype, torch_dtype, OUT_DTYPES),
            activation=check_activation(activation),
            scaling=scaling,
            ieee=ieee and dtype == "float32",
            deterministic=deterministic,
            operands=operands,
        )
