"""Compile ahead: all kernels that the registry would launch for a list of problems, with or without the GPU.

    registry.warm(["attention b=4,hq=16,s=4096,d=128,causal"], target=Target.named("H100"))  # on a build machine
    with registry.record() as seen: ...
    registry.warm(seen)                                                  # before traffic, before a CUDA-graph capture

Kernels go to Triton's cache, where the first launch finds them. Where the GPU is in this machine each problem is also
launched once, so that the plan, the loaded kernel and the tensor maps are there, as CUDA-graph capture needs.
"""

from __future__ import annotations

import os
import pickle
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from registry.contract.capability import Config
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.dispatch.contenders import contenders
from registry.dispatch.decision import NO_KERNEL, Decision
from registry.dispatch.scope import Recorder, current
from registry.dispatch.select import decide
from registry.errors import CaptureError, IllegalVariant, InvalidArgument, NoLegalVariant, shown
from registry.notices import last_line
from registry.ops.known import op_named
from registry.signals import interrupts
from registry.toolbox.capturing import capturing
from registry.toolbox.compile_pool import HIDE_GPU, Child, CompilePool

if TYPE_CHECKING:
    from registry.ops.parts.cases import Case

__all__ = ["Warmed", "warm"]


@dataclass(frozen=True)
class Warmed:
    """What became of one problem."""

    case: str
    variant: str = ""
    kernels: int = 0
    """Kernels now in Triton's cache. 0 for variants that need no compiling, or do not say what they would compile."""
    seconds: float = 0.0
    """Time that compiling took, summed over the kernels; near 0 where the cache had them."""
    launched: bool = False
    error: str = ""


@dataclass(frozen=True)
class _Task:
    """One kernel to compile, spelled so that another process can find it."""

    op: str
    variant: str
    problem: Problem
    config: dict[str, Any]
    index: int

    def compile(self) -> None:
        from registry.toolbox.builds import compile_build

        build = op_named(self.op).variants[self.variant].builds(self.problem, self.config)[self.index]  # type: ignore[misc]
        compile_build(build, self.problem.target.arch)


def warm(
    what: Recorder | Iterable[Case | Problem | str],
    *,
    target: Target | None = None,
    jobs: int | None = None,
    launch: bool | None = None,
    timeout: float = 900.0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Warmed]:
    """Compile what these problems need, and launch each once where its GPU is in this machine.

    what      a `registry.record()` block, Cases, Problems, or text such as "matmul m=4096,n=4096,k=4096"
    target    the GPU to compile for; default: a Problem's own, else the current GPU
    jobs      compiling processes; 1 compiles in this process; default: one a core, 8 at most
    launch    True or False to insist; default: where the target is the current GPU
    timeout   seconds after which one kernel's compiler is ended, and the kernel reported as failed
    progress  called with (kernels done, kernels in all)

    Nothing is raised for a problem that cannot be warmed, whatever its kernel does: its `error` says why. Honours
    `use` and `prefer` blocks. In a `try_out` block all that is tried is compiled ahead, by many processes.
    """
    _check(target, jobs, launch, timeout)
    if capturing():
        raise CaptureError("registry.warm compiles and launches; call it before the capture")
    here = _here()
    found: list[Warmed] = []
    tasks: dict[Any, tuple[_Task, list[int]]] = {}
    cases = list(dict.fromkeys(_cases(what)))
    for number, (case, own) in enumerate(cases):
        problem = case.problem(_target(target, own, here))
        try:
            decision = op_named(case.op).trivial(problem) or decide(problem, current.get())
        except (NoLegalVariant, IllegalVariant) as refusal:
            found.append(Warmed(f"{case.op} {case.text}", error=str(refusal)))
            continue
        found.append(Warmed(f"{case.op} {case.text}", decision.variant))
        try:
            for variant, config in _to_compile(decision):
                for key, task in _tasks(decision.problem, variant, config):
                    tasks.setdefault(key, (task, []))[1].append(number)
        except Exception as error:  # a plugin's `builds`: its failure must not keep the others cold
            found[-1] = replace(found[-1], error=last_line(error))
    work = [task for task, _ in tasks.values()]
    results = _compile_all(work, jobs or min(os.cpu_count() or 1, 8), timeout, progress or (lambda done, of: None))
    for (_, numbers), (seconds, failure) in zip(tasks.values(), results, strict=True):
        for number in numbers:
            was = found[number]
            counted = was.kernels + (not failure)
            found[number] = replace(was, kernels=counted, seconds=was.seconds + seconds, error=was.error or failure)
    for number, (case, own) in enumerate(cases):
        at_hand = here is not None and _target(target, own, here).arch == here.arch
        if found[number].variant not in ("", NO_KERNEL) and (at_hand if launch is None else launch):
            found[number] = _launch(case, found[number])
    return found


