"""The conformance kit's knowledge of the gradients of attention over ragged batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.dispatch.scope import use
from registry.ops.attention_varlen.backward import attention_varlen_backward
from registry.ops.attention_varlen.conformance_forward import VarlenKit
from registry.ops.attention_varlen.conformance_memory import strides
from registry.ops.attention_varlen.op import attention_varlen
from registry.ops.attention_varlen.yardstick import Piece, pieces_of
from registry.ops.parts.attention_kit import noise_of, slack_of, typical
from registry.ops.parts.judging import Expected, Yardstick
from registry.ops.parts.kit import Results, Sample, Spec
from registry.ops.parts.memory import Arena, Slot, dense_strides
from registry.ops.parts.rounding import as_multiplied, factor_eps, floor_of, rounded_to
from registry.ops.parts.sizes import Size

KEPT = ("cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes")
RESULTS = ("dq", "dk", "dv", "dsinks")


class VarlenBackwardKit(VarlenKit):
    def axes(self, requires: Requires, size: Size) -> dict[str, list[Any]]:
        found = super().axes(requires, size) | {"lse": [True], "out": [False], "quantised": [()]}
        found |= {"table": [""], "scales": [""], "grad_memory": ["", "rows", "turned"]}
        found["kv_layout"] = [kind for kind in found["kv_layout"] if kind == "packed"]
        return found | {"page_size": [0], "grad_lse": [False, True] if requires.grad_lse else [False]}

    def unused(self, requires: Requires) -> dict[str, str]:
        given = [name for name in ("kv_dtypes", "kv_scales", "page_size", "out") if getattr(requires, name)]
        found = dict.fromkeys(given, "k and v are packed and of q's dtype, and gradients are new tensors")
        if elsewhere := [kind for kind in requires.kv_layouts if kind != "packed"]:
            found["kv_layouts"] = f"nobody follows gradients of keys that are {' or '.join(elsewhere)}"
        return found

    def outside(self, requires: Requires) -> dict[str, Spec]:
        forward_alone = ("out", "lse", "packed", "cache", "paged", "int8 keys", "float8_e4m3fn keys")
        found = {name: spec for name, spec in super().outside(requires).items() if name not in forward_alone}
        return found if requires.grad_lse else found | {"grad_lse": {"grad_lse": True}}

    def make(self, spec: Spec, device: torch.device, seed: int) -> Sample:
        forward = super().make(spec | {"lse": True, "out": False}, device, seed)
        q, k, v = forward.tensors
        shape, rows = (q.shape[0], q.shape[1], v.shape[-1]), (q.shape[1], q.shape[0])
        kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "grad_out": (shape, q.dtype),
            "out": (shape, q.dtype),
            "lse": (rows, torch.float32),
        }
        kinds |= {"grad_lse": (rows, torch.float32)} if spec["grad_lse"] else {}
        steps = {"grad_out": strides(spec["grad_memory"], shape, q.dtype, False)}
        if spec["grad_memory"]:  # what autograd gives of an LSE that was turned, or cut off
            steps["grad_lse"] = (1, rows[0]) if spec["grad_memory"] == "turned" else (rows[1] + 3, 1)
        shifts = {"grad_out": max(spec["base_alignment"], q.dtype.itemsize) if spec["memory"] == "offset" else 0}
        shifts["grad_lse"] = torch.float32.itemsize if spec["beside"] else 0
        arenas = {
            n: Arena({n: Slot(s, steps.get(n, dense_strides(s)))}, kind, device, shifts.get(n, 0))
            for n, (s, kind) in kinds.items()
        }
        made = {name: arena.views[name] for name, arena in arenas.items()}
        grad_lse = made.get("grad_lse")
        if device.type != "meta":
            generator = torch.Generator(device).manual_seed(seed + 1)
            for tensor in (made["grad_out"],) if grad_lse is None else (made["grad_out"], grad_lse):
                tensor.copy_(torch.randn(tensor.shape, device=device, generator=generator))
            exact, lse = attention_varlen.reference(*forward.tensors, **forward.arguments | {"return_lse": True})
            made["out"].copy_(exact)
            made["lse"].copy_(lse)
        kept = {name: forward.arguments[name] for name in KEPT} | {"grad_lse": grad_lse}
        how = {
            name: forward.arguments[name] for name in ("causal", "window", "softcap", "max_seqlen_q", "max_seqlen_k")
        }
        scale = {"scale": forward.launch_arguments["scale"]}
        tensors = (made["grad_out"], q, k, v, made["out"], made["lse"])
        return Sample(tensors, {**how, **scale, **kept}, {**scale, **kept}, forward.arenas | arenas)

    def launch(self, launch: Callable[..., Any], sample: Sample) -> Results:
        return _named(launch(*sample.tensors, **sample.launch_arguments))

    def front_door(self, variant: str, sample: Sample) -> Results:
        """Gradients as autograd finds them, behind whichever forward is fastest."""
        grad_out, *operands = sample.tensors[:4]
        arguments = dict(sample.arguments)
        grad_lse, sinks = arguments.pop("grad_lse"), arguments.pop("sinks")
        with torch.enable_grad(), use(variant):
            leaves = [t.detach().requires_grad_() for t in (*operands, sinks) if t is not None]
            arguments |= {"sinks": None if sinks is None else leaves[3]}
            out, lse = attention_varlen(*leaves[:3], **arguments, return_lse=True)
            results, grads = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
            return _named(torch.autograd.grad(results, leaves, grads))

    def expected(self, sample: Sample) -> list[Expected]:
        grad_out, q, k, v, *_ = sample.tensors
        wanted = attention_varlen_backward.reference(grad_out, q, k, v, **sample.arguments)
        models, naturals, noise = _model(sample)
        dtypes = [q.dtype] * 3 + [t.dtype for t in (sample.arguments["sinks"],) if t is not None]
        slack = {name: slack_of(noise, natural, q.dtype) for name, natural in naturals.items()}
        if "dsinks" in slack:  # a sum over rows, of which a GPU takes those for nothing that are no normal float32
            slack["dsinks"] += q.shape[0] * torch.finfo(torch.float32).tiny + 2 * _rounding_of_output(sample)
        rows = q.shape[0] * q.shape[1]  # of which each has one delta, of the output as it was rounded, in dq and dk
        alone = {"dq": rows, "dk": rows}
        return [
            Expected(name, want, Yardstick(models[name], slack[name], floor_of(dtype), alone=alone.get(name)), dtype)
            for name, want, dtype in zip(RESULTS, wanted, dtypes, strict=False)
        ]


def _named(grads: tuple[Any, ...]) -> Results:
    return {name: grad for name, grad in zip(RESULTS, grads, strict=False) if grad is not None}


def _model(sample: Sample) -> tuple[dict[str, torch.Tensor], dict[str, float], float]:
    """Gradients rounded as a kernel rounds them; typical magnitudes of their terms; the noise of the arithmetic."""
    dtype, group = sample.tensors[1].dtype, sample.tensors[1].shape[1] // sample.tensors[2].shape[1]
    exact: dict[str, list[torch.Tensor]] = {name: [] for name in RESULTS}
    sizes: dict[str, list[torch.Tensor]] = {name: [] for name in RESULTS}
    noise = 0.0
    for piece in pieces_of(sample):
        scores, *_ = piece.scores()
        noise = max(noise, noise_of(scores, piece.arguments, dtype))
        for name, grad, size in zip(RESULTS, *_gradients(piece, sample, group), strict=False):
            exact[name].append(grad)
            sizes[name].append(size)
    join = {name: torch.cat if name != "dsinks" else lambda parts: torch.stack(parts).sum(0) for name in RESULTS}
    models = {name: join[name](parts) for name, parts in exact.items() if parts}
    naturals = {name: typical(join[name](parts)) for name, parts in sizes.items() if parts}
    dtypes = dict.fromkeys(RESULTS, dtype) | ({"dsinks": sample.arguments["sinks"].dtype} if "dsinks" in models else {})
    return {name: rounded_to(model, dtypes[name]) for name, model in models.items()}, naturals, noise


def _rounding_of_output(sample: Sample) -> float:
    """The standard deviation of a sink's gradient, in the mean over heads, that rounding makes, of O or of what it is
    made of: behind another forward than the sample's, errors are others and no smaller. (1.35 times what was drawn: a
    little too large.)"""
    grad_out, _, _, _, out, lse = sample.tensors
    share = torch.exp(sample.arguments["sinks"].float()[:, None] - lse)
    share = torch.where(torch.isfinite(lse), share, 0.0)
    squares = share.square() * (grad_out.float() * out.float()).square().sum(-1).T
    deviation = factor_eps(out.dtype) / math.sqrt(12.0)  # of a number that is rounded to the nearest, in its size
    return deviation * math.sqrt(float(squares.sum(1).mean())) if squares.numel() else 0.0


def _gradients(piece: Piece, sample: Sample, group: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(gradients, the sums of their terms' magnitudes) of one sequence, as [rows, heads, width]."""
    grad_out, _, _, _, out, lse = sample.tensors
    dtype, scale, sinks = piece.dtype, sample.arguments["scale"], sample.arguments["sinks"]
    scores, seen, capped = piece.scores()
    total = lse[:, piece.rows].to(scores.dtype)
    total = torch.where(torch.isfinite(total), total, 0.0)
    weights = torch.exp(scores - total[..., None])
    g = as_multiplied(grad_out[piece.rows].transpose(0, 1), dtype)
    product = g @ piece.v.mT
    delta = (g * out[piece.rows].transpose(0, 1).to(g.dtype)).sum(-1, keepdim=True)
    if sample.arguments["grad_lse"] is not None:
        delta = delta - sample.arguments["grad_lse"][:, piece.rows, None]
    slope = 1.0 if capped is None else 1.0 - capped.square()
    scores_grad = as_multiplied(weights * (product - delta) * slope, dtype)
    size = weights * (product.abs() + delta.abs())
    weights_in = as_multiplied(weights, dtype)
    grads = [scores_grad @ piece.k * scale, scores_grad.mT @ piece.q * scale, weights_in.mT @ g]
    terms = [size @ piece.k.abs() * scale, size.mT @ piece.q.abs() * scale, weights.mT @ g.abs()]
    for found in (grads, terms):
        for i in (1, 2):
            found[i] = found[i].unflatten(0, (-1, group)).sum(1)
    grads, terms = ([t.transpose(0, 1) for t in found] for found in (grads, terms))
    if sinks is not None:
        share = torch.exp(sinks.to(total.dtype)[:, None] - total)
        grads.append(-(share * delta.squeeze(-1)).sum(1))
        terms.append((share * delta.squeeze(-1).abs()).sum(1))
    return grads, terms
