"""torch's own attention kernels as variants: FlashAttention-2, cuDNN, memory-efficient, the CPU kernel, and plain math.

They are reached through the aten ops, which give the LSE and the alignment that `scaled_dot_product_attention` hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad

import registry
from registry import Design, Reason, Requires, Variant, hookimpl
from registry.ops.attention.oracle import visible
from registry.ops.attention.outputs import new_out

aten = torch.ops.aten
HALVES = ("float16", "bfloat16")
ANY_ORDER = ("bhsd", "bshd", "strided")
UNLIMITED = -1


def _blind_rows(problem: Any) -> bool:
    """Whether some query may see no key: only where a mask cuts the right side and queries outnumber keys."""
    cut_right = problem.causal or (problem.window is not None and problem.window[1] != UNLIMITED)
    return bool(cut_right and problem.seqlen_q > problem.seqlen_k)


def _no_blind_rows(problem: Any, config: Any) -> Iterator[Reason]:
    if _blind_rows(problem):
        yield Reason(
            "semantics", "seqlen_q", problem.seqlen_q, f"<= seqlen_k ({problem.seqlen_k}): no rows without keys"
        )


# --- FlashAttention-2 (aligned bottom-right by itself; marks a row without keys by +inf) --------------------------


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


# --- cuDNN (aligned top-left, which is the same for square problems only) -----------------------------------------


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


# --- memory-efficient (mask type 2 is aligned bottom-right; its LSE is padded to 32 rows) -------------------------

NO_MASK, BOTTOM_RIGHT, LSE_ROWS = 0, 2, 32


def efficient(q, k, v, *, causal, return_lse, scale, config):
    out, lse, *_ = aten._efficient_attention_forward(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        None,
        None,
        None,
        None,
        0.0,
        BOTTOM_RIGHT if causal else NO_MASK,
        return_lse,
        scale=scale,
    )
    return out.transpose(1, 2), lse[:, :, : q.shape[2]].contiguous() if return_lse else None


def efficient_backward(grad_out, q, k, v, out, lse, *, causal, scale, config):
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    rows = -q.shape[2] % LSE_ROWS
    out = out.transpose(1, 2).contiguous()  # it reads `out` as dense [B, S, H, D], whatever the strides say
    grads = aten._efficient_attention_backward(
        grad_out.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        None,
        out,
        None,
        None,
        q.shape[2],
        k.shape[2],
        pad(lse, (0, rows), value=math.inf),
        0.0,
        seed,
        seed,
        BOTTOM_RIGHT if causal else NO_MASK,
        False,
        scale=scale,
    )
    return tuple(grad.transpose(1, 2) for grad in grads[:3])


# --- the CPU kernel (aligned top-left: other alignments and windows go in as a mask) ------------------------------


def _cpu_mask(q, k, causal, window):
    """(is_causal, mask) for aten, additive in q's dtype."""
    if not causal and window is None:
        return False, None
    if window is None and q.shape[2] == k.shape[2]:
        return True, None
    row = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2])
    column = torch.arange(k.shape[2])[None, :]
    left, right = window if window is not None else (UNLIMITED, 0)
    hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool)
    if left != UNLIMITED:
        hidden = hidden | (column < row - left)
    if right != UNLIMITED:
        hidden = hidden | (column > row + right)
    return False, torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -math.inf)


def _for_each_query_head(q, *tensors):
    """k and v with a head for each of q's: torch's backward of groups adds them up in q's dtype, which costs digits."""
    group = q.shape[1] // tensors[0].shape[1]
    return tensors if group == 1 else tuple(t.repeat_interleave(group, dim=1) for t in tensors)


def cpu(q, k, v, *, causal, window, return_lse, scale, config):
    is_causal, mask = _cpu_mask(q, k, causal, window)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, lse.to(torch.float32).contiguous() if return_lse else None


