"""The checks that launch more than once: again with other values, many times, from threads, in a CUDA graph, back to
back."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from registry.errors import CaptureError
from registry.ops.parts.judging import judge
from registry.ops.parts.kit import Results, Sample
from registry.ops.parts.trials import Trial, spec_conditions
from registry.testing.outcomes import Finding
from registry.testing.subject import Subject, copied, same_bits

LONGEST_S = 1.0
"""For launches that are repeated, of which there are FEWEST all the same."""
FEWEST = 3
AT_ONCE = 100
"""Launches of one CUDA graph that is replayed."""
THREADS = 4
ROUNDS_PER_THREAD = 20
SWITCH_S = 1e-5
PAUSE_S = 1e-5
LINES_A_PAUSE = 4
"""On average, of a thread among others."""
OTHER_ORDER = 7
"""From one seed to another whose groups and sequences, of which kits move the first to the end, are in another order:
it divides no number of them."""


def again(subject: Subject, trial: Trial) -> Finding:
    """One bound launch is called with some values, then with others in the same memory, as a step of training or a
    CUDA graph puts them there: what a launch keeps of an operand by its address is stale then. Then with others
    elsewhere (another scale, too), then by another thread and on another stream. Each result is right, and nothing
    that was returned before has changed."""
    seed, other_spec = subject.seed(trial.name), trial.spec | _differing(subject, trial)
    sample, problem = subject.sample(trial.spec, seed)
    other, other_problem = subject.sample(other_spec, seed + 1)
    if problem.facts() != other_problem.facts():
        return Finding((f"what differs from call to call made another problem: {other_problem.summary()}",))
    launch = subject.bind(problem, trial.config)
    with spec_conditions(trial.spec), torch.no_grad():
        first = subject.kit.launch(launch, sample)
        subject.synchronize()
        kept = copied(first)
        verdict = subject.judge(trial.spec, sample, kept)  # while its values are there
        fresh, _ = subject.sample(trial.spec, seed + OTHER_ORDER)
        sample.take(fresh)
        in_place = subject.kit.launch(launch, sample)
        subject.synchronize()
        in_place_kept = copied(in_place)
        second = subject.kit.launch(launch, other)
        subject.synchronize()
        complaints = _changed("first", {name: one for name, one in first.items() if name not in sample.written}, kept)
        complaints += _changed("second", in_place, in_place_kept)
        second = copied(second)
        third, _ = subject.sample(other_spec, seed + 2)
        subject.synchronize()
        elsewhere = _in_a_thread(subject, launch, third)
    complaints += [f"the first call: {text}" for text in verdict.complaints]
    for when, spec, values, results in (
        ("with other values in the same memory", trial.spec, fresh, in_place_kept),
        ("called again", other_spec, other, second),
        ("from another stream", other_spec, third, elsewhere),
    ):
        complaints += [f"{when}: {text}" for text in subject.judge(spec, values, results).complaints]
    return Finding(tuple(complaints), verdict.error, verdict.yardstick, verdict.limit)


def _changed(call: str, results: Results, kept: Results) -> list[str]:
    """Of what a call returned, what is no more as it was."""
    return [
        f"{name} of the {call} call was changed by a later call"
        for name, result in results.items()
        if not same_bits(result, kept[name])
    ]


def _differing(subject: Subject, trial: Trial) -> dict[str, object]:
    return {axis: value for axis, value in subject.kit.between_calls.items() if axis in trial.spec}


def _in_a_thread(subject: Subject, launch: Callable[..., object], sample: Sample) -> Results:
    if subject.interpreted:  # the interpreter changes Triton's module while it runs
        return subject.kit.launch(launch, sample)
    found: list[Results] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad(), subject.own_stream():
                found.append(subject.kit.launch(launch, sample))
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join()
    if errors:
        raise errors[0]
    return found[0]


def repeats(subject: Subject, trial: Trial, count: int, exactly: bool) -> Finding:
    """The same inputs give the same result every time: bit by bit, or else one that is right each time.

    Calls with other values come in between, so that memory which is not written does not hold the right answer.
    """
    seed = subject.seed(trial.name)
    sample, problem = subject.sample(trial.spec, seed)
    between, _ = subject.sample(trial.spec, seed + 1)
    launch = subject.bind(problem, trial.config)
    farthest: dict[str, tuple[float, torch.Tensor]] = {}
    with spec_conditions(trial.spec), torch.no_grad():
        first = copied(subject.kit.launch(launch, sample))
        deadline = time.monotonic() + LONGEST_S
        for number in range(2, count + 1):
            if number > FEWEST and time.monotonic() > deadline:
                break
            subject.kit.launch(launch, between)
            for name, result in subject.kit.launch(launch, sample).items():
                if same_bits(result, first[name]):
                    continue
                off = _off(result, first[name])
                if exactly:
                    return Finding((f"{name} of run {number} of {count} differs from the first, by {off:.3g}",))
                if off >= farthest.get(name, (0.0,))[0]:
                    farthest[name] = off, result.clone()
    subject.synchronize()
    if not farthest:
        return Finding()
    verdict = subject.judge(trial.spec, sample, first | {name: result for name, (_, result) in farthest.items()})
    return Finding.of(verdict, *(("one run differs from the others",) if verdict.complaints else ()))


def _off(result: torch.Tensor, first: torch.Tensor) -> float:
    difference = (result.double() - first.double()).abs()
    same = (result == first) | (torch.isnan(result) & torch.isnan(first)) if result.is_floating_point() else None
    difference = difference if same is None else torch.where(same, 0.0, difference)
    return float(difference.nan_to_num(torch.inf).max())


def graph(subject: Subject, trial: Trial) -> Finding:
    """Captured into a CUDA graph once, and replayed on other values."""
    sample, problem = subject.sample(trial.spec, subject.seed(trial.name))
    other, _ = subject.sample(trial.spec, subject.seed(trial.name) + OTHER_ORDER)
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
    sample.take(other)
    for _ in range(3):
        captured.replay()
    subject.synchronize()
    return Finding.of(subject.judge(trial.spec, other, results))


def back_to_back(subject: Subject, trial: Trial) -> Finding:
    """As many launches as fit into a second, each right behind the one before: a fault of one launch in many shows,
    such as what CTAs of a cluster still send to each other when one of them leaves."""
    sample, problem = subject.sample(trial.spec, subject.seed(trial.name))
    launch = subject.bind(problem, trial.config)
    with spec_conditions(trial.spec), torch.no_grad():
        first = copied(subject.kit.launch(launch, sample))
        subject.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(AT_ONCE):
                results = subject.kit.launch(launch, sample)
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            captured.replay()
            subject.synchronize()
    if subject.variant.requires.deterministic and trial.spec.get("deterministic", True):
        off = [name for name, result in results.items() if not same_bits(result, first[name])]
        return Finding(tuple(f"{name} differs from that of the first launch" for name in off))
    return Finding.of(subject.judge(trial.spec, sample, results))


def no_graph(subject: Subject, trial: Trial) -> Finding:
    """A variant that waits for the device is refused inside of a capture, by name."""
    sample, problem = subject.sample(trial.spec, subject.seed(trial.name))
    launch = subject.bind(problem, trial.config)
    with spec_conditions(trial.spec), torch.no_grad():
        subject.kit.launch(launch, sample)
        subject.synchronize()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                subject.kit.launch(launch, sample)
        except CaptureError as refusal:
            named = subject.variant.name in str(refusal)
            return Finding(() if named else (f"refused without its name: {refusal}",))
    return Finding(("it says that it waits for the device, and a CUDA graph captured it",))


def threads(subject: Subject, trial: Trial, rounds: int = ROUNDS_PER_THREAD) -> Finding:
    """Threads that share one launch, each with its own values (and stream), do not disturb each other."""
    samples = [subject.sample(trial.spec, subject.seed(trial.name) + 1 + number) for number in range(THREADS)]
    launch = subject.bind(samples[0][1], trial.config)
    found: list[list[Results]] = [[] for _ in samples]
    errors: list[BaseException] = []
    barrier = threading.Barrier(THREADS)

    def work(number: int) -> None:
        chance = random.Random(number)
        try:
            with torch.no_grad(), subject.own_stream():
                barrier.wait(30)
                deadline = time.monotonic() + LONGEST_S
                for turn in range(rounds):
                    if turn > FEWEST and time.monotonic() > deadline:
                        break
                    with pausing_between_lines(chance) if turn % 2 else contextlib.nullcontext():
                        results = subject.kit.launch(launch, samples[number][0])
                    found[number].append(copied(results))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    with spec_conditions(trial.spec):
        with torch.no_grad():
            subject.kit.launch(launch, samples[0][0])  # compiles, before there is anything to disturb
        subject.synchronize()
        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(THREADS)]
        with switching_often():
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
    subject.synchronize()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    verdicts = []
    for (sample, _), results in zip(samples, found, strict=True):
        expected = subject.expected(trial.spec, sample)
        verdicts += [judge(one, expected) for one in results]
    worst = max(verdicts, key=lambda verdict: (len(verdict.complaints), verdict.error))
    return Finding.of(worst)


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """A race between threads is likelier where they take turns every 10 microseconds, not every 5 milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def pausing_between_lines(chance: random.Random) -> Iterator[None]:
    """A thread that lets the others in after some lines of what it runs: on a busy machine it would mostly run a
    launch from its start to its end otherwise. Not between the lines of torch and Triton, which are many."""

    def trace(frame: types.FrameType, event: str, _: object) -> Any:
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "triton"):
            return None
        if event == "line" and chance.randrange(LINES_A_PAUSE) == 0:
            time.sleep(PAUSE_S)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
