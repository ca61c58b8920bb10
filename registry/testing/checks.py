"""The single checks of the conformance kit. Each returns findings; nothing here knows pytest, or any one kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from registry.contract.capability import Config, arch_matches
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch.catalog import catalog
from registry.dispatch.select import all_reasons
from registry.errors import IllegalVariant, InvalidArgument
from registry.ops.known import op_named, register, unregister
from registry.ops.op import Op
from registry.ops.parts.judging import Verdict, judge
from registry.ops.parts.kit import Kit, Results, Sample, Spec, Trial, problem_of, spec_conditions
from registry.ops.parts.memory import WatchedAllocations, conditions, stir
from registry.ops.parts.sizes import Size

ROUNDS_PER_THREAD = 6


@dataclass(frozen=True)
class Finding:
    """What one check found; no complaint means that it passed."""

    complaints: tuple[str, ...] = ()
    error: float | None = None
    yardstick: float | None = None
    limit: float | None = None

    @staticmethod
    def of(verdict: Verdict, *complaints: str) -> Finding:
        return Finding((*complaints, *verdict.complaints), verdict.error, verdict.yardstick, verdict.limit)


@dataclass(frozen=True)
class Subject:
    """A variant under test, and where."""

    variant: Variant
    op: Op
    kit: Kit
    target: Target
    device: torch.device
    size: Size
    interpreted: bool = False

    def seed(self, name: str) -> int:
        """Inputs differ from check to check and are the same from run to run."""
        return zlib.crc32(f"{self.variant.name} {name}".encode())

    def bind(self, problem: Problem, config: Config) -> Callable[..., Any]:
        """The launch that the op would make; an interpreted kernel cannot be prepared."""
        variant = dataclasses.replace(self.variant, prepare=None) if self.interpreted else self.variant
        return self.op.bind(variant, problem, config)

    def sample(self, spec: Spec, seed: int) -> tuple[Sample, Problem]:
        """Real tensors for a spec, and the problem that they make."""
        sample = self.kit.make(spec, self.device, seed)
        with spec_conditions(spec):
            target = self.target if self.interpreted else None
            return sample, self.op.problem_of(*sample.tensors, target=target, **sample.arguments)[0]

    def judge(self, spec: Spec, sample: Sample, results: Results) -> Verdict:
        """Against the oracle, with the float32 precision of the spec but without its determinism, which slows torch."""
        with spec_conditions(spec | {"deterministic": False}):
            return judge(results, self.kit.expected(sample))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# --- results ------------------------------------------------------------------------------------------------------


def runs(subject: Subject, trial: Trial) -> Finding:
    """A legal problem runs, is right, writes its results entirely and nothing else."""
    sample, problem = subject.sample(trial.spec, subject.seed(trial.name))
    if problem.facts() != trial.problem.facts():
        return Finding((f"tensors made another problem than was planned: {problem.summary()}",))
    if reasons := all_reasons(subject.variant, problem):
        return Finding(tuple(f"legal for planned tensors, not for real ones: {reason}" for reason in reasons))
    sample.freeze()
    launch = subject.bind(problem, trial.config)
    stir(sample.tensors)
    with spec_conditions(trial.spec), torch.no_grad(), WatchedAllocations() as watched:
        results = subject.kit.launch(launch, sample)
    subject.synchronize()
    complaints = [*sample.changed(), *subject.kit.form(sample, results)]
    if overruns := watched.overruns():
        complaints.append(f"{overruns} allocations were written outside of their bounds")
    verdict = subject.judge(trial.spec, sample, results)
    return Finding.of(verdict, *complaints)


def repeats(subject: Subject, trial: Trial, count: int) -> Finding:
    """The same inputs give the same bits, every time."""
    sample, problem = subject.sample(trial.spec, subject.seed(trial.name))
    launch = subject.bind(problem, trial.config)
    with spec_conditions(trial.spec), torch.no_grad():
        first = subject.kit.launch(launch, sample)
        for number in range(1, count):
            again = subject.kit.launch(launch, sample)
            for name, result in again.items():
                if not torch.equal(_bits(result), _bits(first[name])):
                    off = float((result.double() - first[name].double()).abs().max())
                    return Finding((f"{name} of run {number + 1} of {count} differs from the first, by {off:.3g}",))
    subject.synchronize()
    return Finding()


def front_door(subject: Subject, trial: Trial) -> Finding:
    """Called by name through the op, the variant gives the same right results."""
    sample, _ = subject.sample(trial.spec, subject.seed(trial.name))
    sample.freeze()
    with spec_conditions(trial.spec), present(subject.variant):
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
    probe = dataclasses.replace(subject.variant, run=lambda *_, **__: calls.append(1), prepare=None)
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
    for name in ("cpu", "sm70", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120"):
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


# --- under torch's machinery --------------------------------------------------------------------------------------


def graph(subject: Subject, trial: Trial) -> Finding:
    """Captured into a CUDA graph once, and replayed on other values."""
    sample, problem = subject.sample(trial.spec, subject.seed(trial.name))
    other, _ = subject.sample(trial.spec, subject.seed(trial.name) + 7)
    launch = subject.bind(problem, trial.config)
    with spec_conditions(trial.spec), torch.no_grad():
        side = torch.cuda.Stream(subject.device)
        side.wait_stream(torch.cuda.current_stream(subject.device))
        with torch.cuda.stream(side):
            subject.kit.launch(launch, sample)
        subject.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            results = subject.kit.launch(launch, sample)
    for name, arena in sample.arenas.items():
        arena.raw.copy_(other.arenas[name].raw)
    for _ in range(3):
        captured.replay()
    subject.synchronize()
    verdict = subject.judge(trial.spec, other, results)
    return Finding.of(verdict)


def threads(subject: Subject, trial: Trial) -> Finding:
    """Two threads, each with its own values (and stream), do not disturb each other."""
    pairs = [subject.sample(trial.spec, subject.seed(trial.name) + number) for number in (1, 2)]
    launch = subject.bind(pairs[0][1], trial.config)
    found: list[list[Results]] = [[], []]
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def work(number: int) -> None:
        try:
            with torch.no_grad(), _own_stream(subject.device):
                barrier.wait(30)
                for _ in range(ROUNDS_PER_THREAD):
                    results = subject.kit.launch(launch, pairs[number][0])
                    found[number].append({name: result.clone() for name, result in results.items()})
        except BaseException as error:
            errors.append(error)

    with spec_conditions(trial.spec):
        with torch.no_grad():
            subject.kit.launch(launch, pairs[0][0])  # compiles, before there is anything to disturb
        subject.synchronize()
        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    subject.synchronize()
    if errors:
        raise errors[0]
    verdicts = [subject.judge(trial.spec, pairs[n][0], results) for n in (0, 1) for results in found[n]]
    worst = max(verdicts, key=lambda verdict: (len(verdict.complaints), verdict.error))
    return Finding.of(worst)


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@contextlib.contextmanager
def present(variant: Variant) -> Iterator[None]:
    """The variant in the catalog inside the block, in place of whatever has its name."""
    known = catalog.get().variants.get(variant.name)
    if known == variant:
        yield
        return
    if known is not None:
        added = catalog.take_out(known.name)
    register(variant)
    try:
        yield
    finally:
        unregister(variant.name)
        if known is not None:
            catalog.put_back(known, added)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


# --- once per op --------------------------------------------------------------------------------------------------


def op_checks(op_name: str, device: torch.device) -> dict[str, Callable[[], Finding]]:
    """What an op promises whatever the variant: torch.library.opcheck, torch.compile, empty tensors."""
    checks = op_named(op_name).conformance.checks
    return {name: functools.partial(_complaints_of, check, device) for name, check in checks.items()}


def _complaints_of(check: Callable[[torch.device], list[str]], device: torch.device) -> Finding:
    with conditions():
        return Finding(tuple(check(device)))
