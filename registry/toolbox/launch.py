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

Descriptors that round to tf32, or have boxes of fewer rows (registry.toolbox.tensor_maps), want `if_plain_maps`:
constants with which the kernel does without. They replace others wherever a launch cannot have such maps.

Where Triton's inside is not what registry.toolbox.triton_internals knows, every launch goes that way, with one notice.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from registry.errors import CaptureError, InvalidArgument
from registry.forks import new_lock
from registry.notices import notice
from registry.toolbox.bound_launch import bound_launch, function, listed
from registry.toolbox.capturing import capturing
from registry.toolbox.kernel_keys import settle_keys
from registry.toolbox.known_kernels import KnownKernel, kernel_for, known_kernel
from registry.toolbox.tensor_maps import Address, is_descriptor, rounds_to_tf32, rows_of_box, with_base, without_base
from registry.toolbox.triton_internals import encoder_can, refusal, triton_rounds

__all__ = ["Bound", "Launcher", "NoClusters", "StandIn"]

_loading = new_lock()  # Triton loads a kernel on first use, and two threads doing so see it half loaded


@functools.cache
def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


class Bound(Protocol):
    """A kernel ready to launch. Call it with what varies, by position or by name."""

    parameters: tuple[str, ...]
    compiled: Any
    """Triton's CompiledKernel."""
    fast: bool
    """False where each call goes through `kernel[grid]`."""

    def __call__(self, *varying: Any, **named: Any) -> None: ...


