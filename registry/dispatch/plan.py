"""Plans: a decision bound to a launch, which the first call watches over."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from registry import notices
from registry.dispatch.decision import Decision
from registry.dispatch.quarantine import did_not_compile, quarantine
from registry.dispatch.scope import Scope, Trial
from registry.errors import CaptureError, IllegalVariant, NoLegalVariant, RegistryError, shown
from registry.toolbox.capturing import capturing


def device_of(tensor: Any) -> AbstractContextManager[Any]:
    """Kernels are compiled and loaded for the current device, which need not be that of the tensors."""
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    import torch

    device: AbstractContextManager[Any] = torch.cuda.device(tensor.device)
    with device:
        torch.cuda.current_stream().query()  # gives a new thread the context that driver calls take for granted
    return device


def on_its_device(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launch that may be called while another GPU is current: kernels go to the device of the first tensor."""
    import torch

    if torch.cuda.device_count() < 2 or hasattr(launch, "bare"):  # a function of torch goes there by itself
        return launch
    current_device: Callable[[], int] = torch._C._cuda_getDevice

    def launch_there(*args: Any, **kwargs: Any) -> Any:
        index = args[0].get_device()
        if index < 0 or index == current_device():
            return launch(*args, **kwargs)
        with torch.cuda.device(index):
            return launch(*args, **kwargs)

    return launch_there


class LateLaunch:
    """Calls a variant's `prepare` at the first launch, so that making a plan, or explaining one, never compiles."""

    def __init__(self, name: str, prepare: Callable[[], Callable[..., Any]], unclaimed: list[str]) -> None:
        self._name, self._prepare, self._unclaimed = name, prepare, unclaimed
        self.prepared: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.prepared is None:
            with device_of(args[0]):
                launch = self._prepare()
            if not callable(launch):
                raise RegistryError(
                    f"{self._name}: prepare gave {shown(launch)}; allowed: a launch, which can be called"
                )
            finish = finishing(launch, self._unclaimed)
            self.prepared = launch if finish is None else finish(launch)
        return self.prepared(*args, **kwargs)


def finishing(launch: Callable[..., Any], unclaimed: list[str]) -> Callable[[Any], Any] | None:
    """What makes a prepared launch, and others like it, take all that the op's calls bring; None where they do."""
    known = getattr(launch, "takes", ())
    drops = [keyword for keyword in unclaimed if keyword not in known]
    if not drops:
        return on_its_device if on_its_device(launch) is not launch else None
    return lambda launch: on_its_device(Dropping(launch, drops))


def settled(launch: Callable[..., Any]) -> Callable[..., Any]:
    """What a launch has come to be at its first call, without what it took to get there."""
    for name in ("prepared", "bound"):
        found: Callable[..., Any] | None = getattr(launch, name, None)
        launch = launch if found is None else found
    return launch


class Dropping:
    """Leaves out call arguments that a variant does not claim; legality has made sure that they ask for nothing."""

    def __init__(self, launch: Callable[..., Any], unclaimed: list[str]) -> None:
        self._launch, self._unclaimed = launch, unclaimed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for keyword in self._unclaimed:
            kwargs.pop(keyword, None)
        return self._launch(*args, **kwargs)


class Uncaptured:
    """A launch that waits for the device, which no CUDA graph can capture: refused there before it has begun."""

    def __init__(self, launch: Callable[..., Any], name: str) -> None:
        self._launch, self._name = launch, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if capturing():
            raise CaptureError(
                f"{self._name} reads values that are on the device, and waits for it: no CUDA graph can capture that; "
                "name another variant (explain lists them)"
            )
        return self._launch(*args, **kwargs)


