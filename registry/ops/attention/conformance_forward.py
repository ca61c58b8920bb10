"""The conformance kit's knowledge of attention: axes, memory orders, and what forward and backward are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.ops.attention.op import attention
from registry.ops.attention.outputs import out_geometry
from registry.ops.parts.attention_kit import (
    SOFTCAPS,
    SPREADS,
    AttentionLikeKit,
    alone_of,
    expected_lse,
    fused,
    head_dims_outside,
    latent,
    masked,
    noise_of,
    wide_window,
)
from registry.ops.parts.judging import Expected, Yardstick
from registry.ops.parts.kit import UNIT_BYTES, Results, Sample, Spec, unclaimed
from registry.ops.parts.masks import canonical_mask
from registry.ops.parts.memory import Arena, Slot, Strides, dense_strides
from registry.ops.parts.rounding import as_multiplied, floor_of, rounded_to
from registry.ops.parts.sizes import Size

BSHD_ORDER = (3, 1, 2, 0)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 100, 112, 128, 160, 192, 200, 256, 320, 512)
DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn")


def _head_dims(claim: tuple[int, int] | None, multiple: int, size: Size) -> list[int]:
    """Both ends of the range, what models use, and odd values between, as far as they are claimed."""
    if claim is None:
        return []
    low = -(-claim[0] // multiple) * multiple
    high = min(claim[1], max(size.widest, 2 * low)) // multiple * multiple
    middle = [d for d in HEAD_DIMS if low <= d <= high and d % multiple == 0]
    odd = [d // multiple * multiple for d in ((low + high) // 2 - 1, (low + 3 * high) // 4 - 1)]
    plain = [d for d in (64, 32, 128) if d in middle][:1]
    return list(dict.fromkeys([*plain, high, low, *(d for d in odd if low <= d <= high), *middle]))


def _lengths(requires: Requires, size: Size) -> list[tuple[int, int]]:
    def fit(sq: int, sk: int) -> tuple[int, int]:
        mq, mk = requires.seqlen_q_multiple, requires.seqlen_k_multiple
        return -(-sq // mq) * mq, -(-sk // mk) * mk

    base = size.lengths
    found = [fit(s, s) for s in (base[1], base[2], base[0], *base[3:])]
    if requires.cross_length:
        long = base[-1]
        pairs = ((1, base[1]), (1, 129), (77, 129), (129, 77), (1, long), (long, 129), (base[1], long), (base[1], 1))
        found += [fit(*pair) for pair in pairs]
    return list(dict.fromkeys(pair for pair in found if requires.cross_length or pair[0] == pair[1]))


def _masks(requires: Requires) -> list[tuple[bool, Any]]:
    found: list[tuple[bool, Any]] = [(False, None)]
    if requires.causal:
        found.append((True, None))
    if requires.window:
        found += [(False, (5, 3)), (False, (-1, 7)), (False, (40, -1)), (False, (90, 70)), (False, (0, 1))]
    if requires.window and requires.causal:
        found += [(True, (left, 0)) for left in (33, 0, 100000, 200, 257)] + [(True, (64, 5))]
    return found


def _memory(requires: Requires) -> list[str]:
    found: list[str] = [layout for layout in ("bhsd", "bshd") if layout in requires.layouts]
    if "strided" in requires.layouts:
        found += ["fused", "rows", "expanded", "mixed", "sliced", "turned", "shared", "latent"]
        found += ["odd"] if requires.stride_alignment < UNIT_BYTES else []
        found += [] if requires.unit_inner_stride else ["inner", "transposed"]
    return found + (["offset"] if requires.base_alignment < UNIT_BYTES and found else [])


class AttentionKit(AttentionLikeKit):
    call = attention
    between_calls = {"scale": 0.4}
    of_rules = frozenset(f"memory={style}" for style in ("sliced", "turned", "shared", "latent"))
    claims = ("dtype", "heads", "head_dim", "mask", "softcap", "lse", "ieee", "deterministic", "grad_lse", "memory")

    def axes(self, requires: Requires, size: Size) -> dict[str, list[Any]]:
        dims = _head_dims(requires.head_dim, requires.head_dim_multiple, size)
        dims_v = _head_dims(requires.head_dim_v, requires.head_dim_v_multiple, size) if requires.head_dim_v else []
        heads = [(2, 2), (1, 1), *([] if size.slow else [(3, 3)]), *([(16, 16)] if size.large else [])]
        if requires.gqa:
            heads += [(4, 2), *([(3, 1)] if size.slow else [(6, 1), (6, 2), (8, 1), (5, 1), (16, 1)])]
            heads += [(32, 8)] if size.large else []
        return {
            "dtype": list(requires.dtypes),
            "batch": [2, 1, 3][: 2 if size.slow else 3],
            "heads": heads,
            "lengths": _lengths(requires, size),
            "head_dim": dims,
            "head_dim_v": [0, *dims_v],
            "mask": _masks(requires),
            "softcap": [0.0, *(SOFTCAPS if requires.softcap else ()), *((1e6,) if requires.any_softcap else ())],
            "lse": [True, False] if requires.lse else [False],
            "scale": [None, 0.3, 1.0, 2.5, 0.02],
            "spread": list(SPREADS),
            "memory": _memory(requires),
            "base_alignment": [requires.base_alignment],
            "ieee": [True, False] if requires.ieee else [False],
            "deterministic": [False, True] if requires.deterministic else [False],
        }

    def sensible(self, spec: Spec) -> bool:
        """A mask is there to be tested: one that hides nothing at these lengths would leave its claim untested. What
        heads share takes several of them."""
        causal, window = spec["mask"]
        if spec["memory"] == "shared" and (spec["heads"][1] == 1 or spec["batch"] == 1):
            return False
        if spec["memory"] == "latent" and spec["head_dim_v"] > spec["head_dim"]:
            return False
        return not (causal or window) or canonical_mask(causal, window, *spec["lengths"]) != (False, None)

    def pinned(self) -> Sequence[Spec]:
        causal, window = (True, None), (True, (33, 0))
        return (
            {"mask": causal, "heads": (4, 2)},
            {"mask": causal, "spread": "sharp"},
            *({"mask": m, "lengths": pair, "lse": True} for m in (causal, window) for pair in ((129, 77), (77, 129))),
            {"mask": causal, "lengths": (192, 256)},  # a diagonal that meets tiles of 128 in their middle
            {"mask": (False, (5, 3)), "lengths": (129, 77), "heads": (6, 1)},
            {"mask": (False, (5, 3)), "lengths": (77, 1)},
            {"mask": causal, "softcap": 5.0, "heads": (4, 2)},
            {"memory": "fused", "heads": (4, 2), "mask": causal},
            {"mask": window, "lengths": (1, 129)},  # whose own key begins a block
            *({"mask": (False, (0, 1)), "lengths": (s, s)} for s in (300, 1000)),  # its next key begins one
            {"lengths": (1, 300), "mask": (False, None)},
            {"lengths": (1, 1)},
            {"memory": "expanded", "batch": 2, "heads": (2, 2), "lengths": (77, 77)},
            {"memory": "mixed", "heads": (2, 2), "lengths": (77, 77), "head_dim_v": 0},  # one shape, three orders
        )

    def crowded(self, size: Size) -> Sequence[Spec]:
        if not size.large:
            few: Spec = {"batch": 1, "lengths": (size.long, size.long), "memory": "bhsd", "spread": ""}
            one: Spec = {**few, "heads": (1, 1), "lengths": (size.far, size.far), "head_dim_v": 0}
            masks = (False, None), (True, None), (True, (wide_window(size), 0))
            far = masks[:2] if size.far else ()
            return (*({**few, "mask": mask} for mask in masks), *({**one, "mask": mask} for mask in far))
        many: Spec = {"batch": 64, "heads": (16, 16), "head_dim_v": 0, "memory": "bhsd", "softcap": 0.0, "spread": ""}
        wide: Spec = {**many, "batch": 1, "heads": (4, 4), "lengths": (size.long, size.long), "mask": (True, (257, 0))}
        return wide, *(
            {**many, "head_dim": d, "lengths": (s, s), "mask": (causal, None)}
            for d, s, causal in ((128, 77, False), (128, 129, True), (64, 129, False))
        )

    def ends(self, requires: Requires, size: Size) -> dict[str, Spec]:
        """Besides, more heads and batch entries than a kernel may hold in a table or a mask of bits: short ones."""
        if size.large:  # whose crowded problems have many
            return super().ends(requires, size)
        heads = (24, 8) if requires.gqa else (9, 9)
        many: Spec = {**self.few(requires), "head_dim_v": 0, "memory": _memory(requires)[0], "spread": ""}
        return super().ends(requires, size) | {"many heads": {**many, "batch": 3 if size.slow else 9, "heads": heads}}

    def few(self, requires: Requires) -> Spec:
        multiple = math.lcm(requires.seqlen_q_multiple, requires.seqlen_k_multiple)
        length = -(-16 // multiple) * multiple
        return {"batch": 1, "heads": (1, 1), "lengths": (length, length)}

    def outside(self, requires: Requires) -> dict[str, Spec]:
        """Overrides of the plainest spec that the claims exclude."""
        return head_dims_outside(requires) | unclaimed(
            requires,
            DTYPES,
            ("causal", requires.causal, {"mask": (True, None)}),
            ("window", requires.window, {"mask": (False, (5, 3))}),
            ("softcap", requires.softcap, {"softcap": 5.0}),
            ("a high softcap", not requires.softcap or requires.any_softcap, {"softcap": 1e6}),
            ("gqa", requires.gqa, {"heads": (4, 2)}),
            ("lse", requires.lse, {"lse": True}),
            ("cross_length", requires.cross_length, {"lengths": (64, 128)}),
            ("strided memory", "strided" in requires.layouts, {"memory": "rows"}),
            ("bshd memory", "bshd" in requires.layouts, {"memory": "bshd"}),
            ("inner stride", not requires.unit_inner_stride, {"memory": "inner"}),
        )

    def make(self, spec: Spec, device: torch.device, seed: int) -> Sample:
        dtype = getattr(torch, spec["dtype"])
        arenas = self._operands(spec, dtype, device)
        q, k, v = (next(a.views[n] for a in arenas.values() if n in a.views) for n in ("q", "k", "v"))
        if device.type != "meta":
            generator = torch.Generator(device).manual_seed(seed)
            for tensor, factor in ((q, SPREADS[spec["spread"]]), (k, 1.0), (v, 1.0)):
                _fill(tensor, factor, generator)
        causal, window = spec["mask"]
        scale = spec["scale"]
        arguments = {"causal": causal, "window": window, "softcap": spec["softcap"], "scale": scale}
        arguments["return_lse"] = spec["lse"]
        launch = {"scale": 1.0 / math.sqrt(q.shape[3]) if scale is None else scale}
        return Sample((q, k, v), arguments, launch, arenas)

    def _operands(self, spec: Spec, dtype: torch.dtype, device: torch.device) -> dict[str, Arena]:
        batch, (hq, hkv), (sq, sk), d = spec["batch"], spec["heads"], spec["lengths"], spec["head_dim"]
        dv, memory = spec["head_dim_v"] or d, spec["memory"]
        shapes: dict[str, tuple[int, ...]] = {
            "q": (batch, hq, sq, d),
            "k": (batch, hkv, sk, d),
            "v": (batch, hkv, sk, dv),
        }
        if memory == "fused":
            return fused(shapes, 1, 2, dtype, device)
        styles = {"q": memory, "k": memory, "v": memory}
        if memory == "shared":
            styles["q"] = "expanded"
        if memory == "mixed":
            styles = {"q": "bshd", "k": "bhsd", "v": "rows"}
        elif memory == "expanded":
            styles["q"] = "bhsd"
        shift = max(spec["base_alignment"], dtype.itemsize) if memory == "offset" else 0
        if memory == "latent":
            return latent(
                shapes, dense_strides(shapes["q"], BSHD_ORDER), dense_strides(shapes["k"], BSHD_ORDER), dtype, device
            )
        return {
            name: Arena({name: Slot(shape, strides_in(styles[name], shape, dtype))}, dtype, device, shift)
            for name, shape in shapes.items()
        }

    def expected(self, sample: Sample) -> list[Expected]:
        q, k, v = sample.tensors
        dtype, arguments = q.dtype, sample.arguments
        want, lse = attention.reference(q, k, v, **arguments | {"return_lse": True})
        scores, seen, _ = model_scores(q, k, arguments)
        weights = model_weights(scores, seen, torch.logsumexp(scores, dim=-1))
        wide = _repeat(v, q)
        model = rounded_to(as_multiplied(weights, dtype) @ as_multiplied(wide, dtype), dtype)
        noise = noise_of(scores, arguments, dtype)
        natural = float((weights @ wide.to(weights.dtype).abs()).square().mean().sqrt())
        alone = alone_of(want, q.shape[1] // k.shape[1])
        found = [Expected("out", want, Yardstick(model, 8 * noise * natural, floor_of(dtype), alone=alone), dtype)]
        if arguments["return_lse"]:
            found.append(expected_lse(lse, torch.logsumexp(scores, dim=-1), noise, dtype))
        return found

    def form(self, sample: Sample, results: Results) -> list[str]:
        return [*super().form(sample, results), *named_order_complaints("out", results.get("out"), sample.tensors[0])]

    def order(self, sample: Sample, results: Results) -> list[str]:
        return order_complaints("out", results["out"], "q", sample.tensors[0])


def order_complaints(name: str, result: Any, of: str, like: torch.Tensor) -> list[str]:
    """Results are in the memory order of an operand: whoever turned that one turns the result back for nothing."""
    if not isinstance(result, torch.Tensor) or result.dim() != 4:
        return []
    wanted = out_geometry(like.shape, like.stride(), result.shape[3])[1]
    if all(n == 1 or a == b for n, a, b in zip(result.shape, result.stride(), wanted, strict=True)):
        return []
    return [f"{name} has strides {result.stride()}; in the memory order of {of} they are {wanted}"]


def named_order_complaints(name: str, result: Any, like: torch.Tensor) -> list[str]:
    """Results are dense in one of the two orders that have a name; other variants' claims of memory count on it. (Or in
    that of their operand, which has none then; whether they may, `order_complaints` says.)"""
    if not isinstance(result, torch.Tensor) or result.dim() != 4:
        return []
    for order in (None, BSHD_ORDER, sorted(range(3, -1, -1), key=like.stride)):
        wanted = dense_strides(result.shape, order)
        if all(n == 1 or a == b for n, a, b in zip(result.shape, result.stride(), wanted, strict=True)):
            return []
    return [f"{name} has strides {result.stride()} for shape {tuple(result.shape)}: neither bhsd nor bshd"]


def strides_in(style: str, shape: tuple[int, ...], dtype: torch.dtype) -> Strides:
    """Strides of [B, H, S, D] in one of the memory styles."""
    b, h, s, d = shape
    unit = UNIT_BYTES // dtype.itemsize
    if style == "bshd":
        return dense_strides(shape, BSHD_ORDER)
    if style == "rows":
        row = -(-d // unit) * unit + unit
        return (h * (s + 1) * row, (s + 1) * row, row, 1)
    if style == "odd":
        return (h * (s * (d + 1) + 3), s * (d + 1) + 3, d + 1, 1)
    if style == "inner":
        return (h * s * d * 2, s * d * 2, d * 2, 2)
    if style == "transposed":
        return dense_strides(shape, (2, 3, 1, 0))
    if style == "expanded":
        return (0, *dense_strides(shape)[1:])
    if style == "sliced":  # the first rows of a longer cache
        return (h * (s + 3) * d, *dense_strides(shape, BSHD_ORDER)[1:])
    if style == "turned":  # [S, B, H, D] in memory
        return dense_strides(shape, (3, 1, 0, 2))
    if style == "shared":  # one head of keys, expanded
        return (s * d, 0, d, 1)
    return dense_strides(shape)


def _fill(tensor: torch.Tensor, factor: float, generator: torch.Generator) -> None:
    """Random values; a dimension of stride 0 holds one copy of them."""
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    values = torch.randn(shape, device=tensor.device, generator=generator) * factor
    tensor.as_strided(shape, tensor.stride(), tensor.storage_offset()).copy_(values)


# --- the yardstick: attention as a kernel of this dtype computes it, in plain torch ---------------------------------


def _repeat(kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def model_scores(
    q: torch.Tensor, k: torch.Tensor, arguments: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(masked scores, mask, tanh of the capped scores): products of operands in their dtype, accumulated wider."""
    scale = arguments.get("scale")
    scores = as_multiplied(q, q.dtype) @ as_multiplied(_repeat(k, q), q.dtype).mT
    return masked(scores * (q.shape[3] ** -0.5 if scale is None else scale), arguments)


def model_weights(scores: torch.Tensor, seen: torch.Tensor | None, lse: torch.Tensor) -> torch.Tensor:
    """exp(scores - lse), zero in rows that see no key."""
    weights = torch.exp(scores - lse[..., None].to(scores.dtype))
    return weights if seen is None else weights.masked_fill(~seen, 0.0)
