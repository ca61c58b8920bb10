"""The matmul question: its fields, how each is judged, and how torch.matmul's shapes become two or three dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from registry.contract.capability import Reason, Requires
from registry.contract.problem import OperandFact, Problem, Query, fact, query
from registry.contract.target import Target
from registry.errors import InvalidArgument
from registry.ops.matmul.arguments import ACTIVATIONS, DTYPES, check_activation, default_out_dtype
from registry.ops.tensors import dtype_name

_LAYOUTS = ("nn", "nt", "tn", "tt")


def _same_dtype(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    """Equal to a's dtype, or among the dtypes claimed for this field."""
    got, claim = getattr(problem, name), requires.claim(how.claim) or ()
    if got != problem.dtype and got not in claim:
        yield Reason("unclaimed", name, got, ", ".join((problem.dtype, *claim)))


def _alignment(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    """Of each operand's base, and of every stride but that of its contiguous dimension (which dimension that is, is the
    business of the layout claim). A stride of one element in another dimension counts: it walks over the same memory.
    """
    base, unit = requires.base_alignment, requires.stride_alignment
    for one in problem.operands:
        if one.base_alignment < base:
            fix = f"call .clone() on {one.name}: its storage offset breaks the alignment"
            got, allowed = f"{one.base_alignment} bytes", f"multiples of {base} bytes"
            yield Reason("alignment", "base_alignment", got, allowed, fix, one.name)
        inner = len(one.shape) - (2 if one.shape[-1] != 1 and one.strides[-1] != 1 else 1)
        for dim, (extent, elements) in enumerate(zip(one.shape, one.strides, strict=True)):
            stride = elements * one.itemsize
            if dim != inner and extent > 1 and stride % unit:
                fix = f"pad {one.name}: its stride of {stride} bytes in dimension {dim} is no multiple of {unit}"
                yield Reason(
                    "alignment", "stride_alignment", f"{stride} bytes", f"multiples of {unit} bytes", fix, one.name
                )


def _unit_dimension(got: Any, claim: Any) -> str:
    return "call .contiguous() on the operand of which neither matrix dimension has stride 1"


@dataclass(frozen=True, kw_only=True)
class MatmulProblem(Problem):
    """a @ b with its epilogue, for one call, over matrices [M, K] and [K, N] or batches of them."""

    op: ClassVar[str] = "matmul"
    derived_kinds: ClassVar[Mapping[str, str]] = {"elements": "int", "pitch": "int"}
    known_values: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dtype": tuple(sorted(map(dtype_name, DTYPES))),
        "layout": (*_LAYOUTS, "strided"),
        "activation": ("", *ACTIVATIONS),
        "scaling": ("", "scalar", "rowwise"),
    }

    m: int = fact()
    n: int = fact()
    k: int = fact()
    batch: int = fact(1)
    dtype_b: str = query(_same_dtype, claim="dtypes_b", unclaimed=())
    out_dtype: str = query(_same_dtype, claim="out_dtypes", unclaimed=())
    layout: str = query("member", claim="layouts", default="nn", fix=_unit_dimension)
    bias: bool = query("flag", claim="bias", default=False)
    activation: str = query("optional_member", claim="activations", default="")
    scaling: str = query("optional_member", claim="scaling", default="")
    out: bool = query("flag", claim="out", default=False)
    ieee: bool = query(
        "flag", claim="ieee", default=False, fix=lambda got, claim: 'torch.set_float32_matmul_precision("high")'
    )
    batched: bool = field(init=False, metadata=query("flag", claim="batched", default=False).metadata)
    operands: tuple[OperandFact, ...] = query(_alignment, claim="base_alignment", default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "batched", self.batch != 1)

    def derived_facts(self) -> dict[str, Any]:
        return {"elements": self.batch * self.m * self.n, "pitch": self.pitch}

    @property
    def pitch(self) -> int:
        """Bytes, up to 16, that divide every row's distance from the next, in both operands and the result: what
        decides which of a library's kernels can run."""
        result: int = self.n * getattr(torch, self.out_dtype).itemsize | 16
        return min([fact.stride_alignment for fact in self.operands] + [result & -result])

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
        torch_dtype = getattr(torch, dtype, None)
        if torch_dtype not in DTYPES:
            raise InvalidArgument("dtype", repr(dtype), ", ".join(sorted(map(dtype_name, DTYPES))))
        for name, value in (("m", m), ("n", n), ("k", k), ("b", b)):
            if value < 1:
                raise InvalidArgument(name, value, "a positive integer")
        if layout not in _LAYOUTS:
            raise InvalidArgument("layout", repr(layout), ", ".join(_LAYOUTS))
        operands = (
            _made_up(("a", m, k), b, layout[0], dtype, torch_dtype.itemsize),
            _made_up(("b", k, n), b, layout[1], dtype_b or dtype, torch_dtype.itemsize),
        )
        return cls(
            target=target,
            dtype=dtype,
            m=m,
            n=n,
            k=k,
            batch=b,
            dtype_b=dtype_b or dtype,
            layout=layout,
            bias=bias,
            out_dtype=out_dtype or dtype_name(default_out_dtype(torch_dtype)),
            activation=check_activation(activation),
            scaling=scaling,
            ieee=ieee and dtype == "float32",
            deterministic=deterministic,
            operands=operands,
        )


def _made_up(sized: tuple[str, int, int], batch: int, letter: str, dtype: str, itemsize: int) -> OperandFact:
    name, rows, columns = sized
    strides = (columns, 1) if letter == "n" else (1, rows)
    if batch == 1:
        return OperandFact(name, dtype, (rows, columns), strides, itemsize)
    return OperandFact(name, dtype, (batch, rows, columns), (rows * columns, *strides), itemsize)


def layout_letter(fact: OperandFact) -> str:
    """ "n" where a row is contiguous, "t" where a column is, "" where neither."""
    rows, columns = fact.shape[-2:]
    if fact.strides[-1] == 1 or columns == 1:
        return "n"
    return "t" if fact.strides[-2] == 1 or rows == 1 else ""
