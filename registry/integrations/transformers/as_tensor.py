"""What a mask is to a model that computes with it: the tensor of bool that transformers' sdpa would have been given.

Models that choose keys by themselves (sparse attention of DeepSeek, GLM) index the mask, ask for its dtype and join
it with their own choice. What they make is a tensor of four dimensions, which attention takes as a mask of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree


def _as_the_tensor(operator: str) -> Callable[..., Any]:
    def method(self: AsTensor, *others: Any) -> Any:
        return getattr(self.dense(), operator)(*[_tensor_of(other) for other in others])

    return method


def _tensor_of(value: Any) -> Any:
    return value.dense() if isinstance(value, AsTensor) else value


class AsTensor:
    """Operators, functions and attributes of the tensor that `dense()` gives, made when one of them is asked for."""

    def dense(self) -> torch.Tensor:
        raise NotImplementedError

    ndim = 4

    def dim(self) -> int:
        return self.ndim

    def __getattr__(self, name: str) -> Any:
        # A copy asks before there is anything to make a tensor from; what nobody documents is no business of models.
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_tensor_of, (args, kwargs or {}), is_leaf=lambda x: isinstance(x, AsTensor))
        return function(*args, **kwargs)

    __getitem__, __invert__ = _as_the_tensor("__getitem__"), _as_the_tensor("__invert__")
    __and__, __rand__ = _as_the_tensor("__and__"), _as_the_tensor("__rand__")
    __or__, __ror__ = _as_the_tensor("__or__"), _as_the_tensor("__ror__")
    __add__, __radd__ = _as_the_tensor("__add__"), _as_the_tensor("__radd__")
    __sub__, __rsub__ = _as_the_tensor("__sub__"), _as_the_tensor("__rsub__")
    __mul__, __rmul__ = _as_the_tensor("__mul__"), _as_the_tensor("__rmul__")
    __eq__, __ne__ = _as_the_tensor("__eq__"), _as_the_tensor("__ne__")  # type: ignore[assignment]
    __hash__ = object.__hash__  # it is one of a step's masks, whatever is in it
    numel, size = _as_the_tensor("numel"), _as_the_tensor("size")
