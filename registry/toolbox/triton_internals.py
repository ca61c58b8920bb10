"""What the launcher knows of Triton's inside, held against the installed sources once, at the first launch.

Triton promises none of this. So nothing is assumed from a version number: each part is looked at in the source, and
where one has moved, `internals()` raises `LookupError` and kernels are launched through `kernel[grid]`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from registry.toolbox.tensor_maps import rounds_to_tf32, rows_of_box

__all__ = [
    "Internals",
    "c_launcher",
    "encoder_can",
    "internals",
    "launcher_can_cluster",
    "packed",
    "refusal",
    "triton_rounds",
]

# The arguments that CudaLauncher.__call__ hands to its C function, and the same call as a generated launch writes it.
_GRID = "gridX, gridY, gridZ, stream, function, self.launch_cooperative_grid, self.launch_pdl, "
_HOOKS = "kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, "
_SIGNED = f"{_GRID}{_HOOKS}global_scratch, profile_scratch, self.arg_annotations, self.kernel_signature, "
_SIGNED_FORM = (
    "launch_({grid}, stream_, function_, {flags}, packed_, {hooks}, {scratch}, None, "
    "annotations_, kernel_signature_, ({args}))"
)
_FORMS = {
    f"{_GRID}global_scratch, profile_scratch, *args": (
        "launch_({grid}, stream_, function_, {flags}, {scratch}, None, packed_, {hooks}, {args})"
    ),
    f"{_SIGNED}args": _SIGNED_FORM,  # 3.7
    f"{_SIGNED}kernel_args": _SIGNED_FORM,
}
# What JITFunction.run hands to CudaLauncher.__call__.
_JIT_CALL = (
    "grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata, "
    "knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *bound_args.values()"
)
_DESCRIPTOR_ARGUMENTS = "return [cu_tensor_map, *shape, *strides]"
_ELEMENT_TYPE = ('elem_type = metadata["elem_type"]', "TMA_DTYPE_DEVICE_TO_HOST[elem_type]")
_BOX = 'block_size = metadata["block_size"]'
_PACKED = "(metadata.num_warps, metadata.num_ctas, metadata.shared)"
_TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32


@dataclass(frozen=True)
class Internals:
    """The parts of Triton and torch that a generated launch uses."""

    launch_form: str
    """One call of the C launcher, with holes for grid, flags, scratch, hooks and args."""
    runtime: Any
    """`triton.knobs.runtime`, which holds the launch hooks."""
    allocator: Any
    """The context variable that `triton.set_allocator` sets."""
    raw_stream: Callable[[int], int]
    current_device: Callable[[], int]
    make_descriptor: Callable[[Any, Any], list[Any]]
    """`(descriptor, its compile-time metadata or None)` to what the C launcher takes for it."""

    def encoder(self, descriptor: Any, metadata: Any) -> Callable[[Any], Any]:
        """What makes the tensor map of a descriptor like this one."""
        if rounds_to_tf32(descriptor) and encoder_can_round() and not triton_rounds():
            metadata = {**metadata, "elem_type": _TFLOAT32}
        if (rows := rows_of_box(descriptor)) and encoder_can_box():
            *outer, _, columns = metadata["block_size"]
            metadata = {**metadata, "block_size": [*outer, rows, columns]}
        make = self.make_descriptor

        def encoded(descriptor: Any) -> Any:
            return make(descriptor, metadata)[0]

        return encoded

    def descriptor_rest(self, descriptor: Any, metadata: Any) -> list[Any]:
        """What the C launcher takes after the tensor map (or after the address, where the kernel takes no map)."""
        if metadata is None:
            return self.make_descriptor(descriptor, None)[1:]
        return [*descriptor.shape, *descriptor.strides]


@functools.cache
def internals() -> Internals:
    """Raises LookupError (or whatever a vanished part raises) where Triton is not as this file knows it."""
    import torch
    from triton import knobs
    from triton.runtime import _allocation
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launcher = driver.active.launcher_cls
    form = _FORMS.get(_arguments(launcher.__call__, "self.launch"))
    if form is None or _arguments(JITFunction.run, "kernel.run") != _JIT_CALL:
        raise LookupError(f"{launcher.__module__}.{launcher.__name__} is called in an unknown way")
    make: Any = vars(inspect.getmodule(launcher))["make_tensordesc_arg"]
    unused = (None,) * (len(inspect.signature(make).parameters) - 2)
    if len(unused) > 1 or _DESCRIPTOR_ARGUMENTS not in inspect.getsource(make):
        raise LookupError("tensor descriptors are passed in an unknown way")
    return Internals(
        launch_form=form,
        runtime=knobs.runtime,
        allocator=_allocation._allocator,
        raw_stream=torch._C._cuda_getCurrentRawStream,
        current_device=torch._C._cuda_getDevice,
        make_descriptor=lambda descriptor, metadata: make(descriptor, metadata, *unused),
    )


@functools.cache
def triton_rounds() -> bool:
    """Whether Triton's own descriptors know how to round to tf32, so that every way to launch them does."""
    from triton.experimental.gluon.nvidia import hopper
    from triton.tools import tensor_descriptor

    kinds = (tensor_descriptor.TensorDescriptor, hopper.TensorDescriptor)
    return all("round_f32_to_tf32" in {field.name for field in fields(kind)} for kind in kinds)


