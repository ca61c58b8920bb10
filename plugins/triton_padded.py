"""Head dims that no fast kernel takes as they are (59, 111), and grouped heads that are too wide for those that take
groups: copies that a fast kernel does take, padded with zeroes or with k and v repeated for each query head.

Which kernel that is the registry says: the config names it, so that `explain` shows it and `use` can pin it. The copies
cost a pass over q, k and v, which shows in short sequences.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

import registry
from registry import Design, NoLegalVariant, Reason, Requires, Variant, hookimpl
from registry.ops.attention.problem import AttentionBackwardProblem, AttentionProblem

MULTIPLE, SMALLEST = 8, 16
"""What the fast kernels want of a head dim."""
MOST_WITH_GROUPS = 256
"""The largest head dim for which some of them take groups of heads."""
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
    backward = isinstance(problem, AttentionBackwardProblem)
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
    assert isinstance(found, AttentionBackwardProblem) is backward
    return found


def _configs(problem: Any) -> list[dict[str, Any]]:
    """What runs on the copies."""
    if not _takes_copies(problem):
        return [{"then": ""}]
    op = registry.attention.backward if isinstance(problem, AttentionBackwardProblem) else registry.attention
    try:
        return [{"then": _afresh(op.explain, _of_copies(problem)).variant}]
    except NoLegalVariant:
        return [{"then": STORES_SCORES}]


def _rule(problem: Any, config: Any) -> Iterator[Reason]:
    if not _takes_copies(problem):
        yield Reason(
            "range", "head_dim", problem.head_dim, f"no multiple of {MULTIPLE}: kernels take others as they are"
        )
    elif config["then"] == STORES_SCORES:
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
    column = tl.arange(0, COLUMNS)
    head = row // seqlen
    start = head // heads * stride_b + head % heads // group * stride_h + row % seqlen * stride_s
    inside = (row < rows)[:, None]
    read = inside & (column < WIDTH)[None, :]
    value = tl.load(x + start[:, None] + column[None, :] * stride_d, read, other=0.0)
    tl.store(made + row[:, None] * TO + column[None, :], value, inside & (column < TO)[None, :])


def _resized(x: torch.Tensor, width: int, heads: int = 0) -> torch.Tensor:
    """Dense [B, H, S, D] with another head dim, zeroes beyond the old one, and its heads repeated to so many."""
    b, h, s, d = x.shape
    heads = heads or h
    made, rows = x.new_empty(b, heads, s, width), b * heads * s
    sizes = (min(d, width), width, triton.next_power_of_2(width), ROWS)
    _copy_rows[(triton.cdiv(rows, ROWS),)](x, made, rows, heads, heads // h, s, *x.stride(), *sizes)
    return made


def _copy(x: torch.Tensor, heads: int = 0) -> torch.Tensor:
    return _resized(x, _wide(x.shape[3]), heads)


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """To how many heads k and v are repeated; 0 where they stay as they are."""
    return q.shape[1] if q.shape[1] != k.shape[1] and max(q.shape[3], v.shape[3]) > MOST_WITH_GROUPS else 0


def _narrow(made: torch.Tensor, like: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Back to the head dim of `width`, in the memory order of `like`, sums over repeated heads."""
    if made.shape[1] != like.shape[1]:
        made = made.unflatten(1, (like.shape[1], -1)).sum(2)
    if like.stride(1) < like.stride(2):
        return _resized(made.transpose(1, 2), width.shape[3]).transpose(1, 2)
    return _resized(made, width.shape[3])


def attention(q, k, v, *, causal, window, softcap, return_lse, scale, config):
    heads = _heads(q, k, v)
    copies = _copy(q), _copy(k, heads), _copy(v, heads)
    masks = {"causal": causal, "window": window, "softcap": softcap}
    out, lse = _afresh(registry.attention, *copies, **masks, scale=scale, return_lse=True, variant=config["then"])
    return _narrow(out, q, v), lse if return_lse else None


def backward(grad_out, q, k, v, out, lse, *, causal, window, softcap, grad_lse, deterministic, scale, config):
    heads = _heads(q, k, v)
    copies = _copy(grad_out), _copy(q), _copy(k, heads), _copy(v, heads), _copy(out)
    given = {"causal": causal, "window": window, "softcap": softcap, "grad_lse": grad_lse, "scale": scale}
    grads = _afresh(registry.attention.backward, *copies, lse, **given, variant=config["then"])
    return tuple(_narrow(grad, like, like) for grad, like in zip(grads, (q, k, v), strict=True))


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
            requires=Requires(**claims, **more),
            design=Design(dsl="triton"),
            configs=_configs,
            summary=summary,
        )
        for name, op, run, more in kernels
    ]
