"""Tensor maps (CUtensorMap) of host tensor descriptors, encoded once per address.

A map is an address plus geometry, nothing else: it does not hold memory and does not know who owns it. So a map may be
reused for a reused address exactly when the whole geometry is the same, and each `TensorMaps` serves one geometry.

A map may also say that the TMA unit rounds float32 to the nearest tf32 while it loads (ties to even; NaNs and
infinities stay), which saves kernels `to_tf32`: see `rounded_to_tf32`. And its boxes may have fewer rows than the
blocks that the kernel was compiled for: see `boxed`.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from registry.forks import new_lock

__all__ = [
    "Address",
    "TensorMaps",
    "block",
    "boxed",
    "frozen",
    "geometry",
    "is_descriptor",
    "maps_for",
    "rounded_to_tf32",
    "rounds_to_tf32",
    "rows_of_box",
    "without_base",
]

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

    __slots__ = ("__weakref__", "_descriptor", "_encode", "_old")

    def __init__(self, encode: Callable[[Any], Any], descriptor: Any) -> None:
        """The descriptor's base is an `Address`. It becomes theirs: changed for each, and read, under the lock."""
        self._encode, self._old, self._descriptor = encode, _NONE, descriptor

    def resized(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMaps:
        """Maps of the same blocks, of tensors of other sizes."""
        mine = self._descriptor
        if shape == mine.shape and strides == mine.strides:
            return self
        sizes = {"shape": shape, "strides": strides}
        return TensorMaps(self._encode, with_base(mine, Address(0, mine.base.dtype), **sizes))

    def __missing__(self, pointer: int) -> Any:
        with _encoding:
            found = self._old.pop(pointer, None)
            if found is None:
                self._descriptor.base.pointer = pointer
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


_NONE: dict[int, Any] = {}
"""An old generation before there is one; nobody adds to it."""
_by_geometry: weakref.WeakValueDictionary[Any, TensorMaps] = weakref.WeakValueDictionary()
_lock = new_lock()
_encoding = new_lock()
"""One for all: to encode takes no longer than to make a lock of its own for each of many geometries."""


Encoder = Callable[[Any, Mapping[str, Any]], Callable[[Any], Any]]


def maps_for(descriptor: Any, metadata: Mapping[str, Any], about: Any, encoder: Encoder) -> TensorMaps:
    """The maps of this descriptor's geometry, shared by the kernels that read it so, and living as long as one of them.

    `metadata` is what the compiled kernel says of the descriptor (swizzle, box ...), and `about` the same `frozen`;
    `encoder(descriptor, metadata)` gives what makes the map of one like it. The descriptor becomes theirs.
    """
    key = geometry(descriptor), about
    with _lock:
        found = _by_geometry.get(key)
        if found is None:
            found = _by_geometry[key] = TensorMaps(encoder(descriptor, metadata), descriptor)
        return found


def geometry(descriptor: Any) -> Any:
    """Everything about a descriptor but its address, hashable."""
    return block(descriptor), tuple(descriptor.shape), tuple(descriptor.strides)


def block(descriptor: Any) -> Any:
    """What a kernel is compiled for of a descriptor: not its address, shape and strides."""
    kind, known = type(descriptor), descriptor.__dict__
    special = rounds_to_tf32(descriptor), rows_of_box(descriptor)
    return kind, known["base"].dtype, special, *[frozen(known[name]) for name in _fields(kind)]  # type: ignore[arg-type]


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Of a class of descriptors, those that are the same for all sizes."""
    return tuple(one.name for one in dataclasses.fields(kind) if one.name not in ("base", "shape", "strides"))


def is_descriptor(value: Any) -> bool:
    """Whether an argument is a tensor map."""
    return _describes(type(value)) and hasattr(value, "base")  # type: ignore[arg-type]


@functools.lru_cache(maxsize=1024)
def _describes(kind: type) -> bool:
    return kind.__name__.startswith("TensorDescriptor")


def rounded_to_tf32(descriptor: Any) -> Any:
    """A copy of a float32 descriptor whose map rounds to the nearest tf32 what is loaded through it.

    Where a launch cannot give it such a map, the kernel has to round: the `if_plain_maps` of a Call or Launcher.
    """
    if str(descriptor.base.dtype) != "torch.float32":
        raise TypeError(f"a tensor map rounds float32 to tf32, not {descriptor.base.dtype}")
    return with_base(descriptor, descriptor.base, round_f32_to_tf32=True)  # a field of triton's since 3.8


def rounds_to_tf32(descriptor: Any) -> bool:
    """Whether it was asked to."""
    return bool(getattr(descriptor, "round_f32_to_tf32", False))


def boxed(descriptor: Any, rows: int) -> Any:
    """A copy whose map's boxes have so many rows (of their second-last dimension), and bring or take so many bytes.

    Triton's blocks are powers of two. A row that lies outside of a matrix takes the TMA unit as long as two inside, and
    several small boxes longer than a large one. Where a launch cannot give it such a map, boxes are whole blocks: the
    `if_plain_maps` of a Call or Launcher says so to the kernel.
    """
    if not 0 < rows <= descriptor.block_shape[-2]:
        raise ValueError(f"a box of {rows} rows, for blocks of {descriptor.block_shape[-2]}")
    return with_base(descriptor, descriptor.base, box_rows=rows)


def rows_of_box(descriptor: Any) -> int:
    """Rows of its boxes where `boxed` gave them, else 0."""
    return int(getattr(descriptor, "box_rows", 0))


_PLAIN = frozenset((int, float, str, bool, type(None)))


def frozen(value: Any) -> Any:
    """A hashable copy."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, list | tuple):
        return tuple([one if type(one) in _PLAIN else frozen(one) for one in value])
    if isinstance(value, Mapping):
        return tuple([(name, frozen(one)) for name, one in sorted(value.items())])
    return repr(value) if kind.__hash__ is None else value


def without_base(descriptor: Any) -> Any:
    """A copy that keeps no tensor alive, its sizes as plain tuples."""
    sizes = {"shape": tuple(map(int, descriptor.shape)), "strides": tuple(map(int, descriptor.strides))}
    return with_base(descriptor, None, **sizes)


def with_base(descriptor: Any, base: Any, **changes: Any) -> Any:
    """A copy over another base. Not `dataclasses.replace`: that would validate each time."""
    found = object.__new__(type(descriptor))
    known = found.__dict__
    known.update(descriptor.__dict__)
    known["base"] = base
    if changes:
        known.update(changes)
    return found
