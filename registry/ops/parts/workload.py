"""A case as tensors: what a call of it takes, and the zero-argument launches that the timer runs.

`workload(case, "meta")` allocates nothing and serves planning; on a real device it holds random values, and as many
copies of them as a graph of launches needs to find its inputs out of the cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from registry.contract.problem import Problem
from registry.errors import InvalidArgument
from registry.ops.known import op_named
from registry.ops.parts.cases import Case, Layout
from registry.ops.parts.judging import TOLERANCE, Expected, Verdict, judge
from registry.ops.parts.memory import conditions, copied, extent

Tensors = dict[str, Any]
MAX_COPIES = 64


class Workload:
    """Inputs of one case on one device. Subclasses know one op's arguments."""

    outputs: tuple[str, ...] = ("out",)

    def __init__(self, case: Case, device: str, seed: int = 0) -> None:
        self.case = case
        self.device = torch.device(device)
        self.op = op_named(case.op)
        self.sizes = case.sizes
        self._generator = None if device == "meta" else torch.Generator(self.device).manual_seed(seed)
        with self.settings():
            self.tensors: Tensors = self.make()

    def make(self) -> Tensors:
        raise NotImplementedError

    def arguments(self) -> dict[str, Any]:
        """What `problem_of` takes: the tensors and the rest."""
        raise NotImplementedError

    def front_door(self) -> dict[str, Any]:
        """What a call of the op takes."""
        return self.arguments()

    def call(self, launch: Callable[..., Any], tensors: Tensors) -> Any:
        """One launch as the op does it."""
        raise NotImplementedError

    def expected(self) -> list[Expected]:
        """The oracle's answer, in pieces where the whole is large."""
        raise NotImplementedError

    def judge(self, returned: Any, expected: Sequence[Expected]) -> Verdict:
        """Hold what one launch returned against the oracle's answer."""
        misfit = self.problem().misfit(returned)
        if misfit:
            return Verdict(math.inf, 0.0, 0.0, (misfit,), {self.outputs[0]: math.inf})
        found = returned if isinstance(returned, (tuple, list)) else (returned,)
        return judge(dict(zip(self.outputs, found, strict=False)), expected)

    def tolerance(self) -> float:
        """The relative error that a block of a result may have."""
        dtype = self.sizes.get("dtype", "bfloat16")
        fast = dtype == "float32" and not self.sizes.get("ieee") and self.device.type == "cuda"
        return TOLERANCE["tf32" if fast else dtype]

    def problem(self, target: Any = None) -> Problem:
        """The problem that a call of this case is."""
        with self.settings():
            problem, _ = self.op.problem_of(**self.arguments(), target=target)
        return problem

    def copies(self, wanted_bytes: int) -> list[Tensors]:
        """The inputs, and copies elsewhere in memory until they fill `wanted_bytes`."""
        each = sum(t.numel() * t.element_size() for t in self.tensors.values() if isinstance(t, torch.Tensor))
        count = max(1, min(MAX_COPIES, math.ceil(wanted_bytes / max(each, 1))))
        return [self.tensors, *({n: copied(t) for n, t in self.tensors.items()} for _ in range(count - 1))]

    def launches(self, launch: Callable[..., Any], sets: list[Tensors]) -> list[Callable[[], Any]]:
        """One zero-argument launch for each set of inputs."""
        return [lambda tensors=tensors: self.call(launch, tensors) for tensors in sets]  # type: ignore[misc]

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """torch's switches as the case wants them."""
        filling: Any = torch.utils.deterministic
        fill = filling.fill_uninitialized_memory
        asked = {name: bool(self.sizes.get(name, False)) for name in ("deterministic", "ieee")}
        with conditions(**asked):
            filling.fill_uninitialized_memory = False
            try:
                yield
            finally:
                filling.fill_uninitialized_memory = fill

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Normal values (any of its values for int8), never zeros."""
        if self._generator is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        if dtype is torch.int8:
            return torch.randint(-127, 128, shape, dtype=dtype, device=self.device, generator=self._generator)
        made = dtype if dtype.itemsize > 1 else torch.float16
        return torch.randn(shape, dtype=made, device=self.device, generator=self._generator).to(dtype)

    def positive(self, shape: tuple[int, ...], *, least: float = 0.0, times: float = 1.0) -> torch.Tensor:
        """Scales: magnitudes of normal values. Arithmetic on meta tensors would import torch's compiler: 2 seconds."""
        found = self.random(shape, torch.float32)
        return found if found.is_meta else (found.abs() + least) * times

    def recorded(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """An operand with the strides and the alignment that were recorded, if any were."""
        found: Layout | None = dict(self.case.operands).get(name)
        if found is None:
            return None
        shape, strides, alignment = found
        offset = alignment // dtype.itemsize if alignment < 16 else 0
        return self.random((offset + extent(shape, strides),), dtype).as_strided(shape, strides, offset)


def workload(case: Case, device: str, seed: int = 0) -> Workload:
    """The workload of a case, as its op makes it."""
    found: Workload = op_named(case.op).tuning.workload(case, device, seed)
    return found


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise InvalidArgument("dtype", repr(name), "a torch dtype such as bfloat16")
    return found
