"""The matmul question: its fields, how each is judged, and how torch.matmul's shapes become two or three dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from registry.capability import Reason, Requires
from registry.errors import InvalidArgument
from registry.problem import OperandFact, Problem, Query, fact, query
from registry.target import Target
from registry.tensors import check_tensor, dtype_name

ACTIVATIONS = ("relu", "gelu", "silu")
FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8)) | FP8
OUT_DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int32))
_LAYOUTS = ("nn", "nt", "tn", "tt")


def _same_dtype(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    """Equal to a's dtype, or among the dtypes claimed for this field."""
    got, claim = getattr(problem, name), requires.claim(how.claim)
    if got != problem.dtype and got not in claim:
        yield Reason("unclaimed", name, got, ", ".join((problem.dtype, *claim)))


def _unit_dimension(got: Any, claim: Any) -> str:
    return "call .contiguous() on the operand of which neither matrix dimension has stride 1"


@dataclass(frozen=True, kw_only=True)
class MatmulProblem(Problem):
    """a @ b with its epilogue, for one call, over matrices [M, K] and [K, N] or batches of them."""

    op: ClassVar[str] = "matmul"
    derived_kinds: ClassVar[Mapping[str, str]] = {"elements": "int"}
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
    dtype_b: str = query(_same_dtype, claim="dtypes_b")
    out_dtype: str = query(_same_dtype, claim="out_dtypes")
    layout: str = query("member", claim="layouts", default="nn", fix=_unit_dimension)
    bias: bool = query("flag", claim="bias", default=False)
    activation: str = query("optional_member", claim="activations", default="")
    scaling: str = query("optional_member", claim="scaling", default="")
    out: bool = query("flag", claim="out", default=False)
    ieee: bool = query(
        "flag", claim="ieee", default=False, fix=lambda got, claim: 'torch.set_float32_matmul_precision("high")'
    )
    batched: bool = field(init=False, metadata=query("flag", claim="batched", default=False).metadata)
    operands: tuple[OperandFact, ...] = query("matrix_operands", claim="base_alignment", default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "batched", self.batch != 1)

    def derived_facts(self) -> dict[str, Any]:
        return {"elements": self.batch * self.m * self.n}

    @classmethod
    def of_shape(
        cls, target: Target, *, dtype: str = "bfloat16", m: int = 1024, n: int = 1024, k: int = 1024, b: int = 1,
        layout: str = "nn", dtype_b: str | None = None, out_dtype: str | None = None, bias: bool = False,
        activation: str = "", scaling: str = "", ieee: bool = False, deterministic: bool = False,
    ) -> MatmulProblem:  # fmt: skip
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
            target=target, dtype=dtype, m=m, n=n, k=k, batch=b, dtype_b=dtype_b or dtype, layout=layout, bias=bias,
            out_dtype=out_dtype or dtype_name(default_out_dtype(torch_dtype)), activation=check_activation(activation),
            scaling=scaling, ieee=ieee and dtype == "float32", deterministic=deterministic, operands=operands,
        )  # fmt: skip


def _made_up(sized: tuple[str, int, int], batch: int, letter: str, dtype: str, itemsize: int) -> OperandFact:
    name, rows, columns = sized
    strides = (columns, 1) if letter == "n" else (1, rows)
    if batch == 1:
        return OperandFact(name, dtype, (rows, columns), strides, itemsize)
    return OperandFact(name, dtype, (batch, rows, columns), (rows * columns, *strides), itemsize)


# --- argument checks and shapes -----------------------------------------------------------------------------------


def check_operands(a: object, b: object) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b if torch.matmul would multiply them, else InvalidArgument."""
    a, b = check_tensor("a", a), check_tensor("b", b)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() == 0:
            raise InvalidArgument(name, "0 dimensions", "1 or more dimensions")
        if tensor.dtype not in DTYPES:
            raise InvalidArgument(name, dtype_name(tensor.dtype), ", ".join(sorted(map(dtype_name, DTYPES))))
    if a.device != b.device:
        raise InvalidArgument("b", f"device {b.device}", f"a's device {a.device}")
    if a.dtype != b.dtype and not (a.dtype in FP8 and b.dtype in FP8):
        raise InvalidArgument("b", f"dtype {dtype_name(b.dtype)}", f"a's dtype {dtype_name(a.dtype)}")
    inner = b.shape[-2] if b.dim() > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise InvalidArgument(
            "b", f"shape {tuple(b.shape)} for a of shape {tuple(a.shape)}", f"an inner size of {a.shape[-1]}"
        )
    try:
        torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        allowed = f"batch dimensions that broadcast with a's {tuple(a.shape[:-2])}"
        raise InvalidArgument("b", f"batch dimensions {tuple(b.shape[:-2])}", allowed) from None
    return a, b


def default_out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The operands' dtype, but int32 for int8 and bfloat16 for fp8, whose results would not fit."""
    return torch.int32 if dtype is torch.int8 else torch.bfloat16 if dtype in FP8 else dtype


