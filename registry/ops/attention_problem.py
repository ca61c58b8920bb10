"""The attention question: its fields, how each is judged, and how a call becomes one."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from registry.capability import RULES, Reason, Requires
from registry.errors import InvalidArgument
from registry.problem import OperandFact, Problem, Query, fact, query
from registry.target import Target
from registry.tensors import check_tensor, dtype_name, ieee_float32

LAYOUTS = ("bhsd", "bshd")
UNLIMITED = -1
Window = tuple[int, int]

_FLOATS = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
)


def _expand_heads(got: Any, claim: Any) -> str:
    return "repeat k and v for each query head (repeat_interleave over dim 1)"


def _copy_layout(got: Any, claim: Any) -> str:
    return "call .contiguous() on q, k and v"


def _head_dim_v(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    """The head dim of v must be q's unless a range for it is claimed."""
    if requires.head_dim_v is not None:
        yield from RULES["range"](requires, problem, name, how)
    elif problem.head_dim_v != problem.head_dim:
        yield Reason("range", name, problem.head_dim_v, f"{problem.head_dim} (as head_dim)")


@dataclass(frozen=True, kw_only=True)
class AttentionProblem(Problem):
    """softmax(scale * q k^T) v, with its masks, for one call."""

    op: ClassVar[str] = "attention"
    derived_kinds: ClassVar[Mapping[str, str]] = {"batch_heads": "int", "group": "int", "tokens": "int", "rows": "int"}
    known_values: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dtype": tuple(sorted(map(dtype_name, _FLOATS))),
        "layout": (*LAYOUTS, "strided"),
    }

    batch: int = fact()
    heads_q: int = fact()
    heads_kv: int = fact()
    seqlen_q: int = query("multiple", claim="seqlen_q_multiple")
    seqlen_k: int = query("multiple", claim="seqlen_k_multiple")
    head_dim: int = query("range", claim="head_dim")
    head_dim_v: int = query(_head_dim_v, claim="head_dim_v")
    layout: str = query("member", claim="layouts", default="bhsd", fix=_copy_layout)
    causal: bool = query("flag", claim="causal", default=False)
    window: Window | None = query("flag", claim="window", default=None)
    softcap: float = query("flag", claim="softcap", default=0.0)
    lse: bool = query("flag", claim="lse", default=False)
    ieee: bool = query(
        "flag", claim="ieee", default=False, fix=lambda got, claim: 'torch.set_float32_matmul_precision("high")'
    )
    gqa: bool = field(init=False, metadata=query("flag", claim="gqa", default=False, fix=_expand_heads).metadata)
    cross_length: bool = field(init=False, metadata=query("flag", claim="cross_length", default=False).metadata)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gqa", self.heads_q != self.heads_kv)
        object.__setattr__(self, "cross_length", self.seqlen_q != self.seqlen_k)

    def derived_facts(self) -> dict[str, Any]:
        return {
            "batch_heads": self.batch * self.heads_q,
            "group": self.heads_q // max(self.heads_kv, 1),
            "tokens": self.batch * self.seqlen_q,
            "rows": self.batch * self.heads_q * self.seqlen_q,
        }

    @classmethod
    def of_shape(
        cls, target: Target, *, dtype: str = "bfloat16", b: int = 1, hq: int = 1, hkv: int | None = None, s: int = 1024,
        sk: int | None = None, d: int = 128, dv: int | None = None, layout: str = "bhsd", causal: bool = False,
        window: Any = None, softcap: float = 0.0, lse: bool = False, ieee: bool = False, deterministic: bool = False,
    ) -> AttentionProblem:  # fmt: skip
        """The problem of freshly allocated tensors of these sizes: what `kreg explain` and the tuner ask about."""
        hkv, sk, dv = hq if hkv is None else hkv, s if sk is None else sk, d if dv is None else dv
        torch_dtype = getattr(torch, dtype, None)
        if torch_dtype not in _FLOATS:
            raise InvalidArgument("dtype", repr(dtype), ", ".join(sorted(map(dtype_name, _FLOATS))))
        for name, value in (("b", b), ("hq", hq), ("hkv", hkv), ("s", s), ("sk", sk), ("d", d), ("dv", dv)):
            if value < 1:
                raise InvalidArgument(name, value, "a positive integer")
        if hq % hkv:
            raise InvalidArgument("hkv", f"{hkv} for {hq} query heads", "a divisor of the number of query heads")
        check_layout(layout)
        causal, window = canonical_window(check_window(window), causal)
        shapes = {"q": (b, hq, s, d), "k": (b, hkv, sk, d), "v": (b, hkv, sk, dv)}
        operands = tuple(
            _made_up_operand(name, shape, dtype, torch_dtype.itemsize, layout) for name, shape in shapes.items()
        )
        return cls(
            target=target, dtype=dtype, batch=b, heads_q=hq, heads_kv=hkv, seqlen_q=s, seqlen_k=sk, head_dim=d,
            head_dim_v=dv, layout=layout, causal=causal, window=window, softcap=check_softcap(softcap), lse=lse,
            ieee=ieee and dtype == "float32", deterministic=deterministic, operands=operands,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttentionBackwardProblem(AttentionProblem):
    """The gradients of attention. Its operands include the incoming gradient."""

    op: ClassVar[str] = "attention_backward"

    grad_lse: bool = query("flag", claim="grad_lse", default=False)


def _made_up_operand(name: str, shape: tuple[int, ...], dtype: str, itemsize: int, layout: str) -> OperandFact:
    b, h, s, d = shape
    strides = (h * s * d, s * d, d, 1) if layout == "bhsd" else (s * h * d, d, h * d, 1)
    return OperandFact(name, dtype, shape, strides, itemsize)


# --- argument checks: each names the argument, what it got and what is allowed ------------------------------------


def check_qkv(q: object, k: object, v: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v in bhsd order if they can be attended over, else InvalidArgument."""
    q, k, v = check_4d("q", q), check_4d("k", k), check_4d("v", v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in _FLOATS:
            raise InvalidArgument(name, dtype_name(tensor.dtype), ", ".join(sorted(map(dtype_name, _FLOATS))))
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise InvalidArgument(name, f"dtype {dtype_name(tensor.dtype)}", f"q's dtype {dtype_name(q.dtype)}")
        if tensor.device != q.device:
            raise InvalidArgument(name, f"device {tensor.device}", f"q's device {q.device}")
        if tensor.shape[0] != q.shape[0]:
            raise InvalidArgument(name, f"batch {tensor.shape[0]}", f"q's batch {q.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise InvalidArgument("v", f"{v.shape[1]} heads", f"k's {k.shape[1]} heads")
    if k.shape[2] != v.shape[2]:
        raise InvalidArgument("v", f"length {v.shape[2]}", f"k's length {k.shape[2]}")
    if k.shape[3] != q.shape[3]:
        raise InvalidArgument("k", f"head_dim {k.shape[3]}", f"q's head_dim {q.shape[3]}")
    if q.shape[3] == 0:
        raise InvalidArgument("q", "head_dim 0", "a head_dim of at least 1")
    if k.shape[1] == 0 and q.shape[1] != 0 or (k.shape[1] and q.shape[1] % k.shape[1]):
        raise InvalidArgument("k", f"{k.shape[1]} heads for {q.shape[1]} query heads", "a divisor of q's heads")
    return q, k, v


def check_4d(name: str, value: object) -> torch.Tensor:
    """The value if it is a tensor of four dimensions."""
    tensor = check_tensor(name, value)
    if tensor.dim() != 4:
        raise InvalidArgument(
            name, f"{tensor.dim()} dimensions {tuple(tensor.shape)}", "4: batch, heads, length, head_dim"
        )
    return tensor


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgument(name, repr(value), "True or False")


def check_layout(layout: object) -> str:
    if layout not in LAYOUTS:
        raise InvalidArgument("layout", repr(layout), " or ".join(map(repr, LAYOUTS)))
    return str(layout)


def _is_finite(value: object) -> bool:
    """Whether this is a finite number; spelt so that torch.compile can trace it for a symbolic one."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and value - value == 0.0


LEAST_SCALE = 1e-30


def positive_scale(q: Any, scale: Any) -> tuple[Any, float]:
    """The same scores by a positive scale, which kernels rely on: they take maxima of scores before they scale them.

    A sign moves into q, where autograd follows it; zero becomes so little that all scores vanish.
    """
    check_scale(scale)
    if scale < 0 and isinstance(q, torch.Tensor):
        q, scale = -q, -scale
    return q, max(float(scale), LEAST_SCALE)


def check_scale(scale: object) -> None:
    if not _is_finite(scale):
        raise InvalidArgument("scale", repr(scale), "None (1/sqrt(head_dim)) or a finite number")


def check_softcap(softcap: object) -> float:
    if not _is_finite(softcap) or softcap < 0:  # type: ignore[operator]
        raise InvalidArgument("softcap", repr(softcap), "0.0 (off) or a positive finite number")
    return float(softcap)  # type: ignore[arg-type]


def check_window(window: object) -> Window | None:
    """A window as (left, right), -1 for unlimited; one number means so many keys to either side."""
    if window is None:
        return None
    allowed = "None, a number of keys to either side, or (left, right) with None or -1 for unlimited"
    if isinstance(window, int) and not isinstance(window, bool) and window >= 0:
        return window, window
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidArgument("window", repr(window), allowed)
    sides = [UNLIMITED if side is None else side for side in window]
    if not all(isinstance(side, int) and not isinstance(side, bool) and side >= UNLIMITED for side in sides):
        raise InvalidArgument("window", repr(window), allowed)
    return sides[0], sides[1]


def canonical_window(window: Window | None, causal: bool) -> tuple[bool, Window | None]:
    """(causal, window) with one spelling for each mask: nothing to the right is causal, no limit at all is None."""
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    causal = causal or right == 0
    if left == UNLIMITED and (causal or right == UNLIMITED):
        return causal, None
    return causal, (left, 0 if causal else right)


def memory_order(operands: tuple[OperandFact, ...]) -> str:
    """ "bhsd" or "bshd" where every operand is dense in that order, else "strided"."""
    for layout in LAYOUTS:
        if all(_dense_in(operand, layout) for operand in operands):
            return layout
    return "strided"


def _dense_in(operand: OperandFact, layout: str) -> bool:
    """Whether a [B, H, S, D] operand is dense in memory in that order, strides of single elements aside."""
    expected = 1
    order = (3, 2, 1, 0) if layout == "bhsd" else (3, 1, 2, 0)
    for dim in order:
        if operand.shape[dim] > 1 and operand.strides[dim] != expected:
            return False
        expected *= operand.shape[dim]
    return True


def asks_ieee(dtype: torch.dtype) -> bool:
    """Whether a problem of this dtype must be computed in full float32 precision."""
    return dtype is torch.float32 and ieee_float32()
