"""What the conformance kits of both attentions share: masks, memory, LSEs, and a kernel's arithmetic in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.errors import InvalidArgument
from registry.ops.parts.judging import Expected, Yardstick
from registry.ops.parts.kit import Kit, Results, Sample, Spec, dense_complaints
from registry.ops.parts.masks import canonical_window, visible
from registry.ops.parts.memory import Arena, Slot, Strides
from registry.ops.parts.rounding import sum_eps
from registry.ops.parts.sizes import Size

SPREADS = {"": 1.0, "sharp": 6.0, "flat": 0.01}
SOFTCAPS = (2.5, 5.0, 30.0, 100.0)
"""A fraction, and what models have."""
LSE_TIMES_EPS = 0.1
"""An LSE may be off by this fraction of the operands' rounding: less than what rounding the weights costs anyway."""


class AttentionLikeKit(Kit):
    """Of a forward that gives (out, lse)."""

    call: Callable[..., Any]
    """The op as a user calls it."""

    def few(self, requires: Requires) -> Spec:
        """Axes of as small a problem as tells a right kernel from a wrong one."""
        raise NotImplementedError

    def ends(self, requires: Requires, size: Size) -> dict[str, Spec]:
        """Of head dims, on a CPU: a kernel that is compiled for them, or interpreted, takes its time."""
        wide = self._beyond(requires, size) if size.far else {}
        return {f"{axis}={end}": {axis: end, **self.few(requires)} for axis, (_, end, _) in wide.items()}

    def left_out(self, requires: Requires, size: Size) -> list[str]:
        found = []
        for axis, (first, end, multiple) in self._beyond(requires, size).items():
            last = end - multiple if size.far else end  # which `ends` has
            found += [f"{axis} {first}..{last}" if first < last else f"{axis} {last}"] if first <= last else []
        return found

    def _beyond(self, requires: Requires, size: Size) -> dict[str, tuple[int, int, int]]:
        """By axis: the least value, the end, and the multiple of what is claimed beyond the values of `axes`."""
        axes, found = self.axes(requires, size), {}
        for axis in ("head_dim", "head_dim_v"):
            claim, multiple = getattr(requires, axis), getattr(requires, f"{axis}_multiple")
            if claim is not None and (end := claim[1] // multiple * multiple) > (widest := max(axes[axis])):
                found[axis] = widest + multiple, end, multiple
        return found

    def word(self, axis: str, value: Any) -> str:
        if axis != "mask":
            return super().word(axis, value)
        causal, window = value
        return " ".join([*(["causal"] if causal else []), *([f"window:{window[0]},{window[1]}"] if window else [])])

    def launch(self, launch: Callable[..., Any], sample: Sample) -> Results:
        found = launch(*sample.tensors, **sample.launch_arguments)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            got = f"{len(found)} values" if isinstance(found, (tuple, list)) else type(found).__name__
            raise InvalidArgument("what run returns", got, "(out, lse), where lse may be None if it was not asked for")
        return {"out": found[0], "lse": found[1]} if sample.arguments["return_lse"] else {"out": found[0]}

    def front_door(self, variant: str, sample: Sample) -> Results:
        found = type(self).call(*sample.tensors, **sample.arguments, variant=variant)
        return dict(zip(("out", "lse"), found, strict=True)) if sample.arguments["return_lse"] else {"out": found}

    def form(self, sample: Sample, results: Results) -> list[str]:
        found, lse = dense_complaints(results, sample), results.get("lse")
        if isinstance(lse, torch.Tensor) and not lse.is_contiguous():
            found.append(f"lse has strides {lse.stride()}: backward variants rely on a contiguous one")
        return found


def wide_window(size: Size) -> int:
    """Keys before each query's own: several blocks of them, the first of which is the last of its block."""
    return size.long // 2 // 64 * 64 + 1


def expected_lse(lse: torch.Tensor, model: torch.Tensor, noise: float, dtype: torch.dtype) -> Expected:
    """An LSE, of operands of this dtype, and how far from it one may be."""
    slack = max(4 * noise, LSE_TIMES_EPS / 4 * torch.finfo(dtype).eps)
    bound = Yardstick(model.float(), slack, torch.finfo(torch.float32).eps / 4, absolute=True)
    return Expected("lse", lse, bound, torch.float32)


def head_dims_outside(requires: Requires) -> dict[str, Spec]:
    """Overrides with head dimensions that the claims exclude."""
    if requires.head_dim is None:
        return {}
    (low, high), multiple = requires.head_dim, requires.head_dim_multiple
    found: dict[str, Spec] = {}
    if high < 2**15:
        found["head_dim above"] = {"head_dim": (high // multiple + 1) * multiple}
    if low > multiple:
        found["head_dim below"] = {"head_dim": max(1, (low - 1) // multiple * multiple)}
    if multiple > 1:
        found["head_dim between"] = {"head_dim": -(-low // multiple) * multiple + 1}
    if requires.head_dim_v is None:
        found["head_dim_v"] = {"head_dim": low, "head_dim_v": low + multiple}
    return found


def fused(
    shapes: dict[str, tuple[int, ...]], heads: int, rows: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Arena]:
    """Slices of one projection's output [..., all heads], as models make them; two where the lengths differ. `heads`
    and `rows` are the dimensions of these; before them there may be a batch."""
    arenas = {}
    for names in [("q", "k", "v")] if shapes["q"][rows] == shapes["k"][rows] else [("q",), ("k", "v")]:
        row = sum(shapes[name][heads] * shapes[name][-1] for name in names)
        slots, offset = {}, 0
        for name in names:
            shape = shapes[name]
            by_dim = {heads: shape[-1], rows: row, len(shape) - 1: 1}
            strides = tuple(by_dim.get(dim, shape[rows] * row) for dim in range(len(shape)))
            slots[name] = Slot(shape, strides, offset)
            offset += shape[heads] * shape[-1]
        arenas["+".join(names)] = Arena(slots, dtype, device)
    return arenas


def latent(
    shapes: dict[str, tuple[int, ...]], of_q: Strides, of_k: Strides, dtype: torch.dtype, device: torch.device
) -> dict[str, Arena]:
    """Values that are the first columns of the keys, as in the attention of latent vectors."""
    both = {"k": Slot(shapes["k"], of_k), "v": Slot(shapes["v"], of_k)}
    return {"q": Arena({"q": Slot(shapes["q"], of_q)}, dtype, device), "k+v": Arena(both, dtype, device)}


# --- the yardstick: attention as a kernel of this dtype computes it ---------------------------------------------------


def masked(
    scores: torch.Tensor, arguments: dict[str, Any], bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(masked scores, mask, tanh of the capped scores) of scaled products [..., queries, keys]."""
    capped = None
    if arguments["softcap"]:
        capped = torch.tanh(scores / arguments["softcap"])
        scores = capped * arguments["softcap"]
    scores = scores if bias is None else scores - bias
    causal, window = canonical_window(arguments["window"], arguments["causal"])
    seen = visible(scores.shape[-2], scores.shape[-1], causal, window, scores.device)
    return scores if seen is None else scores.masked_fill(~seen, -math.inf), seen, capped


def noise_of(scores: torch.Tensor, arguments: dict[str, Any], dtype: torch.dtype) -> float:
    """Error that arithmetic in float32 makes in scores of this size, and so in exp(scores), relative to it."""
    largest = float(torch.where(torch.isfinite(scores), scores.abs(), 0.0).max()) if scores.numel() else 0.0
    return sum_eps(dtype) * (1.0 + largest + float(arguments["softcap"]))


def alone_of(want: torch.Tensor, group: int) -> int:
    """How many numbers of an output are off by chance of their own: rows that see no key are zeros, and heads of a
    group have the same values, which are rounded once for all of them."""
    return max(1, int(torch.count_nonzero(want)) // group)


def slack_of(noise: float, natural: float, dtype: torch.dtype) -> float:
    """Error of an element of a gradient whose terms are of this size; where they cancel out, two steps of the dtype are
    next to nothing."""
    return 8 * noise * natural + 2 * torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def typical(x: torch.Tensor) -> float:
    """The root of the mean square."""
    return math.sqrt(float(x.double().square().mean())) if x.numel() else 0.0
