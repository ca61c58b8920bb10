"""Tensor maps (CUtensorMap) of host tensor descriptors, encoded once per address.

A map is an address plus geometry, nothing else: it does not hold memory and does not know who owns it. So a map may be
reused for a reused address exactly when the whole geometry is the same, and each `TensorMaps` serves one geometry.

A map may also say that the TMA unit rounds float32 to the nearest tf32 while it loads (ties to even; NaNs and
infinities stay), which saves kernels `to_tf32`: see `rounded_to_tf32`.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Address", "TensorMaps", "geometry", "maps_for", "rounded_to_tf32", "rounds_to_tf32", "without_base"]

LIMIT = 1024
"""Addresses that one geometry remembers; twice as many at most."""


class Address:
    """A device address in the place of a tensor, for code that asks for `data_ptr()` and `dtype` only."""

    __slots__ = ("dtype", "pointer")

    def __init__(self, pointer: int, dtype: Any) -> None:
        self.pointer, self.dtype = pointer, dtype

    def data_ptr(self) -> int:
        return self.pointer


class TensorMaps(dict[int, Any]):
    """Maps of one geometry by address: `maps[pointer]`.

    A hit is a plain dict lookup. Bounded, about by least recent use: when `LIMIT` addresses are in, they become the old
    generation; what is asked for again moves back, the rest goes at the next change of generation.
    """

    def __init__(self, encode: Callable[[Any], Any], template: Any, dtype: Any) -> None:
        super().__init__()
        self._encode, self._address = encode, Address(0, dtype)
        self._descriptor = with_base(template, self._address)  # one for all, changed and read under the lock
        self._old: dict[int, Any] = {}
        self._lock = threading.Lock()

    def __missing__(self, pointer: int) -> Any:
        with self._lock:
            found = self._old.pop(pointer, None)
            if found is None:
                self._address.pointer = pointer
                found = self._encoded()
            if len(self) >= LIMIT:
                self._old = dict(self)
                self.clear()
            self[pointer] = found
            return found

    def _encoded(self) -> Any:
        try:
            return self._encode(self._descriptor)
        except RuntimeError as error:
            if "invalid device context" not in str(error):
                raise
        # A thread that has made no CUDA runtime call yet has no context, which encoding needs; any such call makes one.
        import torch

        torch.cuda.current_stream().query()
        return self._encode(self._descriptor)


_by_geometry: weakref.WeakValueDictionary[Any, TensorMaps] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def maps_for(descriptor: Any, metadata: Mapping[str, Any], encode: Callable[[Any, Any], Any]) -> TensorMaps:
    """The maps of this descriptor's geometry, shared by the kernels that read it so, and living as long as one of them.

    `metadata` is what the compiled kernel says of the descriptor (swizzle, box ...); `encode(descriptor, metadata)`
    makes a map.
    """
    key = geometry(descriptor, metadata)
    with _lock:
        found = _by_geometry.get(key)
        if found is None:
            template = without_base(descriptor)
            found = TensorMaps(lambda one: encode(one, metadata), template, descriptor.base.dtype)
            _by_geometry[key] = found
        return found


def geometry(descriptor: Any, metadata: Any = None) -> Any:
    """Everything about a descriptor but its address, hashable."""
    fields = [(f.name, getattr(descriptor, f.name)) for f in dataclasses.fields(descriptor) if f.name != "base"]
    kind = [type(descriptor).__qualname__, str(descriptor.base.dtype), rounds_to_tf32(descriptor)]
    return _frozen([*kind, fields, metadata])


def rounded_to_tf32(descriptor: Any) -> Any:
    """A copy of a float32 descriptor whose map rounds to the nearest tf32 what is loaded through it.

    Where a launch cannot give it such a map, the kernel has to round: the `if_unrounded` of a Call or Launcher.
    """
    if str(descriptor.base.dtype) != "torch.float32":
        raise TypeError(f"a tensor map rounds float32 to tf32, not {descriptor.base.dtype}")
    return with_base(descriptor, descriptor.base, round_f32_to_tf32=True)  # a field of triton's since 3.8


def rounds_to_tf32(descriptor: Any) -> bool:
    """Whether it was asked to."""
    return bool(getattr(descriptor, "round_f32_to_tf32", False))


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _frozen(one)) for name, one in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_frozen(one) for one in value)
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


def without_base(descriptor: Any) -> Any:
    """A copy that keeps no tensor alive, its sizes as plain tuples."""
    sizes = {"shape": tuple(map(int, descriptor.shape)), "strides": tuple(map(int, descriptor.strides))}
    return with_base(descriptor, None, **sizes)


def with_base(descriptor: Any, base: Any, **changes: Any) -> Any:
    """A copy over another base. Not `dataclasses.replace`: that would validate each time."""
    found = copy.copy(descriptor)
    for name, value in {"base": base, **changes}.items():
        object.__setattr__(found, name, value)
    return found
