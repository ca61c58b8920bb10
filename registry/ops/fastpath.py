"""The warm path: one C++ check stands in for reading every fact of every tensor from Python.

torch.compile guards its graphs with `TensorGuards`: type, dtype, device, sizes, strides, requires_grad, and the
dispatch keys that modes, subclasses, autocast and functorch leave behind, compared in under a microsecond. Here such
a guard says that a plan made for earlier tensors holds for these. Where torch has no such guard the full key decides,
as it does for whatever a guard refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from registry.dispatch.plan import Plan
from registry.dispatch.plan_cache import Memo, watch_memo
from registry.ops.tensors import ieee_float32

ALIGNED = 15
"""Mask of the address bits that must be zero: every kernel takes bases on 16 bytes, and a plan may rely on them."""


def never(*tensors: torch.Tensor) -> bool:
    """The guard of a plan that was found the long way and is used once."""
    return False


class WarmPlan:
    """A plan, the guard that says for which tensors it holds, and what else it was made under."""

    __slots__ = ("grad", "guard", "ieee", "plan")

    def __init__(self, guard: Callable[..., bool], plan: Plan, grad: bool, ieee: bool | None) -> None:
        self.guard, self.plan, self.grad, self.ieee = guard, plan, grad, ieee


def _tensor_guards() -> Callable[..., Any] | None:
    """torch's guard class, if it is there and tells tensors apart as is needed here."""
    try:
        from torch._C._dynamo import guards

        TensorGuards: Any = guards.TensorGuards
        one, other, wider = torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 3)
        check = TensorGuards(one, other, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        works = (
            check(one, other)
            and check(other, one)
            and not check(one, wider)
            and not check(one, other.t())
            and not check(one, other.double())
            and not check(one, other.clone().requires_grad_())
            and not check(one, torch.nn.Parameter(other, requires_grad=False))
            and not check(one, other.to("meta"))
        )
    except Exception:
        return None
    return TensorGuards if works else None


class WarmPlans:
    """Plans by a small key; the guard of each entry decides whether it holds."""

    def __init__(self) -> None:
        self._memo: Memo = watch_memo()
        self.get = self._memo.get
        self._guards: Any = False

    def remember(self, key: Hashable, plan: Plan, grad: bool, *tensors: torch.Tensor) -> None:
        """Keep a plan that was found the long way. The first one of a key stays: replacing it could go on for ever."""
        if self._guards is False:
            self._guards = _tensor_guards()
        if self._guards is None or self._memo.get(key) is not None or any(t.data_ptr() & ALIGNED for t in tensors):
            return
        guard = self._guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        ieee = ieee_float32() if any(t.dtype is torch.float32 for t in tensors) else None
        self._memo.add(key, lambda: WarmPlan(guard, plan, grad, ieee))
