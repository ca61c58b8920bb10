"""What the conformance kit needs to know of an op (`Kit`).

A problem is described by a flat spec, `{axis: value}`. The axes and their values come from a variant's `Requires`;
registry.ops.parts.trials draws problems from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.ops.parts.judging import Expected
from registry.ops.parts.memory import Arena
from registry.ops.parts.sizes import Size

Spec = dict[str, Any]
Results = dict[str, torch.Tensor]
UNIT_BYTES = 16
"""What TMA and the widest loads take at once."""


# --- one made-up call ---------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """One call of an op with its memory: what the op and a launch are given, and what may be written."""

    tensors: tuple[torch.Tensor, ...]
    arguments: dict[str, Any]
    """Keyword arguments of the op, less `variant`."""
    launch_arguments: dict[str, Any]
    """Keyword arguments of a launch bound by the op."""
    arenas: dict[str, Arena]
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    """By arena: the view that the call may write (`out=`)."""

    def freeze(self) -> None:
        for arena in self.arenas.values():
            arena.freeze()

    def take(self, other: Sample) -> None:
        """The values of another call of the same facts, in this one's memory; what it may write stays as it was.

        No counter of torch's tells of it: kernels that write into a tensor do not raise its version, either."""
        for name, arena in self.arenas.items():
            if name not in self.written:
                arena.raw.data.copy_(other.arenas[name].raw)

    def changed(self) -> list[str]:
        """Complaints about inputs, or bytes around them, that the call changed."""
        return [
            f"{name} was modified, or memory around it"
            for name, arena in self.arenas.items()
            if arena.changed(self.written.get(name))
        ] + [
            f"{name} was written to, and made as it was again: whoever reads it meanwhile reads something else"
            for name, arena in self.arenas.items()
            if name not in self.written and arena.was_written() and not arena.changed()
        ]


class Kit:
    """What differs between ops: an op's folder has one for each of its ops in conformance.py, by name in `BY_OP`."""

    claims: Sequence[str] = ()
    """Axes of which every value must have a legal problem: a claim that nothing can use is no claim."""
    of_rules: frozenset[str] = frozenset()
    """By "axis=value": values of those axes that no claim is about, which a variant's rule may refuse everywhere."""
    self_explaining: Sequence[str] = ("dtype", "memory", "layout")
    """Axes of which a value is named without its axis."""
    between_calls: Mapping[str, Any] = {}
    """Axes that differ from call to call of one launch, and what they are at its second call."""
    checks: Mapping[str, Callable[[torch.device], list[str]]] = {}
    """What the op promises whatever the variant, checked once: functions of the device that return complaints."""

    def axes(self, requires: Requires, size: Size) -> dict[str, list[Any]]:
        """Values of each axis that the claims allow, the plainest first."""
        raise NotImplementedError

    def pinned(self) -> Sequence[Spec]:
        """Combinations that are always tried where they are legal."""
        return ()

    def crowded(self, size: Size) -> Sequence[Spec]:
        """Problems of many tiles, tried with every config: what one tile leaves behind meets the next."""
        return ()

    def ends(self, requires: Requires, size: Size) -> dict[str, Spec]:
        """By "axis=value": the ends of claims beyond the values of `axes`, where little else makes them cheap."""
        return {}

    def left_out(self, requires: Requires, size: Size) -> list[str]:
        """In words: parts of claims of which there is no problem at this size."""
        return []

    def unused(self, requires: Requires) -> dict[str, str]:
        """By claim: why no call can ever make use of it beside the others, and so no axis has it."""
        return {}

    def outside(self, requires: Requires) -> dict[str, Spec]:
        """By description: axis values just outside of the claims, which must be refused."""
        return {}

    def asked(self, label: str) -> bool:
        """Whether "axis=value" must have a legal problem somewhere."""
        return label.split("=")[0] in self.claims and label not in self.of_rules

    def sensible(self, spec: Spec) -> bool:
        """Whether the axis values make a call at all; where not, another one is drawn."""
        return True

    def varies(self, spec: Spec) -> bool:
        """Whether all tensors of such a call have other values from seed to seed."""
        return True

    def word(self, axis: str, value: Any) -> str:
        """An axis value in the name of a check; left out where it is false or empty."""
        if value is True:
            return axis
        if isinstance(value, str):
            return value if axis in self.self_explaining else f"{axis}:{value}"
        return f"{axis}:" + ("x".join(map(str, value)) if isinstance(value, tuple) else str(value))

    def make(self, spec: Spec, device: torch.device, seed: int) -> Sample:
        """The call with its tensors; on the meta device without values."""
        raise NotImplementedError

    def launch(self, launch: Callable[..., Any], sample: Sample) -> Results:
        """Call a bound launch and name its results."""
        raise NotImplementedError

    def front_door(self, variant: str, sample: Sample) -> Results:
        """The same through the op as a user calls it, with the variant asked for by name."""
        raise NotImplementedError

    def expected(self, sample: Sample) -> list[Expected]:
        """What the results are held against."""
        raise NotImplementedError

    def form(self, sample: Sample, results: Results) -> list[str]:
        """Complaints about strides of results; shapes and dtypes are those of `expected`."""
        return []

    def order(self, sample: Sample, results: Results) -> list[str]:
        """Complaints about the memory order of results that are dense. Torch's own kernels are not held to it."""
        return []


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """What there is in memory of a tensor: one element of each dimension that is expanded (torch fills no other)."""
    shape = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(shape, tensor.stride(), tensor.storage_offset())


# --- what is not claimed, and the form of results --------------------------------------------------------------------


def unclaimed(requires: Requires, dtypes: Sequence[str], *own: tuple[str, Any, Spec]) -> dict[str, Spec]:
    """By description: overrides that the claims exclude, among `own` of (description, claim, override) and those of all
    ops that have dtypes and memory."""
    every: tuple[tuple[str, Any, Spec], ...] = (
        ("deterministic", requires.deterministic, {"deterministic": True}),
        ("ieee", requires.ieee or "float32" not in requires.dtypes, {"dtype": "float32", "ieee": True}),
        ("row stride", requires.stride_alignment < UNIT_BYTES, {"memory": "odd"}),
        ("base address", requires.base_alignment < UNIT_BYTES, {"memory": "offset", "base_alignment": 1}),
    )
    found = {name: spec for name, claimed, spec in (*every, *own) if not claimed}
    return found | {dtype: {"dtype": dtype} for dtype in dtypes if dtype not in requires.dtypes}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def dense_complaints(results: Results, sample: Sample) -> list[str]:
    """Results must be dense tensors of their own, with a unit inner stride."""
    found = []
    inputs = {t.untyped_storage().data_ptr() for t in sample.tensors}
    for name, result in results.items():
        if not isinstance(result, torch.Tensor):
            found.append(f"{name} is {type(result).__name__}, not a tensor")
        elif not is_dense(result) or (result.stride(-1) != 1 and result.shape[-1] > 1):
            found.append(f"{name} has strides {result.stride()} for shape {tuple(result.shape)}: not dense")
        elif result.untyped_storage().data_ptr() in inputs:
            found.append(f"{name} shares memory with an input")
    return found
