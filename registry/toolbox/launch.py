"""A thin launcher over compiled Triton and Gluon kernels: a warm `kernel[grid](...)` without its host work.

registry.toolbox.call derives a variant's launches from what it declares, through this::

    bound = Launcher(_kernel, constants={"BLOCK": 64}, options={"num_warps": 4}).bind(
        {"q": TensorDescriptor(q, ...), "k": StandIn(shape, dtype), "out": out, "n": 1024, "scale": 1.0},
        grid=(...), vary=("scale",))
    bound(q, k, out, scale)  # what varies, in the kernel's order; a tensor in place of its descriptor

What varies: every tensor, every descriptor's tensor, and the scalars named in `vary`; all other scalars are frozen at
the value they had in `bind`. Example arguments may be real tensors, meta tensors or `StandIn`s; none is kept alive. An
address may be given as an int in place of a tensor.

A bound kernel belongs to one device (launching while another is current is fine) and may be called from any thread, on
any stream and during CUDA-graph capture. As Triton does, it trusts the caller that tensors are of the example's dtype
and, for descriptors, of the example's shape and strides. It checks what compiled code relies on: alignment, and the
values of integers that Triton specialises on. A call that differs there is launched through `kernel[grid]`, slower and
still right.

Descriptors that round to tf32 (registry.toolbox.tensor_maps) want `if_unrounded`: constants with which the kernel
itself rounds. They replace others wherever a launch cannot have such maps.

Where Triton's inside is not what registry.toolbox.triton_internals knows, every launch goes that way, with one notice.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from registry.errors import CaptureError, InvalidArgument
from registry.notices import notice
from registry.toolbox.capturing import capturing
from registry.toolbox.tensor_maps import Address, maps_for, rounds_to_tf32, with_base, without_base
from registry.toolbox.triton_internals import c_launcher, encoder_can_round, internals, refusal, triton_rounds

__all__ = ["Bound", "Launcher", "StandIn"]

_loading = threading.Lock()  # Triton loads a kernel on first use, and two threads doing so see it half loaded


class Bound(Protocol):
    """A kernel ready to launch. Call it with what varies, by position or by name."""

    parameters: tuple[str, ...]
    compiled: Any
    """Triton's CompiledKernel."""
    fast: bool
    """False where each call goes through `kernel[grid]`."""

    def __call__(self, *varying: Any, **named: Any) -> None: ...


