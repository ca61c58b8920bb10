"""attention_varlen for the tuner: how shapes are spelled, made and judged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from registry.errors import InvalidArgument
from registry.ops.attention_varlen import grids, mixes, oracle
from registry.ops.attention_varlen.arguments import OPTIONAL, QUANTISED
from registry.ops.attention_varlen.draws import FEW, biased, cached, draw, prompts
from registry.ops.parts.attention_workload import MaskedWorkload, OfGradients
from registry.ops.parts.derivatives import gradients_of_oracle
from registry.ops.parts.judging import Expected, Tolerance
from registry.ops.parts.masks import UNLIMITED, canonical_window, check_window
from registry.ops.parts.pieces import piece_bytes, sample
from registry.ops.parts.tuning import PLAIN, Tuning, fields
from registry.ops.parts.workload import Tensors, torch_dtype

INT8_SCALE = 1 / 48
FIELDS = fields(
    "b=batch hq=heads_q hkv=heads_kv sq=max_seqlen_q sk=max_seqlen_k t=total_q tk=total_k mix= d=head_dim "
    "dv=head_dim_v kv=kv_layout page=page_size kv_dtype scales=kv_scale dtype causal window softcap sinks alibi "
    "ieee deterministic"
)


def defaults(shape: Mapping[str, Any]) -> dict[str, Any]:
    b, sq, sk = shape.get("b", 1), shape.get("sq", 1), shape.get("sk", shape.get("sq", 1024))
    paged = shape.get("kv", "packed") == "paged"
    dtype = shape.get("dtype", "bfloat16")
    same = {"hkv": shape.get("hq"), "dv": shape.get("d"), "sk": shape.get("sq"), "kv_dtype": dtype}
    totals = {"t": b * sq, "tk": b * sk if shape.get("kv", "packed") == "packed" else 0}
    mask = {"causal": False, "window": None, "softcap": 0.0, "sinks": False, "alibi": False}
    scales = "" if shape.get("kv_dtype", dtype) == dtype else "tensor"
    kinds = {"kv": "packed", "page": 64 if paged else 0, "scales": scales, "mix": "uniform"}
    return {**PLAIN, **same, **totals, **mask, **kinds, "b": 1, "lse": False, "grad_lse": False}


class VarlenWorkload(MaskedWorkload):
    def make(self) -> Tensors:
        get = self.sizes.get
        known = defaults(self.sizes)
        self.dtype = torch_dtype(get("dtype", "bfloat16"))
        kv_dtype = torch_dtype(get("kv_dtype", get("dtype", "bfloat16")))
        hq, d = get("hq", 1), get("d", 128)
        self.layout, self.page = get("kv", "packed"), get("page", known["page"])
        self.longest = get("sk", get("sq", 1))
        self.queries, self.keys = self._lengths()
        hkv, dv = get("hkv", hq), get("dv", d)
        found: Tensors = dict.fromkeys(OPTIONAL)
        found["q"] = self.operand("q", (sum(self.queries), hq, d), self.dtype)
        found["cu_seqlens_q"] = self.index(list(itertools.accumulate(self.queries, initial=0)))
        leading: tuple[int, ...] = (sum(self.keys),)
        if self.layout == "packed":
            found["cu_seqlens_k"] = self.index(list(itertools.accumulate(self.keys, initial=0)))
        else:
            found["seqused_k"] = self.index(self.keys)
            leading = (len(self.keys), self.longest)
        if self.layout == "paged":
            found["block_table"], pages = self._table()
            leading = (pages, self.page)
        found["k"], found["v"] = (
            self.operand(name, (*leading, hkv, width), kv_dtype) for name, width in (("k", d), ("v", dv))
        )
        self._scales(found, kv_dtype)
        if get("sinks"):
            found["sinks"] = self.random((hq,), torch.float32)
        if get("alibi"):
            found["alibi_slopes"] = self.positive((hq,), times=1 / 16)
        return found

    def _lengths(self) -> tuple[list[int], list[int]]:
        """(queries, keys) of each sequence."""
        get = self.sizes.get
        longest = get("b", 1), get("sq", 1), self.longest
        return mixes.batch_of(longest, get("mix", "uniform"), get("t"), get("tk") or None)

    def _table(self) -> tuple[torch.Tensor, int]:
        """A table over pages in no order, as a server's are after a while, and how many pages there are."""
        needed = [-(-n // self.page) for n in self.keys]
        width, total = -(-self.longest // self.page), max(sum(needed), 1)
        shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(total)).tolist()
        rows, at = [], 0
        for count in needed:
            rows.append([*shuffled[at : at + count], *[0] * (width - count)])
            at += count
        return torch.tensor(rows, dtype=torch.int32, device=self.device), total

    def _scales(self, found: Tensors, kv_dtype: torch.dtype) -> None:
        if kv_dtype not in QUANTISED:
            return
        kind = self.sizes.get("scales", "tensor")
        shapes = {"tensor": (1,), "head": (found["k"].shape[-2],), "token": tuple(found["k"].shape[:-1])}
        if kind not in shapes:
            raise InvalidArgument("scales", repr(kind), ", ".join(shapes))
        shape = shapes[kind]
        size = INT8_SCALE if kv_dtype is torch.int8 else 1.0
        for name in ("k_scale", "v_scale"):
            found[name] = self.positive(shape, least=0.5, times=size)

    def operand(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        found = self.recorded(name, dtype)
        return self.random(shape, dtype) if found is None else found

    def index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    @property
    def scale(self) -> float:
        return float(self.sizes.get("d", 128) ** -0.5)

    def maxima(self) -> dict[str, int]:
        return {"max_seqlen_q": self.sizes.get("sq", 1), "max_seqlen_k": self.longest}

    def arguments(self) -> dict[str, Any]:
        return {**self.tensors, **self.mask(), **self.maxima(), "return_lse": bool(self.sizes.get("lse", False))}

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        q, k, v, rest = _apart(tensors)
        return launch(q, k, v, scale=self.scale, schedule=None, **rest)

    def expected(self) -> list[Expected]:
        lse_bound = self.lse_bound()
        q, whole = self.tensors["q"], self.results_shape()
        found = []
        for b, head in self.pieces():
            rows, heads, pieces = self._piece(b, head)
            parts = [oracle.attend(**piece) for _, _, piece in pieces]
            out, lse = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts], dim=1)
            exact = out if self.dtype == torch.float64 else out.float()
            found.append(Expected("out", exact, self.bound(), self.dtype, (rows, heads), whole))
            if self.sizes.get("lse"):
                shape = (q.shape[1], q.shape[0])
                found.append(Expected("lse", lse, lse_bound, torch.float32, (heads, rows), shape))
        return self._joined(found)

    def bound(self) -> Tolerance:
        """By blocks of a head's rows, as of dense tensors: single rows of a long sequence's dQ are far smaller than
        what they are sums of."""
        return Tolerance(self.tolerance(), rows_first=True)

    def _all_looked_at(self) -> bool:
        return bool(len(self.pieces()) == len([n for n in self.queries if n]) * self.tensors["k"].shape[-2])

    def _joined(self, parts: list[Expected]) -> list[Expected]:
        """One part a result where every piece was looked at: a sequence of one key has gradients of zero, which only
        the size of the others tells from noise, and judging waits for the device a few times a part."""
        if not self._all_looked_at():
            return parts
        wholes: dict[str, torch.Tensor] = {}
        for part in parts:
            assert part.shape is not None
            if part.output not in wholes:
                wholes[part.output] = torch.zeros(part.shape, dtype=part.want.dtype, device=part.want.device)
            wholes[part.output][part.index] = part.want
        first = {part.output: part for part in reversed(parts)}
        return [replace(first[name], want=whole, index=()) for name, whole in wholes.items()]

    def results_shape(self) -> tuple[int, ...]:
        return (*self.tensors["q"].shape[:2], self.tensors["v"].shape[-1])

    def pieces(self) -> list[tuple[int, int]]:
        """(sequence, key head) of the pieces to look at, those with queries."""
        q, k, v = (self.tensors[name] for name in "qkv")
        group, heads = q.shape[1] // k.shape[-2], k.shape[-2]
        there = [b for b, n in enumerate(self.queries) if n]
        mean = sum(self.queries[b] * max(self.keys[b], 1) for b in there) / max(len(there), 1)
        flops = 2.0 * group * mean * (q.shape[2] + v.shape[-1])
        chosen = sample(len(there) * heads, self.passes * flops, self.device)
        return [(there[i // heads], i % heads) for i in chosen]

    def _piece(self, b: int, head: int) -> tuple[slice, slice, list[tuple[slice, slice, dict[str, Any]]]]:
        """(rows of q, query heads, [(rows of the sequence, keys, arguments of the oracle)]) in float64."""
        q, k, v, given = _apart(self.tensors)
        group = q.shape[1] // k.shape[-2]
        heads = slice(head * group, (head + 1) * group)
        start = sum(self.queries[:b])
        rows = slice(start, start + self.queries[b])
        keys, values = (
            oracle.keys_of(b, t, given[name], given)[:, head : head + 1].double()
            for t, name in ((k, "k_scale"), (v, "v_scale"))
        )
        mask = self.mask()
        causal, window = canonical_window(check_window(mask["window"]), mask["causal"])
        how = {"causal": causal, "window": window, "softcap": mask["softcap"], "scale": self.scale}
        how |= {n: None if given[n] is None else given[n][heads].double() for n in ("sinks", "alibi_slopes")}
        n, m, found = self.queries[b], keys.shape[0], []
        step = max(1, min(n, piece_bytes(q.device) // (6 * 8 * max(m, 1) * group * self.passes)))
        left, right = window if window is not None else (UNLIMITED, UNLIMITED)
        right = 0 if causal else right
        for at in range(0, n, step):
            stop = min(n, at + step)
            first = 0 if left == UNLIMITED else min(max(0, at + m - n - left), m)
            last = m if right == UNLIMITED else min(max(first, stop + m - n + right), m)
            piece = {"q": q[rows][at:stop, heads].double(), "k": keys[first:last], "v": values[first:last]}
            found.append((slice(at, stop), slice(first, last), {**piece, **how, "shift": at + m - n - first}))
        return rows, heads, found


class VarlenBackwardWorkload(OfGradients, VarlenWorkload):
    outputs: tuple[str, ...] = ("dq", "dk", "dv", "dsinks")

    def make(self) -> Tensors:
        found = super().make()
        q, v = found["q"], found["v"]
        found["grad_out"] = self.operand("grad_out", (*q.shape[:2], v.shape[-1]), self.dtype)
        found["out"] = torch.empty((*q.shape[:2], v.shape[-1]), dtype=self.dtype, device=self.device)
        found["lse"] = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=self.device)
        wants = self.sizes.get("grad_lse", False)
        found["grad_lse"] = self.random((q.shape[1], q.shape[0]), torch.float32) if wants else None
        self.tensors = found
        if self.device.type != "meta":
            for b, head in itertools.product(range(len(self.queries)), range(found["k"].shape[1])):
                rows, heads, pieces = self._piece(b, head)
                for at, _, piece in pieces:
                    out, lse = oracle.attend(**piece)
                    into = slice(rows.start + at.start, rows.start + at.stop)
                    found["out"][into, heads], found["lse"][heads, into] = out.to(self.dtype), lse.float()
        return found

    def arguments(self) -> dict[str, Any]:
        kept = ("cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes", "grad_lse")
        tensors = ("grad_out", "q", "k", "v", "out", "lse", *kept)
        return {**{name: self.tensors[name] for name in tensors}, **self.mask(), **self.maxima()}

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        kept = ("cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes", "grad_lse")
        order = (tensors[name] for name in ("grad_out", "q", "k", "v", "out", "lse"))
        return launch(*order, scale=self.scale, **{name: tensors[name] for name in kept})

    def expected(self) -> list[Expected]:
        bound, found, sinks = self.bound(), [], self.tensors.get("sinks")
        starts = list(itertools.accumulate(self.keys, initial=0))
        of_sinks = torch.zeros(2, self.tensors["q"].shape[1], dtype=torch.float64, device=self.device)
        for b, head in self.pieces():
            rows, heads, pieces = self._piece(b, head)
            *grads, own = self._gradients(rows, heads, pieces, self.keys[b])
            of_sinks[:, heads] += own
            keys = slice(starts[b], starts[b + 1])
            for name, index, grad in zip(
                self.outputs, ((rows, heads), *[(keys, slice(head, head + 1))] * 2), grads, strict=False
            ):
                if grad.numel():
                    whole = tuple(self.tensors[name[1]].shape)
                    found.append(Expected(name, grad, bound, self.dtype, index, whole))
        joined = self._joined(found)
        if sinks is not None and self._all_looked_at():  # a sum over all sequences, whose terms may cancel out
            limit = self.tolerance() * math.sqrt(float(of_sinks[1].max()))
            joined.append(Expected("dsinks", of_sinks[0], Tolerance(limit, absolute=True), sinks.dtype))
        return joined

    def _gradients(self, rows: slice, heads: slice, pieces: list[Any], keys: int) -> Iterator[torch.Tensor]:
        """(dq, dk, dv, dsinks and the squares of its terms) of one sequence and key head. All but the first are sums
        over pieces of rows."""
        grad_out, grad_lse = self.tensors["grad_out"][rows, heads].double(), self.tensors["grad_lse"]
        grad_lse = None if grad_lse is None else grad_lse[heads, rows].double()
        k, v = (pieces[0][2][name] for name in "kv")
        dq, dk, dv = [], k.new_zeros(keys, *k.shape[1:]), v.new_zeros(keys, *v.shape[1:])
        dsinks = k.new_zeros(2, heads.stop - heads.start)
        for at, seen, piece in pieces:
            followed = [*"qkv", *(["sinks"] if piece["sinks"] is not None else [])]
            leaves = {name: piece[name].detach().requires_grad_() for name in followed}
            with torch.enable_grad():
                out, lse = oracle.attend(**{**piece, **leaves})
                of_sums = None if grad_lse is None else grad_lse[:, at]
                found = gradients_of_oracle((out, lse), list(leaves.values()), grad_out[at], of_sums)
            dq.append(found[0])
            dk[seen] += found[1]
            dv[seen] += found[2]
            if len(found) > 3:
                of_rows = (grad_out[at].transpose(0, 1) * out.detach().transpose(0, 1)).sum(-1)
                of_rows = of_rows if of_sums is None else of_rows - of_sums
                share = torch.exp(piece["sinks"][:, None] - lse.detach())
                dsinks += torch.stack([found[3], torch.where(lse.isfinite(), share * of_rows, 0.0).square().sum(1)])
        yield from (torch.cat(dq), dk, dv, dsinks)


def _apart(tensors: Tensors) -> tuple[Any, Any, Any, dict[str, Any]]:
    """q, k, v, and the others by name."""
    return (tensors["q"], tensors["k"], tensors["v"], {name: tensors[name] for name in ("cu_seqlens_q", *OPTIONAL)})


_ORDER = (
    "max_seqlen_q",
    "kv_layout",
    "head_dim",
    "causal",
    "max_seqlen_k",
    "batch",
    "group",
    "kv_tokens",
    "mean_q",
    "page_size",
    "kv_dtype",
    "dtype",
)
_FORWARD = Tuning(
    {**FIELDS, "lse": "lse"},
    defaults,
    VarlenWorkload,
    grids.FORWARD,
    order=_ORDER,
    leading=("max_seqlen_k", "total_q", "kv_tokens"),
    as_measured=("kv_layout",),
    panels=("kv_layout", "head_dim"),
    # Prompts: who decodes fast is not fast with them.
    apart=({"kv_layout": ["cache", "paged"], "max_seqlen_q": f"{FEW + 1}.."},),
    draws={"random": draw, "cached": cached, "biased": biased, "prompts": prompts},
)
BY_OP = {
    "attention_varlen": _FORWARD,
    "attention_varlen_backward": replace(
        _FORWARD,
        fields={**FIELDS, "grad_lse": "grad_lse"},
        workload=VarlenBackwardWorkload,
        grids=grids.BACKWARD,
        draws={
            "random": partial(draw, op="attention_varlen_backward"),
            "biased": partial(biased, op="attention_varlen_backward"),
        },
    ),
}
