"""FlashAttention-2 as built into torch: aligned bottom-right by itself; marks a row without keys by +inf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from registry import Reason
from registry.plugins.torch_attention.common import ANY_ORDER, HALVES

aten = torch.ops.aten
UNLIMITED = -1


def flash(q, k, v, *, causal, window, return_lse, scale, config):
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    sides = {} if window is None else {"window_size_left": left, "window_size_right": right}
    out, lse, *_ = aten._flash_attention_forward(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal and window is None,
        False,
        scale=scale,
        **sides,
    )
    if q.shape[2] > k.shape[2]:
        lse = lse.masked_fill(lse == math.inf, -math.inf)
    return out.transpose(1, 2), lse if return_lse else None


def flash_backward(grad_out, q, k, v, out, lse, *, causal, window, deterministic, scale, config):
    left, right = window if window is not None else (UNLIMITED, UNLIMITED)
    sides = {} if window is None else {"window_size_left": left, "window_size_right": right}
    if q.shape[2] > k.shape[2]:
        lse = lse.masked_fill(lse == -math.inf, math.inf)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    grads = aten._flash_attention_backward(
        grad_out.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        out.transpose(1, 2),
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal and window is None,
        seed,
        seed.new_empty(()),
        scale=scale,
        **sides,
    )
    return tuple(grad.transpose(1, 2) for grad in grads)


def _flash_rule(problem: Any, config: Any) -> Iterator[Reason]:
    """It takes a right side that is as long as the keys for unlimited, which early rows of a longer query are not; and
    an unlimited one beside a limited left one for as long as the keys."""
    left, right = problem.window if problem.window is not None else (UNLIMITED, UNLIMITED)
    if left != UNLIMITED and right == UNLIMITED and not problem.causal and problem.seqlen_q > problem.seqlen_k:
        # window=(40, -1) with 129 queries and 77 keys: row 0 is given 26 keys of 77.
        yield Reason(
            "semantics", "window", problem.window, f"seqlen_q <= seqlen_k ({problem.seqlen_k}), or a right side"
        )
    if problem.seqlen_k <= right < problem.seqlen_q - 1:
        yield Reason("semantics", "window", problem.window, f"right side < seqlen_k ({problem.seqlen_k})")


def _flash_backward_rule(problem: Any, config: Any) -> Iterator[Reason]:
    yield from _flash_rule(problem, config)
    if problem.window is not None and problem.seqlen_q > problem.seqlen_k:
        # window=(40, -1) with 2049 queries and 129 keys: it leaves out queries that see keys (dq 0, dk and dv short).
        allowed = f"<= seqlen_k ({problem.seqlen_k}) with a window"
        yield Reason("semantics", "seqlen_q", problem.seqlen_q, allowed)
    if problem.target.arch in ("sm86", "sm89", "sm120") and problem.head_dim > 192:
        yield Reason("range", "head_dim", problem.head_dim, f"..192 on {problem.target.arch}")


CLAIMS = dict(
    arch=("sm80+",),
    dtypes=HALVES,
    head_dim=(8, 256),
    head_dim_multiple=8,
    layouts=ANY_ORDER,
    causal=True,
    window=True,
    gqa=True,
    cross_length=True,
    deterministic=True,
    base_alignment=16,
    stride_alignment=16,
    rule=_flash_rule,
)
BACKWARD = {"rule": _flash_backward_rule}
