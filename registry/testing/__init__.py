"""The conformance kit: does a variant do what its op promises, wherever it claims to be legal?

    from registry.testing import check_variant
    report = check_variant("acme.flash")             # a name, or a Variant that is registered nowhere
    print(report)
    assert report.passed

or `python -m registry.testing --variant acme.flash --level full`, or `pytest --registry-variant acme.flash`. Problems,
configs and refusals all come from the variant's declarations; results are held against the op's float64 oracle, with
torch's own error in the same dtype as the yardstick.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from registry.contract.capability import arch_matches
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.errors import InvalidArgument, UnknownVariant
from registry.ops.known import op_named
from registry.ops.parts.kit import Drawn, Kit, Trial, draw
from registry.ops.parts.sizes import size_for
from registry.testing.checks import (
    Finding,
    Subject,
    front_door,
    graph,
    op_checks,
    refuses,
    refuses_architectures,
    repeats,
    runs,
    threads,
)

__all__ = ["Check", "Kit", "Outcome", "Report", "check_op", "check_variant", "checks_for", "checks_of_op", "places"]

DETERMINISTIC_SETTING = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""cuBLAS refuses to be deterministic without it, and reads it once."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one check."""

    name: str
    passed: bool
    error: float | None = None
    """Relative to the float64 oracle (absolute for an LSE); None where nothing was measured."""
    yardstick: float | None = None
    """The same error of torch's computation in that dtype."""
    limit: float | None = None
    """What was allowed: from the yardstick, or from a floor where torch happens to be exact."""
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Check:
    """One check that is ready to run."""

    name: str
    call: Callable[[], Finding]

    def run(self) -> Outcome:
        """Run it; an exception is a failure like any other, and so is an attempt to end the process."""
        start = time.perf_counter()
        try:
            found = self.call()
        except (Exception, SystemExit) as error:
            found = Finding((f"{type(error).__name__}: {error}",))
        seconds = time.perf_counter() - start
        numbers = found.error, found.yardstick, found.limit
        return Outcome(self.name, not found.complaints, *numbers, "; ".join(found.complaints), seconds)


