"""Kernels that this process has compiled already, found without Triton's own look-up.

A new shape of a kernel that is there needs no compiler, but `warmup` takes 100 us to find that out: it writes out all
options, and compares each constant that the kernel's functions read. Here the key is made of what differs between two
bindings of one kernel. It tells apart whatever Triton's does (tests hold it against Triton's), and more at times: then
Triton is asked, and knows the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from registry.toolbox.tensor_maps import block, is_descriptor

__all__ = ["KnownKernel", "kernel_for", "kinds", "known_kernel", "switches"]

MOST = 512
"""Keys kept for one kernel; when there are more, all go."""
_KNOWN = "registry_known_"
"""The attribute of a JIT function that keeps them: they live as long as it does."""
_SWITCHES = ("instrumentation_mode", "fpsan_homomorphic_casts")
"""Of `triton.knobs.compilation`."""
_CONSTANT, _PLAIN, _SPECIALISED = "constant", "plain", "specialised"


class KnownKernel:
    """A compiled kernel, and what it was found among: Triton's caches, and the constants that its functions read."""

    __slots__ = ("_caches", "_read", "compiled")

    def __init__(self, compiled: Any, caches: Any, read: Mapping[Any, tuple[Any, dict[str, Any]]]) -> None:
        self.compiled, self._caches = compiled, caches
        self._read = [(names, name, names.get(name)) for (name, _), (_, names) in read.items()]

    def holds(self, caches: Any) -> bool:
        """Not where the caches were emptied, or a constant is another one: Triton says what is to be done then."""
        return caches is self._caches and all(names.get(name) is one for names, name, one in self._read)


def known_kernel(kernel: Any, given: Mapping[str, Any], options: Mapping[str, Any], device: int) -> KnownKernel | None:
    """One object for all arguments that need the same compiled kernel; None where it was not compiled here."""
    key = _key(kernel, given, options, device)
    found: KnownKernel | None = kernel.__dict__.get(_KNOWN, {}).get(key)
    return found if found is not None and found.holds(kernel.device_caches.get(device)) else None


def kernel_for(
    kernel: Any, given: Mapping[str, Any], options: Mapping[str, Any], device: int, compiled: Callable[[], Any]
) -> Any:
    """What `compiled` gives for these arguments, asked once for all that need the same."""
    known = known_kernel(kernel, given, options, device)
    if known is not None:
        return known.compiled
    made = compiled()
    key = _key(kernel, given, options, device)
    if key is not None and made is not None:  # a hook of Triton's may have kept it from compiling
        kept = kernel.__dict__.setdefault(_KNOWN, {})
        if len(kept) >= MOST:
            kept.clear()
        kept[key] = KnownKernel(made, kernel.device_caches.get(device), kernel.used_global_vals)
    return made


def _key(kernel: Any, given: Mapping[str, Any], options: Mapping[str, Any], device: int) -> Hashable:
    """What differs between two bindings of a kernel; None where each is to be Triton's to look up."""
    try:
        if kernel.pre_run_hooks:
            return None  # they want to see each
        key = (device, kernel.debug, switches(), *options.items(), *kinds(kernel, given))
        hash(key)
        _ = kernel.device_caches, kernel.used_global_vals
    except (AttributeError, KeyError, TypeError):  # not as we know Triton, a missing argument, one without a hash
        return None
    return key


def switches() -> tuple[Any, ...]:
    """What `warmup` makes part of its key beside arguments and options."""
    from triton import knobs

    if getattr(knobs.runtime, "add_stages_inspection_hook", None):
        raise TypeError("a hook wants to see each look-up")
    return knobs.runtime.debug, *[getattr(knobs.compilation, name, None) for name in _SWITCHES]


def kinds(kernel: Any, given: Mapping[str, Any]) -> list[Any]:
    """Of each argument what a kernel may be compiled for."""
    return [_kind(given[name], how) for name, how in _parameters(kernel)]


@functools.lru_cache(maxsize=1024)
def _parameters(kernel: Any) -> tuple[tuple[str, str], ...]:
    return tuple(
        (one.name, _CONSTANT if one.is_constexpr else _PLAIN if one.do_not_specialize else _SPECIALISED)
        for one in kernel.params
    )


def _kind(value: Any, how: str) -> Any:
    if how is _CONSTANT:
        return value
    kind = type(value)
    if kind is int:
        bits = 32 if -(1 << 31) <= value < 1 << 31 else 64 if -(1 << 63) <= value < 1 << 63 else 65
        return bits if how is _PLAIN else (bits, value == 1, value % 16 == 0)
    if kind is float:
        return float
    if is_descriptor(value):
        return block(value)
    if hasattr(value, "data_ptr"):
        return value.dtype, value.data_ptr() % 16 == 0
    return _exact(value)


def _exact(value: Any) -> Any:
    """Not equal to that of an equal value of another type: True, 1 and 1.0 are not one argument."""
    if isinstance(value, tuple):
        return type(value), *map(_exact, value)
    return type(value), repr(value) if isinstance(value, float) else value
