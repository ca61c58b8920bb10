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


_SUMS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.add_)


class AsTensor:
    """Operators, functions and attributes of the tensor that `dense()` gives, made when one of them is asked for.

    Added to scores it hides keys, as eager attention means its masks; other arithmetic is for no mask of bool.
    """

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
        if function in _SUMS:
            one, other, *rest = args
            if isinstance(one, AsTensor):
                one, other = other, one
            return one + other._added(one.dtype) if not rest and not kwargs else NotImplemented
        args, kwargs = pytree.tree_map(_tensor_of, (args, kwargs or {}), is_leaf=lambda x: isinstance(x, AsTensor))
        return function(*args, **kwargs)

    def _added(self, dtype: torch.dtype) -> torch.Tensor:
        dense = self.dense()
        return torch.zeros_like(dense, dtype=dtype).masked_fill_(~dense, torch.finfo(dtype).min)

    def __add__(self, scores: Any) -> Any:
        return scores + self._added(scores.dtype) if isinstance(scores, torch.Tensor) else NotImplemented

    __radd__ = __add__
    __getitem__, __invert__ = _as_the_tensor("__getitem__"), _as_the_tensor("__invert__")
    __and__, __rand__ = _as_the_tensor("__and__"), _as_the_tensor("__rand__")
    __or__, __ror__ = _as_the_tensor("__or__"), _as_the_tensor("__ror__")
    __eq__, __ne__ = _as_the_tensor("__eq__"), _as_the_tensor("__ne__")  # type: ignore[assignment]
    __hash__ = object.__hash__  # it is one of a step's masks, whatever is in it
    numel, size = _as_the_tensor("numel"), _as_the_tensor("size")
