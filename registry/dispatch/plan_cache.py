"""Plans kept for the calls that follow: one cache for each op and direction.

A call finds its plan in the first of three ways that answers:

guard    torch.compile guards its graphs with `TensorGuards`: type, dtype, device, sizes, strides, requires_grad, and
         the dispatch keys that subclasses, autocast and functorch leave behind, compared in under a microsecond.
         Here such a guard proves that a plan made for earlier tensors holds for these.
facts    a key of everything that can change the choice or break a bound launch, read from Python.
Problem  the op checks the arguments, makes the Problem and decides.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.autograd import forward_ad as _forward_ad

from registry.dispatch import traced
from registry.dispatch.alike import Alike
from registry.dispatch.catalog import catalog
from registry.dispatch.plan import Plan
from registry.dispatch.precision import float32_precision
from registry.dispatch.scope import EMPTY, current
from registry.forks import in_child, new_lock

ENTRIES = 3 * 4096
"""Entries kept per cache, guards and facts together; the oldest few go when it is full, so that no call waits long."""
GUARDS = 8
"""Guards tried for one small key (shapes of one size, dtypes, layouts); calls beyond them go by their facts."""
PASSING = 256
"""Of these, entries of plans that were made of others in a few microseconds, such as those of a cache that grows: most
of them never come again, and objects that pile up are what Python's garbage collector goes through again and again."""
STRAIGHT = 256
"""Calls kept that go straight to a function of torch."""
ALIGNED = 15
"""Mask of the address bits that must be zero: every kernel takes bases on 16 bytes, and a plan may rely on them."""

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_jit_trace = torch._C._get_tracing_state
_deterministic = torch.are_deterministic_algorithms_enabled
_grad_enabled = torch.is_grad_enabled
_scope = current.get
_FLOAT32 = torch.float32

NOT_TENSORS = (TypeError, AttributeError, RuntimeError, ValueError)
"""What reading the facts of no tensor, of one without memory, or of an unhashable argument raises."""

Make = Callable[[Any, bool, tuple[Any, ...]], Plan]
"""(settings, whether autograd follows, tensors) -> a new plan, after all checks of the arguments."""


@functools.cache
def _tensor_guards() -> Callable[..., Any] | None:
    """torch's guard class, if it is there and tells apart what is needed here."""
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


