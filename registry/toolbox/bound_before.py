"""Launches of kernels that were bound before, for other sizes: the earlier launch with other numbers in it.

To bind a launch (registry.toolbox.launch) is to find its kernel, and to write two functions with all that they look up.
Where a host side made calls of the same kernels, with the same operands and words, before, only numbers differ: the
grid, integers, tensor maps, and the geometry of outputs. `registry.toolbox.resized` needs not even ask the host side
for these, but holds for the sizes only that meet its conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from registry.toolbox.bound_launch import GRID, frozen_name, maps_name, rest_name, scope_of, within
from registry.toolbox.kernel_keys import settle_keys
from registry.toolbox.known_kernels import KnownKernel, kinds, switches
from registry.toolbox.launch import defaults
from registry.toolbox.operands import PerCall, memory
from registry.toolbox.resized import InFull, Slow
from registry.toolbox.tensor_maps import is_descriptor

__all__ = ["BoundBefore"]

MOST = 64
"""Launches kept of one host side; when there are more, all go."""

Call = Any
"""registry.toolbox.call.Call; that module imports this one."""
Launch = Callable[..., Any]


class BoundBefore:
    """What one host side has bound."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Reference] = {}

    def launch(self, calls: Sequence[Call], given: Iterable[str], device: int, bind: Callable[[], Launch]) -> Launch:
        """The launch of these calls, which are given these operands; `bind` makes it anew."""
        settle_keys()  # a key has the kernels' hashes in it
        key = _key(calls, tuple(given), device)
        reference = self._known.get(key) if key is not None else None
        if reference is not None and reference.holds(device):
            return reference.filled(calls, InFull(bind))
        launch = bind()
        kernels = [known for call in calls if (known := call.known(device))] if key is not None else []
        if len(kernels) == len(calls) and _can_be_filled(launch, calls, kernels):
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[key] = _Reference(launch, calls, kernels)
        return launch


def _key(calls: Sequence[Call], given: tuple[str, ...], device: int) -> Hashable:
    """Of what a launch is the same for all sizes; None where each is to be bound in full."""
    try:
        found: list[Hashable] = [given, device, switches()]
        for call in calls:
            kernel, every = call.kernel, _every(call)
            if kernel.pre_run_hooks or len(every) > len(kernel.params):  # they want to see each; an unknown argument
                return None
            if call.if_plain_maps and not call.has_maps():
                return None
            words, names = call.options.items(), [(where, one.name) for where, one in call.operands().items()]
            factors = [repr(one.factor) for one in call.arguments.values() if type(one) is PerCall]  # not 1 for 1.0
            found += [kernel, kernel.debug, call.cluster, 0 in map(int, call.grid)]
            found += map(tuple, (words, names, factors, kinds(kernel, every)))
        key = tuple(found)
        hash(key)
    except (AttributeError, KeyError, TypeError):  # as in known_kernels
        return None
    return key


def _every(call: Call) -> dict[str, Any]:
    """All that its kernel is given."""
    return {**defaults(call.kernel), **call.arguments, **call.constants}


def _can_be_filled(launch: Any, calls: Sequence[Call], kernels: Sequence[KnownKernel]) -> bool:
    """Not where it goes through Triton's own, slower path, wants memory for each of its blocks, passes tensor maps as
    plain addresses, or is that of other calls (those without clusters)."""
    for number, (call, known) in enumerate(zip(calls, kernels, strict=True)):
        scope = scope_of(scope_of(launch)[f"launch_{number}"])
        if "runtime_" not in scope or "scratch_" in scope:
            return False
        if scope["slow_"].compiled is not known.compiled or scope["slow_"].cluster != call.cluster:
            return False
        if any(place not in scope for place, *_ in _numbers(call)[1]):
            return False
    return True


class _Reference:
    """A launch that is bound, and where its numbers are."""

    def __init__(self, launch: Any, calls: Sequence[Call], kernels: Sequence[KnownKernel]) -> None:
        self._launch, self._kernels = launch, [(call.kernel, known) for call, known in zip(calls, kernels, strict=True)]
        self._calls = [
            (f"launch_{number}", scope_of(launch)[f"launch_{number}"], *_numbers(call))
            for number, call in enumerate(calls)
        ]

    def holds(self, device: int) -> bool:
        return all(known.holds(kernel.device_caches.get(device)) for kernel, known in self._kernels)

    def filled(self, calls: Sequence[Call], in_full: InFull) -> Launch:
        """The same of these calls. What it does not answer itself goes to one that is bound `in_full` then."""
        scope = dict(scope_of(self._launch))
        if scope["otherwise_"] is not None:
            scope["otherwise_"] = in_full
        for (name, launch, integers, maps), call in zip(self._calls, calls, strict=True):
            for operand in call.operands().values():
                if (new := f"new_{operand.name}") in scope:
                    scope[new] = memory(operand)
            arguments = _every(call)
            inner = dict(scope_of(launch))
            inner.update(zip(GRID, (*map(int, call.grid), 1, 1), strict=False))
            for place, parameter in integers:
                inner[place] = arguments[parameter]
            for place, parameter, rest in maps:
                described = arguments[parameter]
                shape, strides = tuple(map(int, described.shape)), tuple(map(int, described.strides))
                inner[place] = inner[place].resized(shape, strides)
                inner.update(zip(rest, (*shape, *strides), strict=True))
            inner["slow_"] = Slow(in_full, name)
            scope[name] = within(inner, launch)
        made = within(scope, self._launch)
        made.takes = self._launch.takes
        return made  # type: ignore[no-any-return]


def _numbers(call: Call) -> tuple[list[tuple[str, str]], list[tuple[str, str, list[str]]]]:
    """(name in the launch's scope, parameter) of its integers and fixed floats; the same of its tensor maps, with the
    names of their sizes and strides."""
    constants = {one.name for one in call.kernel.params if one.is_constexpr}
    integers, maps = [], []
    for parameter, value in _every(call).items():
        place = call.kernel.arg_names.index(parameter)
        if is_descriptor(value):
            rest = [rest_name(place, number) for number in range(2 * len(value.shape))]
            maps.append((maps_name(place), parameter, rest))
        elif type(value) in (int, float) and parameter not in constants:
            integers.append((frozen_name(place), parameter))
    return integers, maps
