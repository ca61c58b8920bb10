"""A variant under test, and where: its problems as tensors, its launches, and what judges them."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from registry.contract.capability import Config
from registry.contract.problem import Problem
from registry.contract.target import Target, interpreting
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.dispatch.plan_cache import forget_plans
from registry.ops.known import register, unregister
from registry.ops.op import Op
from registry.ops.parts.judging import Expected, Verdict, judge
from registry.ops.parts.kit import Kit, Results, Sample, Spec
from registry.ops.parts.sizes import Size
from registry.ops.parts.trials import spec_conditions


@dataclass(frozen=True)
class Subject:
    """A variant under test, and where."""

    variant: Variant
    op: Op
    kit: Kit
    target: Target
    device: torch.device
    size: Size
    interpreted: bool = False
    draw: int = 0
    """Which of many draws of problems and values: 0 is what everybody checks."""

    @contextlib.contextmanager
    def where_it_runs(self) -> Iterator[None]:
        """Interpreted kernels are asked and called as if on their GPU, and what is decided there is forgotten."""
        if not self.interpreted:
            yield
            return
        with interpreting(self.target):
            forget_plans()
            try:
                yield
            finally:
                forget_plans()

    def seed(self, name: str) -> int:
        """Inputs differ from check to check and from draw to draw, and are the same from run to run."""
        return zlib.crc32(f"{self.variant.name} {name}{f' {self.draw}' if self.draw else ''}".encode())

    def bind(self, problem: Problem, config: Config) -> Callable[..., Any]:
        """The launch that the op would make."""
        launch = self.op.bind(self.variant, problem, config)
        if not self.interpreted:
            return launch
        import numpy

        def quietly(*args: Any, **kwargs: Any) -> Any:
            with numpy.errstate(all="ignore"):  # a GPU does not warn of infinities, either
                return launch(*args, **kwargs)

        return quietly

    def sample(self, spec: Spec, seed: int) -> tuple[Sample, Problem]:
        """Real tensors for a spec, and the problem that they make."""
        sample = self.kit.make(spec, self.device, seed)
        with spec_conditions(spec):
            target = self.target if self.interpreted else None
            return sample, self.op.problem_of(*sample.tensors, target=target, **sample.arguments)[0]

    def expected(self, spec: Spec, sample: Sample) -> list[Expected]:
        """By the oracle, with the float32 precision of the spec but without its determinism, which slows torch."""
        with spec_conditions(spec | {"deterministic": False}):
            return self.kit.expected(sample)

    def judge(self, spec: Spec, sample: Sample, results: Results) -> Verdict:
        """Against the oracle."""
        with spec_conditions(spec | {"deterministic": False}):
            return judge(results, self.kit.expected(sample))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:
        """Work inside the block goes to a stream of its own, and is done at its end."""
        if self.device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


@contextlib.contextmanager
def present(variant: Variant) -> Iterator[None]:
    """The variant in the catalog inside the block, in place of whatever has its name."""
    known = catalog.get().variants.get(variant.name)
    if known == variant:
        yield
        return
    if known is not None:
        added = catalog.take_out(known.name)
    register(variant)
    try:
        yield
    finally:
        unregister(variant.name)
        if known is not None:
            catalog.put_back(known, added)


def copied(results: Results) -> Results:
    """Values as they are now: a launch that is given `out=` writes into the same memory again."""
    return {name: result.clone() if isinstance(result, torch.Tensor) else result for name, result in results.items()}


def same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.shape != other.shape:
        return one is other
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
