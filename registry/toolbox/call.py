"""One `Call` for each kernel of a (problem, config); from it follow `run`, `prepare` and `builds`.

A plugin says once what it launches. Operands are stand-ins (shape, strides, dtype, alignment), whether the question is
asked with tensors or without a GPU::

    def call(problem, config, given, scale):
        out = StandIn(..., name="out")                    # not among what was given: allocated for each launch
        arguments = {
            "q_map": TensorDescriptor(given["q"], ...),   # a tensor map; `rounded_to_tf32` of one: see Call
            "out": out,                                   # a pointer
            "n": problem.seqlen_k,                        # fixed
            "scale_log2": PerCall("scale", 1.44),         # what the call brings, times a number
            "counter": Zeroes(1),                         # zero before a launch, left at zero by it
            "word": Kept((1,), "int32", "word", find),    # what find(first tensor) gives, the same for many launches
            "unused": StandIn((1,), "float32"),           # without a name: a null pointer
        }
        return [Call(_kernel, (grid,), arguments, constants={...}, options={"num_warps": 4})]

    HOST = Host(FORWARD, call)
    HOST.variant(name, op=..., requires=...)              # with `run`, `prepare` and `builds` of these calls

`FORWARD` is the op's: what its launches take and return (registry.ops.attention.calls, registry.ops.matmul.calls).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from registry.contract.target import Target, interpreted_as
from registry.contract.variant import Variant
from registry.toolbox.bound_before import BoundBefore
from registry.toolbox.bound_launch import function
from registry.toolbox.known_kernels import KnownKernel
from registry.toolbox.launch import Launcher, NoClusters, StandIn, device_index, plain_constants
from registry.toolbox.operands import Kept, PerCall, Zeroes, memory
from registry.toolbox.resized import Resizing, numbers_of
from registry.toolbox.tensor_maps import Address, is_descriptor, with_base, without_base
from registry.toolbox.triton_internals import encoder_can, launcher_can_cluster

if TYPE_CHECKING:
    from registry.toolbox.builds import Build

__all__ = ["Call", "Host", "Interface", "Kept", "PerCall", "Zeroes"]

Launch = Callable[..., Any]
Operands = Mapping[str, StandIn]


@dataclass(frozen=True)
class Call:
    """One launch of one kernel: all but addresses, stream, and the floats that differ from call to call."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    if_plain_maps: Mapping[str, Any] = field(default_factory=dict)
    """Where a tensor map is to round to tf32 or has boxes of fewer rows: the constants with which the kernel does
    without, for launches that cannot have such maps (those through `kernel[grid]`)."""
    cluster: int = 1
    """CTAs of a cluster, side by side in the first dimension of the grid, which counts clusters then. The kernel is
    compiled as for single CTAs (it cannot be where Triton knows of several: `num_ctas`)."""
    alone: Callable[[], Call] | None = None
    """Makes the same without clusters, for launches that cannot have them (those through `kernel[grid]`)."""

    def operands(self) -> dict[str, StandIn]:
        """Parameter -> what it points to, for tensors and tensor maps."""
        return self._operands

    @functools.cached_property
    def _operands(self) -> dict[str, StandIn]:
        found = {name: value.base if is_descriptor(value) else value for name, value in self.arguments.items()}
        return {name: value for name, value in found.items() if isinstance(value, StandIn)}

    def has_maps(self) -> bool:
        """Whether a bound launch can have the tensor maps that it asks for."""
        return encoder_can(self.arguments.values())

    def clusters(self) -> bool:
        """Whether a bound launch can have them."""
        return launcher_can_cluster() and self.has_maps()

    def varying(self) -> dict[str, str]:
        """Parameter -> code for what a launch passes, in the kernel's order."""
        return self._varying

    @functools.cached_property
    def _varying(self) -> dict[str, str]:
        operands, found = self.operands(), {}
        for name in self.kernel.arg_names:
            value = self.arguments.get(name)
            if name in operands:
                found[name] = operands[name].name or "0"
            elif isinstance(value, PerCall):
                found[name] = f"{value.name} * {value.factor!r}"
        return found

    def example(self) -> dict[str, Any]:
        return {name: one.factor if isinstance(one, PerCall) else one for name, one in self.arguments.items()}

    def build(self, arch: Any) -> Build:
        """What the compiler would be given."""
        from registry.toolbox.builds import Build

        plainly = self._plainly()
        constants = {**self.constants, **({} if self.has_maps() else plainly)}
        return Build.of(self.kernel, self.example(), constants=constants, options=self.options, arch=arch)

    def bind(self, device: Any = None) -> Launch:
        """The fast launch; it takes `varying`, by position."""
        vary = [name for name, value in self.arguments.items() if isinstance(value, PerCall)]
        return self._launcher.bind(self.example(), self.grid, vary=vary, device=device)

    def known(self, device: int) -> KnownKernel | None:
        """The kernel that `bind` would find compiled."""
        return self._launcher.known(self.example(), device)

    @functools.cached_property
    def _launcher(self) -> Launcher:
        return Launcher(
            self.kernel,
            constants=self.constants,
            options=self.options,
            if_plain_maps=self.if_plain_maps,
            cluster=self.cluster,
        )

    def plain(self) -> Launch:
        """The launch through `kernel[grid]`, which Triton's interpreter has too."""
        if self.cluster > 1:
            raise TypeError(f"{self.kernel.__name__}: kernel[grid] launches no clusters; `alone` says what it launches")
        names, operands = tuple(self.varying()), self.operands()
        constants = {**self.constants, **self._plainly()}

        def launch(*varying: Any) -> None:
            arguments = dict(self.arguments)
            for name, value in zip(names, varying, strict=True):
                base = self._pointer(value, operands[name].dtype) if name in operands else value
                template = self.arguments[name]
                arguments[name] = with_base(without_base(template), base) if is_descriptor(template) else base
            self.kernel[self.grid](**arguments, **constants, **self.options)

        return launch

    def _pointer(self, value: Any, dtype: Any) -> Any:
        """A tensor, or what stands for an address. Triton's interpreter wants memory behind null pointers too."""
        if not isinstance(value, int):
            return value
        if value == 0 and type(self.kernel).__name__ == "InterpretedFunction":
            import torch

            return torch.empty(0, dtype=dtype)
        return Address(value, dtype)

    def _plainly(self) -> Mapping[str, Any]:
        return plain_constants(self.arguments, self.if_plain_maps)


