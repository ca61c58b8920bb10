"""Attention as a kernel of each dtype computes it, in plain torch, a sequence at a time: what results are held to."""

from __future__ import annotations

import math
from typing import Any

import torch

from registry.ops.attention_varlen.arguments import OPTIONAL, QUANTISED
from registry.ops.attention_varlen.oracle import distances, sequences
from registry.ops.parts.attention_kit import masked, noise_of
from registry.ops.parts.kit import Sample
from registry.ops.parts.rounding import as_multiplied


class Piece:
    """One sequence of a sample, as the oracle sees it: heads repeated, in a dtype wide enough to accumulate in."""

    def __init__(self, rows: slice, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]):
        self.rows, self.dtype, self.arguments = rows, q.dtype, arguments
        group = q.shape[1] // k.shape[1]
        self.q = as_multiplied(q.transpose(0, 1), q.dtype)
        self.k, self.v = (
            as_multiplied(t.to(torch.float32) if t.dtype in QUANTISED else t, q.dtype)
            .transpose(0, 1)
            .repeat_interleave(group, dim=0)
            for t in (k, v)
        )

    def scores(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """(masked scores [H, n, m], mask, tanh of the capped scores)."""
        arguments, (n, m) = self.arguments, (self.q.shape[1], self.k.shape[1])
        scale = arguments["scale"]
        scores = self.q @ self.k.mT * (self.q.shape[2] ** -0.5 if scale is None else scale)
        bias = None
        if arguments["alibi_slopes"] is not None:
            bias = arguments["alibi_slopes"].to(scores.dtype)[:, None, None] * distances(n, m, scores.device)
        return masked(scores, arguments, bias)

    def lse(self, scores: torch.Tensor) -> torch.Tensor:
        lse, sinks = torch.logsumexp(scores, dim=-1), self.arguments["sinks"]
        return lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])


def pieces_of(sample: Sample) -> list[Piece]:
    """Every sequence of a sample."""
    q, k, v = sample.tensors[:3] if len(sample.tensors) == 3 else sample.tensors[1:4]
    given = dict.fromkeys(OPTIONAL) | {n: t for n, t in sample.arguments.items() if n in OPTIONAL}
    found = sequences(k, v, sample.arguments["cu_seqlens_q"], given)
    return [Piece(rows, q[rows], keys, values, sample.arguments) for rows, keys, values in found]


class KernelLike:
    """What a kernel of this dtype gives for one sequence."""

    def __init__(self, out: torch.Tensor, lse: torch.Tensor, noise: float, natural: float) -> None:
        self.out, self.lse, self.noise, self.natural = out, lse, noise, natural


def model_of(piece: Piece) -> KernelLike:
    scores, *_ = piece.scores()
    lse = piece.lse(scores)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = as_multiplied(weights, piece.dtype) @ piece.v
    natural = float((weights @ piece.v.abs()).square().sum())
    return KernelLike(out.transpose(0, 1), lse, noise_of(scores, piece.arguments, piece.dtype), natural)
