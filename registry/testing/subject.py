"""A variant under test, and where: its problems as tensors, its launches, and what judges them."""

from __future__ import annotations

import contextlib
import functools
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
from registry.errors import InvalidArgument
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
        quiet: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if self.interpreted:
            import numpy

            quiet = functools.partial(numpy.errstate, all="ignore")  # a GPU does not warn of infinities, either

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.naming_misfits(), quiet():
                return launch(*args, **kwargs)

        return watched

    @contextlib.contextmanager
    def naming_misfits(self) -> Iterator[None]:
        """Around calls of what a variant gives: where it cannot take what it is called with, it is named, and the call.
        A declaration tells that of `run`, but nobody has seen what `prepare` gives before it is called."""
        try:
            yield
        except TypeError as error:
            if _raised_in(error) not in _CALLERS:
                raise
            prepared = self.variant.prepare is not None and not self.interpreted
            handed = self.op.handed(self.variant)
            keywords = handed.varying if prepared else ("config", *handed.fixed, *handed.varying)
            name, what = ("launch", "the launch that prepare gave") if prepared else ("run", "run")
            call = f"{name}({', '.join((*handed.tensors, *(['*', *keywords] if keywords else ())))})"
            got = f"one that cannot be called so ({error})"
            allowed = f"one that {self.op.name} can call as {call}"
            raise InvalidArgument(f"{self.variant.name}: {what}", got, allowed) from error

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


_CALLERS = (__name__, "registry.dispatch.plan", "registry.dispatch.launches", "registry.ops.op")
"""Modules that call what a variant gives. Where a call does not fit, its error begins there."""


def _raised_in(error: BaseException) -> str:
    """The module of the innermost frame."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return "" if place is None else str(place.tb_frame.f_globals.get("__name__", ""))


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
