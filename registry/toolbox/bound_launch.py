"""The code of a bound launch. It is written once for a compiled kernel and filled in for each shape that runs it.

All that the shapes of one compiled kernel have in common is in the code: addresses, guards, the one call of Triton's C
launcher. What they differ in (grid, integers, tensor maps) is found by name in each launch's own scope.
"""

from __future__ import annotations

import builtins
import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from registry.toolbox.tensor_maps import Address, frozen, maps_for, with_base
from registry.toolbox.triton_internals import c_launcher, internals, packed

__all__ = ["bound_launch", "function", "listed", "renumbered", "scope_of", "within"]

GRID = ("grid_x_", "grid_y_", "grid_z_")

Unbound = Any
"""registry.toolbox.launch.Unbound, which imports this."""

_FORMS = "registry_forms_"
"""The attribute of a CompiledKernel that keeps its forms: they live as long as it does."""


@dataclass(frozen=True)
class _Form:
    function: FunctionType
    scope: dict[str, Any]
    """Names that every shape shares."""
    frozen: tuple[tuple[str, str], ...]
    """(name in the scope, parameter) of what is fixed for a shape."""
    described: tuple[tuple[int, str, Any, Any], ...]
    """(place of a parameter, its name, what the compiled kernel says of it, the same frozen) of tensor maps."""
    scratch: tuple[int, int] | None
    """Bytes a block, and their alignment."""

    def filled(self, launch: Unbound) -> Any:
        """The launch of one shape."""
        x, y, z = launch.grid
        scope = {**self.scope, "slow_": launch, **dict(zip(GRID, launch.grid, strict=True))}
        if self.scratch is not None:
            scope["scratch_"] = self.scratch[0] * x * y * z, self.scratch[1]
        for name, parameter in self.frozen:
            scope[name] = launch.frozen[parameter]
        inside = internals()
        for at, parameter, metadata, about in self.described:
            template = launch.templates[parameter]
            if metadata is not None:
                example = with_base(template, Address(0, launch.dtypes[parameter]))
                scope[maps_name(at)] = maps_for(example, metadata, about, inside.encoder)
            for number, value in enumerate(inside.descriptor_rest(template, metadata)):
                scope[rest_name(at, number)] = value
        return within(scope, self.function)


def bound_launch(launch: Unbound, compiled: Any) -> Any:
    """The function that launches this compiled kernel as `launch` says."""
    forms = compiled.__dict__.setdefault(_FORMS, {})
    key = (
        launch.index,
        launch.cluster,
        launch.names,
        launch.vary,
        tuple(launch.templates),
        tuple(launch.dtypes),
        0 in launch.grid,
    )
    form = forms.get(key)
    if form is None:
        form = forms[key] = _written(launch, compiled)
    return form.filled(launch)


def _written(launch: Unbound, compiled: Any) -> _Form:
    import torch

    inside, runner = internals(), compiled.run
    scope: dict[str, Any] = {
        "launch_": c_launcher(runner),
        "function_": compiled.function,
        "runtime_": inside.runtime,
        "packed_": packed(compiled.packed_metadata, launch.cluster),
        "annotations_": getattr(runner, "arg_annotations", None),
        "kernel_signature_": getattr(runner, "kernel_signature", None),
        "allocator_": inside.allocator,
        "raw_stream_": inside.raw_stream,
        "current_device_": inside.current_device,
    }
    arguments = _Arguments(launch, compiled)
    names = listed(launch.varying)
    lines = [*arguments.addresses]
    if arguments.guards:
        lines.append(f"if {' or '.join(arguments.guards)}: return slow_.respecialised({names})")
    if torch.cuda.device_count() > 1:
        first = next((f" or type({n}) is not int and {n}.get_device() != {launch.index}" for n in launch.dtypes), "")
        lines.append(f"if current_device_() != {launch.index}{first}: return slow_.elsewhere({names})")
    lines.append(f"stream_ = raw_stream_({launch.index})")
    scratch = None
    if runner.global_scratch_size:
        scratch = runner.global_scratch_size * runner.num_ctas, runner.global_scratch_align
    holes = {
        "grid": ", ".join(GRID),
        "flags": f"{runner.launch_cooperative_grid!r}, {runner.launch_pdl!r}",
        "scratch": "allocator_.get()(*scratch_, stream_)" if scratch else "None",
        "args": "".join(f"{one}, " for one in arguments.passed),
    }
    hooks = f"slow_.metadata(stream_, {names}), runtime_.launch_enter_hook, runtime_.launch_exit_hook"
    lines += [
        "try: hooked_ = runtime_.launch_enter_hook.calls or runtime_.launch_exit_hook.calls",
        "except AttributeError: hooked_ = True",
        "if hooked_: " + inside.launch_form.format(hooks=hooks, **holes),
        "else: " + inside.launch_form.format(hooks="None, None, None", **holes),
    ]
    lines = ["return"] if 0 in launch.grid else lines
    source = f"bound({names})", tuple(lines), launch.kernel.__name__
    scope[_SOURCE], made = source, _written_function(*source)
    return _Form(made, scope, tuple(arguments.frozen), tuple(arguments.described), scratch)


