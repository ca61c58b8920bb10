"""Attention for the tuner: how shapes are spelled, made and judged, and the grids of shapes worth measuring."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from registry.ops.attention.backward import attention_backward
from registry.ops.attention.draws import draw, of_a_model
from registry.ops.attention.op import attention
from registry.ops.parts.attention_workload import MaskedWorkload, OfGradients
from registry.ops.parts.cases import Case
from registry.ops.parts.judging import Expected, Tolerance
from registry.ops.parts.masks import canonical_window, check_window
from registry.ops.parts.pieces import piece_bytes, sample
from registry.ops.parts.tuning import PLAIN, Tuning, fields
from registry.ops.parts.workload import Tensors, torch_dtype

FIELDS = fields(
    "b=batch hq=heads_q hkv=heads_kv s=seqlen_q sk=seqlen_k d=head_dim dv=head_dim_v dtype layout causal window "
    "softcap ieee deterministic"
)


def defaults(shape: Mapping[str, Any]) -> dict[str, Any]:
    same = {"hkv": shape.get("hq"), "sk": shape.get("s"), "dv": shape.get("d")}
    mask = {"causal": False, "window": None, "softcap": 0.0}
    return {**PLAIN, **same, **mask, "b": 1, "layout": "bhsd", "lse": False, "grad_lse": False}


class AttentionWorkload(MaskedWorkload):
    def make(self) -> Tensors:
        get = self.sizes.get
        b, hq, s, d = get("b", 1), get("hq", 1), get("s", 1024), get("d", 128)
        hkv, sk, dv = get("hkv", hq), get("sk", s), get("dv", d)
        self.dtype = torch_dtype(get("dtype", "bfloat16"))
        shapes = {"q": (b, hq, s, d), "k": (b, hkv, sk, d), "v": (b, hkv, sk, dv)}
        return {name: self.operand(name, shape) for name, shape in shapes.items()}

    def operand(self, name: str, shape: tuple[int, int, int, int]) -> torch.Tensor:
        found = self.recorded(name, self.dtype)
        if found is not None:
            return found
        if self.sizes.get("layout", "bhsd") == "bshd":
            b, h, s, d = shape
            return self.random((b, s, h, d), self.dtype).transpose(1, 2)
        return self.random(shape, self.dtype)

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.sizes.get("d", 128))

    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, **self.mask(), "return_lse": bool(self.sizes.get("lse", False))}

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        return launch(tensors["q"], tensors["k"], tensors["v"], scale=self.scale)

    def expected(self) -> list[Expected]:
        return _joined(self.parts())

    def parts(self) -> Iterator[Expected]:
        """The oracle's answer, one batch entry and key head at a time."""
        whole = (*self.tensors["q"].shape[:3], self.tensors["v"].shape[3])
        lse_bound = self.lse_bound()
        mask = _Mask(self.mask(), self.scale)
        for b, head, heads in self.heads():
            out, lse = _forward_piece(self.tensors, (b, head, heads), mask)
            exact = out[0].float() if self.dtype != torch.float64 else out[0]
            yield Expected("out", exact, Tolerance(self.tolerance()), self.dtype, (b, heads), whole)
            if self.sizes.get("lse"):
                yield Expected("lse", lse[0], lse_bound, torch.float32, (b, heads), whole[:3])

    def heads(self) -> list[tuple[int, int, slice]]:
        """(batch, key head, query heads) of the pieces to look at."""
        q, k = self.tensors["q"], self.tensors["k"]
        group, heads = q.shape[1] // k.shape[1], k.shape[1]
        flops = 4.0 * group * q.shape[2] * k.shape[2] * (q.shape[3] + self.tensors["v"].shape[3])
        chosen = sample(q.shape[0] * heads, self.passes * flops, self.device)
        return [(i // heads, i % heads, slice(i % heads * group, (i % heads + 1) * group)) for i in chosen]


class AttentionBackwardWorkload(OfGradients, AttentionWorkload):
    outputs: tuple[str, ...] = ("dq", "dk", "dv")

    def make(self) -> Tensors:
        found = super().make()
        q, v = found["q"], found["v"]
        shape = (*q.shape[:3], v.shape[3])
        found["grad_out"] = self.operand("grad_out", shape)
        found["out"] = self.operand("out", shape)
        found["lse"] = torch.empty(q.shape[:3], dtype=torch.float32, device=self.device)
        wants_lse_gradient = self.sizes.get("grad_lse", False)
        found["grad_lse"] = self.random(tuple(q.shape[:3]), torch.float32) if wants_lse_gradient else None
        if self.device.type != "meta":
            self.save_forward(found)
        return found

    def save_forward(self, tensors: Tensors) -> None:
        """Fill in what a forward saves for the backward: all at once where the scores fit in memory."""
        q, k = tensors["q"], tensors["k"]
        group, mask = q.shape[1] // k.shape[1], _Mask(self.mask(), self.scale)
        if 6 * 8 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= piece_bytes(q.device):
            out, lse = attention.reference(q, k, tensors["v"], return_lse=True, **mask.arguments)
            tensors["out"].copy_(out)
            tensors["lse"].copy_(lse)
            return
        for b in range(q.shape[0]):
            for head in range(k.shape[1]):
                heads = slice(head * group, (head + 1) * group)
                out, lse = _forward_piece(tensors, (b, head, heads), mask)
                tensors["out"][b, heads] = out[0].to(q.dtype)
                tensors["lse"][b, heads] = lse[0].float()

    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, **self.mask()}

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        order = (tensors[name] for name in ("grad_out", "q", "k", "v", "out", "lse"))
        return launch(*order, scale=self.scale, grad_lse=tensors["grad_lse"])

    def parts(self) -> Iterator[Expected]:
        tensors, bound, mask = self.tensors, Tolerance(self.tolerance()), _Mask(self.mask(), self.scale)
        for b, head, heads in self.heads():
            for name, of, grad in zip(
                self.outputs, "qkv", _backward_piece(tensors, (b, head, heads), mask), strict=True
            ):
                at = heads if of == "q" else slice(head, head + 1)
                yield Expected(name, grad[0], bound, self.dtype, (b, at), tuple(tensors[of].shape))


# --- the oracle in pieces: rows and heads are independent; gradients of k and v are sums over pieces of rows ---------


class _Mask:
    """The oracle's mask arguments, and how a problem with that mask may be cut."""

    def __init__(self, mask: Mapping[str, Any], scale: float) -> None:
        causal, window = canonical_window(check_window(mask["window"]), mask["causal"])
        self.arguments = {**mask, "causal": causal, "window": window, "scale": scale}
        self.cuts_keys: bool = causal
        self.whole = not causal and window is not None

    def pieces(self, q: torch.Tensor, k: torch.Tensor, heads: int) -> Iterator[tuple[slice, int]]:
        """Slices of query rows whose scores fit in memory, each with the number of leading keys that it is given.

        That is all of them, or those up to its last row's, so that the piece is aligned as the whole is."""
        rows, keys = q.shape[2], k.shape[2]
        step = rows if self.whole else max(1, min(rows, piece_bytes(q.device) // (6 * 8 * keys * heads)))
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            seen = max(0, min(keys, stop + keys - rows)) if self.cuts_keys else keys
            if seen:
                yield slice(start, stop), seen


def _forward_piece(tensors: Tensors, at: tuple[int, int, slice], mask: _Mask) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of one batch entry and key head, float64."""
    b, head, heads = at
    q = tensors["q"][b : b + 1, heads]
    k, v = (tensors[name][b : b + 1, head : head + 1] for name in "kv")
    out = torch.zeros((1, q.shape[1], q.shape[2], v.shape[3]), dtype=torch.float64, device=q.device)
    lse = torch.full(out.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    for rows, keys in mask.pieces(q, k, q.shape[1]):
        out[:, :, rows], lse[:, :, rows] = attention.reference(
            q[:, :, rows], k[:, :, :keys], v[:, :, :keys], return_lse=True, **mask.arguments
        )
    return out, lse


def _backward_piece(tensors: Tensors, at: tuple[int, int, slice], mask: _Mask) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of one batch entry and key head, float64."""
    b, head, heads = at
    q, g = tensors["q"][b : b + 1, heads], tensors["grad_out"][b : b + 1, heads]
    k, v = (tensors[name][b : b + 1, head : head + 1] for name in "kv")
    dq, dk, dv = (torch.zeros(t.shape, dtype=torch.float64, device=q.device) for t in (q, k, v))
    for rows, keys in mask.pieces(q, k, 2 * q.shape[1]):
        extra = {} if tensors["grad_lse"] is None else {"grad_lse": tensors["grad_lse"][b : b + 1, heads, rows]}
        part = attention_backward.reference(
            g[:, :, rows], q[:, :, rows], k[:, :, :keys], v[:, :, :keys], **mask.arguments, **extra
        )
        dq[:, :, rows] = part[0]
        dk[:, :, :keys] += part[1]
        dv[:, :, :keys] += part[2]
    return dq, dk, dv


def _joined(parts: Iterable[Expected]) -> list[Expected]:
    """Neighbouring heads of the oracle's answer as one part each: judging waits for the device a few times a part."""
    runs: list[list[Expected]] = []
    last: dict[tuple[str, int], list[Expected]] = {}
    for part in parts:
        key = (part.output, part.index[0])
        if key in last and last[key][-1].index[1].stop == part.index[1].start:
            last[key].append(part)
        else:
            last[key] = [part]
            runs.append(last[key])
    return [
        replace(
            run[0],
            index=(run[0].index[0], slice(run[0].index[1].start, run[-1].index[1].stop)),
            want=torch.cat([part.want for part in run]),
        )
        for run in runs
    ]


# --- grids --------------------------------------------------------------------------------------------------------

TOKENS = 16384
HIDDEN = 2048


def paper18(op: str) -> list[Case]:
    """FlashAttention-3's figure 5: bf16, 16k tokens, hidden size 2048; head dims, lengths, full and causal."""
    return [
        Case.of(op, b=TOKENS // s, hq=HIDDEN // d, s=s, d=d, causal=causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for s in (1024, 4096, 16384)
    ]


def lengths(op: str) -> list[Case]:
    """The lengths and head counts between those of paper18."""
    return [
        Case.of(op, b=max(1, tokens // s), hq=HIDDEN // d, s=s, d=d, causal=causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for s, tokens in ((512, TOKENS), (1536, TOKENS), (2048, TOKENS), (3072, 12288), (8192, TOKENS), (2048, 4096))
    ]


def gqa(op: str) -> list[Case]:
    """Grouped heads as served models have them: 32 or 64 query heads over 8, or over 1, head dim 128."""
    shapes = (
        (1, 32, 8, 8192),
        (4, 32, 8, 4096),
        (8, 32, 8, 2048),
        (2, 64, 8, 4096),
        (16, 32, 8, 1024),
        (4, 32, 1, 4096),
    )
    return [
        Case.of(op, b=b, hq=hq, hkv=hkv, s=s, d=128, causal=causal)
        for b, hq, hkv, s in shapes
        for causal in (False, True)
    ]


def single(op: str) -> list[Case]:
    """One sequence at a time, too small to fill the chip: few heads, short lengths, and a query of one token."""
    prompts = [Case.of(op, b=1, hq=h, s=s, d=128, causal=True) for h in (8, 16, 32) for s in (256, 1024, 4096)]
    prompts += [Case.of(op, b=1, hq=h, s=s, d=64) for h in (12, 16) for s in (197, 512, 2048)]
    if op == "attention_backward":
        return prompts
    decode = [Case.of(op, b=b, hq=32, hkv=8, s=1, sk=sk, d=128) for b in (1, 16, 64) for sk in (1024, 8192, 32768)]
    return prompts + decode


def training(op: str) -> list[Case]:
    """What training runs: paper18, grouped heads at usual lengths, and a few short ones. Made for the backward."""
    grouped = ((16, 1024, True), (16, 1024, False), (8, 2048, True), (4, 4096, True), (4, 4096, False), (1, 8192, True))
    short = ((32, 16, 512, 128, True), (32, 32, 512, 64, True), (1, 16, 512, 64, False), (4, 16, 256, 128, True))
    return [
        *paper18(op),
        *(Case.of(op, b=b, hq=32, hkv=8, s=s, d=128, causal=causal) for b, s, causal in grouped),
        *(Case.of(op, b=b, hq=hq, s=s, d=d, causal=causal) for b, hq, s, d, causal in short),
    ]


def quick(op: str) -> list[Case]:
    """A few minutes' worth: one shape of each kind."""
    shapes = ((64, 1024, True), (64, 4096, False), (128, 4096, True), (128, 16384, False), (256, 4096, True))
    return [Case.of(op, b=TOKENS // s, hq=HIDDEN // d, s=s, d=d, causal=causal) for d, s, causal in shapes]


def tiny(op: str) -> list[Case]:
    """Shapes that a CPU finishes at once: for trying the tool out and for its tests."""
    return [Case.of(op, hq=2, s=s, d=16, causal=causal, dtype="float32") for s in (32, 96) for causal in (False, True)]


GRIDS = {"quick": quick, "tiny": tiny, "paper18": paper18, "gqa": gqa, "single": single, "lengths": lengths}


def _draws(op: str, *kinds: str) -> dict[str, Callable[[random.Random], Case]]:
    return {"random": partial(draw, op=op), **{kind: partial(draw, op=op, kind=kind) for kind in kinds}}


_FORWARD = Tuning(
    {**FIELDS, "lse": "lse"},
    defaults,
    AttentionWorkload,
    GRIDS,
    order=(
        "head_dim",
        "causal",
        "seqlen_q",
        "rows",
        "batch_heads",
        "seqlen_k",
        "group",
        "gqa",
        "layout",
        "dtype",
        "lse",
        "window",
    ),
    leading=("seqlen_q", "seqlen_k", "blocks"),
    over="seqlen_q",
    panels=("head_dim", "causal"),
    draws=_draws("attention", "float32"),
    of_a_model=of_a_model,
    apart=({"dtype": "float32"},),
)
BY_OP = {
    "attention": _FORWARD,
    "attention_backward": replace(
        _FORWARD,
        fields={**FIELDS, "grad_lse": "grad_lse"},
        workload=AttentionBackwardWorkload,
        grids={"training": training, **GRIDS},
        draws=_draws("attention_backward", "float32", "deterministic"),
        apart=({"dtype": "float32"}, {"deterministic": True}),
    ),
}
