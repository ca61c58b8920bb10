"""The conformance kit's knowledge of attention over ragged batches: axes, memory, what a variant is held against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.ops.attention_varlen.arguments import OPTIONAL, QUANTISED
from registry.ops.attention_varlen.conformance_memory import scale_strides, slots, strides, table
from registry.ops.attention_varlen.op import attention_varlen
from registry.ops.attention_varlen.yardstick import model_of, pieces_of
from registry.ops.parts.attention_kit import (
    SOFTCAPS,
    SPREADS,
    AttentionLikeKit,
    alone_of,
    expected_lse,
    fused,
    head_dims_outside,
    latent,
    wide_window,
)
from registry.ops.parts.judging import Expected, Yardstick
from registry.ops.parts.kit import UNIT_BYTES, Results, Sample, Spec, stored, unclaimed
from registry.ops.parts.masks import canonical_mask
from registry.ops.parts.memory import Arena, Slot, dense_strides
from registry.ops.parts.rounding import floor_of, rounded_to
from registry.ops.parts.sizes import Size
from registry.ops.tensors import dtype_name

FAINT = -100.0
"""The sink of the first of several heads: nothing beside any key, and all there is where a sequence has none."""
STEEP = 1.5
"""The slope of the last head: most models' are below one."""
LOUD = 60.0
"""What values are multiplied with where a softmax is flat: their scales are above one then."""
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256, 512)
QUANTISED_NAMES = tuple(sorted(map(dtype_name, QUANTISED)))
LOOSE = 70
"""By how much bounds of lengths may be more than the longest."""
TABLE_GAP = 5
"""Entries between the rows of a block table that is a slice of a wider one."""
NO_PAGE = 2**30
"""What they hold: a page that is nowhere near."""
PAGES = (16, 1, 64, 128, 256, 3, 48)
DTYPES = ("float16", "bfloat16", "float32", "float64")
SCALED = tuple(itertools.product(QUANTISED_NAMES, ("packed", "cache", "paged")))

Pairs = tuple[tuple[int, int], ...]
"""(queries, keys) of each sequence."""