class _Arguments:
    """Code that takes the addresses, conditions under which the compiled code does not fit, and the C arguments."""

    def __init__(self, launch: Unbound, compiled: Any) -> None:
        inside, names = internals(), launch.kernel.arg_names
        divisible = {
            names[path[0]]
            for path, attributes in compiled.src.attrs.items()
            if any(attribute[0] == "tt.divisibility" for attribute in attributes)
        }
        about_descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or itertools.repeat(None))
        self.addresses: list[str] = []
        self.guards: list[str] = []
        self.passed: list[str] = []
        self.frozen: list[tuple[str, str]] = []
        self.described: list[tuple[int, str, Any, Any]] = []
        sixteenths: list[str] = []
        for name, kind in compiled.src.signature.items():
            place = names.index(name)
            at = f"a{place}_"
            if name in launch.dtypes:
                self.addresses.append(f"{at} = {name} if type({name}) is int else {name}.data_ptr()")
                if name in divisible or name in launch.templates:
                    sixteenths.append(at)
            elif name in divisible and name in launch.vary:
                sixteenths.append(name)
            if name in launch.templates:
                about = next(about_descriptors)
                self.described.append((place, name, about, frozen(about)))
                self.passed.append(at if about is None else f"{maps_name(place)}[{at}]")
                rest = inside.descriptor_rest(launch.templates[name], about)
                self.passed += (rest_name(place, number) for number in range(len(rest)))
            elif name in launch.dtypes:
                self.passed.append(at)
            elif kind == "constexpr":
                self.passed.append("None")
                if name in launch.vary:
                    self.guards.append(f"{name} != {self._frozen(place, name)}")
            elif name in launch.vary:
                self.passed.append(name)
                if kind in _RANGES:
                    self.guards.append(f"not {_RANGES[kind][0]} <= {name} <= {_RANGES[kind][1]}")
            else:
                self.passed.append(self._frozen(place, name))
        if sixteenths:
            self.guards.insert(0, f"({' | '.join(sixteenths)}) & 15")

    def _frozen(self, place: int, parameter: str) -> str:
        self.frozen.append((frozen_name(place), parameter))
        return frozen_name(place)


_RANGES = {
    f"{sign}{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if sign == "i" else (0, 2**bits - 1)
    for sign in "iu"
    for bits in (8, 16, 32, 64)
}


def frozen_name(place: int) -> str:
    """In the scope of a launch: an argument that is fixed for a shape, by its place among the kernel's parameters."""
    return f"frozen_a{place}_"


def maps_name(place: int) -> str:
    """The tensor maps of one, by address."""
    return f"maps_a{place}_"


def rest_name(place: int, number: int) -> str:
    """What a kernel takes after a tensor map: the sizes, then the strides."""
    return f"rest_a{place}_{number}"


def function(signature: str, lines: Iterable[str], scope: dict[str, Any], kernel: str) -> Any:
    """The function of this source; what it calls is in `scope`. Numbers that differ from shape to shape belong there
    too: the source is then the same for all, and is compiled once."""
    source = signature, tuple(lines), kernel
    scope[_SOURCE] = source
    return within(scope, _written_function(*source))


_SOURCE = "source_"
"""The name in a launch's scope of what it was written from."""


@functools.lru_cache(maxsize=1024)
def _written_function(signature: str, lines: tuple[str, ...], kernel: str) -> FunctionType:
    source = f"def {signature}:\n" + "".join(f"    {line}\n" for line in lines)
    found: dict[str, Any] = {}
    exec(compile(source, f"<launch of {kernel}>", "exec"), found)
    made: FunctionType = found[signature.partition("(")[0]]
    return made


def within(scope: dict[str, Any], written: FunctionType) -> Any:
    """The function, looking in this scope. Its code is a copy: the interpreter keeps in it where it found what.

    The scope says where the built-in functions are, as a module's does: what is written in C looks there when it
    imports (torch does, in the first `contiguous()` of a process that copies on a GPU), and fails without.
    """
    scope.setdefault("__builtins__", builtins)
    made = FunctionType(written.__code__.replace(), scope, written.__name__, written.__defaults__)
    made.__kwdefaults__ = written.__kwdefaults__
    return made


def scope_of(launch: Any) -> dict[str, Any]:
    """Where a launch that was written here looks."""
    return launch.__globals__  # type: ignore[no-any-return]


def renumbered(launch: Any, names: Sequence[str]) -> Any:
    """The same function of what these names of its scope stand for, as its first argument, and of what it takes: one
    for all sizes, to be filled in with functools.partial."""
    signature, lines, kernel = scope_of(launch)[_SOURCE]
    name, _, rest = signature.partition("(")
    first = f"{', '.join(names)}, = numbers_"
    return within(scope_of(launch), _written_function(f"{name}(numbers_, {rest}", (first, *lines), kernel))


def listed(names: Sequence[str]) -> str:
    return ", ".join(names)
