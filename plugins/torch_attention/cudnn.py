"""cuDNN's fused attention: aligned top-left, which is the same for square problems only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from registry import Reason
from registry.plugins.torch_attention.common import ANY_ORDER, HALVES

aten = torch.ops.aten


def cudnn(q, k, v, *, causal, return_lse, scale, config):
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, return_lse, 0.0, causal, False, scale=scale)
    return out, lse.squeeze(-1) if return_lse else None


def cudnn_backward(grad_out, q, k, v, out, lse, *, causal, scale, config):
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        seed,
        seed,
        None,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=scale,
    )


def _cudnn_rule(problem: Any, config: Any) -> Iterator[Reason]:
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        yield Reason("semantics", "causal", "aligned bottom-right", "causal only where seqlen_q == seqlen_k (top-left)")
    if max(problem.head_dim, problem.head_dim_v) > 128 and problem.target.arch != "sm90":
        yield Reason("range", "head_dim", max(problem.head_dim, problem.head_dim_v), f"..128 on {problem.target.arch}")


def _cudnn_forward_rule(problem: Any, config: Any) -> Iterator[Reason]:
    yield from _cudnn_rule(problem, config)
    if problem.head_dim_v != problem.head_dim:
        # torch lays such a result out in the order of q's strides, in which one of 0 comes before that of the columns.
        for q in problem.operands[:1]:
            if any(stride == 0 and size > 1 for size, stride in zip(q.shape, q.strides, strict=True)):
                allowed = "none of 0 where head_dim_v is another"
                yield Reason("layout", "strides", q.strides, allowed, "q.contiguous()", operand="q")


def _cudnn_backward_rule(problem: Any, config: Any) -> Iterator[Reason]:
    yield from _cudnn_rule(problem, config)
    if problem.seqlen_q == problem.seqlen_k == 1:
        yield Reason("range", "seqlen_q", 1, "more than one query or key: cuDNN has no backward for 1 x 1")


CLAIMS = dict(
    arch=("sm80+",),
    dtypes=HALVES,
    head_dim=(8, 256),
    head_dim_multiple=8,
    head_dim_v=(8, 256),
    head_dim_v_multiple=8,
    layouts=ANY_ORDER,
    causal=True,
    gqa=True,
    cross_length=True,
    rule=_cudnn_forward_rule,
    base_alignment=16,
    stride_alignment=16,
    deterministic=True,
)
BACKWARD = {"rule": _cudnn_backward_rule, "deterministic": False}