class Plan:
    """One decision and the launch it is bound to: callers run `plan.launch(...)`.

    The first launch is watched: a kernel that fails to compile is quarantined and the next legal variant takes its
    place, before anything was written. Any later failure is raised, never retried. After it, `launch` is the bound one.
    With a `trial` others are launched before it, and it is decided again by what that told.
    """

    __slots__ = (
        "_bound",
        "_decision",
        "_lock",
        "_replan",
        "_trial",
        "default",
        "launch",
        "new",
        "passing",
        "with_grad",
    )

    def __init__(
        self,
        decision: Decision | Callable[[], Decision],
        bound: Callable[..., Any],
        replan: Callable[[], Plan],
        default: Any = None,
        with_grad: bool = False,
        trial: Trial | None = None,
    ) -> None:
        self._decision = decision
        self._trial = trial
        self.launch: Callable[..., Any] = self._first_launch
        self.default = default
        """What a call takes where it is given nothing; the op derives it from the Problem once."""
        self.with_grad = with_grad
        """Whether it was made for tensors that autograd follows."""
        self.new = True
        """Whether its first call has not been found yet: it may well be the only one."""
        self.passing = False
        """Whether it could be made again in a few microseconds."""
        self._bound = bound
        self._replan = replan
        self._lock = threading.Lock()

    @property
    def decision(self) -> Decision:
        """What was decided; found when first asked for, where it is known to be as for other sizes."""
        found = self._decision
        if not isinstance(found, Decision):
            self._decision = found = found()
        return found

    def bind(self, launch: Callable[..., Any]) -> None:
        """Launch this, which does the same sooner. For a plan that nobody else has yet."""
        self._bound = launch

    def _first_launch(self, *args: Any, **kwargs: Any) -> Any:
        """Launch, replacing this plan's choice while kernels fail to compile, and then this launch by the bound one."""
        with self._lock:
            while self.launch == self._first_launch:
                if capturing() and not isinstance(self._bound, Uncaptured):  # which has a better reason
                    refuse_capture(self.decision)
                if self._trial is not None and not capturing():
                    self._try_out(self._trial, args, kwargs)
                try:
                    result = self._bound(*args, **kwargs)
                except Exception as error:
                    if not did_not_compile(error):
                        raise
                    self._give_way(error)
                    continue
                self._check_form(result, args[0].device, kwargs.get("out"))
                self.launch = settled(self._bound)
                return result
        return self.launch(*args, **kwargs)

    def _try_out(self, trial: Trial, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._trial = None
        trial(args, kwargs)
        self._succeed(self._replan())

    def _check_form(self, result: Any, device: Any, out: Any) -> None:
        """Raise for what the op would take apart wrongly; a choice that is as for other sizes was looked at then."""
        decision = self._decision
        if isinstance(decision, Decision):
            misfit = decision.problem.misfit(result) or _misplaced(result, device, out)
            if misfit:
                raise RegistryError(f"{decision.variant} {misfit}, for {decision.problem.summary()}")

    def _give_way(self, error: BaseException) -> None:
        quarantine.add(self.decision.variant, self.decision.problem, error)
        try:
            successor = self._replan()
        except (IllegalVariant, NoLegalVariant) as refusal:
            raise refusal from error
        self._succeed(successor)

    def _succeed(self, successor: Plan) -> None:
        self._decision, self._bound = successor.decision, successor._bound


def _misplaced(result: Any, device: Any, out: Any) -> str:
    """Why the tensors of a result are not where a call looks for them; "" where they are."""
    every = result if isinstance(result, (tuple, list)) else (result,)
    for found in every:
        if found is not None and found.device != device:
            return f"returned a tensor on {found.device}; allowed: on {device}"
    if out is not None and every[0] is not None and every[0].data_ptr() != out.data_ptr():
        return "returned another tensor than out; allowed: out, which it claims to write to"
    return ""


def observe(scope: Scope, decision: Decision) -> None:
    """Tell the recorders of a scope what ran, and count a preference that could not be met."""
    if decision.fallback_from:
        wanted = ", ".join(decision.fallback_from)
        problem, ran = decision.problem, decision.variant
        text = f"preferred {wanted} is illegal for {problem.summary()}: {ran} ran instead"
        notices.notice(text, cause=("preferred", decision.fallback_from, problem.kind(), ran))
    for recorder in scope.recorders:
        recorder.add(decision)


def refuse_capture(decision: Decision) -> None:
    """Raise CaptureError for a first launch, which may compile, inside of a capture."""
    if decision.problem.target.arch != "cpu":
        raise CaptureError(
            f"{decision.variant} was never launched for {decision.problem.summary()}; a CUDA graph cannot capture a "
            f"first launch, which compiles. Call it once before the capture, or use registry.warm(...)"
        )