def _range(claim: tuple[int, int] | None, multiple: int, values: Sequence[int], widest: int) -> list[int]:
    """The plainest of the values that are claimed, both ends of the claim, and the others between."""
    if claim is None:
        return []
    low = -(-claim[0] // multiple) * multiple
    high = min(claim[1], max(widest, low)) // multiple * multiple
    middle = [n for n in values if low <= n <= high and n % multiple == 0]
    return list(dict.fromkeys([*middle[:1], high, low, *middle]))


def _batches(size: Size) -> list[Pairs]:
    """Batches of all kinds: ragged ones, with sequences of nothing; decoding; few and many; more queries than keys."""
    one, two, three, *_, long = sorted(size.lengths)[-4:]
    return [
        ((two, two), (one, one), (0, 0), (three, three), (1, 1)),
        ((one, one), (one, one)),
        ((1, long), (1, one), (1, 1), (1, 0), (1, three)),
        ((three, one), (0, two), (one, long), (two, 0), (1, two)),
        ((two, three), (three, two), (3, long), (long, 3), (1, 1)),  # as many queries as keys, in other places
        ((4, two), (4, long), (4, 3)),
        ((9, two), (12, long), (10, one)),  # as many as kernels for decoding may take
        tuple((1 + i % 3, 5 + 7 * i % 40) for i in range(13)),
        ((long, long),),
    ]


def _masks(requires: Requires) -> list[tuple[bool, Any]]:
    found: list[tuple[bool, Any]] = [(False, None)]
    found += [(True, None)] if requires.causal else []
    if requires.window:
        found += [(False, (5, 3)), (False, (-1, 7)), (False, (40, -1)), (False, (90, 70)), (False, (0, 1))]
    if requires.window and requires.causal:
        found += [(True, (left, 0)) for left in (33, 0, 200, 257)]
    return found


def _memory(requires: Requires) -> list[str]:
    found = ["dense", *(["fused"] if "packed" in requires.kv_layouts else []), "rows", "turned", "latent"]
    found += ["planes"] if set(requires.kv_layouts) - {"packed"} else []
    found += ["odd"] if requires.stride_alignment < UNIT_BYTES else []
    found += [] if requires.unit_inner_stride else ["inner"]
    return found + (["offset"] if requires.base_alignment < UNIT_BYTES else [])


class VarlenKit(AttentionLikeKit):
    call = attention_varlen
    of_rules = frozenset(f"memory={style}" for style in ("turned", "planes", "latent"))
    claims = (
        "dtype",
        "heads",
        "head_dim",
        "mask",
        "softcap",
        "sinks",
        "alibi",
        "lse",
        "kv_layout",
        "page_size",
        "quantised",
        "out",
        "ieee",
        "deterministic",
        "grad_lse",
        "memory",
    )
    self_explaining = ("dtype", "memory", "kv_layout")

    def axes(self, requires: Requires, size: Size) -> dict[str, list[Any]]:
        heads = [(4, 2)] if requires.gqa else []
        heads += [(2, 2), (1, 1), (3, 3)]
        if requires.gqa:
            heads += [(6, 1), (16, 1), (6, 2), (32, 1), (16, 2), (5, 1)] + ([(32, 8)] if size.large else [])
        dims_v = _range(requires.head_dim_v, requires.head_dim_v_multiple, HEAD_DIMS, size.widest)
        pages = _range(requires.page_size, requires.page_size_multiple, PAGES, 256) if _paged(requires) else []
        quantised = [(name, scale) for name in _quantised(requires) for scale in requires.kv_scales]
        odd = ["odd"] if requires.stride_alignment < UNIT_BYTES else []
        loose = any(scale != "tensor" for _, scale in quantised)
        return {
            "dtype": list(requires.dtypes),
            "heads": heads,
            "lengths": _batches(size),
            "head_dim": _range(requires.head_dim, requires.head_dim_multiple, (64, *HEAD_DIMS), size.widest),
            "head_dim_v": [0, *dims_v],
            "kv_layout": list(requires.kv_layouts),
            "page_size": pages or [0],
            "table": ["", "wide"] if _paged(requires) else [""],
            "quantised": [(), *quantised],
            "scales": ["", "strided", "expanded"] if loose else [""],
            "mask": _masks(requires),
            "softcap": [0.0, *(SOFTCAPS if requires.softcap else ()), *((1e6,) if requires.any_softcap else ())],
            "sinks": [False, True, "narrow"] if requires.sinks else [False],
            "alibi": [False, True] if requires.alibi else [False],
            "lse": [True, False] if requires.lse else [False],
            "out": [False, True, "rows", "turned", *odd] if requires.out else [False],
            "bounds": ["", "loose"],
            "beside": ["", "offset"],
            "scale": [None, 0.3, 1.0],
            "spread": list(SPREADS),
            "memory": _memory(requires),
            "base_alignment": [requires.base_alignment],
            "ieee": [True, False] if requires.ieee else [False],
            "deterministic": [False, True] if requires.deterministic else [False],
        }

    def sensible(self, spec: Spec) -> bool:
        """A mask is there to be tested, a page size belongs to pages, and views of one projection to packed tensors."""
        causal, window = spec["mask"]
        queries, keys = (max(lengths) for lengths in zip(*spec["lengths"], strict=True))
        if (causal or window) and canonical_mask(causal, window, queries, keys) == (False, None):
            return False
        if spec["memory"] == "fused" and (spec["kv_layout"] != "packed" or spec["quantised"]):
            return False
        if spec["memory"] == "planes" and spec["kv_layout"] == "packed":
            return False
        if spec["memory"] == "latent" and (spec["head_dim_v"] > spec["head_dim"] or spec["quantised"]):
            return False
        if spec["scales"] and (not spec["quantised"] or spec["quantised"][1] == "tensor"):
            return False
        return spec["kv_layout"] == "paged" or (spec["page_size"] in (0, PAGES[0]) and not spec["table"])

    def pinned(self) -> Sequence[Spec]:
        causal, paged = (True, None), {"kv_layout": "paged", "page_size": 16}
        return (
            {"mask": causal, "heads": (4, 2)},
            {"mask": causal, "spread": "sharp"},
            {**paged, "heads": (4, 2)},
            {**paged, "heads": (6, 1), "mask": causal, "sinks": True},
            {"kv_layout": "cache", "mask": (True, (33, 0))},
            {"sinks": True, "mask": (False, (5, 3))},
            {"mask": causal, "softcap": 5.0, "heads": (4, 2)},
            {"alibi": True, "mask": causal},
            *({"quantised": (name, "head"), "kv_layout": kind, "heads": (2, 2)} for name, kind in SCALED),
        )

    def crowded(self, size: Size) -> Sequence[Spec]:
        """Long sequences, without a mask and in windows of several blocks."""
        one: Spec = {"heads": (1, 1), "head_dim_v": 0, "spread": ""}
        wide: Spec = {**one, "lengths": ((size.long, size.long),), "mask": (True, (wide_window(size), 0))}
        long: Spec = {**one, "lengths": ((size.far, size.far), (1, size.far)), "mask": (False, None)}
        return wide, *([long] if size.far else [])

    def ends(self, requires: Requires, size: Size) -> dict[str, Spec]:
        """Besides, more sequences, and more heads, than a kernel may hold in a warp or a table: short ones."""
        few: Spec = {"head_dim_v": 0, "memory": "dense", "spread": "", "mask": (False, None), "scales": ""}
        lengths = tuple((i % 3, 1 + i % 4) for i in range(40 if size.slow else 300))
        many = {"many sequences": {**few, "lengths": lengths, "heads": (1, 1)}}
        heads = (24, 12) if requires.gqa else (20, 20)
        many["many heads"] = {**few, "heads": heads, "lengths": ((2, 9), (1, 5))}
        if "packed" in requires.kv_layouts:  # as many queries as keys, in other places
            many["other places"] = {**few, "lengths": ((3, 9), (9, 3), (5, 5)), "kv_layout": "packed", "quantised": ()}
        return super().ends(requires, size) | many

    def few(self, requires: Requires) -> Spec:
        return {"heads": (1, 1), "lengths": ((9, 9), (1, 5))}

    def left_out(self, requires: Requires, size: Size) -> list[str]:
        found, pages = super().left_out(requires, size), self.axes(requires, size)["page_size"]
        end = requires.page_size[1] if _paged(requires) and requires.page_size else 0
        return [*found, f"page_size {max(pages) + 1}..{end}"] if 0 < max(pages) < end else found

    def unused(self, requires: Requires) -> dict[str, str]:
        quantised, found = _quantised(requires), {}
        if quantised and not requires.kv_scales:
            found["kv_dtypes"] = f"keys of {', '.join(quantised)} come with scales, and no kv_scales are claimed"
        if requires.kv_scales and not quantised:
            found["kv_scales"] = f"keys of {', '.join(QUANTISED_NAMES)} alone have scales, which no kv_dtypes claim"
        if requires.page_size and not _paged(requires):
            found["page_size"] = "paged is not among kv_layouts"
        return found

    def outside(self, requires: Requires) -> dict[str, Spec]:
        """Overrides of the plainest spec that the claims exclude."""
        decoding: Pairs = ((4, 20), (3, 9))
        found = head_dims_outside(requires) | unclaimed(
            requires,
            DTYPES,
            ("causal", requires.causal, {"mask": (True, None), "lengths": decoding}),
            ("window", requires.window, {"mask": (False, (5, 3)), "lengths": decoding}),
            ("softcap", requires.softcap, {"softcap": 5.0}),
            ("a high softcap", not requires.softcap or requires.any_softcap, {"softcap": 1e6}),
            ("sinks", requires.sinks, {"sinks": True}),
            ("alibi", requires.alibi, {"alibi": True}),
            ("gqa", requires.gqa, {"heads": (4, 2)}),
            ("lse", requires.lse, {"lse": True}),
            ("out", requires.out, {"out": True}),
            ("inner stride", not requires.unit_inner_stride, {"memory": "inner"}),
        )
        found |= {kind: {"kv_layout": kind} for kind in ("packed", "cache") if kind not in requires.kv_layouts}
        if not _paged(requires):
            found["paged"] = {"kv_layout": "paged", "page_size": PAGES[0]}
        for name in ("int8", "float8_e4m3fn"):
            if name not in requires.kv_dtypes:
                found[f"{name} keys"] = {"quantised": (name, "tensor")}
        return found

    def varies(self, spec: Spec) -> bool:
        """The order of sequences is all that a seed changes of where they begin: of one length, it changes nothing."""
        return len(set(spec["lengths"])) > 1

    def word(self, axis: str, value: Any) -> str:
        if axis == "lengths":
            shown = [f"{q}/{k}" for q, k in value[:5]]
            return "lengths:" + "+".join(shown) + (f"+{len(value) - 5}" if len(value) > 5 else "")
        return " by ".join(value) if axis == "quantised" else super().word(axis, value)

    def make(self, spec: Spec, device: torch.device, seed: int) -> Sample:
        pairs = spec["lengths"]
        if device.type != "meta":  # the same batch in another order: a CUDA graph of one serves the others
            pairs = (*pairs[seed % len(pairs) :], *pairs[: seed % len(pairs)])
        arenas, indices = self._memory_of(spec, pairs, device, seed)
        if spec["kv_layout"] == "packed" and all(queries == keys for queries, keys in pairs):
            arenas["cu_seqlens_k"] = arenas["cu_seqlens_q"]  # as callers do whose keys are their queries'
            arenas["cu_seqlens_k"].views["cu_seqlens_k"] = arenas["cu_seqlens_q"].views["cu_seqlens_q"]
        tensors = {name: view for arena in arenas.values() for name, view in arena.views.items()}
        given = dict.fromkeys(OPTIONAL) | {name: tensors[name] for name in OPTIONAL if name in tensors}
        if device.type != "meta":
            generator = torch.Generator(device).manual_seed(seed)
            for name, values in indices.items():
                if name == "block_table":
                    arenas[name].raw.fill_(NO_PAGE)
                tensors[name].copy_(values)
            self._fill(spec, tensors, generator)
        causal, window = spec["mask"]
        q, k, v, scale = tensors["q"], tensors["k"], tensors["v"], spec["scale"]
        most = [max(lengths) + (LOOSE if spec["bounds"] else 0) for lengths in zip(*pairs, strict=True)]
        lengths = {"cu_seqlens_q": tensors["cu_seqlens_q"]}
        arguments = {"causal": causal, "window": window, "softcap": spec["softcap"], "scale": scale, **given, **lengths}
        arguments |= {"return_lse": spec["lse"], "max_seqlen_q": most[0], "max_seqlen_k": most[1]}
        launch = {"scale": q.shape[2] ** -0.5 if scale is None else scale, "schedule": None, **given, **lengths}
        written = {"out": tensors["out"]} if "out" in tensors else {}
        return Sample((q, k, v), arguments, launch, arenas, written)

    def _memory_of(
        self, spec: Spec, pairs: Pairs, device: torch.device, seed: int
    ) -> tuple[dict[str, Arena], dict[str, torch.Tensor]]:
        """Poisoned memory for all tensors of a call, and the values of those that are indices."""
        queries, keys = zip(*pairs, strict=True)
        dtype, (hq, hkv), d = getattr(torch, spec["dtype"]), spec["heads"], spec["head_dim"]
        dv, layout, page = spec["head_dim_v"] or d, spec["kv_layout"], spec["page_size"] or PAGES[0]
        kv_dtype = getattr(torch, spec["quantised"][0]) if spec["quantised"] else dtype
        indices = {"cu_seqlens_q": torch.tensor([0, *itertools.accumulate(queries)])}
        leading: tuple[int, ...] = (sum(keys),)
        if layout == "packed":
            indices["cu_seqlens_k"] = torch.tensor([0, *itertools.accumulate(keys)])
        else:
            indices["seqused_k"] = torch.tensor(keys)
            leading = (len(pairs), max(keys) + 3)
        if layout == "paged":
            indices["block_table"], pages = table(keys, page, seed)
            leading = (pages, page)
        shapes = {"q": (sum(queries), hq, d), "k": (*leading, hkv, d), "v": (*leading, hkv, dv)}
        dtypes = {"q": dtype, "k": kv_dtype, "v": kv_dtype}
        if spec["memory"] == "fused":
            arenas = fused(shapes, 1, 0, dtype, device)
        elif spec["memory"] == "latent":
            arenas = latent(shapes, dense_strides(shapes["q"]), dense_strides(shapes["k"]), dtype, device)
        else:
            shift = max(spec["base_alignment"], dtype.itemsize) if spec["memory"] == "offset" else 0
            arenas = {
                name: Arena(
                    {name: Slot(s, strides(spec["memory"], s, dtypes[name], name == "v"))}, dtypes[name], device, shift
                )
                for name, s in shapes.items()
            }
        small: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            name: (tuple(values.shape), torch.int32) for name, values in indices.items()
        }
        steps: dict[str, tuple[int, ...]] = {}
        if spec["quantised"]:
            shape = {"tensor": (1,), "head": (hkv,), "token": shapes["k"][:-1]}[spec["quantised"][1]]
            small |= dict.fromkeys(("k_scale", "v_scale"), (shape, torch.float32))
            steps |= {name: scale_strides(spec["scales"], shape, name) for name in ("k_scale", "v_scale")}
        small |= {"sinks": ((hq,), dtype if spec["sinks"] == "narrow" else torch.float32)} if spec["sinks"] else {}
        small |= {"alibi_slopes": ((hq,), torch.float32)} if spec["alibi"] else {}
        if spec["out"]:
            small["out"] = (sum(queries), hq, dv), dtype
            steps["out"] = strides(str(spec["out"]), small["out"][0], dtype, False)
        if spec["table"]:
            steps["block_table"] = (small["block_table"][0][1] + TABLE_GAP, 1)
        for name, (shape, kind) in small.items():
            shift = kind.itemsize if spec["beside"] else 0
            arenas[name] = Arena({name: Slot(shape, steps.get(name, dense_strides(shape)))}, kind, device, shift)
        return arenas, indices

    def _fill(self, spec: Spec, tensors: dict[str, torch.Tensor], generator: torch.Generator) -> None:
        """Values for what the lengths say is there. All else stays NaN: nobody's pages, what follows the last key."""

        def random(shape: Sequence[int]) -> torch.Tensor:
            return torch.randn(tuple(shape), device=generator.device, generator=generator)

        tensors["q"].copy_(random(tensors["q"].shape) * SPREADS[spec["spread"]])
        given = {name: tensors.get(name) for name in OPTIONAL}
        size = 1.0
        for name in ("k", "v"):
            there = slots(tensors[name], given)
            values = random((*there[0].shape, *tensors[name].shape[-2:]))
            if tensors[name].dtype is torch.int8:
                values, size = (values * 40).clamp(-128, 127).round(), 1 / 40
            tensors[name][there] = values.to(tensors[name].dtype)
            if f"{name}_scale" in tensors:
                scale = stored(tensors[f"{name}_scale"])
                at = there if scale.dim() > 1 else ...
                drawn, loud = random(scale[at].shape), LOUD if name == "v" and spec["spread"] == "flat" else 1.0
                scale[at] = (drawn + drawn.sign() * 0.5) * size * loud
        if "alibi_slopes" in tensors:
            tensors["alibi_slopes"].copy_(random(tensors["alibi_slopes"].shape) / 8)
            tensors["alibi_slopes"][-1:] = STEEP
        if "sinks" in tensors:
            tensors["sinks"].copy_(random(tensors["sinks"].shape) * 2)
            tensors["sinks"][: min(len(tensors["sinks"]) - 1, 1)] = FAINT
            tensors["sinks"][2:3] = -math.inf  # none at all

    def expected(self, sample: Sample) -> list[Expected]:
        q, arguments = sample.tensors[0], sample.arguments
        dtype = q.dtype
        want, lse = attention_varlen.reference(*sample.tensors, **arguments | {"return_lse": True})
        models = [model_of(piece) for piece in pieces_of(sample)]
        noise = max(m.noise for m in models)
        natural = math.sqrt(sum(m.natural for m in models) / max(sum(m.out.numel() for m in models), 1))
        model = rounded_to(torch.cat([m.out for m in models]), dtype)
        alone = alone_of(want, q.shape[1] // sample.tensors[1].shape[-2])
        found = [Expected("out", want, Yardstick(model, 8 * noise * natural, floor_of(dtype), alone=alone), dtype)]
        if arguments["return_lse"]:
            found.append(expected_lse(lse, torch.cat([m.lse for m in models], dim=1), noise, dtype))
        return found

    def form(self, sample: Sample, results: Results) -> list[str]:
        out, got = sample.written.get("out"), results.get("out")
        if out is None or not isinstance(got, torch.Tensor):
            return super().form(sample, results)
        found = super().form(sample, {name: result for name, result in results.items() if name != "out"})
        if (got.data_ptr(), got.stride()) != (out.data_ptr(), out.stride()):
            found.append("what was returned is not the `out` that was given")
        return found


def _paged(requires: Requires) -> bool:
    return "paged" in requires.kv_layouts


def _quantised(requires: Requires) -> list[str]:
    """Of the dtypes claimed for keys, those that have scales."""
    return [name for name in requires.kv_dtypes if name in QUANTISED_NAMES]
