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

import dataclasses
import functools
import os
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from registry.contract.capability import arch_matches
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.dispatch.select import INTERPRETED
from registry.errors import InvalidArgument
from registry.ops.known import REGISTERED, op_named
from registry.ops.op import Op
from registry.ops.parts.kit import Kit
from registry.ops.parts.sizes import size_for
from registry.ops.parts.trials import Drawn, Trial
from registry.ops.parts.trials import draw as draw_trials
from registry.testing import interpreted
from registry.testing.checks import (
    BUILDS,
    builds_compile,
    builds_compile_elsewhere,
    front_door,
    op_checks,
    refuses,
    refuses_architectures,
    runs,
)
from registry.testing.declared import can_be_traced, declared_answers, has_a_run_beside, runs_itself, traces
from registry.testing.neighbours import beside_each_other
from registry.testing.outcomes import Check, Finding, Outcome, Report, in_common
from registry.testing.repeated import ROUNDS_PER_THREAD, again, back_to_back, graph, no_graph, repeats, threads
from registry.testing.shrinking import smallest_failure
from registry.testing.subject import Subject

__all__ = [
    "Check",
    "Kit",
    "Outcome",
    "Report",
    "check_op",
    "check_variant",
    "checks_for",
    "checks_here",
    "checks_of_op",
    "in_common",
    "interpret_without_gpu",
    "breaks_process",
    "is_sticky",
    "places",
    "smallest",
]

DETERMINISTIC_SETTING = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""cuBLAS refuses to be deterministic without it, and reads it once."""


# --- what there is to check ---------------------------------------------------------------------------------------


def places(variant: Variant | str) -> list[Target]:
    """The devices of this machine on which a variant may be legal: the GPU, the CPU, both or neither."""
    variant = _resolved(variant)
    found = [Target.of(torch.device("cuda"))] if torch.cuda.is_available() else []
    found.append(Target.named("cpu"))
    return [target for target in found if arch_matches(variant.requires.arch, target.arch)]


def interpret_without_gpu() -> None:
    """Interpret this process's kernels where it has no GPU. To be called before anything imports Triton."""
    if not torch.cuda.is_available():
        interpreted.ask_for_it()


def checks_here(variant: Variant | str, level: str = "quick", *, target: str = "H100") -> list[Check]:
    """Every check of a variant wherever it can be run on this machine: on its devices, or interpreted for `target`."""
    variant = _resolved(variant)
    there = Target.named(target)
    found = places(variant)
    if not found and interpreted.is_on() and arch_matches(variant.requires.arch, there.arch):
        found = [there]
    if not found:
        raise InvalidArgument("target", target, f"a GPU with {', '.join(variant.requires.arch)} for {variant.name}")
    return [check for place in found for check in checks_for(variant, place, level)]


def checks_for(
    variant: Variant | str,
    target: Target | None = None,
    level: str = "quick",
    *,
    repeat: int | None = None,
    compile_only: bool = False,
    draw: int = 0,
) -> list[Check]:
    """Every check of a variant on a target (default: the first of `places`), generated from its declarations.

    With TRITON_INTERPRET=1 the target may be a GPU that is not there: kernels then run interpreted, on small problems.
    `repeat` is how often launches on the same values are compared, from each thread at most. `compile_only` leaves the
    checks that compile, which need no GPU. Another `draw` gives other problems and values.
    """
    subject = dataclasses.replace(_subject(_resolved(variant), target, level, compile_only), draw=draw)
    made = functools.partial(draw_trials, subject.variant, subject.op, subject.kit, subject.target, subject.size, draw)
    if compile_only:
        return _compiled(subject, made().trials)
    with subject.where_it_runs():
        drawn = made()
    found = [_check(subject, trial, trial.name, runs) for trial in drawn.trials]
    found += _coverage(subject, drawn)
    if drawn.trials:
        found += _declared(subject, drawn.trials)
        found += _refusals(subject, drawn.trials[0])
        found += _under_load(subject, drawn.trials, repeat or subject.size.repeats)
        found += _compiled(subject, drawn.trials)
    return [_where_it_runs(subject, check) for check in found] if subject.interpreted else found


def check_variant(
    variant: Variant | str,
    target: Target | None = None,
    level: str = "quick",
    *,
    repeat: int | None = None,
    only: Callable[[str], bool] = lambda name: True,
    draw: int = 0,
) -> Report:
    """Run every check of a variant whose name passes `only`, and look for the smallest failure like the first one.
    Another `draw` gives other problems and values."""
    variant = _resolved(variant)
    target = target or _default_target(variant)
    made = checks_for(variant, target, level, repeat=repeat, draw=draw)
    checks = [check for check in made if only(check.name)]
    cases = _run_all(checks)
    return Report(variant.name, target.name, level, cases, smallest(checks, cases))


