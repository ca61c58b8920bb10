"""Triton's interpreter as kernels need it: where it is wrong on this machine, it is mended.

What is mended, each only where a probe shows that it is wrong here:

- a scalar as a loop bound, which old interpreters turn into an int in a way that new numpys refuse;
- bfloat16, which interpreters hold as bits in uint16 and add, compare, reduce and multiply as integers, and cut off
  where a GPU rounds to the nearest.

Nothing is assumed from a version: parts that are not there, or still wrong afterwards, are named in a notice. Atomic
operations on bfloat16 are not mended. Work that nobody looks at is spared, too: kernels run in half the time.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from registry.errors import InvalidArgument
from registry.notices import notice

__all__ = ["VARIABLE", "ask_for_it", "is_on", "mend"]

VARIABLE = "TRITON_INTERPRET"


def is_on() -> bool:
    """Whether kernels that are defined now will be interpreted."""
    return os.environ.get(VARIABLE) == "1"


def ask_for_it() -> None:
    """Interpret the kernels of this process. Triton has to be told before it is imported."""
    if not is_on() and "triton" in sys.modules:
        raise InvalidArgument(
            VARIABLE, "triton, imported without it", f"{VARIABLE}=1 in the environment from the start"
        )
    os.environ[VARIABLE] = "1"


@functools.cache
def mend() -> tuple[str, ...]:
    """Mend the interpreter of this process, once; what could not be mended, which a notice names too."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return ()  # then no kernel is Triton's
    left = []
    for what, is_right, repair in (
        ("scalars as loop bounds", _scalars_are_numbers, _number_scalars),
        ("bfloat16", _bfloat16_is_right, _widen_bfloat16),
        ("time", _wastes_nothing, _spare),
    ):
        try:
            if not is_right(interpreter):
                repair(interpreter)
                left += [] if is_right(interpreter) else [what]
        except Exception as moved:  # private parts of Triton: any error may be how their absence shows
            left.append(f"{what} ({type(moved).__name__}: {moved})")
    for what in left:
        notice(f"this Triton's interpreter is not known, and may be wrong with {what}")
    return tuple(left)


# --- scalars ------------------------------------------------------------------------------------------------------


def _scalars_are_numbers(interpreter: Any) -> bool:
    """A scalar is an array of one element there."""
    import numpy
    import triton.language as tl

    class Probe:
        handle = interpreter.TensorHandle(numpy.array([3], dtype=numpy.int32), tl.int32)

    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_tensor(Probe, scope)
    try:
        return int(Probe.__index__(Probe())) == 3  # type: ignore[attr-defined]
    except TypeError:
        return False
    finally:
        scope.restore()


