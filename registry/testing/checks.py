"""The checks of the conformance kit that launch once, or not at all. Each returns findings; nothing here knows pytest,
or any one kernel."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from registry.contract.capability import arch_matches
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch.precision import float32_precision
from registry.dispatch.select import all_reasons
from registry.errors import IllegalVariant, InvalidArgument
from registry.ops.known import op_named
from registry.ops.parts.kit import Spec
from registry.ops.parts.memory import WatchedAllocations, conditions, stir
from registry.ops.parts.trials import ARCHITECTURES, Trial, problem_of, spec_conditions
from registry.testing import interpreted, processes
from registry.testing.outcomes import Finding
from registry.testing.subject import Subject, present
from registry.tuning.extra import as_arguments

OF_TORCH = ("aten", "cuda")
"""`Design.dsl` of torch's own kernels, which lay out their results as they will; others that say so pass."""

# --- results ------------------------------------------------------------------------------------------------------


def runs(subject: Subject, trial: Trial) -> Finding:
    """A legal problem runs, is right, writes its results entirely and nothing else, and leaves torch as it was."""
    sample, problem = subject.sample(trial.spec, subject.seed(trial.name))
    if problem.facts() != trial.problem.facts():
        return Finding((f"tensors made another problem than was planned: {problem.summary()}",))
    if reasons := all_reasons(subject.variant, problem):
        return Finding(tuple(f"legal for planned tensors, not for real ones: {reason}" for reason in reasons))
    sample.freeze()
    launch = subject.bind(problem, trial.config)
    stir(sample.tensors)
    with spec_conditions(trial.spec), torch.no_grad(), WatchedAllocations() as watched:
        before = _state(subject.device)
        results = subject.kit.launch(launch, sample)
        after = _state(subject.device)
    subject.synchronize()
    complaints = [*sample.changed(), *subject.kit.form(sample, results)]
    if subject.variant.design.dsl not in OF_TORCH:
        complaints += subject.kit.order(sample, results)
    complaints += [f"{name} {wrong}" for name, result in results.items() if (wrong := _no_plain_tensor(result))]
    complaints += [f"the launch changed {what}" for what in before if not _equal(before[what], after[what])]
    if overruns := watched.overruns():
        complaints.append(f"{overruns} allocations were written outside of their bounds")
    verdict = subject.judge(trial.spec, sample, results)
    return Finding.of(verdict, *complaints)


def _no_plain_tensor(result: Any) -> str:
    """Why a tensor is none as torch's own functions give without gradients; callers count on such."""
    if not isinstance(result, torch.Tensor):
        return ""  # which is judged elsewhere
    kind = type(result)
    if kind is not torch.Tensor:
        return f"is a {kind.__module__}.{kind.__qualname__}; allowed: a plain torch.Tensor"
    return "requires a gradient" if result.requires_grad else ""


def _state(device: torch.device) -> dict[str, Any]:
    """What belongs to the whole process, and no kernel's business."""
    found: dict[str, Any] = {
        "torch's random numbers": torch.get_rng_state(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's float32 precision": float32_precision(),
        "torch's deterministic setting": torch.are_deterministic_algorithms_enabled(),
        "whether torch follows gradients": torch.is_grad_enabled(),
        "torch's settings of products": _flags(),
        "whether the CPU flushes denormal numbers": sys.float_info.min * 0.5 == 0.0,  # nobody else tells
    }
    if device.type == "cuda":
        found["the GPU's random numbers"] = torch.cuda.get_rng_state(device)
        found["the current GPU"] = torch.cuda.current_device()
        found["the current stream"] = torch.cuda.current_stream().cuda_stream
    return found


def _flags() -> tuple[Any, ...]:
    products, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_accumulation,
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
    )


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def front_door(subject: Subject, trial: Trial) -> Finding:
    """Called by name through the op, the variant gives the same right results."""
    sample, _ = subject.sample(trial.spec, subject.seed(trial.name))
    sample.freeze()
    with spec_conditions(trial.spec), present(subject.variant), subject.naming_misfits():
        results = subject.kit.front_door(subject.variant.name, sample)
    subject.synchronize()
    verdict = subject.judge(trial.spec, sample, results)
    return Finding.of(verdict, *sample.changed())


# --- refusals -----------------------------------------------------------------------------------------------------