class StandIn:
    """Shape, strides, dtype and alignment of a tensor that is not there, as an example argument."""

    def __init__(
        self,
        shape: Iterable[int],
        dtype: Any,
        strides: Iterable[int] | None = None,
        alignment: int = 16,
        name: str = "",
    ) -> None:
        """Strides default to dense ones; `dtype` is torch's, or its name; `alignment` counts bytes. By its `name`
        registry.toolbox.call knows what it stands in for."""
        import torch

        self.shape = tuple(shape)
        self.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        sizes = itertools.accumulate(reversed(self.shape[1:]), lambda a, b: a * b, initial=1)
        dense = [*sizes][: len(self.shape)]
        self.strides = tuple(reversed(dense)) if strides is None else tuple(strides)
        self.alignment = alignment
        self.name = name

    @classmethod
    def of(cls, operand: Any) -> StandIn:
        """From one of a Problem's operands."""
        return cls(operand.shape, operand.dtype, operand.strides, operand.base_alignment, operand.name)

    @classmethod
    def of_tensor(cls, name: str, tensor: Any) -> StandIn:
        """From a real tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.stride(), math.gcd(tensor.data_ptr(), 16), name)

    def data_ptr(self) -> int:
        """An address of the stated alignment."""
        return 0 if self.alignment % 16 == 0 else self.alignment

    def stride(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.strides if dim is None else self.strides[dim]


class Launcher:
    """One JIT function, its compile-time constants, and Triton's options such as `num_warps`."""

    def __init__(
        self,
        kernel: Any,
        *,
        constants: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        if_unrounded: Mapping[str, Any] | None = None,
    ) -> None:
        if hasattr(kernel, "configs") or not hasattr(kernel, "arg_names"):
            raise TypeError(f"{kernel!r} is not a plain JIT function; choosing configs is the registry's work")
        self.kernel, self.constants, self.options = kernel, dict(constants or {}), dict(options or {})
        self.if_unrounded = dict(if_unrounded or {})

    def bind(self, arguments: Mapping[str, Any], grid: Any, *, vary: Collection[str] = (), device: Any = None) -> Bound:
        """Compile for these arguments (out of Triton's caches where it can) and return the launch.

        `grid` is a tuple, or a function of all arguments by name. The device is the one given, else that of the first
        real tensor, else the current one. Raises CaptureError during CUDA-graph capture.
        """
        import torch

        parameters = self.kernel.signature.parameters
        defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
        unrounded = unrounded_constants(arguments, self.if_unrounded)
        given = {**defaults, **arguments, **self.constants}
        if unrounded and not encoder_can_round():
            given |= unrounded
        if unknown := [n for n in (*given, *self.if_unrounded, *vary) if n not in parameters]:
            raise TypeError(f"{self.kernel.__name__} has no parameters {unknown}")
        if capturing():
            raise CaptureError(
                f"{self.kernel.__name__} was never compiled for these arguments, and a CUDA graph is being captured; "
                f"call it once with the same shapes before the capture, or use registry.warm(...)"
            )
        index = _device_index(device, arguments.values())
        blocks = tuple(map(int, grid(given) if callable(grid) else grid))
        slow = _Slow(self, given, (*blocks, 1, 1)[:3], vary, index, unrounded)
        with torch.cuda.device(index):
            compiled = self._compiled(given, blocks)
            with _loading:
                why = refusal(self.kernel, compiled)  # loads the kernel: OutOfResources is raised here
            about = getattr(compiled.metadata, "tensordesc_meta", None)
            if unrounded and not (about and all(about)):
                why = why or f"{self.kernel.__name__} takes no tensor maps, which would round to tf32"
            if why and unrounded:  # the slower path takes another kernel
                compiled = self._compiled({**given, **unrounded}, blocks)
        if why:
            notice(f"kernels are launched through Triton's own, slower path: {why}")
            bound: Any = slow.wrapped()
        else:
            bound = _generate(slow, compiled)
        bound.parameters, bound.compiled, bound.fast = slow.varying, compiled, not why
        return bound  # type: ignore[no-any-return]

    def _compiled(self, given: Mapping[str, Any], blocks: tuple[int, ...]) -> Any:
        compiled = self.kernel.warmup(**given, **self.options, grid=blocks)
        return compiled.result() if hasattr(compiled, "result") else compiled


