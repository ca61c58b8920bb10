"""The conformance kit's knowledge of attention's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.dispatch.scope import use
from registry.ops.attention.backward import attention_backward
from registry.ops.attention.conformance_forward import (
    AttentionKit,
    _fill,
    _repeat,
    model_scores,
    model_weights,
    named_order_complaints,
    order_complaints,
    strides_in,
)
from registry.ops.attention.op import attention
from registry.ops.attention.outputs import new_out
from registry.ops.parts.attention_kit import noise_of, slack_of, typical
from registry.ops.parts.judging import Expected, Yardstick
from registry.ops.parts.kit import Results, Sample, Spec, dense_complaints
from registry.ops.parts.memory import Arena, Slot, Strides, dense_strides
from registry.ops.parts.rounding import as_multiplied, floor_of, rounded_to
from registry.ops.parts.sizes import Size


class BackwardKit(AttentionKit):
    def axes(self, requires: Requires, size: Size) -> dict[str, list[Any]]:
        found = super().axes(requires, size) | {"lse": [True]}
        found["grad_lse"] = [False, True] if requires.grad_lse else [False]
        found["grad_memory"] = ["", "bhsd", "bshd"] if "strided" in requires.layouts else [""]
        found["saved"] = ["", "turned"] if "strided" in requires.layouts else [""]
        return found

    def outside(self, requires: Requires) -> dict[str, Spec]:
        found = super().outside(requires)
        return found if requires.grad_lse else found | {"grad_lse": {"grad_lse": True}}

    def make(self, spec: Spec, device: torch.device, seed: int) -> Sample:
        forward = super().make(spec | {"lse": True}, device, seed)
        q, k, v = forward.tensors
        dense = new_out(q.to("meta"), v.to("meta"))
        shape, dtype = tuple(dense.shape), q.dtype
        kept = dense.stride() if not spec["saved"] else _other_order(shape, dense.stride())
        plain = spec["memory"] in ("fused", "offset", "mixed", "expanded", "shared", "latent")
        style = spec["grad_memory"] or ("bhsd" if plain else spec["memory"])
        shift = max(spec["base_alignment"], dtype.itemsize) if spec["memory"] == "offset" else 0
        arenas = {
            "grad_out": Arena({"grad_out": Slot(shape, strides_in(style, shape, dtype))}, dtype, device, shift),
            "out": Arena({"out": Slot(shape, kept)}, dtype, device),
            "lse": Arena({"lse": Slot(shape[:3], dense_strides(shape[:3]))}, torch.float32, device),
        }
        if spec["grad_lse"]:
            batch, heads, length = shape[:3]  # autograd gives one in the memory order of what the LSE became
            strides = (heads * length, 1, heads) if style == "bshd" else dense_strides(shape[:3])
            arenas["grad_lse"] = Arena({"grad_lse": Slot((batch, heads, length), strides)}, torch.float32, device)
        grad_out, out, lse = (arenas[name].views[name] for name in ("grad_out", "out", "lse"))
        grad_lse = arenas["grad_lse"].views["grad_lse"] if spec["grad_lse"] else None
        scale = forward.launch_arguments["scale"]
        arguments = {key: forward.arguments[key] for key in ("causal", "window", "softcap")}
        arguments |= {"scale": scale, "grad_lse": grad_lse}
        if device.type != "meta":
            generator = torch.Generator(device).manual_seed(seed + 1)
            for tensor in (grad_out,) if grad_lse is None else (grad_out, grad_lse):
                _fill(tensor, 1.0, generator)
            exact, exact_lse = attention.reference(q, k, v, **forward.arguments | {"return_lse": True})
            out.copy_(exact)
            lse.copy_(exact_lse)
        tensors = (grad_out, q, k, v, out, lse)
        launch = {"scale": scale, "grad_lse": grad_lse}
        return Sample(tensors, arguments, launch, forward.arenas | arenas)

    def launch(self, launch: Callable[..., Any], sample: Sample) -> Results:
        return dict(zip(("dq", "dk", "dv"), launch(*sample.tensors, **sample.launch_arguments), strict=True))

    def front_door(self, variant: str, sample: Sample) -> Results:
        """Gradients as autograd finds them, behind whichever forward is fastest."""
        grad_out, *operands = sample.tensors[:4]
        arguments = dict(sample.arguments)
        grad_lse = arguments.pop("grad_lse")
        with torch.enable_grad(), use(variant):
            leaves = [t.detach().requires_grad_() for t in operands]
            out, lse = attention(*leaves, **arguments, return_lse=True)
            results, grads = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
            return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(results, leaves, grads), strict=True))

    def form(self, sample: Sample, results: Results) -> list[str]:
        found, operands = (
            dense_complaints(results, sample),
            dict(zip(("dq", "dk", "dv"), sample.tensors[1:4], strict=True)),
        )
        named = (named_order_complaints(name, result, operands[name]) for name, result in results.items())
        return [*found, *(text for texts in named for text in texts)]

    def order(self, sample: Sample, results: Results) -> list[str]:
        operands = zip("qkv", sample.tensors[1:4], strict=True)
        return [text for of, one in operands for text in order_complaints(f"d{of}", results.get(f"d{of}"), of, one)]

    def expected(self, sample: Sample) -> list[Expected]:
        grad_out, q, k, v, *_ = sample.tensors
        arguments = sample.arguments
        wanted = attention_backward.reference(grad_out, q, k, v, **arguments)
        models, naturals, noise = _model(sample)
        rows = q.shape[:3].numel()  # of which each has one delta, of the output as it was rounded, in dq and dk
        alone = {"dq": rows, "dk": rows}
        return [
            Expected(
                name,
                want,
                Yardstick(model, slack_of(noise, natural, q.dtype), floor_of(q.dtype), alone=alone.get(name)),
                q.dtype,
            )
            for name, want, model, natural in zip(("dq", "dk", "dv"), wanted, models, naturals, strict=True)
        ]


def _other_order(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Of a dense output, as a forward of others may save it: in the named order that q does not have."""
    bhsd, bshd = (strides_in(order, shape, torch.float32) for order in ("bhsd", "bshd"))
    return bshd if strides == bhsd else bhsd


