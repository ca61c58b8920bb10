"""Head dims that no fast kernel takes as they are (59, 111), and grouped heads that are too wide for those that take
groups: copies that a fast kernel does take, padded with zeroes or with k and v repeated for each query head.

Which kernel that is the registry says: the config names it, so that `explain` shows it and `use` can pin it. The copies
cost a pass over q, k and v, which shows in short sequences.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

import registry
from registry import Design, NoLegalVariant, Reason, Requires, Variant, hookimpl
from registry.ops.attention.problem import AttentionBackwardProblem, AttentionProblem
from registry.toolbox.call import Call
from registry.toolbox.launch import StandIn

MULTIPLE, SMALLEST = 8, 16
"""What the fast kernels want of a head dim."""
MOST_WITH_GROUPS = 256
"""The largest head dim for which some of them take groups of heads."""
Bind = Callable[[Call], Callable[..., Any]]
"""Which way a copy is launched: by the thin launcher, or by Triton's own, which its interpreter has too."""
ROWS = 32
"""Rows that a program copies."""
STORES_SCORES = "torch_math"


def _afresh(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Outside of any `use` around the call: that asked for the copies, not for what runs on them."""
    return contextvars.Context().run(call, *args, **kwargs)


def _wide(head_dim: int) -> int:
    return max(SMALLEST, -(-head_dim // MULTIPLE) * MULTIPLE)


def _is_repeated(problem: Any) -> bool:
    return bool(problem.gqa) and max(problem.head_dim, problem.head_dim_v) > MOST_WITH_GROUPS


def _takes_copies(problem: Any) -> bool:
    return bool(problem.head_dim % MULTIPLE or problem.head_dim_v % MULTIPLE or _is_repeated(problem))


def _of_copies(problem: Any) -> AttentionProblem:
    """The problem that the copies pose."""
    found = type(problem).of_shape(
        problem.target,
        dtype=problem.dtype,
        b=problem.batch,
        hq=problem.heads_q,
        hkv=problem.heads_q if _is_repeated(problem) else problem.heads_kv,
        s=problem.seqlen_q,
        sk=problem.seqlen_k,
        d=_wide(problem.head_dim),
        dv=_wide(problem.head_dim_v),
        causal=problem.causal,
        window=problem.window,
        softcap=problem.softcap,
        lse=problem.lse,
        ieee=problem.ieee,
        deterministic=problem.deterministic,
    )
    return (
        dataclasses.replace(found, grad_lse=problem.grad_lse)
        if isinstance(problem, AttentionBackwardProblem)
        else found
    )


def _op(problem: Any) -> Any:
    return registry.attention.backward if isinstance(problem, AttentionBackwardProblem) else registry.attention


def _configs(problem: Any) -> list[dict[str, Any]]:
    """What runs on the copies."""
    if not _takes_copies(problem):
        return [{"then": ""}]
    try:
        return [{"then": _afresh(_op(problem).explain, _of_copies(problem)).variant}]
    except NoLegalVariant:
        return [{"then": STORES_SCORES}]


def _rule(problem: Any, config: Any) -> Iterator[Reason]:
    if not _takes_copies(problem):
        yield Reason(
            "range", "head_dim", problem.head_dim, f"no multiple of {MULTIPLE}: kernels take others as they are"
        )
    elif config["then"].startswith(STORES_SCORES):
        yield Reason("semantics", "copies", config["then"], "a kernel that stores no scores, on the copies")


@triton.jit
def _copy_rows(
    x,
    made,
    rows,
    heads,
    group,
    seqlen,
    stride_b,
    stride_h,
    stride_s,
    stride_d,
    WIDTH: tl.constexpr,
    TO: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One pass over memory, where torch takes three: a strided copy, a fill, and the strides made dense."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS).to(tl.int64)
    head = row // seqlen
    start = head // heads * stride_b + head % heads // group * stride_h + row % seqlen * stride_s
    inside = (row < rows)[:, None]
    read = inside & (column < WIDTH)[None, :]
    value = tl.load(x + start[:, None] + column[None, :] * stride_d, read, other=0.0)
    tl.store(made + row[:, None] * TO + column[None, :], value, inside & (column < TO)[None, :])


class _Resize:
    """A dense copy of a [B, H, S, D] in another head dim, zeroes beyond the old one, heads repeated to so many."""

    def __init__(self, x: StandIn, width: int, heads: int, bind: Bind) -> None:
        b, h, s, d = x.shape
        self.shape, rows = (b, heads, s, width), b * heads * s
        sizes = {"rows": rows, "heads": heads, "group": heads // h, "seqlen": s}
        strides = dict(zip(("stride_b", "stride_h", "stride_s", "stride_d"), x.strides, strict=True))
        made = StandIn(self.shape, x.dtype, name="made")
        self.call = Call(
            _copy_rows,
            (triton.cdiv(rows, ROWS),),
            {"x": StandIn(x.shape, x.dtype, x.strides, x.alignment, "x"), "made": made, **sizes, **strides},
            constants={"WIDTH": min(d, width), "TO": width, "COLUMNS": triton.next_power_of_2(width), "ROWS": ROWS},
        )
        self._launch = bind(self.call)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = x.new_empty(self.shape)
        self._launch(x, made)
        return made


class _Narrow:
    """Back to a head dim, in the memory order of an operand, sums over repeated heads."""

    def __init__(self, problem: Any, like: Any, width: int, bind: Bind) -> None:
        b, heads, s, _ = like.shape
        self.heads = heads
        self.rows_first = like.strides[1] < like.strides[2]
        made = StandIn((b, heads, s, _wide(width)), problem.dtype)
        if self.rows_first:
            b_, h_, s_, d_ = made.strides
            made = StandIn((b, s, heads, _wide(width)), problem.dtype, (b_, s_, h_, d_))
        self.resize = _Resize(made, width, made.shape[1], bind)

    def __call__(self, made: torch.Tensor) -> torch.Tensor:
        if made.shape[1] != self.heads:
            made = made.unflatten(1, (self.heads, -1)).sum(2)
        made = made.contiguous()  # it is, but for kernels that answer in another memory order
        return self.resize(made.transpose(1, 2)).transpose(1, 2) if self.rows_first else self.resize(made)


class _Copies:
    """What stands around a kernel that runs on copies: one resize for each operand, and one back for each result."""

    def __init__(self, problem: Any, bind: Bind) -> None:
        operands = {operand.name: operand for operand in problem.operands}
        heads = problem.heads_q if _is_repeated(problem) else problem.heads_kv
        self.resize = {
            name: _Resize(
                StandIn(o.shape, problem.dtype, o.strides, o.base_alignment),
                _wide(o.shape[3]),
                heads if name in ("k", "v") else problem.heads_q,
                bind,
            )
            for name, o in operands.items()
        }
        q, k, v = (operands[name] for name in "qkv")
        self.out = _Narrow(problem, q, problem.head_dim_v, bind)
        self.grads = [_Narrow(problem, one, one.shape[3], bind) for one in (q, k, v)]

    def around(self, problem: Any, inner: Callable[..., Any]) -> Callable[..., Any]:
        """A launch of the problem from one of its copies."""
        resize = self.resize

        def forward(q: Any, k: Any, v: Any, *, scale: float) -> Any:
            out, lse = inner(resize["q"](q), resize["k"](k), resize["v"](v), scale=scale)
            return self.out(out), lse

        def backward(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, scale: float, grad_lse: Any) -> Any:
            given = {"grad_out": grad_out, "q": q, "k": k, "v": v, "out": out}
            copies = [resize[name](given[name]) for name in given]
            grads = inner(*copies, lse, scale=scale, grad_lse=grad_lse)
            return tuple(back(grad) for back, grad in zip(self.grads, grads, strict=True))

        return backward if isinstance(problem, AttentionBackwardProblem) else forward


def _inner(problem: Any, then: str) -> Callable[..., Any]:
    """The launch of what runs on the copies."""
    op, copies = _op(problem), _of_copies(problem)
    decision = _afresh(op.explain, copies, variant=then)
    launch: Callable[..., Any] = op.bind(op.variants[then], copies, decision.config)
    return launch


def prepare(problem: Any, config: Any) -> Callable[..., Any]:
    return _Copies(problem, Call.bind).around(problem, _inner(problem, config["then"]))


def builds(problem: Any, config: Any) -> list[Any]:
    """The copies' own kernels; those between them are their variant's."""
    calls: list[Call] = []
    _Copies(problem, lambda call: calls.append(call) or call.plain)  # type: ignore[func-returns-value]
    return [call.build(problem.target) for call in calls]


def attention(q, k, v, *, causal, window, softcap, return_lse, scale, config):
    masks = {"causal": causal, "window": window, "softcap": softcap}
    problem, _ = registry.attention.problem_of(q, k, v, **masks, return_lse=return_lse)
    return _Copies(problem, Call.plain).around(problem, _inner(problem, config["then"]))(q, k, v, scale=scale)


def backward(grad_out, q, k, v, out, lse, *, causal, window, softcap, grad_lse, deterministic, scale, config):
    tensors, masks = (grad_out, q, k, v, out, lse), {"causal": causal, "window": window, "softcap": softcap}
    problem, _ = registry.attention.backward.problem_of(*tensors, **masks, grad_lse=grad_lse)
    launch = _Copies(problem, Call.plain).around(problem, _inner(problem, config["then"]))
    return launch(*tensors, scale=scale, grad_lse=grad_lse)


@hookimpl
def registry_variants():
    claims = dict(
        arch=("sm80+",),
        dtypes=("float16", "bfloat16", "float32"),
        head_dim=(1, 1024),
        head_dim_v=(1, 1024),
        layouts=("bhsd", "bshd", "strided"),
        unit_inner_stride=False,
        causal=True,
        window=True,
        softcap=True,
        gqa=True,
        lse=True,
        cross_length=True,
        deterministic=True,
        ieee=True,
        toolchain={"triton": ">=3.6,<4"},
        rule=_rule,
    )
    summary = "a copy in a head dim that fast kernels take, and the fastest of them on it"
    kernels = (
        ("triton_padded", "attention", attention, {}),
        ("triton_padded_backward", "attention_backward", backward, {"grad_lse": True}),
    )
    return [
        Variant(
            name,
            op=op,
            run=run,
            prepare=prepare,
            builds=builds,
            requires=Requires(**claims, **more),
            design=Design(dsl="triton"),
            configs=_configs,
            summary=summary,
        )
        for name, op, run, more in kernels
    ]
