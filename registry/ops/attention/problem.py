"""The attention question: its fields, how each is judged, and how a call becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from registry.contract.problem import OperandFact, Problem, derived_flag, fact, query
from registry.contract.target import Target
from registry.errors import InvalidArgument
from registry.ops.attention.arguments import BHSD, FLOATS, LAYOUTS, check_layout
from registry.ops.attention.likeness import coordinates
from registry.ops.parts.heads import as_head_dim, as_softcap
from registry.ops.parts.masks import Window, canonical_mask, check_softcap, check_window
from registry.ops.parts.memory import dense_strides
from registry.ops.tensors import check_sizes, dtype_name, ieee_flag, known_dtype


def _expand_heads(problem: Any, claim: Any) -> str:
    # What is [B, S, H, D] in memory is passed as such, or as a view of it that is transposed.
    other = "" if problem.layout == BHSD else ', or over dim 2 where layout="bshd"'
    return f"repeat k and v for each query head (repeat_interleave over dim 1{other})"


def _copy_layout(problem: Any, claim: Any) -> str | None:
    return "make every operand dense as [B, H, S, D]" if BHSD in claim else None


_ORDERS = {"bhsd": (3, 2, 1, 0), "bshd": (3, 1, 2, 0)}
"""The dimensions of an operand [B, H, S, D] from the innermost out, as each layout has them in memory."""
DECODING = 16
"""Queries up to which attention over more keys than that is taken for a step of decoding."""


@dataclass(frozen=True, kw_only=True)
class AttentionProblem(Problem):
    """softmax(scale * q k^T) v, with its masks, for one call.

    Masks are put as plainly as they can be: one that hides nothing at these lengths is not there, so that no kernel
    refuses a problem for it.
    """

    op: ClassVar[str] = "attention"
    derived_kinds: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("batch_heads", "group", "tokens", "rows", "blocks"), "int"
    )
    known_values: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dtype": tuple(sorted(map(dtype_name, FLOATS))),
        "layout": (*LAYOUTS, "strided"),
    }
    more_claims: ClassVar[Mapping[str, Any]] = {"head_dim_v_multiple": 1, "any_softcap": False}

    batch: int = fact()
    heads_q: int = fact()
    heads_kv: int = fact()
    seqlen_q: int = query("multiple", claim="seqlen_q_multiple")
    seqlen_k: int = query("multiple", claim="seqlen_k_multiple")
    head_dim: int = query("range", claim="head_dim")
    head_dim_v: int = query(as_head_dim, claim="head_dim_v")
    layout: str = query("member", claim="layouts", default="bhsd", fix=_copy_layout)
    causal: bool = query("flag", claim="causal", default=False)
    window: Window | None = query("flag", claim="window", default=None)
    softcap: float = query(as_softcap, claim="softcap", default=0.0, unclaimed=False)
    lse: bool = query("flag", claim="lse", default=False)
    ieee: bool = ieee_flag()
    gqa: bool = derived_flag("gqa", _expand_heads)
    cross_length: bool = derived_flag("cross_length")

    def __post_init__(self) -> None:
        object.__setattr__(self, "gqa", self.heads_q != self.heads_kv)
        object.__setattr__(self, "cross_length", self.seqlen_q != self.seqlen_k)
        if self.causal or self.window is not None:
            causal, window = canonical_mask(self.causal, self.window, self.seqlen_q, self.seqlen_k)
            object.__setattr__(self, "causal", causal)
            object.__setattr__(self, "window", window)

    def likeness(self) -> dict[str, float]:
        return coordinates(self)

    @property
    def growing(self) -> bool:
        """A few queries over more keys: the next token's will be one more."""
        return self.op == "attention" and self.seqlen_q <= DECODING and self.seqlen_k > self.seqlen_q

    def results(self) -> tuple[str, ...]:
        return ("out", "lse")

    def unasked(self) -> tuple[str, ...]:
        return () if self.lse else ("lse",)

    def result_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        rows = (self.batch, self.heads_q, self.seqlen_q)
        return {"out": ((*rows, self.head_dim_v), self.dtype), "lse": (rows, "float32")}

    def derived_facts(self) -> dict[str, Any]:
        return {
            "batch_heads": self.batch * self.heads_q,
            "group": self.heads_q // max(self.heads_kv, 1),
            "tokens": self.batch * self.seqlen_q,
            "rows": self.batch * self.heads_q * self.seqlen_q,
            "blocks": self.batch * self.heads_q * -(-self.seqlen_q // 64),
        }

    @classmethod
    def of_shape(
        cls,
        target: Target,
        *,
        dtype: str = "bfloat16",
        b: int = 1,
        hq: int = 1,
        hkv: int | None = None,
        s: int = 1024,
        sk: int | None = None,
        d: int = 128,
        dv: int | None = None,
        layout: str = "bhsd",
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        lse: bool = False,
        ieee: bool = False,
        deterministic: bool = False,
    ) -> AttentionProblem:
        """The problem of freshly allocated tensors of these sizes: what `kreg explain` and the tuner ask about."""
        hkv, sk, dv = hq if hkv is None else hkv, s if sk is None else sk, d if dv is None else dv
        torch_dtype = known_dtype("dtype", dtype, FLOATS)
        check_sizes(b=b, hq=hq, hkv=hkv, s=s, sk=sk, d=d, dv=dv)
        if hq % hkv:
            raise InvalidArgument("hkv", f"{hkv} for {hq} query heads", "a divisor of the number of query heads")
        check_layout(layout)
        shapes = {"q": (b, hq, s, d), "k": (b, hkv, sk, d), "v": (b, hkv, sk, dv)}
        operands = tuple(
            OperandFact(name, dtype, shape, dense_strides(shape, _ORDERS[layout]), torch_dtype.itemsize)
            for name, shape in shapes.items()
        )
        return cls(
            target=target,
            dtype=dtype,
            batch=b,
            heads_q=hq,
            heads_kv=hkv,
            seqlen_q=s,
            seqlen_k=sk,
            head_dim=d,
            head_dim_v=dv,
            layout=layout,
            causal=causal,
            window=check_window(window),
            softcap=check_softcap(softcap),
            lse=lse,
            ieee=ieee and dtype == "float32",
            deterministic=deterministic,
            operands=operands,
        )


@dataclass(frozen=True, kw_only=True)
class AttentionBackwardProblem(AttentionProblem):
    """The gradients of attention. Its operands include the incoming gradient."""

    op: ClassVar[str] = "attention_backward"

    grad_lse: bool = query("flag", claim="grad_lse", default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lse", True)  # it is handed the sums of rows, whoever asked for them
        super().__post_init__()

    def results(self) -> tuple[str, ...]:
        return ("dq", "dk", "dv")

    def result_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        keys = (self.batch, self.heads_kv, self.seqlen_k)
        return {
            "dq": ((self.batch, self.heads_q, self.seqlen_q, self.head_dim), self.dtype),
            "dk": ((*keys, self.head_dim), self.dtype),
            "dv": ((*keys, self.head_dim_v), self.dtype),
        }


def memory_order(operands: tuple[OperandFact, ...]) -> str:
    """ "bhsd" or "bshd" where every operand is dense in that order, else "strided"."""
    for layout in LAYOUTS:
        if all(_dense_in(operand, layout) for operand in operands):
            return layout
    return "strided"


def _dense_in(operand: OperandFact, layout: str) -> bool:
    """Whether a [B, H, S, D] operand is dense in memory in that order, strides of single elements aside."""
    expected = 1
    for dim in _ORDERS[layout]:
        if operand.shape[dim] > 1 and operand.strides[dim] != expected:
            return False
        expected *= operand.shape[dim]
    return True