def refuses(subject: Subject, spec: Spec) -> Finding:
    """A problem outside of the claims has reasons, and the op raises them instead of launching."""
    try:
        problem = problem_of(subject.op, subject.kit, spec, subject.target)
    except InvalidArgument:
        return Finding()  # refused to every variant
    if complaint := _complaint_about_reasons(subject.variant, problem):
        return Finding((complaint,))
    if subject.interpreted:
        return Finding()
    sample = subject.kit.make(spec, subject.device, 0)
    calls = []
    run = functools.wraps(subject.variant.run)(lambda *_, **__: calls.append(1))
    probe = dataclasses.replace(subject.variant, run=run, prepare=None)
    with spec_conditions(spec), present(probe):
        try:
            subject.op(*sample.tensors, **sample.arguments, variant=probe.name)  # type: ignore[operator]
        except IllegalVariant:
            return Finding(("the kernel was launched all the same",) if calls else ())
        except Exception as error:
            return Finding((f"{type(error).__name__} was raised, not IllegalVariant: {error}",))
    return Finding(("nothing was raised",))


def refuses_architectures(subject: Subject, spec: Spec) -> Finding:
    """Asked for GPUs that it does not claim, the variant refuses, and says that this is why."""
    problem = problem_of(subject.op, subject.kit, spec, subject.target)
    for name in ARCHITECTURES:
        if not arch_matches(subject.variant.requires.arch, name):
            reasons = all_reasons(subject.variant, problem.on(Target.named(name)))
            if not any(reason.field == "arch" for reason in reasons):
                return Finding((f"legal on {name}, which is not claimed",))
    return Finding()


def _complaint_about_reasons(variant: Variant, problem: Problem) -> str:
    reasons = all_reasons(variant, problem)
    if not reasons:
        return f"legal, but outside of the claims: {problem.summary()}"
    vague = [reason for reason in reasons if not (reason.code and reason.field and str(reason.allowed))]
    return f"reasons without a code, a field or what is allowed: {vague}" if vague else ""


# --- compiling ----------------------------------------------------------------------------------------------------

BUILDS = "builds compile"


def builds_compile(subject: Subject, trial: Trial) -> Finding:
    """What the variant says that it would compile compiles, and fits the target. Needs no GPU."""
    from registry.toolbox.builds import compile_build, inspect

    assert subject.variant.builds is not None
    found = list(subject.variant.builds(trial.problem, trial.config))
    if not found:
        return Finding((f"builds gave nothing for {trial.about}",))
    complaints = []
    for build in found:
        made = inspect(compile_build(build, subject.target.arch))
        if made.shared > subject.target.shared_memory:
            allowed = subject.target.shared_memory
            complaints.append(f"{build.name} takes {made.shared} bytes of shared memory of {allowed}: {trial.about}")
        if made.lent_barriers:
            where = f"at bytes {', '.join(map(str, made.lent_barriers))} of shared memory"
            complaints.append(
                f"{build.name} sets up a barrier {where} for which nobody waits, and the compiler keeps data there that"
                f" are lost where processes share a GPU (registry.toolbox.hopper): {trial.about}"
            )
        if made.touched_in_flight:
            complaints.append(
                f"{build.name} touches what a product in flight writes or reads, in {len(made.touched_in_flight)}"
                f" instructions, first {made.touched_in_flight[0]}: the assembler moved them before the wait, and"
                f" results may be wrong now and then (registry.toolbox.in_flight): {trial.about}"
            )
    return Finding(tuple(complaints))


def builds_compile_elsewhere(subject: Subject, trial: Trial) -> Finding:
    """The same from a process whose kernels are interpreted, which cannot compile them: in another one."""
    arguments = ("--target", subject.target.name, "--only", f"{BUILDS}*", "--compile-only")
    command = processes.command("--variant", subject.variant.name, *as_arguments(subject.variant), *arguments)
    environment = {name: value for name, value in os.environ.items() if name != interpreted.VARIABLE}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return Finding() if done.returncode == 0 else Finding(((done.stdout + done.stderr)[-2000:],))


# --- once per op --------------------------------------------------------------------------------------------------


def op_checks(op_name: str, device: torch.device) -> dict[str, Callable[[], Finding]]:
    """What an op promises whatever the variant: torch.library.opcheck, torch.compile, empty tensors."""
    checks = op_named(op_name).conformance.checks
    return {name: functools.partial(_complaints_of, check, device) for name, check in checks.items()}


def _complaints_of(check: Callable[[torch.device], list[str]], device: torch.device) -> Finding:
    with conditions():
        return Finding(tuple(check(device)))
