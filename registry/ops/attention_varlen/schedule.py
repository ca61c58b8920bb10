"""What the layers of one step share: lengths that were checked once, and the tile lists that variants made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from registry.contract.capability import Config
from registry.contract.variant import Variant
from registry.dispatch.plan import settled
from registry.errors import InvalidArgument, shown
from registry.ops.attention_varlen.problem import VarlenProblem

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table")
_OF_A_STEP = ("batch", "total_q", "total_k", "max_seqlen_q", "max_seqlen_k", "kv_layout", "page_size")


class Schedule:
    """One step's lengths, for all of its layers: `registry.attention_varlen(..., plan=schedule)`.

    Holds the lengths within their bounds, as they were when it was made. A variant that shares more than that between
    calls (`Variant.schedule`) makes it at its first call with this object, and finds it again at the next: layers of
    other masks or heads, which other variants run, have their own. A schedule that is made while a CUDA graph is
    captured follows the lengths at each replay.
    """

    def __init__(self, problem: VarlenProblem, lengths: Mapping[str, Any]) -> None:
        self._step = {name: getattr(problem, name) for name in _OF_A_STEP}
        self._width = _width(lengths["block_table"])
        self._device = lengths["cu_seqlens_q"].device
        self.lengths = {name: _kept(one) for name, one in lengths.items()}
        """cu_seqlens_q, cu_seqlens_k, seqused_k and block_table."""
        self._shared: dict[object, Any] = {}
        self._fits: dict[tuple[int, int], Any] = {}

    def check(self, problem: Any, device: torch.device, table: torch.Tensor | None) -> None:
        """Raise where a call is not one of this step's."""
        if device != self._device:
            raise InvalidArgument("plan", f"a schedule on {self._device} for a call on {device}", "one of its device")
        width = _width(table)
        if (id(problem), width) in self._fits:  # which holds it, so that no other one is found by its id
            return
        for name, value in self._step.items():
            if getattr(problem, name) != value:
                got = f"a schedule of {name}={value} for a call of {name}={getattr(problem, name)}"
                raise InvalidArgument("plan", got, "one that schedule(...) made for the same lengths")
        if width != self._width:
            got = f"a schedule of {self._width} pages a sequence for a call of {width}"
            raise InvalidArgument("plan", got, "one that schedule(...) made for the same block_table")
        self._fits[id(problem), width] = problem

    def check_lengths(self, given: Mapping[str, Any]) -> None:
        """Raise for a call of other lengths, where they can be seen for nothing: on a CPU."""
        if self._device.type != "cpu":
            return
        for name, own in self.lengths.items():
            told = given.get(name)
            same = own is told if own is None or told is None else torch.equal(own, told)
            if not same:
                got = f"a schedule of {shown(own)} as {name} for a call of {shown(told)}"
                raise InvalidArgument("plan", got, "one that schedule(...) made for the same lengths")

    def shared(self, owner: object, make: Callable[[], Any]) -> Any:
        """What `owner` made for this step, made now where this is its first call."""
        if owner not in self._shared:
            self._shared[owner] = make()
        return self._shared[owner]


def _width(table: torch.Tensor | None) -> int:
    return 0 if table is None else table.shape[1]


def _kept(lengths: torch.Tensor | None) -> torch.Tensor | None:
    """As they are now: on a GPU they have been copied within their bounds."""
    return lengths.clone() if lengths is not None and lengths.is_cpu else lengths


def check_schedule(plan: object) -> Schedule:
    """The value if it is a schedule, else an error that names the argument."""
    if not isinstance(plan, Schedule):
        raise InvalidArgument("plan", shown(plan), "None, or what registry.attention_varlen.schedule(...) made")
    return plan


class Stepped:
    """A launch of a variant that does not check lengths itself, or that shares something between calls."""

    def __init__(
        self, launch: Callable[..., Any], variant: Variant, problem: Any, config: Config, checks: bool, first: int
    ) -> None:
        self._launch, self._checks, self._first = launch, checks, first
        self._schedule, self._problem, self._config = variant.schedule, problem, config
        self._made: Callable[..., Any] | None = None

    def __call__(self, *tensors: Any, schedule: Schedule | None = None, **given: Any) -> Any:
        q, k = tensors[self._first : self._first + 2]
        if self._checks and schedule is None:
            given |= checked(q, k, self._problem, given)
        if self._schedule is not None:
            given["schedule"] = None if schedule is None else schedule.shared(self, lambda: self._make(q, k, given))
        found = self._launch(*tensors, **given)
        self._launch = settled(self._launch)
        return found

    def _make(self, q: Any, k: Any, given: dict[str, Any]) -> Any:
        assert self._schedule is not None
        if self._made is None:  # kept: steps come in numbers, and binding a launch costs far more than the launch
            self._made = self._schedule(self._problem, self._config)
        return self._made(q, k, **{name: given.get(name) for name in LENGTHS})


def checked(q: Any, k: Any, problem: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths within their bounds, by the kernel that complains of those that were not. They stay on the GPU."""
    from registry.ops.attention_varlen.bounds import within  # imports triton, which a CPU needs not have

    present = {name: given[name] for name in LENGTHS if name in given}
    held = within(q, k, **present, max_seqlen_q=problem.max_seqlen_q, max_seqlen_k=problem.max_seqlen_k)
    return {name: held[name] for name in present}