@dataclass(frozen=True)
class Interface:
    """How an op calls the launches of its variants."""

    tensors: tuple[str, ...]
    """By position."""
    results: tuple[str, ...]
    """Names of the operands that a launch returns."""
    operands: Callable[[Any], Operands]
    """From a Problem: the operands that it has."""
    problem_of: Callable[..., Any]
    """The Problem of the arguments of `run`."""
    optional: tuple[str, ...] = ()
    """Tensors by keyword, or None."""
    scale: bool = False
    """Whether calls bring a `scale`."""
    ignored: tuple[str, ...] = ()
    """Keywords that the Problem has already answered."""
    late: Callable[[Any], bool] = lambda problem: False
    """Whether a launch depends on more than the Problem tells: strides of an optional tensor, say."""


@dataclass(frozen=True)
class Host:
    """The host side of a variant, from a function that makes its calls."""

    interface: Interface
    calls: Callable[[Any, Mapping[str, Any], Operands, float], Sequence[Call]]
    """(problem, config, operands, scale) -> the launches, in order. The scale is 1 where the op has none."""
    contiguous: tuple[str, ...] = ()
    """Vectors that the kernel wants dense; they are copied where they are not."""

    def builds(self, problem: Any, config: Mapping[str, Any]) -> list[Build]:
        """The kernels that a call with a positive scale compiles."""
        calls = self._calls(problem, config, self.interface.operands(problem), 1.0)
        return [call.build(problem.target) for call in calls]

    def _calls(
        self, problem: Any, config: Mapping[str, Any], given: Operands, scale: float, plain: bool = False
    ) -> list[Call]:
        """Those that this way to launch can have."""
        made = self.calls(problem, {**config}, given, scale)  # its own to take apart
        return [one if one.alone is None or (not plain and one.clusters()) else one.alone() for one in made]

    def variant(self, name: str, **declared: Any) -> Variant:
        """The variant that this is the host side of; `declared` is what else a Variant says."""
        return Variant(name, run=self.run, prepare=self.prepare, builds=self.builds, **declared)

    @functools.cached_property
    def prepare(self) -> Prepare:
        """For a Variant: what makes its launches."""
        return Prepare(self)

    def bound(self, problem: Any, config: Mapping[str, Any]) -> Launch:
        """A launch with all host work but the addresses done once, here or at its first call."""
        if not self.interface.late(problem):
            return self._bound(problem, config, self.interface.operands(problem), 1.0)
        return BoundByCall(functools.partial(self._bound_by_call, problem, config), self._keywords())

    def run(self, *tensors: Any, config: Mapping[str, Any], **given: Any) -> Any:
        """The same launch through Triton's own, slower way; `given` are the op's keywords."""
        problem, scale = self.interface.problem_of(*tensors, **given), given.get("scale", 1.0)
        if interpreted_as() is not None:  # which has none of that GPU's own instructions
            problem = problem.on(Target.named("cpu"))
        passed = (*self.interface.optional, *(["scale"] if self.interface.scale else ()))
        given = {name: given[name] for name in passed if name in given}
        operands = self._operands_of(tensors, given)
        calls = self._calls(problem, config, operands, scale, plain=True)
        return self._generate(calls, [call.plain() for call in calls], operands)(*tensors, **given)

    def _operands_of(self, tensors: Sequence[Any], given: Mapping[str, Any]) -> Operands:
        named = dict(zip(self.interface.tensors, tensors, strict=True))
        named |= {name: given[name] for name in self.interface.optional if given.get(name) is not None}
        dense = {name: one.contiguous() if name in self.contiguous else one for name, one in named.items()}
        return {name: StandIn.of_tensor(name, one) for name, one in dense.items()}

    def _keywords(self) -> frozenset[str]:
        """What its launches take by keyword."""
        op = self.interface
        return frozenset((*(["scale"] if op.scale else ()), *op.optional, *op.ignored))

    def _bound_by_call(self, problem: Any, config: Mapping[str, Any], tensors: Any, given: Mapping[str, Any]) -> Launch:
        return self._bound(problem, config, self._operands_of(tensors, given), 1.0, tensors[0].device)

    def _bound(
        self, problem: Any, config: Mapping[str, Any], operands: Operands, scale: float, device: Any = None
    ) -> Launch:
        """For scales of one sign: a kernel may depend on it. Others are bound when they first come."""
        device, config = device_index(device), {**config}  # for what is bound later too
        bind = functools.partial(self._bound_in_full, problem, config, operands, scale, device)
        if self.interface.scale and not scale > 0:
            return bind()
        calls = self._calls(problem, config, operands, scale)
        return self._before.launch(calls, operands, device, bind)

    @functools.cached_property
    def _before(self) -> BoundBefore:
        return BoundBefore()

    def _bound_in_full(
        self, problem: Any, config: Mapping[str, Any], operands: Operands, scale: float, device: Any
    ) -> Launch:
        calls = self._calls(problem, config, operands, scale)
        bound = [_bound_call(call, device) for call in calls]
        launches: dict[Any, Launch] = {}

        def otherwise(*passed: Any, scale: float, **given: Any) -> Any:
            key = -1 if scale < 0 else repr(scale)  # negative, or one of "0.0", "-0.0" and "nan"
            if key not in launches:
                launches[key] = self._bound(problem, config, operands, scale, device)
            return launches[key](*passed, scale=scale, **given)

        positive = otherwise if self.interface.scale and scale > 0 else None
        return self._generate([call for call, _ in bound], [launch for _, launch in bound], operands, positive)

    def _generate(
        self, calls: Sequence[Call], launches: Sequence[Launch], given: Operands, otherwise: Launch | None = None
    ) -> Launch:
        """Write the launch: memory for what is not given, the kernels, and what is returned."""
        op = self.interface
        first, scale = op.tensors[0], ["scale"] if op.scale else []
        used = {one.name: one for call in calls for one in call.operands().values() if one.name}
        scope: dict[str, Any] = {"otherwise_": otherwise}
        lines = [f"{name} = {name}.contiguous()" for name in self.contiguous if name in used and name in given]
        if otherwise:
            passed = [*op.tensors, *(f"{name}={name}" for name in (*scale, *op.optional))]
            lines.insert(0, f"if not scale > 0.0: return otherwise_({', '.join(passed)})")
        for name, one in used.items():
            if name not in given:
                scope[f"new_{name}"] = memory(one)
                lines.append(f"{name} = new_{name}({first})")
        for number, (call, launch) in enumerate(zip(calls, launches, strict=True)):
            scope[f"launch_{number}"] = launch
            lines.append(f"launch_{number}({', '.join(call.varying().values())})")
        lines.append("return " + ", ".join(name if name in used else "None" for name in op.results))
        keywords = ", ".join([*op.tensors, "*", *scale, *(f"{name}=None" for name in (*op.optional, *op.ignored))])
        made = function(f"launch({keywords})", lines, scope, calls[0].kernel.__name__)
        made.takes = self._keywords()
        return made  # type: ignore[no-any-return]


