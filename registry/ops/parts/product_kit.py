"""What the conformance kits of matrix products share: memory, results, and an epilogue as a kernel computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from registry.contract.capability import Requires
from registry.errors import InvalidArgument
from registry.ops.parts.kit import UNIT_BYTES, Kit, Results, Sample, Spec
from registry.ops.parts.memory import Arena, Slot, Strides, dense_strides
from registry.ops.parts.products import FP8_NAMES, default_out_dtype

LAYOUTS = ("nn", "nt", "tn", "tt", "strided")


class ProductKit(Kit):
    """Of a product that gives `out`."""

    call: Callable[..., Any]
    """The op as a user calls it."""

    def memory(self, requires: Requires) -> list[str]:
        """How operands may lie."""
        found = ["dense", "rows", *(["turned"] if self.has_batches(requires) else [])]
        found += ["odd"] if requires.stride_alignment < UNIT_BYTES else []
        return found + (["offset"] if requires.base_alignment < UNIT_BYTES else [])

    def has_batches(self, requires: Requires) -> bool:
        """Whether an operand may be several matrices, which may lie row by row beside each other."""
        raise NotImplementedError

    def launch(self, launch: Callable[..., Any], sample: Sample) -> Results:
        found = launch(*sample.tensors, **sample.launch_arguments)
        if not isinstance(found, torch.Tensor):
            raise InvalidArgument("what run returns", type(found).__name__, "out, a tensor")
        return {"out": found}

    def front_door(self, variant: str, sample: Sample) -> Results:
        return {"out": type(self).call(*sample.tensors, **sample.arguments, variant=variant)}

    def form(self, sample: Sample, results: Results) -> list[str]:
        return complaints_of_form(results["out"], sample.written.get("out"), sample.tensors)


class Places(dict[str, Arena]):
    """Arenas of one tensor each, by its name. What is `beside` the operands is aligned to its elements, and no further
    where that is "offset"."""

    def __init__(self, device: torch.device, beside: str = "") -> None:
        super().__init__()
        self.device, self.beside = device, beside

    def put_beside(self, name: str, shape: Strides, strides: Strides, kind: torch.dtype) -> torch.Tensor:
        return self.put(name, shape, strides, kind, kind.itemsize if self.beside else 0)

    def put(self, name: str, shape: Strides, strides: Strides, kind: torch.dtype, shift: int = 0) -> torch.Tensor:
        self[name] = Arena({name: Slot(shape, strides)}, kind, self.device, shift)
        return self[name].views[name]


def matrix_strides(
    rows: int, columns: int, batch: int, letter: str, memory: str, dtype: torch.dtype, shared: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of [rows, columns], or a batch of them: the layout by its letter ("s" is neither dimension
    contiguous), and "dense", "rows" apart by whole units, or an "odd" number of elements apart. "turned" matrices have
    their first rows beside each other, and so on, as those of x.transpose(0, 1) do."""
    unit = UNIT_BYTES // dtype.itemsize
    inner = rows if letter == "t" else columns
    outer_size = columns if letter == "t" else rows
    gap = {"rows": -inner % unit + unit, "odd": 1}.get(memory, 0)
    step = 2 if letter == "s" else 1
    outer = (inner + gap) * step
    if memory == "turned" and batch:
        return (batch, rows, columns), (outer, *((1, outer * batch) if letter == "t" else (outer * batch, step)))
    strides = (1, outer) if letter == "t" else (outer, step)
    if not batch:
        return (rows, columns), strides
    per_batch = outer * outer_size + {"rows": unit, "odd": 1}.get(memory, 0)
    return (batch, rows, columns), (0 if shared else per_batch, *strides)


LOOSE = ("strided", "expanded")
"""How what is beside the operands (scales, a bias) may lie, where its contract says "any strides"."""


def loose_strides(shape: Strides, style: str, step: int = 2) -> Strides:
    """ "strided": elements `step` apart, in the order of columns; "expanded": one for all of the first dimension."""
    if style == "expanded":
        return (0, *dense_strides(shape)[1:])
    if style == "strided":
        return (step, *(step * shape[0] + 1 for _ in shape[1:]))
    return dense_strides(shape)


def away_from_zero(values: torch.Tensor) -> torch.Tensor:
    """Scales of either sign, of which none makes nothing of its row."""
    return values + values.sign() * 0.1


def unpromoted(requires: Requires) -> dict[str, Spec]:
    """float8 of a variant that does not say how it adds it up: outside of its claims."""
    dtypes = [dtype for dtype in requires.dtypes if dtype in FP8_NAMES]
    return {"float8 sums": {"dtype": dtypes[0]}} if dtypes and not requires.promoted else {}


def wanted_out_dtype(spec: Mapping[str, Any]) -> torch.dtype:
    """Of a conformance case."""
    dtype = getattr(torch, spec["out_dtype"]) if spec["out_dtype"] else default_out_dtype(getattr(torch, spec["dtype"]))
    assert isinstance(dtype, torch.dtype)
    return dtype


def complaints_of_form(result: torch.Tensor, given: torch.Tensor | None, inputs: Iterable[torch.Tensor]) -> list[str]:
    """What is wrong with a result before its values are looked at; `given` is the out= of the call."""
    if given is not None:
        same = (result.data_ptr(), result.stride(), result.shape) == (given.data_ptr(), given.stride(), given.shape)
        return [] if same else ["out= was given, but another tensor was returned"]
    found = []
    if not result.is_contiguous():
        found.append(f"out has strides {result.stride()} for shape {tuple(result.shape)}: not contiguous")
    if result.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in inputs}:
        found.append("out shares memory with an input")
    return found
