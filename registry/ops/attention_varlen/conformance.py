"""What attention_varlen and its gradients promise whatever the variant; the kits hold each variant to the rest."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from registry.errors import InvalidArgument
from registry.ops.attention_varlen.conformance_backward import VarlenBackwardKit
from registry.ops.attention_varlen.conformance_forward import VarlenKit
from registry.ops.attention_varlen.op import attention_varlen
from registry.ops.parts.op_checks import any_scale, backend, off, off_with_gradients, opcheck, random, usual_dtype

QUERIES, KEYS = (5, 0, 33, 1), (9, 4, 33, 0)


def _batch(device: torch.device, grad: bool = False, sinks: bool = False) -> tuple[list[Any], dict[str, Any]]:
    """(q, k, v) packed, and the arguments that go with them."""
    tensors = [random(device, sum(n), h, 64, grad=grad) for n, h in ((QUERIES, 4), (KEYS, 2), (KEYS, 2))]
    how: dict[str, Any] = {f"cu_seqlens_{x}": _starts(device, n) for x, n in (("q", QUERIES), ("k", KEYS))}
    how |= {"max_seqlen_q": max(QUERIES), "max_seqlen_k": max(KEYS), "causal": True}
    if sinks:
        how["sinks"] = random(device, 4).detach().float().requires_grad_(grad)
    return tensors, how


def _starts(device: torch.device, lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def _call(tensors: list[Any], how: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of the torch op."""
    optional = (how["cu_seqlens_k"], None, None, how.get("sinks"), None, None, None)
    return (*tensors, how["cu_seqlens_q"], *optional, max(QUERIES), max(KEYS), True, 0.125, -1, -1, 0.0, True, None)


def forward_opcheck(device: torch.device) -> list[str]:
    calls = [_call(*_batch(device, grad, sinks)) for grad, sinks in ((False, False), (True, False), (True, True))]
    return opcheck(torch.ops.registry.attention_varlen.default, calls)


def backward_opcheck(device: torch.device) -> list[str]:
    (q, k, v), how = _batch(device)
    out, lse = attention_varlen(q, k, v, **how, return_lse=True)
    starts = (how["cu_seqlens_q"], how["cu_seqlens_k"])
    call = (torch.ones_like(out), q, k, v, out, lse, *starts, None, None, None, max(QUERIES), max(KEYS), True, 0.125)
    return opcheck(torch.ops.registry.attention_varlen_backward.default, [(*call, -1, -1, 0.0)])


def forward_compile(device: torch.device) -> list[str]:
    """Forward and gradients of a compiled call, fullgraph, sinks among them."""

    def call(q: Any, k: Any, v: Any, how: dict[str, Any]) -> Any:
        return attention_varlen(q, k, v, **how)

    compiled: Any = torch.compile(call, fullgraph=True, backend=backend(device))
    (eager, how), (traced, same) = (_batch(device, grad=True, sinks=True) for _ in range(2))
    want, got = attention_varlen(*eager, **how), compiled(*traced, same)
    return off_with_gradients("qkvs", got, want, [*traced, same["sinks"]], [*eager, how["sinks"]])


def forward_empty(device: torch.device) -> list[str]:
    """Nothing to attend over gives zeros and -inf, or the sink; no rows give no rows."""
    found = []
    sinks = torch.tensor([0.5, -1.0], device=device)
    for queries, keys in (((0, 0), (3, 4)), ((2, 3), (0, 0)), ((), ())):
        q, k, v = (torch.ones(sum(n), 2, 16, device=device, dtype=usual_dtype(device)) for n in (queries, keys, keys))
        how: dict[str, Any] = {"cu_seqlens_q": _starts(device, queries), "cu_seqlens_k": _starts(device, keys)}
        how |= {"max_seqlen_q": max(queries, default=0), "max_seqlen_k": max(keys, default=0)}
        for given in (None, sinks):
            out, lse = attention_varlen(q, k, v, **how, sinks=given, return_lse=True)
            right = torch.full((2,), -math.inf, device=device) if given is None else given
            if out.shape != q.shape or lse.shape != (2, q.shape[0]) or lse.dtype != torch.float32:
                found.append(f"{queries} over {keys}: shapes {tuple(out.shape)}, {tuple(lse.shape)}")
            elif bool(out.any()) or bool((lse != right[:, None]).any()):
                found.append(f"{queries} over {keys}: not zeros, or an LSE that is none of nothing")
    return found


def backward_empty(device: torch.device) -> list[str]:
    found = []
    for queries, keys in (((0, 0), (3, 4)), ((2, 3), (0, 0))):
        q, k, v = (
            torch.ones(sum(n), 2, 16, device=device, dtype=usual_dtype(device)).requires_grad_()
            for n in (queries, keys, keys)
        )
        how: dict[str, Any] = {"cu_seqlens_q": _starts(device, queries), "cu_seqlens_k": _starts(device, keys)}
        out = attention_varlen(q, k, v, **how, max_seqlen_q=max(queries), max_seqlen_k=max(keys))
        for name, grad in zip("qkv", torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), strict=True):
            if bool(grad.any()):
                found.append(f"{queries} over {keys}: d{name} is not zero")
    return found


def schedules(device: torch.device) -> list[str]:
    """A schedule serves calls of its step, of other masks too, and refuses those of another step."""
    (q, k, v), how = _batch(device)
    plan = attention_varlen.schedule(q, k, v, **how)
    found = []
    masks: tuple[dict[str, Any], ...] = ({}, {"causal": False}, {"window": (7, 0)})
    for mask in masks:
        given = {**how, **mask}
        found += off(str(mask), attention_varlen(q, k, v, **given, plan=plan), attention_varlen(q, k, v, **given))
    try:
        attention_varlen(q, k, v, **how | {"max_seqlen_q": max(QUERIES) + 1}, plan=plan)
    except InvalidArgument:
        return found
    return [*found, "a schedule of other maxima was taken"]


VarlenKit.checks = {
    "opcheck": forward_opcheck,
    "torch.compile": forward_compile,
    "empty tensors": forward_empty,
    "any finite scale": lambda device: any_scale(attention_varlen, *_batch(device, grad=True)),
    "schedules": schedules,
}
VarlenBackwardKit.checks = {"opcheck": backward_opcheck, "empty tensors": backward_empty}
BY_OP = {"attention_varlen": VarlenKit(), "attention_varlen_backward": VarlenBackwardKit()}