def smallest(checks: Iterable[Check], cases: Iterable[Outcome]) -> str:
    """The smallest failure like the first one; "" where nothing failed, or the process is broken."""
    failed = {case.name for case in cases if not case.passed and not is_sticky(case)}
    broken = any(is_sticky(case) for case in cases)
    check = next((check for check in checks if check.name in failed and check.smallest is not None), None)
    return "" if check is None or broken or check.smallest is None else check.smallest()


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
    return breaks_process(case.detail)


def breaks_process(complaint: str) -> bool:
    """Whether a complaint is such an error."""
    return "CUDA error" in complaint


def _resolved(variant: Variant | str) -> Variant:
    return variant if isinstance(variant, Variant) else catalog.get().named(variant)


def _default_target(variant: Variant) -> Target:
    found = places(variant)
    if not found:
        raise InvalidArgument("target", "none", f"a machine with {', '.join(variant.requires.arch)} for {variant.name}")
    return found[0]


def _subject(variant: Variant, target: Target | None, level: str, compile_only: bool) -> Subject:
    op = op_named(variant.op)
    target = target or _default_target(variant)
    device = torch.device("cpu" if target.arch == "cpu" or not torch.cuda.is_available() else "cuda")
    elsewhere = target.arch != "cpu" and device.type == "cpu"
    if elsewhere and not compile_only:
        if not interpreted.is_on():
            allowed = f"a device of this machine (or {interpreted.VARIABLE}=1, for Triton kernels)"
            raise InvalidArgument("target", target.name, allowed)
        interpreted.mend()
    if device.type == "cuda":
        os.environ.setdefault(*DETERMINISTIC_SETTING)
    return Subject(variant, op, op.conformance, target, device, size_for(device, level, elsewhere), elsewhere)


Fails = Callable[[Subject, Trial], Finding]


def _check(subject: Subject, trial: Trial, name: str, check: Fails) -> Check:
    """A check of one problem, which knows how to make it smaller."""
    smaller = functools.partial(smallest_failure, subject, trial, check)
    return Check(name, functools.partial(check, subject, trial), trial.about, trial.traits, smaller)