def _bound_call(call: Call, device: Any) -> tuple[Call, Launch]:
    """A call and its launch; without clusters where a bound launch turns out not to have them."""
    try:
        return call, call.bind(device)
    except NoClusters:
        if call.alone is None:
            raise
    alone = call.alone()
    return alone, alone.bind(device)


class Prepare:
    """`Host.bound`, and what it gives for problems that differ in sizes alone."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __call__(self, problem: Any, config: Mapping[str, Any]) -> Launch:
        return self._host.bound(problem, config)

    def of_any_size(self, noted: Any, problem: Any, config: Mapping[str, Any]) -> Resizing | None:
        """What makes launches of other sizes, from a problem and the same with noted sizes (contract/noted.py). They
        hold where the conditions hold that are noted meanwhile. None where there is no such way."""
        host, op = self._host, self._host.interface
        if op.late(noted):
            return None
        given = op.operands(problem)
        calls = host._calls(problem, config, given, 1.0)
        numbers = numbers_of(host._calls(noted, config, op.operands(noted), 1.0), calls, given)
        outputs = {one.name: one for call in calls for one in call.operands().values()}
        return Resizing(functools.partial(host.bound, problem, config), outputs, numbers)


class BoundByCall:
    """A launch that is bound at its first call, whose tensors tell more than the Problem."""

    def __init__(self, bind: Callable[[Any, Mapping[str, Any]], Launch], takes: frozenset[str]) -> None:
        self._bind, self.takes = bind, takes
        self.bound: Launch | None = None

    def __call__(self, *tensors: Any, **given: Any) -> Any:
        if self.bound is None:
            self.bound = self._bind(tensors, given)
        return self.bound(*tensors, **given)
