"""The check of several launches of one variant beside each other: of problems that have the same shapes, and differ in
one thing each. What a kernel keeps by the shapes of a call, it would hand to the wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from registry.contract.capability import Config
from registry.contract.problem import Problem
from registry.dispatch.select import all_reasons
from registry.ops.parts.kit import Spec
from registry.ops.parts.trials import Trial, problem_of, spec_conditions
from registry.testing.outcomes import Finding
from registry.testing.subject import Subject, copied


def beside_each_other(subject: Subject, trial: Trial) -> Finding:
    """A launch, then those of its neighbours, then it again: each result is that of its own problem."""
    seed = subject.seed(trial.name)
    turns = [("", trial.spec, trial.config), *_neighbours(subject, trial), ("", trial.spec, trial.config)]
    complaints: list[str] = []
    measured: Finding | None = None
    for number, (difference, spec, config) in enumerate(turns):
        sample, problem = subject.sample(spec, seed + number)
        with spec_conditions(spec), torch.no_grad():
            results = copied(subject.kit.launch(subject.bind(problem, config), sample))
        subject.synchronize()
        verdict = subject.judge(spec, sample, results)
        measured = measured or Finding.of(verdict)
        when = f"beside it, with {difference}" if difference else "again" if number else "alone"
        complaints += [f"{when}: {text}" for text in verdict.complaints]
    assert measured is not None
    return Finding(tuple(complaints), measured.error, measured.yardstick, measured.limit)


def _neighbours(subject: Subject, trial: Trial) -> Iterator[tuple[str, Spec, Config]]:
    """By what differs: for each axis the first other value of which there is a legal problem of the same shapes, and a
    config, which is the trial's where it may be."""
    shapes = _shapes(subject, trial.spec)
    for axis, values in subject.kit.axes(subject.variant.requires, subject.size).items():
        for value in values:
            spec = {**trial.spec, axis: value}
            if value == trial.spec[axis] or not subject.kit.sensible(spec) or _shapes(subject, spec) != shapes:
                continue
            problem = problem_of(subject.op, subject.kit, spec, subject.target)
            if config := _config(subject, problem, trial):
                shown = subject.kit.word(axis, value) if value not in (False, None, "", 0.0) else ""
                yield shown or f"no {axis}", spec, config[0]
                break


def _shapes(subject: Subject, spec: Spec) -> list[Any]:
    return [tuple(tensor.shape) for tensor in subject.kit.make(spec, torch.device("meta"), 0).tensors]


def _config(subject: Subject, problem: Problem, trial: Trial) -> list[Config]:
    """The trial's config where it is legal for a neighbour of the trial's problem, or else the first that is; none
    where the variant may not run it, or it is the same problem."""
    if problem.facts() == trial.problem.facts() or subject.op.trivial(problem) is not None:
        return []
    if all_reasons(subject.variant, problem):
        return []
    legal = list(subject.variant.legal_configs(problem))
    return [trial.config] if trial.config in legal else legal[:1]