def _where_it_runs(subject: Subject, check: Check) -> Check:
    def inside(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with subject.where_it_runs():
                return call()

        return run

    smallest = check.smallest
    return dataclasses.replace(check, call=inside(check.call), smallest=None if smallest is None else inside(smallest))


def _coverage(subject: Subject, drawn: Drawn) -> list[Check]:
    """Claims that no problem can make use of are claims too many."""
    idle = {label: why for label, why in drawn.uncovered.items() if subject.kit.asked(label)}
    complaints = tuple(f"no legal problem found for {label}: {why}" for label, why in idle.items())
    unused = subject.kit.unused(subject.variant.requires)
    complaints += tuple(f"no call can make use of {claim}: {why}" for claim, why in unused.items())
    if not drawn.trials:
        dsl = subject.variant.design.dsl
        because = f": {dsl} kernels are not interpreted" if subject.interpreted and dsl not in INTERPRETED else ""
        complaints = (*complaints, f"no legal problem found at all{because}")
    left_out = subject.kit.left_out(subject.variant.requires, subject.size)
    there = {label: arch for label, arch in drawn.elsewhere.items() if subject.kit.asked(label)}
    why = "interpreted" if subject.interpreted else f"on {subject.device.type}"
    notes = [f"{part} was not run: too wide {why}" for part in left_out]
    notes += [f"{label} was not run: of {subject.target.arch} refused, of {arch} not" for label, arch in there.items()]
    note = "; ".join(notes)
    return [Check("every claim can be used", lambda: Finding(complaints, note=note))]


def _declared(subject: Subject, trials: tuple[Trial, ...]) -> list[Check]:
    """What a variant says beside its launches."""
    found = [Check(f"{name} answers", call) for name, call in declared_answers(subject, trials).items()]
    if has_a_run_beside(subject):
        few = _few(subject.op, trials, 4)
        found += [_check(subject, trial, f"run itself: {trial.name}", runs_itself) for trial in few]
    graphs = [trial for trial in trials if can_be_traced(trial)] if subject.variant.traceable else []
    few = _few(subject.op, graphs, 2) if graphs else []
    return found + [_check(subject, trial, f"traced: {trial.name}", traces) for trial in few]


def _refusals(subject: Subject, plainest: Trial) -> list[Check]:
    base = {axis: values[0] for axis, values in subject.kit.axes(subject.variant.requires, subject.size).items()}
    found = [Check("refuses other architectures", functools.partial(refuses_architectures, subject, plainest.spec))]
    for name, override in subject.kit.outside(subject.variant.requires).items():
        found.append(Check(f"refuses {name}", functools.partial(refuses, subject, base | override)))
    return found


def _under_load(subject: Subject, trials: tuple[Trial, ...], repeat: int) -> list[Check]:
    """Checks that launch often, which a few problems are enough for."""
    plain = [t for t in trials if not t.spec.get("deterministic")] or list(trials)
    op, few = subject.op, _few(subject.op, plain, 4)
    several = _with_every_operand(subject, few, plain)
    found = [_check(subject, trial, f"called again: {trial.name}", again) for trial in several]
    sides = [few[0]] if subject.size.slow else [few[0], few[-1]]
    for one in sides:  # without traits: what fails is a neighbour, which has others
        found.append(Check(f"beside others: {one.name}", functools.partial(beside_each_other, subject, one), one.about))
    loads = [(f"right {repeat} times", False, _with_every_value(few[1:3] or few, _smallest_last(op, plain)))]
    if subject.variant.requires.deterministic:
        fixed = [t for t in trials if t.spec.get("deterministic")] or plain
        some = _few(op, fixed, 2)
        if subject.interpreted:  # where programs take turns
            some = _with_every_value(some, _smallest_last(op, fixed))
        else:  # sums of many terms tell an order of them from another
            most = sorted(fixed, key=lambda one: op.flops(one.problem), reverse=True)
            some = list(dict.fromkeys([*some, *_with_every_value(most[:1], most)]))
        loads.append((f"same bits {repeat} times", True, some))
    for words, exactly, some in loads:
        for trial in some:
            check = functools.partial(repeats, count=repeat, exactly=exactly)
            found.append(_check(subject, trial, f"{words}: {trial.name}", check))
    if subject.interpreted:
        return found
    found += [_check(subject, trial, f"by name: {trial.name}", front_door) for trial in few]
    from_threads = functools.partial(threads, rounds=min(ROUNDS_PER_THREAD, repeat))
    found += [_check(subject, trial, f"threads: {trial.name}", from_threads) for trial in few[:2]]
    if subject.device.type == "cuda":
        waits = subject.variant.may_wait
        asked = no_graph if waits(few[0].problem) else graph
        found.append(_check(subject, few[0], f"CUDA graph: {few[0].name}", asked))
        captured = sorted((one for one in trials if not waits(one.problem)), key=lambda one: op.flops(one.problem))
        found += [_check(subject, one, f"back to back: {one.name}", back_to_back) for one in captured[:SHORT]]
    return found


SHORT = 3
"""Problems of the least work, which are launched back to back: of those most launches fit into a second."""


def _few(op: Op, trials: Iterable[Trial], count: int) -> list[Trial]:
    """Problems that are not large, the same every time, after the first, which is the plainest."""
    first, *rest = trials
    mixed = sorted(rest, key=lambda trial: zlib.crc32(trial.name.encode()))[: 8 * count]
    ordered = sorted(mixed, key=lambda trial: op.flops(trial.problem))
    return [first, *ordered[len(ordered) // 3 :][: count - 1]]


def _with_every_value(few: list[Trial], others: list[Trial]) -> list[Trial]:
    """A few problems, and more until each value that configs have (a split, a schedule) was in one; the first of the
    others where several have as many that were in none."""
    found, missing = list(few), {item for one in others for item in one.config.items()}
    while missing := missing - {item for one in found for item in one.config.items()}:
        found.append(max(others, key=lambda trial: len(missing & set(trial.config.items()))))
    return found


def _smallest_last(op: Op, trials: Iterable[Trial]) -> list[Trial]:
    """In the order of their work, but the smallest last: one element tells little."""
    ordered = sorted(trials, key=lambda trial: op.flops(trial.problem))
    least = len(ordered) // 3
    return [*ordered[least:], *ordered[:least]]


def _with_every_operand(subject: Subject, few: list[Trial], trials: Iterable[Trial]) -> list[Trial]:
    """A few problems, and more until each optional tensor (a bias, scales, pages) that problems have is in one whose
    values are others from seed to seed."""
    varying = [trial for trial in trials if subject.kit.varies(trial.spec)]
    found, seen = list(few), {name for one in few if one in varying for name in _optional_tensors(subject, one)}
    for trial in _smallest_last(subject.op, varying):
        names = _optional_tensors(subject, trial)
        if not names <= seen:
            found.append(trial)
            seen |= names
    return found


def _optional_tensors(subject: Subject, trial: Trial) -> set[str]:
    made = subject.kit.make(trial.spec, torch.device("meta"), 0).launch_arguments
    return {name for name, value in made.items() if isinstance(value, torch.Tensor)}


def _compiled(subject: Subject, trials: tuple[Trial, ...]) -> list[Check]:
    """Checks of `builds`, where there is a compiler for the target."""
    if subject.variant.builds is None or not trials or subject.target.arch == "cpu":
        return []
    if subject.interpreted and interpreted.is_on():
        if subject.variant.origin == REGISTERED or subject.variant.name not in catalog.get().variants:
            return []  # another process would not know the variant
        call = functools.partial(builds_compile_elsewhere, subject, trials[0])
        return [Check(f"{BUILDS}, in another process", call)]
    return [_check(subject, trial, f"{BUILDS}: {trial.name}", builds_compile) for trial in (trials[0], trials[-1])]