def _model(sample: Sample) -> tuple[list[torch.Tensor], list[float], float]:
    """Gradients rounded as a kernel rounds them; typical magnitudes of their terms; the noise of the arithmetic."""
    grad_out, q, k, v, out, lse = sample.tensors
    dtype, arguments, scale = q.dtype, sample.arguments, sample.arguments["scale"]
    scores, seen, capped = model_scores(q, k, arguments)
    weights = model_weights(scores, seen, torch.where(torch.isfinite(lse), lse, 0.0))
    g, wide_q = as_multiplied(grad_out, dtype), as_multiplied(q, dtype)
    wide_k, wide_v = (as_multiplied(_repeat(t, q), dtype) for t in (k, v))
    product = g @ wide_v.mT
    delta = (grad_out.to(g.dtype) * out.to(g.dtype)).sum(-1, keepdim=True)
    if arguments["grad_lse"] is not None:
        delta = delta - arguments["grad_lse"][..., None]
    slope = 1.0 if capped is None else 1.0 - capped.square()
    scores_grad = as_multiplied(weights * (product - delta) * slope, dtype)
    sizes = weights * (product.abs() + delta.abs())
    weights_in = as_multiplied(weights, dtype)
    exact = (scores_grad @ wide_k * scale, scores_grad.mT @ wide_q * scale, weights_in.mT @ g)
    terms = (sizes @ wide_k.abs() * scale, sizes.mT @ wide_q.abs() * scale, weights.mT @ g.abs())
    group = q.shape[1] // k.shape[1]
    models = [rounded_to(t if i == 0 else _summed(t, group), dtype) for i, t in enumerate(exact)]
    naturals = [typical(t if i == 0 else _summed(t, group)) for i, t in enumerate(terms)]
    return models, naturals, noise_of(scores, arguments, dtype)


def _summed(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.unflatten(1, (-1, group)).sum(2) if group > 1 else x
