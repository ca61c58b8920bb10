"""The checks of what a variant says beside its launches: a `run` that `prepare` stands in for, `traceable`, `cost`,
`waits` and `design_of`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from registry.contract.capability import Config, Design
from registry.contract.problem import Problem
from registry.contract.variant import Variant
from registry.errors import shown
from registry.notices import told
from registry.ops.parts.kit import Results
from registry.ops.parts.trials import Trial, spec_conditions
from registry.testing.checks import runs
from registry.testing.outcomes import Finding
from registry.testing.subject import Subject

# --- run ----------------------------------------------------------------------------------------------------------


def has_a_run_beside(subject: Subject) -> bool:
    """Whether `run` is code of its own that no other check launches: interpreted, all do; of toolbox.call, it comes
    from one declaration with `prepare`. Gluon kernels are left out, whose plain launches are for profilers alone."""
    from registry.toolbox.call import Prepare  # imports triton, which must know first whether it interprets

    variant = subject.variant
    own = variant.prepare is not None and not isinstance(variant.prepare, Prepare)
    return own and not subject.interpreted and variant.design.dsl != "gluon"


def runs_itself(subject: Subject, trial: Trial) -> Finding:
    """`run`, which compiled graphs and profilers call, is as right as the launch that `prepare` makes."""
    return runs(_plain(subject), trial)


def _plain(subject: Subject) -> Subject:
    return dataclasses.replace(subject, variant=dataclasses.replace(subject.variant, prepare=None))


def can_be_traced(trial: Trial) -> bool:
    """Graphs have no `out=`."""
    return not trial.spec.get("out")


def traces(subject: Subject, trial: Trial) -> Finding:
    """A graph can hold what `run` does: it looks at no values, writes to nothing, and is right when it is run."""
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a while

    sample, problem = subject.sample(trial.spec, subject.seed(trial.name))
    launch = _plain(subject).bind(problem, trial.config)
    names = [name for name, value in sample.launch_arguments.items() if isinstance(value, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Results:
        count = len(sample.tensors)
        given = sample.launch_arguments | dict(zip(names, tensors[count:], strict=True))
        made = dataclasses.replace(sample, tensors=tensors[:count], launch_arguments=given)
        return subject.kit.launch(launch, made)

    inputs = (*sample.tensors, *(sample.launch_arguments[name] for name in names))
    with spec_conditions(trial.spec), torch.no_grad():
        try:
            graph = make_fx(call, tracing_mode="fake")(*inputs)
        except Exception as error:
            return Finding((f"it says that it is traceable, and no graph can hold its run: {told(error)}",))
        results = graph(*inputs)
    subject.synchronize()
    called = [node.target for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    writes = dict.fromkeys(str(target) for target in called if target._schema.is_mutable)
    complaints = [f"it says that it is traceable, and its run writes: {', '.join(writes)}"] if writes else []
    return Finding.of(subject.judge(trial.spec, sample, results), *complaints)


# --- what is asked of a problem and a config --------------------------------------------------------------------------


def _configs(variant: Variant, problem: Problem, config: Config) -> str:
    """Whoever is asked about a config is handed the one that was declared, and not a copy for each decision."""
    if {**config} not in variant.as_declared(problem):
        return f"{shown({**config})} is not what was declared; allowed: what stays as it is when it is asked about"
    asked: dict[str, Any] = {name: getattr(variant.requires, name) for name in ("rule", "shared_memory", "registers")}
    asked |= {"cost": variant.cost, "design_of": lambda _, given: variant.design_for(given)}
    for name, function in asked.items():
        given = {**config}
        with contextlib.suppress(*(Exception, SystemExit) if name in _ANSWERS else ()):  # a check of its own says so
            answer = function(problem, given) if function is not None else None
            if name == "rule":
                list(answer or ())  # may be a generator
        if given != config:
            return f"{name} made {shown(given)} of {shown({**config})}; allowed: to leave it as it is"
    return ""


def _cost(variant: Variant, problem: Problem, config: Config) -> str:
    assert variant.cost is not None
    found = variant.cost(problem, {**config})
    number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return "" if number and math.isfinite(found) and found > 0 else f"got {shown(found)}; allowed: a finite number > 0"


def _waits(variant: Variant, problem: Problem, config: Config) -> str:
    assert variant.waits is not None
    found = variant.waits(problem)
    return "" if isinstance(found, bool) else f"got {shown(found)}; allowed: True or False"


def _design_of(variant: Variant, problem: Problem, config: Config) -> str:
    assert variant.design_of is not None
    found = variant.design_of({**config})
    return "" if isinstance(found, Design) else f"got {shown(found)}; allowed: a record Design(...)"


_ANSWERS: dict[str, Callable[[Variant, Problem, Config], str]] = {
    "configs": _configs,
    "cost": _cost,
    "waits": _waits,
    "design_of": _design_of,
}


def declared_answers(subject: Subject, trials: Sequence[Trial]) -> dict[str, Callable[[], Finding]]:
    """By name, of those that the variant declares: whether each gives for all problems what its caller can use."""

    def check(name: str) -> Callable[[], Finding]:
        return lambda: Finding(tuple(_complaints(subject.variant, name, trials)))

    return {name: check(name) for name in _ANSWERS if getattr(subject.variant, name) is not None}


MOST_COMPLAINTS = 3


def _complaints(variant: Variant, name: str, trials: Sequence[Trial]) -> Iterator[str]:
    found = 0
    for trial in trials:
        try:
            said: Any = _ANSWERS[name](variant, trial.problem, trial.config)
        except (Exception, SystemExit) as error:
            said = told(error)
        if said:
            found += 1
            yield f"{name}: {said}: {trial.about}"
        if found == MOST_COMPLAINTS:
            return
