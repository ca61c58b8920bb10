"""Results against an oracle in float64: the gate before the tuner's timer and the conformance kit judge by this.

What was not returned, or has another shape or dtype than was promised, is wrong. Values are held to a bound: a fixed
tolerance on each block of rows, or torch's own error in the same dtype as a yardstick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

BLOCK = 64
"""Rows that are judged together: one wrong tile must not vanish in the norm of a large result."""
FLOOR = 0.05
"""A block whose values are smaller than this share of the usual is judged by that share."""
TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "tf32": 4e-3,
    "float16": 5e-3,
    "bfloat16": 2e-2,
    "float8_e4m3fn": 0.15,
    "float8_e5m2": 0.3,
    "int8": 0.0,
    "int32": 0.0,
}
"""Largest relative error of one block. Rounding of a bfloat16 result alone gives 2e-3."""
TIMES_YARDSTICK = 1.5
"""A result may be this much further from the float64 oracle than torch's computation in the same dtype."""
LUCK = 2.0
"""Both errors are drawn by chance, and differ the more the fewer numbers they are taken over: by a share that falls
with the root of how many. Two rows of 16 were seen at 1.7 times torch's error by as many roundings in another order."""
MAX_TIMES_YARDSTICK = 4.0
"""The same for the worst single element, of which there is more chance."""
NEAR = 8.0
"""So many times as large as the largest of those that were compared another element may well be."""


class Measured(NamedTuple):
    """How far one part of one result is off."""

    error: float
    yardstick: float
    limit: float
    complaints: list[str]


@dataclass(frozen=True)
class Tolerance:
    """A fixed bound on the relative error of each block."""

    limit: float
    absolute: bool = False
    """A bound on each element instead, for results on a logarithmic scale."""
    rows_first: bool = False
    """Results are [row, head, column], not [..., row, column]."""

    def measure(self, got: torch.Tensor, want: torch.Tensor) -> Measured:
        if self.rows_first:
            got, want = got.transpose(0, 1), want.transpose(0, 1)
        error = _log_error(got, want) if self.absolute else block_error(got, want)
        complaints = [] if error <= self.limit else [f"error {error:.3g}, allowed {self.limit:.3g}"]
        return Measured(error, 0.0, self.limit, complaints)


@dataclass(frozen=True)
class Yardstick:
    """A bound relative to the error that torch makes."""

    model: torch.Tensor
    """By torch, rounding as its own kernels of that dtype do."""
    slack: float = 0.0
    """Absolute error, per element, that the arithmetic (not the dtype) makes unavoidable."""
    floor: float = 0.0
    """Relative error that nobody is blamed for."""
    absolute: bool = False
    """Judge elements by absolute error alone (an LSE)."""
    alone: int | None = None
    """How many numbers are off by chance of their own, where others are off with them, as a row of gradients is with
    what was rounded once for all of it. None: each."""

    def measure(self, got: torch.Tensor, want: torch.Tensor) -> Measured:
        got, model = (_held(t, want, got.dtype) for t in (got, self.model))
        if bad := _disagreeing(got, want):
            return Measured(math.nan, math.nan, 0.0, [bad])
        finite, zero = torch.isfinite(want), torch.zeros((), dtype=torch.float64, device=want.device)
        want, got, model = (torch.where(finite, t, zero) for t in (want, got, model))
        off, model_off = (got - want).abs(), (model - want).abs()
        complaints = []
        worst_limit = MAX_TIMES_YARDSTICK * float(model_off.max()) + 4 * self.slack
        worst_limit += 4 * self.floor * float(want.abs().max())
        if float(off.max()) > worst_limit:
            at = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
            complaints.append(
                f"{list(at)} is {float(got[at]):.6g}, not {float(want[at]):.6g}: off by {float(off[at]):.3g}, "
                f"allowed {worst_limit:.3g}"
            )
        if self.absolute:
            return Measured(float(off.max()), float(model_off.max()), worst_limit, complaints)
        length = max(float(want.norm()), torch.finfo(torch.float64).tiny)
        error, yardstick = float(off.norm()) / length, float(model_off.norm()) / length
        times = TIMES_YARDSTICK * (1 + LUCK / math.sqrt(max(1, self.alone or want.numel())))
        limit = times * max(yardstick, self.floor) + self.slack * math.sqrt(want.numel()) / length
        if error > limit:
            complaints.append(f"relative error {error:.3g}, allowed {limit:.3g} (torch: {yardstick:.3g})")
        return Measured(error, yardstick, limit, complaints)


