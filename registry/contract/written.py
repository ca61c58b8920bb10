"""Makes Python functions of the expressions that noted.py writes down."""

from __future__ import annotations

import builtins
import functools
import math
import types
from collections.abc import Callable, Sequence
from typing import Any


def function_of(text: str, numbers: Sequence[Any]) -> Callable[[tuple[int, ...]], Any]:
    """The function `following` of this text, whose last arguments are these numbers."""
    return types.FunctionType(_code_of(text), _FUNCTIONS, "following", tuple(numbers))


@functools.lru_cache(maxsize=256)
def _code_of(function: str) -> types.CodeType:
    """Of a function's text. Answers that lie next to each other differ in the numbers that they were noted for alone,
    which are no part of it: to compile it took most of what one costs."""
    scope: dict[str, Any] = {}
    exec(function, scope)
    found: types.CodeType = scope["following"].__code__
    return found


def compiled(code: str, scope: dict[str, Any]) -> Any:
    """A function of the sizes from code that was noted."""
    return eval(_expression(code), {**_FUNCTIONS, **scope})


@functools.lru_cache(maxsize=256)
def _expression(code: str) -> types.CodeType:
    return compile(f"lambda x: {code}", "<noted>", "eval")


_FUNCTIONS: dict[str, Any] = {"ceil": math.ceil, "floor": math.floor, "gcd": math.gcd, "inf": math.inf}
_FUNCTIONS["__builtins__"] = builtins
"""Of the globals of functions that are made here: torch.jit.trace looks there, and crashes where there are none."""
