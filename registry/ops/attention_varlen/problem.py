"""The question of attention over sequences of differing lengths. It has host facts alone: no length is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from registry.contract.capability import RULES, Reason, Requires
from registry.contract.problem import OperandFact, Problem, Query, derived_flag, fact, query
from registry.contract.target import Target
from registry.errors import InvalidArgument
from registry.ops.attention_varlen import mixes
from registry.ops.attention_varlen.arguments import FLOATS, KV_LAYOUTS, KV_SCALES, QUANTISED, coarse
from registry.ops.attention_varlen.likeness import coordinates
from registry.ops.parts.heads import as_head_dim, as_softcap
from registry.ops.parts.masks import Window, canonical_mask, check_softcap, check_window
from registry.ops.parts.memory import dense_strides
from registry.ops.tensors import check_sizes, dtype_name, ieee_flag, known_dtype


def _kv_dtype(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    """k and v have q's dtype, or one that is claimed."""
    if problem.kv_dtype != problem.dtype:
        yield from RULES["member"](requires, problem, name, how)


def _page_size(requires: Requires, problem: Any, name: str, how: Query) -> Iterator[Reason]:
    if problem.kv_layout == "paged":
        yield from RULES["range"](requires, problem, name, how)


@dataclass(frozen=True, kw_only=True)
class VarlenProblem(Problem):
    """softmax(scale * q k^T) v for each sequence of a batch, for one call.

    Masks are put as plainly as they can be: one that hides nothing up to the maxima is not there. One query a sequence
    is never causal.
    """

    op: ClassVar[str] = "attention_varlen"
    derived_kinds: ClassVar[Mapping[str, str]] = dict.fromkeys(("group", "mean_q", "rows", "kv_tokens"), "int")
    known_values: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "dtype": tuple(sorted(map(dtype_name, FLOATS))),
        "kv_dtype": tuple(sorted(map(dtype_name, FLOATS | QUANTISED))),
        "kv_layout": KV_LAYOUTS,
        "kv_scale": ("", *KV_SCALES),
    }
    more_claims: ClassVar[Mapping[str, Any]] = {
        "head_dim_v_multiple": 1,
        "page_size_multiple": 1,
        "any_softcap": False,
        # That its kernels hold lengths and page numbers to their bounds themselves and complain of what they met (see
        # lengths.py). For one that does not, the op launches a small kernel first.
        "checks_lengths": False,
    }

    batch: int = fact()
    heads_q: int = fact()
    heads_kv: int = fact()
    total_q: int = fact()
    total_k: int = fact(0)
    """Rows of packed k; 0 for a cache and for pages, whose size says nothing about the work."""
    max_seqlen_q: int = fact()
    max_seqlen_k: int = fact()
    head_dim: int = query("range", claim="head_dim")
    head_dim_v: int = query(as_head_dim, claim="head_dim_v")
    kv_layout: str = query("member", claim="kv_layouts", default="packed")
    page_size: int = query(_page_size, claim="page_size", default=0)
    kv_dtype: str = query(_kv_dtype, claim="kv_dtypes", default="bfloat16", unclaimed=())
    kv_scale: str = query("optional_member", claim="kv_scales", default="")
    causal: bool = query("flag", claim="causal", default=False)
    window: Window | None = query("flag", claim="window", default=None)
    softcap: float = query(as_softcap, claim="softcap", default=0.0, unclaimed=False)
    sinks: bool = query("flag", claim="sinks", default=False)
    alibi: bool = query("flag", claim="alibi", default=False)
    lse: bool = query("flag", claim="lse", default=False)
    out: bool = query("flag", claim="out", default=False, fix=lambda problem, claim: "leave out= away")
    ieee: bool = ieee_flag()
    gqa: bool = derived_flag("gqa")

    def __post_init__(self) -> None:
        object.__setattr__(self, "gqa", self.heads_q != self.heads_kv)
        if self.causal or self.window is not None:
            causal, window = canonical_mask(self.causal, self.window, self.max_seqlen_q, self.max_seqlen_k)
            object.__setattr__(self, "causal", causal)
            object.__setattr__(self, "window", window)

    def likeness(self) -> dict[str, float]:
        return coordinates(self)

    def results(self) -> tuple[str, ...]:
        return ("out", "lse")

    def unasked(self) -> tuple[str, ...]:
        return () if self.lse else ("lse",)

    def result_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        out = (self.total_q, self.heads_q, self.head_dim_v)
        return {"out": (out, self.dtype), "lse": ((self.heads_q, self.total_q), "float32")}

    def derived_facts(self) -> dict[str, Any]:
        return {
            "group": self.heads_q // max(self.heads_kv, 1),
            "mean_q": -(-self.total_q // max(self.batch, 1)),
            "rows": self.total_q * self.heads_q,
            "kv_tokens": self.total_k or self.batch * self.max_seqlen_k,
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
        sq: int | None = None,
        sk: int | None = None,
        t: int | None = None,
        tk: int | None = None,
        mix: str = "uniform",
        d: int = 128,
        dv: int | None = None,
        kv: str = "packed",
        page: int = 64,
        kv_dtype: str | None = None,
        scales: str = "",
        causal: bool = False,
        window: Any = None,
        softcap: float = 0.0,
        sinks: bool = False,
        alibi: bool = False,
        lse: bool = False,
        out: bool = False,
        ieee: bool = False,
        deterministic: bool = False,
    ) -> VarlenProblem:
        """The problem of freshly allocated tensors of these sizes: what `kreg explain` and the tuner ask about.

        t and tk are the rows of q and of packed k: as many as sequences of that mix have where left out. There are as
        many keys as queries, and one query over 1,024 keys where neither is given.
        """
        sq, sk = 1 if sq is None else sq, (1024 if sq is None else sq) if sk is None else sk
        hkv, dv, kv_dtype = hq if hkv is None else hkv, d if dv is None else dv, kv_dtype or dtype
        scales = scales or ("" if kv_dtype == dtype else "tensor")
        known_dtype("dtype", dtype, FLOATS)
        if kv_dtype != dtype and getattr(torch, kv_dtype, None) not in QUANTISED:
            raise InvalidArgument("kv_dtype", repr(kv_dtype), ", ".join([dtype, *sorted(map(dtype_name, QUANTISED))]))
        if kv not in KV_LAYOUTS:
            raise InvalidArgument("kv", repr(kv), ", ".join(KV_LAYOUTS))
        check_sizes(b=b, hq=hq, hkv=hkv, sq=sq, sk=sk, d=d, dv=dv, **({"page": page} if kv == "paged" else {}))
        t, tk, pages = mixes.totals((b, sq, sk), mix, page, t, tk)
        check_sizes(t=t)
        if hq % hkv:
            raise InvalidArgument("hkv", f"{hkv} for {hq} query heads", "a divisor of the number of query heads")
        leading = {"packed": (tk,), "cache": (b, sk), "paged": (pages, page)}[kv]
        longest = {"packed": min(sk, tk), "cache": sk, "paged": min(coarse(sk), -(-sk // max(page, 1)) * page)}[kv]
        shapes = {"q": (t, hq, d), "k": (*leading, hkv, d), "v": (*leading, hkv, dv)}
        return cls(
            target=target,
            dtype=dtype,
            batch=b,
            heads_q=hq,
            heads_kv=hkv,
            total_q=t,
            total_k=tk if kv == "packed" else 0,
            max_seqlen_q=min(sq, t),
            max_seqlen_k=longest,
            head_dim=d,
            head_dim_v=dv,
            kv_layout=kv,
            page_size=page if kv == "paged" else 0,
            kv_dtype=kv_dtype,
            kv_scale=scales,
            causal=causal,
            window=check_window(window),
            softcap=check_softcap(softcap),
            sinks=sinks,
            alibi=alibi,
            lse=lse,
            out=out,
            ieee=ieee and dtype == "float32",
            deterministic=deterministic,
            operands=tuple(
                _made_up_operand(name, shape, dtype if name == "q" else kv_dtype) for name, shape in shapes.items()
            ),
        )


@dataclass(frozen=True, kw_only=True)
class VarlenBackwardProblem(VarlenProblem):
    """The gradients of attention over packed sequences. Its operands include the incoming gradient."""

    op: ClassVar[str] = "attention_varlen_backward"

    grad_lse: bool = query("flag", claim="grad_lse", default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lse", True)  # it is handed the sums of rows, whoever asked for them
        super().__post_init__()

    def results(self) -> tuple[str, ...]:
        return ("dq", "dk", "dv", "dsinks") if self.sinks else ("dq", "dk", "dv")

    def result_shapes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        keys = (self.total_k, self.heads_kv)
        return {
            "dq": ((self.total_q, self.heads_q, self.head_dim), self.dtype),
            "dk": ((*keys, self.head_dim), self.dtype),
            "dv": ((*keys, self.head_dim_v), self.dtype),
        }


def _made_up_operand(name: str, shape: tuple[int, ...], dtype: str) -> OperandFact:
    return OperandFact(name, dtype, shape, dense_strides(shape), getattr(torch, dtype).itemsize)
