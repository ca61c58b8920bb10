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

import registry
from registry import Design, NoLegalVariant, Reason, Requires, Variant, hookimpl
from registry.ops.attention.outputs import new_out
from registry.ops.attention.problem import AttentionBackwardProblem, AttentionProblem

MULTIPLE, SMALLEST = 8, 16
"""What the fast kernels want of a head dim."""
MOST_WITH_GROUPS = 256
"""The largest head dim for which some of them take groups of heads."""
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


def _copy(x: torch.Tensor, heads: int = 0) -> torch.Tensor:
    """[B, H, S, D] padded with zeroes to a head dim that kernels take, and with its heads repeated to so many."""
    b, h, s, d = x.shape
    group = heads // h if heads else 1
    made = x.new_empty(b, h, group, s, _wide(d))
    made[..., :d] = x.unsqueeze(2)
    made[..., d:] = 0
    return made.flatten(1, 2)


def _heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    """To how many heads k and v are repeated; 0 where they stay as they are."""
    return q.shape[1] if q.shape[1] != k.shape[1] and max(q.shape[3], v.shape[3]) > MOST_WITH_GROUPS else 0


def _narrow(made: torch.Tensor, like: torch.Tensor, width: torch.Tensor) -> torch.Tensor:
    """Back to the head dim of `width`, in the memory order of `like`, sums over repeated heads."""
    made = made[..., : width.shape[3]]
    if made.shape[1] != like.shape[1]:
        made = made.unflatten(1, (like.shape[1], -1)).sum(2)
    return new_out(like, width).copy_(made)


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
        rule=_rule,
    )
    summary = "a copy in a head dim that fast kernels take, and the fastest of them on it"
    kernels = (
        ("torch_padded", "attention", attention, {}),
        ("torch_padded_backward", "attention_backward", backward, {"grad_lse": True}),
    )
    return [
        Variant(
            name,
            op=op,
            run=run,
            requires=Requires(**claims, **more),
            design=Design(dsl="aten"),
            configs=_configs,
            summary=summary,
        )
        for name, op, run, more in kernels
    ]