class _Slow:
    """The launch through `kernel[grid]`, for all that a generated launch leaves out."""

    def __init__(
        self,
        launcher: Launcher,
        given: Mapping[str, Any],
        grid: tuple[int, ...],
        vary: Collection[str],
        index: int,
        unrounded: Mapping[str, Any],
    ) -> None:
        self.kernel, self.options, self.grid, self.index = launcher.kernel, launcher.options, grid, index
        self.unrounded = unrounded  # constants for `kernel[grid]`
        self.templates: dict[str, Any] = {}  # descriptors without their tensors
        self.dtypes: dict[str, Any] = {}  # of tensors and descriptors
        self.frozen: dict[str, Any] = {}
        self.names = tuple(n for n in self.kernel.arg_names if n in given)
        self.vary = frozenset(vary)
        for name in self.names:
            value = given[name]
            if is_descriptor(value):
                self.templates[name], self.dtypes[name] = without_base(value), value.base.dtype
            elif hasattr(value, "data_ptr"):
                self.dtypes[name] = value.dtype
            elif isinstance(value, tuple) and any(is_descriptor(one) or hasattr(one, "data_ptr") for one in value):
                raise TypeError(f"{self.kernel.__name__}: {name} is a tuple with tensors, which cannot be bound")
            else:
                self.frozen[name] = value
        self.varying = tuple(n for n in self.names if n in self.dtypes or n in self.vary)

    def arguments(self, varying: Sequence[Any]) -> dict[str, Any]:
        """All arguments by name, as `kernel[grid]` takes them."""
        found = self.frozen | dict(zip(self.varying, varying, strict=True))
        for name, dtype in self.dtypes.items():
            if isinstance(found[name], int):
                found[name] = Address(found[name], dtype)
            if name in self.templates:
                found[name] = with_base(self.templates[name], found[name])
        return {name: found[name] for name in self.names}

    def launch(self, *varying: Any) -> None:
        """Launch as Triton does."""
        import torch

        with torch.cuda.device(self.index):
            self.kernel[self.grid](**{**self.arguments(varying), **self.unrounded}, **self.options)

    def wrapped(self) -> Any:
        """`launch` with the parameters' names."""
        return self.written([f"return slow_.launch({_listed(self.varying)})"], {"slow_": self})

    def written(self, lines: Iterable[str], scope: dict[str, Any]) -> Any:
        """A function of what varies."""
        return function(f"bound({_listed(self.varying)})", lines, scope, self.kernel.__name__)

    def respecialised(self, *varying: Any) -> None:
        """A call that differs from the example in alignment or integers: Triton compiles another kernel for it."""
        for name, value in zip(self.varying, varying, strict=True):
            address = value.data_ptr() if hasattr(value, "data_ptr") else value
            if name in self.templates and address % 16:
                raise InvalidArgument(name, hex(address), "an address that is a multiple of 16, as tensor maps need")
        if capturing():
            raise CaptureError(
                f"{self.kernel.__name__} was bound for other alignments or integers, and a CUDA graph is being "
                f"captured; use buffers in the capture that are aligned like those of the call before it"
            )
        self.launch(*varying)

    def elsewhere(self, *varying: Any) -> None:
        """A call while another device is current, or with a tensor that is not on this one."""
        import torch

        for name, value in zip(self.varying, varying, strict=True):
            if isinstance(value, torch.Tensor) and value.get_device() != self.index:
                raise InvalidArgument(name, f"a tensor on {value.device}", f"cuda:{self.index}, where this was bound")
        with torch.cuda.device(self.index):
            self.fast(*varying)

    fast: Callable[..., None]


def _generate(slow: _Slow, compiled: Any) -> Any:
    """Write the launch: addresses, guards, tensor maps, stream, and one call of Triton's C launcher."""
    import torch

    inside, runner = internals(), compiled.run
    scope: dict[str, Any] = {
        "slow_": slow,
        "launch_": c_launcher(runner),
        "function_": compiled.function,
        "runtime_": inside.runtime,
        "packed_": compiled.packed_metadata,
        "annotations_": getattr(runner, "arg_annotations", None),
        "kernel_signature_": getattr(runner, "kernel_signature", None),
        "allocator_": inside.allocator,
        "raw_stream_": inside.raw_stream,
        "current_device_": inside.current_device,
        "metadata_": lambda stream, *varying: compiled.launch_metadata(
            slow.grid, stream, *slow.arguments(varying).values()
        ),
    }
    addresses, guards, passed = _arguments(slow, compiled, scope)
    listed = _listed(slow.varying)
    lines = [*addresses]
    if guards:
        lines.append(f"if {' or '.join(guards)}: return slow_.respecialised({listed})")
    if torch.cuda.device_count() > 1:
        first = next((f" or type({n}) is not int and {n}.get_device() != {slow.index}" for n in slow.dtypes), "")
        lines.append(f"if current_device_() != {slow.index}{first}: return slow_.elsewhere({listed})")
    lines.append(f"stream_ = raw_stream_({slow.index})")
    x, y, z = slow.grid
    scratch = "None"
    if runner.global_scratch_size:
        size = runner.global_scratch_size * runner.num_ctas * x * y * z
        scratch = f"allocator_.get()({size}, {runner.global_scratch_align}, stream_)"
    holes = {
        "grid": f"{x}, {y}, {z}",
        "flags": f"{runner.launch_cooperative_grid!r}, {runner.launch_pdl!r}",
        "scratch": scratch,
        "args": "".join(f"{one}, " for one in passed),
    }
    hooks = f"metadata_(stream_, {listed}), runtime_.launch_enter_hook, runtime_.launch_exit_hook"
    lines += [
        "try: hooked_ = runtime_.launch_enter_hook.calls or runtime_.launch_exit_hook.calls",
        "except AttributeError: hooked_ = True",
        "if hooked_: " + inside.launch_form.format(hooks=hooks, **holes),
        "else: " + inside.launch_form.format(hooks="None, None, None", **holes),
    ]
    slow.fast = slow.written(lines if x * y * z else ["return"], scope)
    return slow.fast


