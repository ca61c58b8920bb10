"""What the conformance kit checks once per op: the torch boundary, and the answers to empty tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from registry.ops.attention.op import attention
from registry.ops.matmul.op import matmul

Check = Callable[[torch.device], list[str]]


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float16 if device.type == "cuda" else torch.float32


def _backend(device: torch.device) -> str:
    """Inductor where it has its usual work; on a CPU it would need a C++ compiler, and the graph is checked without."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def _random(device: torch.device, *shape: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, device=device, generator=generator).to(_dtype(device)).requires_grad_(grad)


def _qkv(device: torch.device, grad: bool = False) -> tuple[torch.Tensor, ...]:
    return tuple(_random(device, 2, heads, length, 64, grad=grad) for heads, length in ((4, 33), (2, 65), (2, 65)))


def _opcheck(op: Any, calls: list[tuple[Any, ...]]) -> list[str]:
    found = []
    for call in calls:
        for name, outcome in torch.library.opcheck(op, call, raise_exception=False).items():
            if outcome != "SUCCESS":
                found.append(f"opcheck {name}: {outcome}")
    return found


def _off(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    tolerance = 4 * math.sqrt(torch.finfo(got.dtype).eps * 1e-3)
    got, want = got.detach().double(), want.detach().double()
    off = (got - want).norm() / max(float(want.norm()), 1.0)
    return [] if float(off) < tolerance else [f"{name} is off by {float(off):.3g}, relative to its norm"]


def attention_opcheck(device: torch.device) -> list[str]:
    masks = (True, 0.125, -1, -1, 0.0)
    calls = [(*_qkv(device, grad), *masks, True, None) for grad in (False, True)]
    return _opcheck(torch.ops.registry.attention.default, calls)


def backward_opcheck(device: torch.device) -> list[str]:
    q, k, v = _qkv(device)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    call = (torch.ones_like(out), q, k, v, out, lse, None, True, 0.125, -1, -1, 0.0)
    return _opcheck(torch.ops.registry.attention_backward.default, [call])


def matmul_opcheck(device: torch.device) -> list[str]:
    dtype = _dtype(device)
    calls = []
    for grad in (False, True):
        a, b = _random(device, 48, 32, grad=grad), _random(device, 32, 16, grad=grad)
        calls.append((a, b, _random(device, 16, grad=grad), "" if grad else "relu", dtype, None, None, None))
    return _opcheck(torch.ops.registry.matmul.default, calls)


def attention_compile(device: torch.device) -> list[str]:
    """Forward and gradients of a compiled call, fullgraph, at two lengths."""
    found = []
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True, dynamic=True, backend=_backend(device)
    )
    for length in (64, 96):
        eager, traced = ([_random(device, 1, 2, length, 32, grad=True) for _ in range(3)] for _ in range(2))
        want, got = attention(*eager, causal=True), compiled(*traced)
        found += _off("out", got, want)
        want.backward(torch.ones_like(want))
        got.backward(torch.ones_like(got))
        for name, a, b in zip("qkv", traced, eager, strict=True):
            assert a.grad is not None and b.grad is not None
            found += _off(f"d{name}", a.grad, b.grad)
    return found


def matmul_compile(device: torch.device) -> list[str]:
    found = []
    compiled = torch.compile(
        lambda a, b: matmul(a, b, activation="relu"), fullgraph=True, dynamic=True, backend=_backend(device)
    )
    for rows in (32, 48):
        a, b = _random(device, rows, 64), _random(device, 64, 16)
        found += _off("out", compiled(a, b), matmul(a, b, activation="relu"))
    return found


def attention_empty(device: torch.device) -> list[str]:
    """Nothing to attend over gives zeros and -inf; no rows give no rows."""
    found = []
    for b, h, sq, sk in ((0, 2, 4, 4), (2, 2, 0, 4), (2, 2, 4, 0), (2, 0, 4, 4)):
        q, k, v = (torch.ones(b, h, s, 16, device=device, dtype=_dtype(device)) for s in (sq, sk, sk))
        out, lse = attention(q, k, v, return_lse=True)
        if out.shape != q.shape or lse.shape != q.shape[:3] or lse.dtype != torch.float32:
            found.append(f"b={b} h={h} sq={sq} sk={sk}: shapes {tuple(out.shape)}, {tuple(lse.shape)}")
        elif bool(out.any()) or bool((lse != -math.inf).any()):
            found.append(f"b={b} h={h} sq={sq} sk={sk}: not zeros and -inf")
    return found


def backward_empty(device: torch.device) -> list[str]:
    found = []
    for sq, sk in ((0, 4), (4, 0)):
        q, k, v = (torch.ones(2, 2, s, 16, device=device, dtype=_dtype(device)).requires_grad_() for s in (sq, sk, sk))
        out = attention(q, k, v)
        for name, grad in zip("qkv", torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), strict=True):
            if bool(grad.any()):
                found.append(f"sq={sq} sk={sk}: d{name} is not zero")
    return found


def matmul_empty(device: torch.device) -> list[str]:
    """A sum over nothing is zero, and still gets its bias."""
    found = []
    bias = torch.full((3,), 2.0, device=device, dtype=_dtype(device))
    for m, k in ((0, 4), (4, 0), (0, 0)):
        a, b = (torch.ones(shape, device=device, dtype=_dtype(device)) for shape in ((m, k), (k, 3)))
        for given, value in ((None, 0.0), (bias, 2.0)):
            result = matmul(a, b, bias=given)
            if result.shape != (m, 3) or (k == 0 and bool((result != value).any())):
                found.append(f"m={m} k={k}: {tuple(result.shape)}, {result.flatten()[:3].tolist()}")
    return found


def attention_scale(device: torch.device) -> list[str]:
    """Any finite scale is right, negative ones and zero too, and so are its gradients."""
    found = []
    for scale in (-0.3, 0.0, 2.0):
        operands = _qkv(device, grad=True)
        exact = [t.detach().double().requires_grad_() for t in operands]
        out, want = (
            attention(*operands, causal=True, scale=scale),
            attention.reference(*exact, causal=True, scale=scale),
        )
        found += _off(f"out at scale {scale}", out, want)
        grads = torch.autograd.grad(out, operands, torch.ones_like(out))
        wanted = torch.autograd.grad(want, exact, torch.ones_like(want))
        for name, grad, right in zip("qkv", grads, wanted, strict=True):
            found += _off(f"d{name} at scale {scale}", grad, right)
    return found


CHECKS: dict[str, dict[str, Check]] = {
    "attention": {
        "opcheck": attention_opcheck,
        "torch.compile": attention_compile,
        "empty tensors": attention_empty,
        "any finite scale": attention_scale,
    },
    "attention_backward": {"opcheck": backward_opcheck, "empty tensors": backward_empty},
    "matmul": {"opcheck": matmul_opcheck, "torch.compile": matmul_compile, "empty tensors": matmul_empty},
}
"""By op: what is checked, once."""
