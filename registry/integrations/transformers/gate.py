"""act(gate) * up where gradients are wanted: one pass over memory forward and one backward; torch takes two and three.

Products that end with their gate throw away what a gradient needs, so training has them apart, and this between them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 2048
_TORCHS = {"silu": torch.nn.functional.silu, "relu": torch.relu}


@triton.jit
def _gate(gate, up, out, count, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, inside, 0.0).to(tl.float32)
    u = tl.load(up + at, inside, 0.0).to(tl.float32)
    value = g * tl.sigmoid(g) if SILU else tl.where(g <= 0.0, 0.0, g)
    tl.store(out + at, (value * u).to(out.dtype.element_ty), inside)


@triton.jit
def _gradients(grad, gate, up, d_gate, d_up, count, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, inside, 0.0).to(tl.float32)
    g = tl.load(gate + at, inside, 0.0).to(tl.float32)
    u = tl.load(up + at, inside, 0.0).to(tl.float32)
    if SILU:
        share = tl.sigmoid(g)
        value, slope = g * share, share * (1.0 + g * (1.0 - share))
    else:
        value, slope = tl.where(g <= 0.0, 0.0, g), tl.where(g <= 0.0, 0.0, 1.0)
    tl.store(d_gate + at, (d * u * slope).to(d_gate.dtype.element_ty), inside)
    tl.store(d_up + at, (d * value).to(d_up.dtype.element_ty), inside)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        out = torch.empty_like(gate)
        _launch(_gate, activation, gate, up, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # whoever differentiates this again follows torch's own functions
            value, *rest = torch.func.vjp(_TORCHS[ctx.activation], gate)
            return rest[0](grad * up)[0], grad * value, None
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        _launch(_gradients, ctx.activation, grad.contiguous(), gate, up, d_gate, d_up)
        return d_gate, d_up, None


def _launch(kernel: Any, activation: str, *tensors: torch.Tensor) -> None:
    count = tensors[0].numel()
    if count:
        with torch.cuda.device_of(tensors[0]):
            kernel[(triton.cdiv(count, BLOCK),)](*tensors, count, SILU=activation == "silu", BLOCK=BLOCK, num_warps=8)


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up of dense tensors of one shape, for "silu" and "relu", rounded once."""
    return _Gated.apply(gate, up, activation)  # type: ignore[no-any-return]
