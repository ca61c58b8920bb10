"""For the checks that an op makes once: a GPU's or a CPU's usual dtype and compiler, operands, opcheck, comparisons."""

from __future__ import annotations

import math
from typing import Any

import torch


def usual_dtype(device: torch.device) -> torch.dtype:
    return torch.float16 if device.type == "cuda" else torch.float32


def backend(device: torch.device) -> str:
    """Inductor where it has its usual work; on a CPU it would need a C++ compiler, and the graph is checked without."""
    return "inductor" if device.type == "cuda" else "aot_eager"


def random(device: torch.device, *shape: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, device=device, generator=generator).to(usual_dtype(device)).requires_grad_(grad)


def opcheck(op: Any, calls: list[tuple[Any, ...]]) -> list[str]:
    found = []
    for call in calls:
        for name, outcome in torch.library.opcheck(op, call, raise_exception=False).items():
            if outcome != "SUCCESS":
                found.append(f"opcheck {name}: {outcome}")
    return found


def any_scale(op: Any, operands: list[torch.Tensor], how: dict[str, Any]) -> list[str]:
    """Any finite scale of an attention is right, negative ones and zero too, and so are its gradients."""
    found = []
    for scale in (-0.3, 0.0, 2.0):
        exact = [t.detach().double().requires_grad_() for t in operands]
        out, want = op(*operands, **how, scale=scale), op.reference(*exact, **how, scale=scale)
        found += [f"at scale {scale}: {text}" for text in off_with_gradients("qkv", out, want, operands, exact)]
    return found


def off_with_gradients(
    names: str, got: torch.Tensor, want: torch.Tensor, inputs: list[torch.Tensor], wanted_inputs: list[torch.Tensor]
) -> list[str]:
    """Of a result and of its gradients by each input."""
    grads = torch.autograd.grad(got, inputs, torch.ones_like(got))
    wanted = torch.autograd.grad(want, wanted_inputs, torch.ones_like(want))
    each = [off(f"d{name}", *pair) for name, *pair in zip(names, grads, wanted, strict=True)]
    return [*off("out", got, want), *(text for texts in each for text in texts)]


def off(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    tolerance = 4 * math.sqrt(torch.finfo(got.dtype).eps * 1e-3)
    got, want = got.detach().double(), want.detach().double()
    error = (got - want).norm() / max(float(want.norm()), 1.0)
    return [] if float(error) < tolerance else [f"{name} is off by {float(error):.3g}, relative to its norm"]