@dataclass
class Report:
    """All outcomes for one variant (or op) in one place."""

    subject: str
    target: str
    level: str
    cases: list[Outcome]

    @property
    def passed(self) -> bool:
        """True where there were cases and none failed."""
        return bool(self.cases) and not self.failures

    @property
    def failures(self) -> list[Outcome]:
        return [case for case in self.cases if not case.passed]

    @property
    def worst(self) -> float:
        """The largest error in units of what was allowed."""
        measured = [c.error / c.limit for c in self.cases if c.error is not None and c.limit]
        return max(measured, default=math.nan)

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.cases)

    def line(self) -> str:
        """One row of a table."""
        state = "ok" if self.passed else "FAILED" if self.cases else "nothing to check"
        return (
            f"{self.subject:28} {self.target[:16]:16} {self.level:5} {len(self.cases):5} cases "
            f"{len(self.failures):4} failed  error/allowed {self.worst:5.2f}  {self.seconds:6.1f} s  {state}"
        )

    def __str__(self) -> str:
        return "\n".join([self.line(), *(f"  - {case.name}: {case.detail}" for case in self.failures)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(found: dict[str, Any]) -> Report:
        """What `to_dict` gave."""
        return Report(**found | {"cases": [Outcome(**case) for case in found["cases"]]})


# --- what there is to check ---------------------------------------------------------------------------------------


def places(variant: Variant | str) -> list[Target]:
    """The devices of this machine on which a variant may be legal: the GPU, the CPU, both or neither."""
    variant = _resolved(variant)
    found = [Target.of(torch.device("cuda"))] if torch.cuda.is_available() else []
    found.append(Target.named("cpu"))
    return [target for target in found if arch_matches(variant.requires.arch, target.arch)]


def checks_for(
    variant: Variant | str, target: Target | None = None, level: str = "quick", *, repeat: int | None = None
) -> list[Check]:
    """Every check of a variant on a target (default: the first of `places`), generated from its declarations.

    With TRITON_INTERPRET=1 the target may be a GPU that is not there: kernels then run interpreted, on small problems.
    `repeat` is how often deterministic launches are compared.
    """
    subject = _subject(_resolved(variant), target, level)
    drawn = draw(subject.variant, subject.op, subject.kit, subject.target, subject.size)
    found = [Check(trial.name, functools.partial(runs, subject, trial)) for trial in drawn.trials]
    found += _coverage(subject, drawn)
    if drawn.trials:
        found += _refusals(subject, drawn.trials[0])
        found += _under_load(subject, drawn.trials, repeat or subject.size.repeats)
    return found


def check_variant(
    variant: Variant | str,
    target: Target | None = None,
    level: str = "quick",
    *,
    repeat: int | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Report:
    """Run every check of a variant whose name `only` lets through."""
    variant = _resolved(variant)
    target = target or _default_target(variant)
    checks = checks_for(variant, target, level, repeat=repeat)
    return Report(variant.name, target.name, level, _run_all(check for check in checks if only(check.name)))


def checks_of_op(name: str, device: torch.device | str = "cpu") -> list[Check]:
    """What an op promises whatever the variant: its torch boundary, and the answers to empty tensors."""
    return [Check(label, call) for label, call in op_checks(name, torch.device(device)).items()]


def check_op(name: str, device: torch.device | str = "cpu") -> Report:
    """Run every check of an op."""
    return Report(f"op {name}", str(device), "", _run_all(checks_of_op(name, device)))


def _run_all(checks: Iterable[Check]) -> list[Outcome]:
    found = []
    for check in checks:
        found.append(check.run())
        if is_sticky(found[-1]):
            break
    return found


def is_sticky(case: Outcome) -> bool:
    """Whether a CUDA error broke the process: whatever runs after it fails too, and tells nothing."""
    return "CUDA error" in case.detail


def _resolved(variant: Variant | str) -> Variant:
    if isinstance(variant, Variant):
        return variant
    known = catalog.get().variants
    if variant not in known:
        raise UnknownVariant(variant, "any", sorted(known))
    return known[variant]


def _default_target(variant: Variant) -> Target:
    found = places(variant)
    if not found:
        raise InvalidArgument("target", "none", f"a machine with {', '.join(variant.requires.arch)} for {variant.name}")
    return found[0]


def _subject(variant: Variant, target: Target | None, level: str) -> Subject:
    op = op_named(variant.op)
    target = target or _default_target(variant)
    device = torch.device("cpu" if target.arch == "cpu" or not torch.cuda.is_available() else "cuda")
    interpreted = target.arch != "cpu" and device.type == "cpu"
    if interpreted and os.environ.get("TRITON_INTERPRET") != "1":
        allowed = "a device of this machine (or TRITON_INTERPRET=1, for Triton kernels)"
        raise InvalidArgument("target", target.name, allowed)
    if device.type == "cuda":
        os.environ.setdefault(*DETERMINISTIC_SETTING)
    return Subject(variant, op, op.conformance, target, device, size_for(device, level, interpreted), interpreted)


def _coverage(subject: Subject, drawn: Drawn) -> list[Check]:
    """Claims that no problem can make use of are claims too many."""
    idle = [label for label in drawn.uncovered if label.split("=")[0].split(":")[0] in subject.kit.claims]
    complaints = tuple(f"no legal problem found for {label}" for label in idle)
    if not drawn.trials:
        complaints = (*complaints, "no legal problem found at all")
    return [Check("every claim can be used", lambda: Finding(complaints))]


def _refusals(subject: Subject, plainest: Trial) -> list[Check]:
    base = {axis: values[0] for axis, values in subject.kit.axes(subject.variant.requires, subject.size).items()}
    found = [Check("refuses other architectures", functools.partial(refuses_architectures, subject, plainest.spec))]
    for name, override in subject.kit.outside(subject.variant.requires).items():
        found.append(Check(f"refuses {name}", functools.partial(refuses, subject, base | override)))
    return found


def _under_load(subject: Subject, trials: tuple[Trial, ...], repeat: int) -> list[Check]:
    """Checks that need only one or two problems."""
    found = []
    plain = [t for t in trials if not t.spec.get("deterministic")] or list(trials)
    if subject.variant.requires.deterministic:
        fixed = [t for t in trials if t.spec.get("deterministic")] or plain
        for trial in (fixed[0], fixed[-1]) if len(fixed) > 1 else fixed:
            call = functools.partial(repeats, subject, trial, repeat)
            found.append(Check(f"same bits {repeat} times: {trial.name}", call))
    if subject.interpreted:
        return found
    for trial in (plain[0], plain[len(plain) // 2]):
        found.append(Check(f"by name: {trial.name}", functools.partial(front_door, subject, trial)))
    found.append(Check(f"two threads: {plain[0].name}", functools.partial(threads, subject, plain[0])))
    if subject.device.type == "cuda":
        found.append(Check(f"CUDA graph: {plain[0].name}", functools.partial(graph, subject, plain[0])))
    return found
