"""Launches of other sizes: what was bound once, with other numbers in it.

A host side is asked once with noted sizes (registry.contract.noted): which grid, integers, tensor maps and outputs
would it give a launch? Where these are all that differs between two sizes, both run the same compiled kernels, and the
launch of one is that of the other with its numbers replaced. Nothing is compiled, specialised or looked up for it.

`numbers_of` finds the code of these numbers. It keeps among the conditions of the question what kernels are compiled
for, so that sizes which meet them run the same ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from registry.contract.noted import Noted, Unnoted
from registry.toolbox.bound_launch import GRID, frozen_name, maps_name, renumbered, rest_name, scope_of
from registry.toolbox.launch import StandIn
from registry.toolbox.operands import Zeroes, memory
from registry.toolbox.tensor_maps import TensorMaps, is_descriptor

Call = Any
"""registry.toolbox.call.Call; that module imports this one."""
Launch = Callable[..., Any]
Codes = dict[str, str]
"""Name in the scope of a launch -> code of its value for other sizes."""


class Resizing:
    """What launches of other sizes are made from: one that is bound in full, and where its numbers are."""

    def __init__(self, bind: Callable[[], Launch], outputs: Mapping[str, StandIn], numbers: Sequence[Codes]) -> None:
        self._bind, self._outputs = bind, outputs
        self.numbers = numbers
        """Groups of code, of whose values `resized` makes launches: the outputs', then each kernel's integers and
        maps."""
        self.reference: Any = None
        self._forms: dict[tuple[tuple[str, ...], ...], _Form] = {}
        """By the names of the numbers that differ."""

    def bind(self) -> Launch:
        """The reference. It may compile, and wants the device of its tensors to be current."""
        self.reference = launch = self._bind()
        return launch

    def resized(self, values: Sequence[Mapping[str, Any]], in_full: Callable[[], Launch]) -> Launch:
        """The launch of other sizes; of `values` those may be missing that are the reference's. What it does not answer
        goes to one that is then bound `in_full`: other alignment, another sign of the scale, another device, hooks."""
        names = tuple(map(tuple, values))
        form = self._forms.get(names)
        if form is None:
            form = self._forms[names] = _Form(self.reference, self._outputs, values)
        return form.filled(values, InFull(in_full))


class _Form:
    """The launches in which the same numbers are others than the reference's."""

    def __init__(self, reference: Any, outputs: Mapping[str, StandIn], values: Sequence[Mapping[str, Any]]) -> None:
        scope = scope_of(reference)
        self._outputs = [outputs[name] for name in values[0]]
        self._calls: list[tuple[int, str, Any, list[TensorMaps]]] = []
        self._possible = True
        for number in range(len(values) // 2):
            integers, maps = values[1 + 2 * number : 3 + 2 * number]
            name = f"launch_{number}"
            inner = scope_of(scope[name])
            # not so where it goes through Triton's own, slower path, wants memory for each of its blocks, or passes
            # tensor maps as plain addresses
            self._possible &= "runtime_" in inner and "scratch_" not in inner and all(one in inner for one in maps)
            if self._possible and (integers or maps):
                form = renumbered(scope[name], [*integers, *maps, "slow_"])
                self._calls.append((1 + 2 * number, name, form, [inner[which] for which in maps]))
        news = [f"new_{name}" for name in values[0]]
        self._launch = renumbered(reference, ["otherwise_", *news, *(name for _, name, *_ in self._calls)])

    def filled(self, values: Sequence[Mapping[str, Any]], otherwise: InFull) -> Launch:
        if not self._possible:
            return otherwise
        numbers: list[Any] = [otherwise]
        for like, (shape, strides) in zip(self._outputs, values[0].values(), strict=True):
            made = Zeroes(shape[0]) if isinstance(like, Zeroes) else StandIn(shape, like.dtype, strides)
            numbers.append(memory(made))
        for at, name, form, maps in self._calls:
            own = [*values[at].values()]
            for known, (shape, strides) in zip(maps, values[at + 1].values(), strict=True):
                own.append(known.resized(shape, strides))
            own.append(Slow(otherwise, name))
            numbers.append(functools.partial(form, own))
        return functools.partial(self._launch, numbers)


class InFull:
    """A launch that is bound in full when it is first called."""

    __slots__ = ("_bind", "bound")

    def __init__(self, bind: Callable[[], Launch]) -> None:
        self._bind = bind
        self.bound: Any = None

    def launch(self) -> Any:
        if self.bound is None:
            self.bound = self._bind()
        return self.bound

    def __call__(self, *passed: Any, **given: Any) -> Any:
        return self.launch()(*passed, **given)


class Slow:
    """In the place of registry.toolbox.launch.Unbound: that of the launch in full, where it is asked for anything."""

    __slots__ = ("_in_full", "_name")

    def __init__(self, in_full: InFull, name: str) -> None:
        self._in_full, self._name = in_full, name

    def __getattr__(self, asked: str) -> Any:
        bound = scope_of(self._in_full.launch())[self._name]
        return getattr(scope_of(bound)["slow_"], asked)


# --- what differs between sizes -----------------------------------------------------------------------------------


def numbers_of(noted: Sequence[Call], calls: Sequence[Call], given: Mapping[str, StandIn]) -> list[Codes]:
    """The code of what follows from the sizes, of these calls and of the same that were asked for with noted ones.

    Raises Unnoted where they differ in more than numbers.
    """
    outputs: Codes = {}
    found = [outputs]
    for other, call in zip(noted, calls, strict=True):
        if other.kernel is not call.kernel or [*other.arguments] != [*call.arguments]:
            raise Unnoted("another kernel, or other arguments")
        for fixed, known in (
            (other.constants, call.constants),
            (other.options, call.options),
            (other.if_plain_maps, call.if_plain_maps),
        ):
            _same(fixed, known)
        integers: Codes = {}
        maps: Codes = {}
        for name, one, known in zip(GRID, (*other.grid, 1, 1), (*call.grid, 1, 1), strict=False):
            _same(one != 0, known != 0)
            _add(integers, name, _code(one, known))
        constants = {parameter.name for parameter in call.kernel.params if parameter.is_constexpr}
        for parameter, known in call.arguments.items():
            one = other.arguments[parameter]
            if isinstance(known, StandIn):
                _same_operand(one, known)
                if known.name not in given:
                    _add_output(outputs, one, known)
            elif is_descriptor(known):
                at = call.kernel.arg_names.index(parameter)
                _add_map(integers, maps, at, one, known)
                if known.base.name not in given:
                    _add_output(outputs, one.base, known.base)
            elif parameter not in constants and type(known) in (int, float):
                _add(integers, frozen_name(call.kernel.arg_names.index(parameter)), _specialised(one, known))
            else:
                _same(one, known)
        found += [integers, maps]
    found[0] = {name: geometry for name, geometry in outputs.items() if geometry}
    return found


def _same(noted: Any, known: Any) -> None:
    """Hold sizes to what makes these equal: comparing notes what is compared."""
    if not noted == known:
        raise Unnoted("more differs than numbers")


def _same_operand(noted: Any, known: StandIn) -> None:
    if noted is known:
        return
    if type(noted) is not type(known) or type(known) not in (StandIn, Zeroes):
        raise Unnoted("memory that is found by the plugin's own code")
    _same((noted.name, noted.dtype, noted.alignment), (known.name, known.dtype, known.alignment))


def _code(noted: Any, known: Any) -> str | None:
    """The code of a number; None where it is the same for all sizes."""
    if type(noted) is not Noted:
        _same(noted, known)
        return None
    if type(noted.value) is not type(known) or noted.value != known:
        raise Unnoted("the same question has two answers")
    return noted.code


def _specialised(noted: Any, known: Any) -> str | None:
    """The same of what a kernel may be compiled for: ones, multiples of 16, and what needs more than 32 bits."""
    size: Any = noted
    if type(noted) is Noted and type(known) is int and size != 1:
        bool(size % 16)
        narrow = -(2**31) <= known < 2**31
        _same(size >= -(2**31), narrow or known > 0)
        _same(size < 2**31, narrow or known < 0)
        _same(size >= -(2**63), True)
        _same(size < 2**63, True)
    return _code(noted, known)


def _add(codes: Codes, name: str, code: str | None) -> None:
    if code is not None:
        codes[name] = code


def _add_output(outputs: Codes, noted: StandIn, known: StandIn) -> None:
    geometry = _sequences(noted, known, _code)
    if known.name and outputs.setdefault(known.name, geometry) != geometry:
        raise Unnoted("two operands of one name")


def _add_map(integers: Codes, maps: Codes, at: int, noted: Any, known: Any) -> None:
    """The map is made of other sizes; the kernel takes them as integers too."""
    if type(noted) is not type(known):
        raise Unnoted("another kind of tensor map")
    _same_operand(noted.base, known.base)
    other, kept = vars(noted), vars(known)
    for name in kept.keys() | other.keys():
        if name not in ("base", "shape", "strides"):
            _same(other.get(name), kept.get(name))
    if geometry := _sequences(noted, known, _specialised):
        maps[maps_name(at)] = geometry
    for number, (one, value) in enumerate(
        zip((*noted.shape, *noted.strides), (*known.shape, *known.strides), strict=True)
    ):
        _add(integers, rest_name(at, number), _code(one, value))


def _sequences(noted: Any, known: Any, code_of: Callable[[Any, Any], str | None]) -> str:
    """Code of (shape, strides); "" where both are the same for all sizes."""
    found, any_differs = [], False
    for mine, other in ((noted.shape, known.shape), (noted.strides, known.strides)):
        codes = [code_of(one, value) for one, value in zip(mine, other, strict=True)]
        any_differs = any_differs or any(codes)
        found.append("".join(f"{code or repr(value)}, " for code, value in zip(codes, other, strict=True)))
    return f"(({found[0]}), ({found[1]}))" if any_differs else ""
