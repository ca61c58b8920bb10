"""What attention and its gradients promise whatever the variant, and the kits that hold each variant to the rest."""

from __future__ import annotations

import math

import torch

from registry.ops.attention.conformance_backward import BackwardKit
from registry.ops.attention.conformance_forward import AttentionKit
from registry.ops.attention.op import attention
from registry.ops.parts.op_checks import any_scale, backend, off_with_gradients, opcheck, random, usual_dtype


def _qkv(device: torch.device, grad: bool = False) -> tuple[torch.Tensor, ...]:
    return tuple(random(device, 2, heads, length, 64, grad=grad) for heads, length in ((4, 33), (2, 65), (2, 65)))


def forward_opcheck(device: torch.device) -> list[str]:
    """Of both memory orders, with few and with many features."""
    plain, crowded = (False, 0.125, -1, -1, 0.0), (True, 0.25, 3, 0, 5.0)
    calls = [(*_qkv(device, grad), *masks, True, None) for grad in (False, True) for masks in (plain, crowded)]
    turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in _qkv(device))
    return opcheck(torch.ops.registry.attention.default, [*calls, (*turned, *plain, False, None)])


def backward_opcheck(device: torch.device) -> list[str]:
    q, k, v = _qkv(device)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    call = (torch.ones_like(out), q, k, v, out, lse, None, True, 0.125, -1, -1, 0.0)
    return opcheck(torch.ops.registry.attention_backward.default, [call])


def forward_compile(device: torch.device) -> list[str]:
    """Forward and gradients of a compiled call, fullgraph, at two lengths."""
    found = []
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=backend(device)
    )
    for length in (64, 96):
        eager, traced = ([random(device, 1, 2, length, 32, grad=True) for _ in range(3)] for _ in range(2))
        found += off_with_gradients("qkv", compiled(*traced), attention(*eager, causal=True), traced, eager)
    return found


def forward_empty(device: torch.device) -> list[str]:
    """Nothing to attend over gives zeros and -inf; no rows give no rows."""
    found = []
    for b, h, sq, sk in ((0, 2, 4, 4), (2, 2, 0, 4), (2, 2, 4, 0), (2, 0, 4, 4)):
        q, k, v = (torch.ones(b, h, s, 16, device=device, dtype=usual_dtype(device)) for s in (sq, sk, sk))
        out, lse = attention(q, k, v, return_lse=True)
        if out.shape != q.shape or lse.shape != q.shape[:3] or lse.dtype != torch.float32:
            found.append(f"b={b} h={h} sq={sq} sk={sk}: shapes {tuple(out.shape)}, {tuple(lse.shape)}")
        elif bool(out.any()) or bool((lse != -math.inf).any()):
            found.append(f"b={b} h={h} sq={sq} sk={sk}: not zeros and -inf")
    return found


def backward_empty(device: torch.device) -> list[str]:
    found = []
    for sq, sk in ((0, 4), (4, 0)):
        q, k, v = (
            torch.ones(2, 2, s, 16, device=device, dtype=usual_dtype(device)).requires_grad_() for s in (sq, sk, sk)
        )
        out = attention(q, k, v)
        for name, grad in zip("qkv", torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), strict=True):
            if bool(grad.any()):
                found.append(f"sq={sq} sk={sk}: d{name} is not zero")
    return found


AttentionKit.checks = {
    "opcheck": forward_opcheck,
    "torch.compile": forward_compile,
    "empty tensors": forward_empty,
    "any finite scale": lambda device: any_scale(attention, list(_qkv(device, grad=True)), {"causal": True}),
}
BackwardKit.checks = {"opcheck": backward_opcheck, "empty tensors": backward_empty}
BY_OP = {"attention": AttentionKit(), "attention_backward": BackwardKit()}