class PlanCache:
    """The plans of one op. Reads take no lock; a plan is made under it, so that no two threads make one twice.

    `settings` are all arguments that are no tensors, as one tuple. They also say which tensors are given where that is
    not plain from their number: optional ones are left out at the end, or None.
    """

    def __init__(
        self, make: Make, eager: Callable[..., bool], limit: int = ENTRIES, alike: Alike | None = None
    ) -> None:
        self.limit = limit
        self._alike = alike
        self._make = make
        self._eager = eager
        self._entries: dict[Hashable, Any] = {}
        self._get = self._entries.get
        self._lock = new_lock()
        self._passing: collections.deque[Hashable] = collections.deque()
        self._forgotten = 0
        self.straight: dict[Hashable, tuple[Callable[..., bool], Callable[..., Any], str | None]] = {}
        """Calls that are one of torch's functions: what stands for numbers of elements, and the variant where one was
        named -> a guard, the function, and the precision of float32 products that it was chosen under, where that
        matters."""
        _caches.append(self)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, settings: Hashable, *tensors: Any) -> Plan | None:
        """The plan of an eager call; None where it must go by the torch op, which others want to see."""
        if _dispatch_modes():  # guards overlook them, and fake tensors have no memory to be asked about
            return None
        if _jit_trace() is not None:  # to whom a size is an operation, and one that it refuses ends it
            return None
        kept: tuple[Any, ...] = ()
        try:
            key: Any = (tensors[0].numel(), tensors[1].numel(), len(tensors), settings, _scope().key, _deterministic())
            low = 0
            for tensor in tensors:
                if tensor.is_nested:  # a guard ends the process at a nested tensor
                    break
                low |= tensor.data_ptr()
            else:
                kept = self._get(key, ())
                for guard, precision, grad, offsets, plan in kept:
                    if (
                        guard(*tensors)
                        and (precision is None or precision == float32_precision())
                        and (grad is None or grad is _grad_enabled())
                    ):
                        if offsets is None:
                            fits = not low & ALIGNED
                        else:
                            fits = offsets == [tensor.data_ptr() & ALIGNED for tensor in tensors]
                        if fits:
                            # nor do they see other modes, and the tangents of forward-mode autograd
                            if not _function_modes() and _forward_ad._current_level < 0:
                                found: Plan = plan
                                return found
                            break
        except NOT_TENSORS:
            key = None
        if not self._eager(*tensors):
            return None
        plans_then = self._forgotten
        needs_grad = False
        for tensor in tensors:
            needs_grad = needs_grad or tensor.requires_grad
        made = self.by_facts(settings, *tensors, with_grad=needs_grad and _grad_enabled())
        if made.new:
            made.new = False  # a guard is for those who come again
        elif key is not None and tensors[-1] is not tensors[-2] and len(kept) < GUARDS:  # k may well be v, too
            self._add_guard(key, kept, made, tensors, needs_grad, plans_then)
        return made

    def keep_straight(
        self, key: Hashable, settings: Any, plan: Plan, called: tuple[torch.Tensor, ...], *tensors: torch.Tensor | None
    ) -> None:
        """Have a call that comes down to one of torch's own functions go there, by a guard and nothing else.

        `called` are its tensors, of which the plan's are views. Only where nothing else could change the choice: with
        worse alignment, or deterministic algorithms, fewer variants are legal than when this one was chosen.
        """
        bare = getattr(plan.launch, "bare", None)
        guards = _tensor_guards()
        if bare is None or guards is None or _deterministic() or plan.with_grad:
            return
        for tensor in called:
            if tensor.requires_grad or tensor.data_ptr() & ALIGNED:
                return
        if len(set(map(id, called))) < len(called):
            return
        precision = float32_precision() if any(tensor.dtype is _FLOAT32 for tensor in called) else None
        guard = guards(*called, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        with self._lock:
            if self.by_facts(settings, *tensors) is plan:  # it may have been forgotten meanwhile
                if len(self.straight) >= STRAIGHT:
                    self.straight.clear()
                self.straight[key] = guard, bare, precision

    def holding(self, settings: Any, *given: Any) -> tuple[Plan, Callable[..., bool]] | None:
        """The plan of a call outside of all blocks, and whether it holds for tensors in the place of those that are
        given; None where there is no quick way to tell."""
        tensors = [tensor for tensor in given if tensor is not None]
        guards, forgotten, deterministic = _tensor_guards(), self._forgotten, _deterministic()
        if guards is None or _scope() is not EMPTY or any(tensor.data_ptr() & ALIGNED for tensor in tensors):
            return None
        if len(set(map(id, tensors))) < len(tensors):
            return None
        guard = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        precision = float32_precision() if any(tensor.dtype is _FLOAT32 for tensor in tensors) else None

        def holds(*tensors: torch.Tensor) -> bool:
            low = 0
            for tensor in tensors:
                low |= tensor.data_ptr()
            return (
                not low & ALIGNED
                and guard(*tensors)
                and self._forgotten == forgotten
                and _scope() is EMPTY
                and _deterministic() is deterministic
                and (precision is None or precision == float32_precision())
            )

        return self.by_facts(settings, *given), holds

    def by_facts(self, settings: Any, *tensors: Any, with_grad: bool = False) -> Plan:
        """The plan of a call that nobody else wants to see, such as one that comes from the torch op."""
        kind: list[Any] = [settings, _scope().key, _deterministic(), with_grad]
        sizes: list[int] = []
        try:
            for tensor in tensors:
                if tensor is None:
                    kind.append(None)
                    continue
                dtype, shape = tensor.dtype, tensor.shape
                if dtype is _FLOAT32:
                    kind.append(float32_precision())
                place = tensor.get_device()
                if place < 0 and not tensor.is_cpu:
                    place = tensor.device  # numbers are compared ten times as fast, and tell what has kernels apart
                kind += (dtype, place, tensor.data_ptr() & ALIGNED, len(shape))
                sizes += shape
                sizes += tensor.stride()
            key = tuple(kind), tuple(sizes)
            plan: Plan | None = self._get(key)
        except NOT_TENSORS:  # the checks name the argument; what passes them has no key to be kept under
            return self._make(settings, with_grad, tensors)
        if plan is None:
            catalog.get()  # discovery runs plugins' code, which may register or call ops: not under the lock
            with self._lock:
                plan = self._get(key)
                if plan is None:
                    forgotten = self._forgotten
                    plan = self._new(*key, settings, with_grad, tensors)
                    if self._forgotten == forgotten:  # what was asked on the way may have changed the variants
                        self._keep(key, plan, plan)
        return plan

    def _new(
        self, kind: Hashable, sizes: tuple[int, ...], settings: Any, with_grad: bool, tensors: tuple[Any, ...]
    ) -> Plan:
        """A plan from those of calls that differ in sizes alone; else one that is made in full."""
        if self._alike is None or _scope().trying is not None:  # there each is tried out by itself
            return self._make(settings, with_grad, tensors)
        plan = self._alike.plan(kind, sizes, with_grad)
        if plan is None:
            plan = self._make(settings, with_grad, tensors)
            self._alike.decided(kind, sizes, plan, settings, tensors)
        return plan

    def _add_guard(
        self,
        key: Hashable,
        kept: tuple[Any, ...],
        plan: Plan,
        tensors: tuple[torch.Tensor, ...],
        needs_grad: bool,
        plans_then: int,
    ) -> None:
        """Keep a guard for a plan that was found by its facts, beside those that its key has. The first few stay: they
        could take turns."""
        if len(set(map(id, tensors))) < len(tensors):
            return  # a guard takes no tensor twice: self-attention of one tensor goes by its facts
        guards = _tensor_guards()
        if guards is None:
            return
        guard = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        precision = float32_precision() if any(t.dtype is _FLOAT32 for t in tensors) else None
        offsets = [t.data_ptr() & ALIGNED for t in tensors]
        entry = guard, precision, _grad_enabled() if needs_grad else None, offsets if any(offsets) else None, plan
        with self._lock:
            if self._forgotten == plans_then and self._get(key, ()) is kept:
                self._keep(key, (*kept, entry), plan)

    def _keep(self, key: Hashable, entry: Any, plan: Plan) -> None:
        if plan.passing:
            self._passing.append(key)
            if len(self._passing) > min(PASSING, self.limit // 8):
                self._entries.pop(self._passing.popleft(), None)
        if len(self._entries) >= self.limit:
            for old in list(itertools.islice(self._entries, max(1, self.limit // 64))):
                del self._entries[old]
        self._entries[key] = entry

    def clear(self) -> None:
        with self._lock:
            self._forgotten += 1
            self._entries.clear()
            self.straight.clear()
            self._passing.clear()
            if self._alike is not None:
                self._alike.clear()


_caches: list[PlanCache] = []


def forget_plans() -> None:
    """Drop every plan: after variants or tables changed."""
    traced.new_era()
    _clear_all()


def _clear_all() -> None:
    for cache in _caches:
        cache.clear()


# Of a thread that is gone a plan may be in the middle of its first launch, and a cache in that of being cleared.
in_child(_clear_all)