def cpu_backward(grad_out, q, k, v, out, lse, *, causal, window, deterministic, scale, config):
    heads, (k, v) = k.shape[1], _for_each_query_head(q, k, v)
    is_causal, mask = _cpu_mask(q, k, causal, window)
    if q.dtype is torch.float64:  # the LSE that was kept is a float32, and so would be the gradients' accuracy
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        lse = forward(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[1]
    lse = lse.to(_math_dtype(q.dtype))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    if heads == k.shape[1]:
        return dq, dk, dv
    return dq, *(t.unflatten(1, (heads, -1)).sum(2) for t in (dk, dv))


# --- plain math: slow, large, and able to do everything -----------------------------------------------------------


def _math_dtype(dtype):
    return torch.float64 if dtype is torch.float64 else torch.float32


def math_attention(q, k, v, *, causal, window, softcap, return_lse, scale, config):
    with torch.no_grad():
        out, lse = registry.attention.reference(
            q,
            k,
            v,
            causal=causal,
            window=window,
            softcap=softcap,
            scale=scale,
            return_lse=True,
            dtype=_math_dtype(q.dtype),
        )
    return out.to(q.dtype), lse.float() if return_lse else None


def math_backward(grad_out, q, k, v, out, lse, *, causal, window, softcap, deterministic, grad_lse, scale, config):
    """By the formula, since autograd is off where compilers call. Out and LSE are computed again, unrounded."""
    dtype, group = _math_dtype(q.dtype), q.shape[1] // k.shape[1]
    grad, q_, k_, v_ = (t.to(dtype) for t in (grad_out, q, k, v))
    k_, v_ = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (k_, v_))
    scores = torch.matmul(q_, k_.mT) * scale
    slope = scale
    if softcap:
        capped = torch.tanh(scores / softcap)
        scores, slope = capped * softcap, (1.0 - capped.square()) * scale
    seen = visible(q.shape[2], k.shape[2], causal, window, q.device)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores, dim=-1)
    if seen is not None:
        weights = weights.masked_fill(~seen, 0.0)  # NaN in rows without keys
    terms = torch.matmul(grad, v_.mT)
    terms = terms - (weights * terms).sum(-1, keepdim=True)
    if grad_lse is not None:
        terms = terms + grad_lse.to(dtype).unsqueeze(-1)
    terms = terms * weights * slope
    found = (torch.matmul(terms, k_), torch.matmul(terms.mT, q_), torch.matmul(weights.mT, grad))
    grouped = (t.unflatten(1, (-1, group)).sum(2) if i and group > 1 else t for i, t in enumerate(found))
    return tuple(new_out(like, like).copy_(t) for like, t in zip((q, k, v), grouped, strict=True))


@hookimpl
def registry_variants():
    design = Design(dsl="cuda")
    flash_requires = dict(
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
    cudnn_requires = dict(
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
    efficient_requires = dict(
        arch=("sm70+",),
        dtypes=(*HALVES, "float32"),
        head_dim=(8, 512),
        head_dim_multiple=8,
        head_dim_v=(8, 512),
        head_dim_v_multiple=8,
        layouts=ANY_ORDER,
        causal=True,
        cross_length=True,
        ieee=True,
        rule=_no_blind_rows,
        base_alignment=16,
        stride_alignment=16,
        deterministic=True,
    )
    cpu_requires = dict(
        arch=("cpu",),
        dtypes=(*HALVES, "float32", "float64"),
        head_dim=(1, 2**16),
        layouts=ANY_ORDER,
        causal=True,
        window=True,
        gqa=True,
        cross_length=True,
        deterministic=True,
        ieee=True,
        rule=_no_blind_rows,
    )
    math_requires = dict(
        arch=("any",),
        dtypes=(*HALVES, "float32", "float64"),
        head_dim=(1, 2**16),
        head_dim_v=(1, 2**16),
        layouts=ANY_ORDER,
        unit_inner_stride=False,
        causal=True,
        window=True,
        softcap=True,
        any_softcap=True,
        gqa=True,
        cross_length=True,
        deterministic=True,
        ieee=True,
    )
    flash_only = {"rule": _flash_backward_rule}
    cudnn_only = {"rule": _cudnn_backward_rule, "deterministic": False}
    kernels = (
        ("torch_flash", flash, flash_backward, flash_requires, flash_only, "FlashAttention-2 as built into torch"),
        ("torch_cudnn", cudnn, cudnn_backward, cudnn_requires, cudnn_only, "cuDNN's fused attention"),
        (
            "torch_efficient",
            efficient,
            efficient_backward,
            efficient_requires,
            {"deterministic": False},
            "xFormers' memory-efficient attention as built into torch",
        ),
        ("torch_cpu", cpu, cpu_backward, cpu_requires, {}, "torch's blocked CPU kernel"),
        (
            "torch_math",
            math_attention,
            math_backward,
            math_requires,
            {"grad_lse": True},
            "plain torch operations: does everything, stores all scores",
        ),
    )
    found = []
    for name, forward, backward, requires, backward_only, summary in kernels:
        made = Design(dsl="aten") if name in ("torch_cpu", "torch_math") else design
        found.append(
            Variant(
                name,
                op="attention",
                run=forward,
                requires=Requires(**requires, lse=True),
                design=made,
                traceable=name != "torch_math",  # its oracle is no graph of a few operations
                builds_each_size=name == "torch_cudnn",
                summary=summary,
            )
        )
        found.append(
            Variant(
                f"{name}_backward",
                op="attention_backward",
                run=backward,
                design=made,
                summary=f"{summary}: gradients",
                requires=Requires(**{**requires, **backward_only}, lse=True),
            )
        )
    return found