class NoClusters(RuntimeError):
    """A kernel whose CTAs are launched as clusters has to be launched through `kernel[grid]`, which makes none."""


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
        self.shape = tuple(shape)
        self.dtype = _dtype(dtype) if isinstance(dtype, str) else dtype
        if strides is None:
            sizes = itertools.accumulate(reversed(self.shape[1:]), operator.mul, initial=1)
            strides = reversed([*sizes][: len(self.shape)])
        self.strides = tuple(strides)
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
        if_plain_maps: Mapping[str, Any] | None = None,
        cluster: int = 1,
    ) -> None:
        if hasattr(kernel, "configs") or not hasattr(kernel, "arg_names"):
            raise TypeError(f"{kernel!r} is not a plain JIT function; choosing configs is the registry's work")
        settle_keys()
        self.kernel, self.constants, self.options = kernel, dict(constants or {}), dict(options or {})
        self.if_plain_maps = dict(if_plain_maps or {})
        self.cluster = cluster

    def bind(self, arguments: Mapping[str, Any], grid: Any, *, vary: Collection[str] = (), device: Any = None) -> Bound:
        """Compile for these arguments (out of Triton's caches where it can) and return the launch.

        `grid` is a tuple, or a function of all arguments by name. The device is the one given, else that of the first
        real tensor, else the current one. Raises CaptureError during CUDA-graph capture, but for known kernels.
        """
        import torch

        given, plainly = self._completed(arguments)
        if unknown := {*given, *self.if_plain_maps, *vary}.difference(self.kernel.arg_names):
            raise TypeError(f"{self.kernel.__name__} has no parameters {sorted(unknown)}")
        index = device_index(device, arguments.values())
        if capturing() and known_kernel(self.kernel, given, self.options, index) is None:
            raise CaptureError(
                f"{self.kernel.__name__} was never compiled for these arguments, and a CUDA graph is being captured; "
                f"call it once with the same shapes before the capture, or use registry.warm(...)"
            )
        blocks = tuple(map(int, grid(given) if callable(grid) else grid))
        slow = Unbound(self, given, (*blocks, 1, 1)[:3], vary, index, plainly)
        with torch.cuda.device(index):
            compiled = kernel_for(
                self.kernel, given, self.options, index, functools.partial(self._compiled, given, blocks)
            )
            with _loading:
                why = refusal(self.kernel, compiled)  # loads the kernel: OutOfResources is raised here
            about = getattr(compiled.metadata, "tensordesc_meta", None)
            if plainly and not (about and all(about)):
                why = why or f"{self.kernel.__name__} takes no tensor maps, of which it asks more than to load"
            if why and self.cluster > 1:
                raise NoClusters(f"{self.kernel.__name__} is launched as clusters, and this way is closed: {why}")
            if why and plainly:  # the slower path takes another kernel
                compiled = self._compiled({**given, **plainly}, blocks)
        if why:
            notice(f"kernels are launched through Triton's own, slower path: {why}")
            bound: Any = slow.wrapped()
        else:
            slow.compiled = compiled
            bound = slow.fast = bound_launch(slow, compiled)
        bound.parameters, bound.compiled, bound.fast = slow.varying, compiled, not why
        return bound  # type: ignore[no-any-return]

    def known(self, arguments: Mapping[str, Any], device: int) -> KnownKernel | None:
        """The kernel that `bind` would find compiled; None where it has to ask Triton."""
        return known_kernel(self.kernel, self._completed(arguments)[0], self.options, device)

    def _completed(self, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """All arguments by name, and the constants with which `kernel[grid]` does without special maps."""
        given = {**defaults(self.kernel), **arguments, **self.constants}
        plainly = plain_constants(arguments, self.if_plain_maps)
        if plainly and not encoder_can(arguments.values()):
            given |= plainly
        return given, plainly

    def _compiled(self, given: Mapping[str, Any], blocks: tuple[int, ...]) -> Any:
        compiled = self.kernel.warmup(**given, **self.options, grid=blocks)
        return compiled.result() if hasattr(compiled, "result") else compiled


class Unbound:
    """The launch through `kernel[grid]`, for all that a generated launch leaves out."""

    def __init__(
        self,
        launcher: Launcher,
        given: Mapping[str, Any],
        grid: tuple[int, ...],
        vary: Collection[str],
        index: int,
        plainly: Mapping[str, Any],
    ) -> None:
        self.kernel, self.options, self.grid, self.index = launcher.kernel, launcher.options, grid, index
        self.cluster = launcher.cluster
        self.plainly = plainly  # constants for `kernel[grid]`
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

    def metadata(self, stream: int, *varying: Any) -> Any:
        """What Triton's launch hooks are told."""
        return self.compiled.launch_metadata(self.grid, stream, *self.arguments(varying).values())

    def launch(self, *varying: Any) -> None:
        """Launch as Triton does."""
        import torch

        if self.cluster > 1:
            raise InvalidArgument("cluster", self.cluster, "1, where a call is not aligned as the one that was bound")
        with torch.cuda.device(self.index):
            self.kernel[self.grid](**{**self.arguments(varying), **self.plainly}, **self.options)

    def wrapped(self) -> Any:
        """`launch` with the parameters' names."""
        return self.written([f"return slow_.launch({listed(self.varying)})"], {"slow_": self})

    def written(self, lines: Iterable[str], scope: dict[str, Any]) -> Any:
        """A function of what varies."""
        return function(f"bound({listed(self.varying)})", lines, scope, self.kernel.__name__)

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
    compiled: Any


@functools.lru_cache(maxsize=256)
def defaults(kernel: Any) -> dict[str, Any]:
    return {name: p.default for name, p in kernel.signature.parameters.items() if p.default is not p.empty}


def plain_constants(arguments: Mapping[str, Any], if_plain_maps: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `kernel[grid]` needs instead of other constants: nothing where Triton's own descriptors can all that."""
    maps = {name: value for name, value in arguments.items() if is_descriptor(value)}
    special = [name for name, value in maps.items() if rounds_to_tf32(value) or rows_of_box(value)]
    if special and not if_plain_maps:
        raise TypeError(f"maps of {special} do more than Triton's, and if_plain_maps does not say how to do without")
    beyond = any(rows_of_box(maps[name]) or not triton_rounds() for name in special)
    return if_plain_maps if beyond else {}


def device_index(device: Any, examples: Iterable[Any] = ()) -> int:
    """Of the device that is said, of the first real tensor, or the current one."""
    import torch

    if device is None:
        tensors = [getattr(one, "base", one) for one in examples]
        device = next((t.device for t in tensors if isinstance(t, torch.Tensor) and t.device.type == "cuda"), None)
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index