def encoder_can(descriptors: Iterable[Any]) -> bool:
    """Whether a bound launch can have all these maps as they are asked for. Asked without a GPU too: builds depend on
    it."""
    asked = list(descriptors)
    return (encoder_can_round() or not any(map(rounds_to_tf32, asked))) and (
        encoder_can_box() or not any(map(rows_of_box, asked))
    )


@functools.cache
def encoder_can_box() -> bool:
    try:
        from triton.backends.nvidia import driver

        return _BOX in inspect.getsource(driver.make_tensordesc_arg)
    except Exception:  # as in `refusal`
        return False


@functools.cache
def encoder_can_round() -> bool:
    if triton_rounds():
        return True
    try:
        from triton.backends.nvidia import driver

        source = inspect.getsource(driver.make_tensordesc_arg)
        return all(one in source for one in _ELEMENT_TYPE) and driver.TMA_DTYPE_DEVICE_TO_HOST[_TFLOAT32] == _TFLOAT32
    except Exception:  # as in `refusal`
        return False


@functools.cache
def launcher_can_cluster() -> bool:
    """Whether a bound launch can make clusters of CTAs of a kernel that was compiled for single ones."""
    try:
        from triton.backends.nvidia.compiler import CUDABackend

        tree = ast.parse(textwrap.dedent(inspect.getsource(CUDABackend.pack_metadata)))
        returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
        return any(value is not None and ast.unparse(value) == _PACKED for value in returned)
    except Exception:  # as in `refusal`
        return False


def packed(metadata: Any, cluster: int) -> Any:
    """What the C launcher is told of a kernel: with `cluster` CTAs for each of the grid, as one cluster."""
    if cluster == 1:
        return metadata
    warps, ctas, shared = metadata
    if ctas != 1 or not launcher_can_cluster():
        raise LookupError("clusters are launched in an unknown way")
    return warps, cluster, shared


def _arguments(function: Any, callee: str) -> str:
    """The arguments of the one call of `callee` in a function's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == callee]
    return ", ".join(ast.unparse(argument) for argument in calls[0].args) if len(calls) == 1 else ""


def c_launcher(runner: Any) -> Any:
    """Triton's C function, taken out of the Python wrapper that encodes tensor maps; None if it is not there."""
    launch = runner.launch
    if isinstance(launch, types.FunctionType):
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
    return launch if isinstance(launch, types.BuiltinFunctionType) else None


_RUNNER_NEEDS = (
    "launch",
    "launch_cooperative_grid",
    "launch_pdl",
    "global_scratch_size",
    "global_scratch_align",
    "num_ctas",
    "profile_scratch_size",
)


def refusal(kernel: Any, compiled: Any) -> str:
    """Why this compiled kernel cannot be launched the fast way, or ""."""
    if getattr(kernel, "pre_run_hooks", None):
        return f"{kernel.__name__} has pre-run hooks"
    known: dict[str, Any] = compiled.__dict__
    if _REFUSAL not in known:
        known[_REFUSAL] = _refusal(kernel, compiled)
    return str(known[_REFUSAL])


_REFUSAL = "registry_refusal_"
"""The attribute of a CompiledKernel that keeps the answer."""


def _refusal(kernel: Any, compiled: Any) -> str:
    try:
        inside = internals()
    except Exception as moved:  # a private part of Triton is gone, and any error may be how that shows
        return f"this Triton is not known: {moved}"
    runner = compiled.run
    if missing := [name for name in _RUNNER_NEEDS if not hasattr(runner, name)]:
        return f"Triton's launcher lacks {', '.join(missing)}"
    if runner.profile_scratch_size or getattr(runner, "gsan_enabled", False):
        return f"{kernel.__name__} is compiled with instrumentation"
    if "annotations_" in inside.launch_form and not hasattr(runner, "kernel_signature"):
        return "Triton's launcher lacks kernel_signature"
    if any(one and one.get("fp4_padded") for one in getattr(compiled.metadata, "tensordesc_meta", None) or ()):
        return f"{kernel.__name__} takes fp4 tensor descriptors"
    return "" if c_launcher(runner) else "Triton's C launcher was not found"