@dataclass(frozen=True)
class Expected:
    """What one result, or one part of it, should be."""

    output: str
    want: torch.Tensor
    """By the oracle."""
    bound: Tolerance | Yardstick
    dtype: torch.dtype
    index: tuple[Any, ...] = ()
    """Which part this is; () is the whole."""
    shape: tuple[int, ...] | None = None
    """Of the whole result, where this is a part of it."""

    def misfit(self, got: Any) -> str:
        """Why this is no such result at all; "" where its values are worth a look."""
        if got is None:
            return f"{self.output} was not returned"
        if not isinstance(got, torch.Tensor):
            return f"{self.output} is {type(got).__name__}, not a tensor"
        shape = tuple(self.want.shape) if self.shape is None else self.shape
        if tuple(got.shape) != shape:
            return f"{self.output} has shape {tuple(got.shape)}, not {shape}"
        if got.dtype != self.dtype:
            return f"{self.output} is {got.dtype}, not {self.dtype}"
        if got.layout is not torch.strided or got.device != self.want.device:
            return f"{self.output} is {got.layout} on {got.device}, not {torch.strided} on {self.want.device}"
        sampled = self.index and got.dtype.is_floating_point and not self.bound.absolute
        if sampled and self._strays(got.float()):
            return f"{self.output} has elements that are not finite"
        return ""

    def _strays(self, got: torch.Tensor) -> bool:
        """Whether what nobody compares is NaN, or infinite though this part does not come near the end of its dtype."""
        if bool(got.isnan().any()):
            return True
        return bool(got.isinf().any()) and float(self.want.abs().max()) * NEAR < torch.finfo(self.dtype).max


@dataclass(frozen=True)
class Verdict:
    """How one set of results compares; the numbers are those of the result that came nearest to failing."""

    error: float
    yardstick: float
    limit: float
    complaints: tuple[str, ...]
    errors: Mapping[str, float] = field(default_factory=dict)
    """The largest error of each result."""

    @property
    def ok(self) -> bool:
        return not self.complaints


def judge(results: Mapping[str, Any], expected: Sequence[Expected]) -> Verdict:
    """Hold the results of one launch, by name, against the oracle. A result is looked at up to its first wrong part."""
    nearest, worst = -1.0, (0.0, 0.0, 0.0)
    complaints: dict[str, list[str]] = {}
    errors: dict[str, float] = {}
    for part in expected:
        got = results.get(part.output)
        if part.output not in errors and (misfit := part.misfit(got)):
            complaints[part.output], errors[part.output] = [misfit], math.inf
        if complaints.get(part.output):
            continue
        assert isinstance(got, torch.Tensor)
        *numbers, found = part.bound.measure(got[part.index], part.want)
        error, _, limit = numbers
        complaints[part.output] = [f"{part.output}{_where(part.index)}: {text}" for text in found]
        errors[part.output] = max(errors.get(part.output, 0.0), math.inf if math.isnan(error) else error)
        ratio = error / limit if limit > 0 else math.inf if error > 0 else 0.0
        if ratio > nearest or math.isnan(ratio):
            nearest, worst = ratio, (error, numbers[1], limit)
    return Verdict(*worst, tuple(text for texts in complaints.values() for text in texts), errors)


def block_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest relative error of a block of rows, the last with what is left; integers must be equal.

    Left over, a row alone would be judged alone: one of dQ whose weights are nearly all on one key is far smaller than
    the terms that cancel out in it."""
    if not want.dtype.is_floating_point:
        return 0.0 if torch.equal(got, want) else math.inf
    want = want.reshape(-1, want.shape[-2] if want.dim() > 1 else 1, want.shape[-1]).double()
    difference = got.reshape(want.shape).double() - want
    rows = want.shape[1]
    blocks = max(rows // BLOCK, 1)
    starts = (torch.arange(rows, device=want.device) // BLOCK).clamp(max=blocks - 1)
    sums = [torch.zeros(want.shape[0], blocks, dtype=torch.float64, device=want.device) for _ in range(2)]
    for total, values in zip(sums, (difference, want), strict=True):
        total.index_add_(1, starts, values.square().sum(dim=-1))
    counts = torch.bincount(starts, minlength=blocks).double() * want.shape[-1]
    usual = float(want.square().mean().sqrt())
    floor = counts * max(FLOOR * usual, 1e-30) ** 2
    return float((sums[0] / torch.maximum(sums[1], floor)).sqrt().max())


def _log_error(got: torch.Tensor, want: torch.Tensor) -> float:
    same = torch.isinf(want) & (got == want)
    return float(torch.where(same, 0.0, (got.double() - want.double()).abs()).nan_to_num(math.inf, math.inf).max())


def _where(index: tuple[Any, ...]) -> str:
    shown = [str(i) if isinstance(i, int) else f"{i.start or 0}:{'' if i.stop is None else i.stop}" for i in index]
    return f"[{', '.join(shown)}]" if shown else ""


def _held(values: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In float64; what is infinite where a result of this dtype has no number so large is what it should be."""
    values = values.to(torch.float64)
    if not dtype.is_floating_point:
        return values
    largest = torch.finfo(dtype).max * (1 - 4 * torch.finfo(dtype).eps)
    beyond = (want.abs() >= largest) & torch.isinf(values) & (values.sign() == want.sign())
    return torch.where(beyond, want, values)


def _disagreeing(got: torch.Tensor, want: torch.Tensor) -> str:
    """Where a result is not finite although it should be, or the reverse; "" if nowhere."""
    for what, wrong in (
        ("NaN", torch.isnan(got)),
        ("not finite", torch.isfinite(want) & ~torch.isfinite(got)),
        ("not infinite", torch.isinf(want) & (got != want)),
    ):
        count = int(wrong.sum())
        if count:
            at = tuple(int(i) for i in wrong.nonzero()[0])
            values = f"got {float(got[at])}, expected {float(want[at]):.6g}"
            return f"{count} of {got.numel()} elements are {what}, the first at {list(at)} ({values})"
    return ""
