"""Plans kept for the calls that follow: one cache for each op and direction.

A call finds its plan in the first of three ways that answers:

guard    torch.compile guards its graphs with `TensorGuards`: type, dtype, device, sizes, strides, requires_grad, and
         the dispatch keys that modes, subclasses, autocast and functorch leave behind, compared in under a microsecond.
         Here such a guard proves that a plan made for earlier tensors holds for these.
facts    a key of everything that can change the choice or break a bound launch, read from Python.
Problem  the op checks the arguments, makes the Problem and decides.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from registry.dispatch.catalog import catalog
from registry.dispatch.plan import Plan
from registry.dispatch.scope import current

ENTRIES = 3 * 4096
"""Entries kept per cache, guards and facts together; the oldest quarter goes when it is full."""
GUARDS = 4
"""Guards tried for one small key (dtypes, layouts, who requires grad); calls beyond them go by their facts."""
ALIGNED = 15
"""Mask of the address bits that must be zero: every kernel takes bases on 16 bytes, and a plan may rely on them."""

_function_modes = torch._C._len_torch_function_stack
_any_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch.are_deterministic_algorithms_enabled
_grad_enabled = torch.is_grad_enabled
_precision = torch._C._get_float32_matmul_precision
_scope = current.get

NOT_TENSORS = (TypeError, AttributeError, RuntimeError)
"""What reading the facts of no tensor, of one without memory, or of an unhashable argument raises."""

Make = Callable[[Any, bool, tuple[Any, ...]], Plan]
"""(settings, whether autograd follows, tensors) -> a new plan, after all checks of the arguments."""


def _tensor_guards() -> Callable[..., Any] | None:
    """torch's guard class, if it is there and tells apart what is needed here."""
    try:
        from torch._C._dynamo import guards

        TensorGuards: Any = guards.TensorGuards
        one, other, wider = torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 3)
        check = TensorGuards(one, other, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        with TorchDispatchMode():
            seen_by_modes = check(one, other)
        works = (
            check(one, other)
            and check(other, one)
            and not seen_by_modes
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


def _fact(tensor: torch.Tensor | None) -> Hashable:
    """What of one tensor can change the choice or break a bound launch."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & ALIGNED


class PlanCache:
    """The plans of one op. Reads take no lock; a plan is made under it, so that no two threads make one twice.

    `settings` are all arguments that are no tensors, as one tuple. They also say which tensors are given where that is
    not plain from their number: optional ones are left out at the end, or None.
    """

    def __init__(self, make: Make, eager: Callable[..., bool], limit: int = ENTRIES) -> None:
        self.limit = limit
        self._make = make
        self._eager = eager
        self._entries: dict[Hashable, Any] = {}
        self._get = self._entries.get
        self._lock = threading.RLock()
        self._forgotten = 0
        self._guards: Any = False
        _caches.append(self)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, settings: Hashable, *tensors: Any) -> Plan | None:
        """The plan of an eager call; None where it must go by the torch op, which others want to see."""
        try:
            first, second = tensors[0], tensors[1]
            key: Any = (first.shape, second.numel(), settings, _scope().key, _deterministic(), _grad_enabled())
            for guard, precision, plan in self._get(key, ()):
                if guard(*tensors):
                    if (precision is not None and precision != _precision()) or _function_modes():
                        break
                    for tensor in tensors:
                        if tensor.data_ptr() & ALIGNED:
                            break
                    else:
                        found: Plan = plan
                        return found
                    break
        except NOT_TENSORS:
            key = None
        if not self._eager(*tensors):
            return None
        plans_then = self._forgotten
        plan = self.by_facts(settings, *tensors, with_grad=_grad_enabled() and any(t.requires_grad for t in tensors))
        if key is not None:
            self._add_guard(key, plan, tensors, plans_then)
        return plan

    def by_facts(self, settings: Hashable, *tensors: Any, with_grad: bool = False) -> Plan:
        """The plan of these tensors and settings, made if it is new. Asks nothing of modes: for calls beneath them."""
        around = _scope().key, _deterministic(), _precision(), _any_autocast(), with_grad
        try:
            key = (settings, around, *map(_fact, tensors))
            plan: Plan | None = self._get(key)
        except NOT_TENSORS:  # the checks name the argument; what passes them has no key to be kept under
            return self._make(settings, with_grad, tensors)
        if plan is None:
            catalog.get()  # discovery runs plugins' code, which may register or call ops: not under the lock
            with self._lock:
                plan = self._get(key)
                if plan is None:
                    plan = self._make(settings, with_grad, tensors)
                    self._keep(key, plan)
        return plan

    def _add_guard(self, key: Hashable, plan: Plan, tensors: tuple[torch.Tensor, ...], plans_then: int) -> None:
        """Keep a guard for a plan that was found by its facts. The first few of a key stay: they could take turns."""
        if self._guards is False:
            self._guards = _tensor_guards()
        kept = self._get(key, ())
        if self._guards is None or len(kept) >= GUARDS or any(t.data_ptr() & ALIGNED for t in tensors):
            return
        guard = self._guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        precision = _precision() if any(t.dtype is torch.float32 for t in tensors) else None
        with self._lock:
            kept = self._get(key, ())
            if self._forgotten == plans_then and all(entry[2] is not plan for entry in kept):
                self._keep(key, (*kept, (guard, precision, plan)))

    def _keep(self, key: Hashable, entry: Any) -> None:
        if len(self._entries) >= self.limit:
            for old in list(itertools.islice(self._entries, max(1, self.limit // 4))):
                del self._entries[old]
        self._entries[key] = entry

    def clear(self) -> None:
        with self._lock:
            self._forgotten += 1
            self._entries.clear()


_caches: list[PlanCache] = []


def forget_plans() -> None:
    """Drop every plan: after variants or tables changed."""
    for cache in _caches:
        cache.clear()