def check_activation(activation: object) -> str:
    if activation in (None, ""):
        return ""
    if activation not in ACTIVATIONS:
        raise InvalidArgument("activation", repr(activation), "None, " + ", ".join(ACTIVATIONS))
    return str(activation)


def check_out_dtype(out_dtype: object, dtype: torch.dtype) -> torch.dtype:
    if out_dtype is None:
        return default_out_dtype(dtype)
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in OUT_DTYPES:
        raise InvalidArgument("out_dtype", repr(out_dtype), "None, " + ", ".join(sorted(map(dtype_name, OUT_DTYPES))))
    return out_dtype


def check_scales(scale_a: Any, scale_b: Any, a: torch.Tensor, b: torch.Tensor) -> str:
    """ "", "scalar" or "rowwise": how the product is scaled."""
    if scale_a is None and scale_b is None:
        return ""
    kinds = set()
    for name, scale, size in (("scale_a", scale_a, a.shape[-2]), ("scale_b", scale_b, b.shape[-1])):
        if not isinstance(scale, torch.Tensor) or scale.dtype is not torch.float32 or scale.device != a.device:
            raise InvalidArgument(
                name, getattr(scale, "dtype", scale), f"a float32 tensor on {a.device}, as for the other operand"
            )
        if scale.numel() == 1 and scale.dim() <= 1 and (scale.dim() == 0 or size == 1):
            kinds.add("scalar" if scale.dim() == 0 else "rowwise")
        elif scale.dim() == 1 and scale.shape[0] == size:
            kinds.add("rowwise")
        else:
            raise InvalidArgument(name, f"shape {tuple(scale.shape)}", f"() or ({size},)")
    if len(kinds) > 1:
        raise InvalidArgument(
            "scale_b", "one scale a scalar and the other a vector", "both () or both one value a row or column"
        )
    return kinds.pop()


def check_bias(bias: Any, a: torch.Tensor, b: torch.Tensor) -> None:
    columns = b.shape[-1] if b.dim() > 1 else 1
    if not isinstance(bias, torch.Tensor) or bias.shape != (columns,) or bias.device != a.device:
        got = f"{tuple(bias.shape)} on {bias.device}" if isinstance(bias, torch.Tensor) else repr(bias)
        raise InvalidArgument("bias", got, f"None or a tensor of shape ({columns},) on {a.device}")


def check_out(
    out: Any, matrices: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """`out` must be a tensor of the result's shape (as asked, or as the kernels see it), dtype and device."""
    if not isinstance(out, torch.Tensor):
        raise InvalidArgument("out", type(out).__name__, "None or a torch.Tensor")
    if tuple(out.shape) not in (matrices, shape):
        raise InvalidArgument("out", f"shape {tuple(out.shape)}", f"shape {shape}")
    if out.dtype != dtype or out.device != device:
        raise InvalidArgument("out", f"{dtype_name(out.dtype)} on {out.device}", f"{dtype_name(dtype)} on {device}")


def as_matrices(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Views of two or three dimensions that multiply to the same numbers, and the shape of the result.

    No copy is made, except to broadcast over several batch dimensions that no single stride can walk.
    """
    shape = (
        *torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]),
        *a.shape[-2:-1],
        *(b.shape[-1:] if b.dim() > 1 else ()),
    )
    a2 = a if a.dim() > 1 else a[None, :]
    b2 = b if b.dim() > 1 else b[:, None]
    if a2.dim() == 2 and b2.dim() == 2:
        return a2, b2, shape
    if b2.dim() == 2 and (folded := _fold_rows(a2)) is not None:
        return folded, b2, shape
    batch = torch.broadcast_shapes(a2.shape[:-2], b2.shape[:-2])
    a3 = a2.expand(*batch, *a2.shape[-2:]).reshape(-1, *a2.shape[-2:]) if len(batch) != 1 else a2.expand(*batch, -1, -1)
    b3 = b2.expand(*batch, *b2.shape[-2:]).reshape(-1, *b2.shape[-2:]) if len(batch) != 1 else b2.expand(*batch, -1, -1)
    if a3.shape[0] == 1:
        return a3[0], b3[0], shape
    return a3, b3, shape


def _fold_rows(a: torch.Tensor) -> torch.Tensor | None:
    """[..., M, K] as one tall matrix, if its strides allow that without a copy."""
    try:
        return a.view(-1, a.shape[-1]) if a.shape[-1] else None
    except RuntimeError:
        return None


def layout_letter(fact: OperandFact) -> str:
    """ "n" where a row is contiguous, "t" where a column is, "" where neither."""
    rows, columns = fact.shape[-2:]
    if fact.strides[-1] == 1 or columns == 1:
        return "n"
    return "t" if fact.strides[-2] == 1 or rows == 1 else ""