def _arguments(slow: _Slow, compiled: Any, scope: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Code that takes the addresses, conditions under which the compiled code does not fit, and the C arguments."""
    inside, names = internals(), slow.kernel.arg_names
    divisible = {
        names[path[0]]
        for path, attributes in compiled.src.attrs.items()
        if any(attribute[0] == "tt.divisibility" for attribute in attributes)
    }
    about_descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or itertools.repeat(None))
    addresses, guards, passed, sixteenths = [], [], [], []
    for name, kind in compiled.src.signature.items():
        at = f"a{names.index(name)}_"
        if name in slow.dtypes:
            addresses.append(f"{at} = {name} if type({name}) is int else {name}.data_ptr()")
            if name in divisible or name in slow.templates:
                sixteenths.append(at)
        elif name in divisible and name in slow.vary:
            sixteenths.append(name)
        if name in slow.templates:
            about = next(about_descriptors)
            rest = inside.descriptor_rest(slow.templates[name], about)
            if about is None:
                passed.append(at)
            else:
                example = with_base(slow.templates[name], Address(0, slow.dtypes[name]))
                scope[f"maps_{at}"] = maps_for(example, about, inside.encode)
                passed.append(f"maps_{at}[{at}]")
            passed += map(repr, rest)
        elif name in slow.dtypes:
            passed.append(at)
        elif kind == "constexpr":
            passed.append("None")
            if name in slow.vary:
                guards.append(f"{name} != {slow.frozen[name]!r}")
        elif name in slow.vary:
            passed.append(name)
            if kind in _RANGES:
                guards.append(f"not {_RANGES[kind][0]} <= {name} <= {_RANGES[kind][1]}")
        else:
            scope[f"frozen_{at}"] = slow.frozen[name]
            passed.append(f"frozen_{at}")
    if sixteenths:
        guards.insert(0, f"({' | '.join(sixteenths)}) & 15")
    return addresses, guards, passed


_RANGES = {
    f"{sign}{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if sign == "i" else (0, 2**bits - 1)
    for sign in "iu"
    for bits in (8, 16, 32, 64)
}


def function(signature: str, lines: Iterable[str], scope: dict[str, Any], kernel: str) -> Any:
    """The function of this source; what it calls is in `scope`."""
    source = f"def {signature}:\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, f"<launch of {kernel}>", "exec"), scope)
    made = scope[signature.partition("(")[0]]
    made.source = source
    return made


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def is_descriptor(value: Any) -> bool:
    """Whether an argument is a tensor map."""
    return type(value).__name__.startswith("TensorDescriptor") and hasattr(value, "base")


def unrounded_constants(arguments: Mapping[str, Any], if_unrounded: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `kernel[grid]` needs instead of other constants: nothing where Triton's own descriptors round to tf32."""
    rounded = [name for name, value in arguments.items() if is_descriptor(value) and rounds_to_tf32(value)]
    if rounded and not if_unrounded:
        raise TypeError(f"maps of {rounded} round to tf32, and if_unrounded does not say what the kernel does without")
    return if_unrounded if rounded and not triton_rounds() else {}


def _device_index(device: Any, examples: Iterable[Any]) -> int:
    import torch

    if device is None:
        tensors = [getattr(one, "base", one) for one in examples]
        device = next((t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"), None)
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index