def _check(target: Any, jobs: Any, launch: Any, timeout: Any) -> None:
    """Raise for what an argument cannot be, before the first kernel is compiled."""
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    for name, got, fine, allowed in (
        (
            "target",
            target,
            target is None or isinstance(target, Target),
            'None or a Target such as Target.named("H100")',
        ),
        ("jobs", jobs, jobs is None or (type(jobs) is int and jobs > 0), "None or a positive integer"),
        ("launch", launch, launch is None or isinstance(launch, bool), "None, True or False"),
        ("timeout", timeout, number and timeout > 0, "a positive number of seconds"),
    ):
        if not fine:
            raise InvalidArgument(name, shown(got), allowed)


def _cases(what: Any) -> Iterable[tuple[Case, Target | None]]:
    from registry.ops.parts.cases import Case, of_problem

    given = what.problems if isinstance(what, Recorder) else what
    allowed = 'a record() block, or a list of Cases, Problems and text such as "matmul m=64,n=64,k=64"'
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidArgument("what", shown(given), allowed)
    for one in given:
        if isinstance(one, Problem):
            yield of_problem(one), one.target
        elif isinstance(one, str):
            op, _, shape = one.strip().partition(" ")
            yield Case.parse(op, shape), None
        elif isinstance(one, Case):
            yield one, None
        else:
            raise InvalidArgument("what", f"{shown(one)} in a list", allowed)


def _here() -> Target | None:
    import torch

    return Target.of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None


def _target(given: Target | None, own: Target | None, here: Target | None) -> Target:
    chosen = given or own or here
    if chosen is None:
        raise InvalidArgument("target", None, 'a target such as Target.named("H100"): this machine has no GPU')
    return chosen


def _to_compile(decision: Decision) -> list[tuple[str, Config]]:
    """(variant, config) of a decision, and in a `try_out` block of all that the first launch will try."""
    if decision.variant == NO_KERNEL:
        return []
    scope = current.get()
    rivals = contenders(decision.problem, scope, scope.trying.most) if scope.trying is not None else []
    return [(one.variant.name, one.config) for one in rivals] or [(decision.variant, decision.config)]


def _tasks(problem: Problem, variant: str, config: Config) -> list[tuple[Any, _Task]]:
    """Each kernel of a variant with a key that equal builds share."""
    builds = op_named(problem.op).variants[variant].builds
    if builds is None:
        return []
    config, arch = dict(config), problem.target.arch
    return [
        (
            (arch, build.source(arch).hash(), str(sorted(build.options.items()))),
            _Task(problem.op, variant, problem, config, index),
        )
        for index, build in enumerate(builds(problem, config))
    ]


def _launch(case: Case, warmed: Warmed) -> Warmed:
    import torch

    from registry.ops.parts.workload import workload

    try:
        inputs = workload(case, "cuda")
        with torch.no_grad(), inputs.settings():
            op_named(case.op)(**inputs.front_door())  # type: ignore[operator]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what a kernel did wrong is said here, not of the next one
    except BaseException as error:  # whatever a plugin's `run` raises must not keep the others cold
        if interrupts(error):
            raise
        return replace(warmed, error=warmed.error or last_line(error))
    return replace(warmed, launched=True)


# --- compiling ----------------------------------------------------------------------------------------------------


def _compile_all(
    tasks: Sequence[_Task], jobs: int, timeout: float, progress: Callable[[int, int], None]
) -> list[tuple[float, str]]:
    """(seconds, error) of each task. A compiler that dies or hangs costs its own task alone."""
    results = []
    with CompilePool(lambda: Child(__name__, {}, HIDE_GPU), jobs, timeout) as pool:
        if jobs > 1:
            pool.submit({number: {"task": b64encode(pickle.dumps(task)).decode()} for number, task in enumerate(tasks)})
        for number, task in enumerate(tasks):
            answer = pool.result(number)
            if answer is None or answer.get("missing"):
                answer = _compile_here(task)
            error = "" if answer["ok"] else ": ".join(filter(None, (answer.get("why"), answer["detail"])))
            results.append((answer.get("seconds", 0.0), error))
            progress(number + 1, len(tasks))
    return results


def _compile_here(task: _Task) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        task.compile()
    except Exception as error:
        return {"ok": False, "detail": last_line(error), "seconds": time.perf_counter() - start}
    return {"ok": True, "seconds": time.perf_counter() - start}


def answerer() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A compiling process's side (see registry.toolbox.compile_pool)."""

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        if not command:  # the hello
            return {"ok": True}
        task = pickle.loads(b64decode(command["task"]))
        if task.variant not in op_named(task.op).variants:  # it exists in the caller's process only
            return {"ok": False, "missing": True}
        return _compile_here(task)

    return answer