def _number_scalars(interpreter: Any) -> None:
    original = interpreter._patch_lang_tensor

    def patched(kind: Any, scope: Any) -> None:
        original(kind, scope)
        scope.set_attr(kind, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


# --- time ---------------------------------------------------------------------------------------------------------


def _wastes_nothing(interpreter: Any) -> bool:
    return getattr(interpreter._patch_lang, "once", False)


def _spare(interpreter: Any) -> None:
    """Not to do again what is done, nor what nobody looks at: three quarters of the time of a kernel of many helpers.

    For each call of a helper Triton patches anew the language that the launch has patched, looking through all of its
    names; it makes a table of dtypes for each look into it; it finds out which integers overflow, which only a builder
    with `debug` would tell; and it works out anew, and writes down in words, what every block of a shape is like.
    """
    import triton.language as tl

    original, patched = interpreter._patch_lang, set[int]()

    @functools.cache
    def languages(function: Any) -> frozenset[int]:
        return frozenset({id(value) for value in function.__globals__.values()} & {id(tl), id(tl.core)})

    def patch(function: Any) -> Any:
        there = languages(function)
        if there and there <= patched:
            return interpreter._LangPatchScope()
        scope = original(function)
        patched.update(there)
        restore = scope.restore

        def restored() -> None:
            patched.clear()
            restore()

        scope.restore = restored
        return scope

    patch.once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch
    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    interpreter._get_np_dtype = dtype_of
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    _remember_blocks(tl.core)


def _remember_blocks(core: Any) -> None:
    """A block's type is worked out once for each shape and element, and so is what a tensor takes from its type."""
    new_type, new_tensor = core.block_type.__init__, core.tensor.__init__
    types, tensors = dict[Any, dict[str, Any]](), dict[str, dict[str, Any]]()

    def block_type(self: Any, element: Any, shape: Any) -> None:
        key = (str(element), *[getattr(size, "value", size) for size in shape])
        if key not in types:
            new_type(self, element, shape)
            types[key] = dict(vars(self))
        vars(self).update(types[key], element_ty=element)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            new_tensor(self, handle, type)
            tensors[type.name] = {**vars(self), "handle": None}  # (whose memory nobody keeps)
        vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


# --- bfloat16 -----------------------------------------------------------------------------------------------------

_ONE, _TWO, _THREE = 0x3F80, 0x4000, 0x4040  # 1.0, 2.0 and 3.0
_ROUNDED_UP = 1.0 + 3 * 2.0**-8  # halfway between two of them; the upper one is even


def _bfloat16_is_right(interpreter: Any) -> bool:
    import numpy as np
    import triton.language as tl

    def held(*bits: int) -> Any:
        return interpreter.TensorHandle(np.array([bits], dtype=np.uint16), tl.bfloat16)

    def exact(value: float) -> Any:
        return interpreter.TensorHandle(np.array([[value]], dtype=np.float32), tl.float32)

    builder = interpreter.InterpreterBuilder()
    total = builder.create_fadd(held(_ONE), held(_TWO))
    less = builder.create_fcmpOLT(held(_ONE | 0x8000), held(_ONE))  # -1 < 1, which their bits are not
    product = builder.create_dot(held(_TWO), held(_ONE), exact(1.0), None, 0)
    rounded = builder.cast_impl(exact(_ROUNDED_UP), tl.bfloat16)
    counted = builder.cast_impl(interpreter.TensorHandle(np.array([[3]], dtype=np.int32), tl.int32), tl.bfloat16)
    largest = interpreter.ReduceOps(1, tl.standard._elementwise_max, False)
    tensor = tl.core.tensor(held(_ONE | 0x8000, _ONE), tl.block_type(tl.bfloat16, [1, 2]))
    found = largest.apply(tensor).handle
    right = (
        (total.data == _THREE).all()
        and less.data.all()
        and (product.data == 3.0).all()
        and (rounded.data == _ONE + 2).all()
        and (counted.data == _THREE).all()
        and found.data.dtype == np.uint16
        and (found.data == _ONE).all()
    )
    return bool(right) and hasattr(builder, "get_bf16")


def _widen_bfloat16(interpreter: Any) -> None:
    """Every operation on bfloat16 as a GPU does it: in float32, rounded to the nearest afterwards."""
    import numpy as np
    import triton.language as tl

    handle = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder

    def holds_bits(one: Any) -> bool:
        return isinstance(one, handle) and one.data.dtype == np.uint16 and one.dtype.scalar == tl.bfloat16

    def wide(one: Any) -> Any:
        return handle((one.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if holds_bits(one) else one

    def narrow(one: Any) -> Any:
        bits = np.ascontiguousarray(one.data, dtype=np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return handle(np.where(np.isnan(one.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)

    def in_float32(original: Callable[..., Any], decides: int) -> Callable[..., Any]:
        """The operation, whose result is of the dtype of its operand number `decides`."""

        def operation(self: Any, *operands: Any, **rest: Any) -> Any:
            bits = holds_bits(operands[decides])
            result = original(self, *map(wide, operands), **rest)
            return narrow(result) if bits and result.data.dtype == np.float32 else result

        return operation

    def cast(original: Callable[..., Any]) -> Callable[..., Any]:
        """Between bfloat16 and anything else, by way of float32."""

        def conversion(self: Any, source: Any, kind: Any, *rest: Any) -> Any:
            if kind.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
                exact = source if source.dtype.scalar == tl.float32 else original(self, source, tl.float32, *rest)
                return narrow(exact)
            source = wide(source) if kind.scalar != tl.bfloat16 else source
            return source if kind.scalar == source.dtype.scalar else original(self, source, kind, *rest)

        return conversion

    for name, decides in (("binary_op", 0), ("unary_op", 0), ("ternary_op", 2), ("create_fma", 2), ("create_dot", 2)):
        setattr(builder, name, in_float32(getattr(builder, name), decides))
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(builder, name, cast(getattr(builder, name)))
    builder.get_bf16 = lambda self, value: narrow(self.get_fp32(value))

    def tensor(one: Any, made: Any) -> Any:
        kind = tl.block_type(made.dtype, list(one.shape)) if one.type.is_block() else made.dtype
        return tl.core.tensor(made, kind)

    reduces = interpreter.ReduceScanOpInterface
    apply = reduces.apply

    def reduced(self: Any, given: Any) -> Any:
        alone = not isinstance(given, tuple)
        parts = (given,) if alone else given
        bits = [holds_bits(part.handle) for part in parts]
        if not any(bits):
            return apply(self, given)
        found = apply(
            self, tuple(tensor(part, wide(part.handle)) if b else part for part, b in zip(parts, bits, strict=True))
        )
        back = tuple(
            tensor(one, narrow(one.handle)) if b and one.handle.data.dtype == np.float32 else one
            for one, b in zip(found, [*bits, *[False] * len(found)], strict=False)
        )
        return back[0] if alone else back

    reduces.apply = reduced
