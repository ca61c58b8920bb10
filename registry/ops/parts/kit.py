"""What the conformance kit needs to know of an op (`Kit`), and how it samples problems.

A problem is described by a flat spec, `{axis: value}`. The axes and their values come from a variant's `Requires`; each
value of each axis is tried with the other axes drawn at random from a seed that is the variant's name, so the same
declarations always give the same problems.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from registry.contract.capability import Config, Reason, Requires
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch import in_force
from registry.dispatch.configs import undeclared
from registry.dispatch.select import all_reasons
from registry.ops.op import Op
from registry.ops.parts.judging import Expected
from registry.ops.parts.memory import Arena, conditions
from registry.ops.parts.sizes import Size

Spec = dict[str, Any]
Results = dict[str, torch.Tensor]


# --- one made-up call ---------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """One call of an op with its memory: what the op and a launch are given, and what may be written."""

    tensors: tuple[torch.Tensor, ...]
    arguments: dict[str, Any]
    """Keyword arguments of the op, less `variant`."""
    launch_arguments: dict[str, Any]
    """Keyword arguments of a launch bound by the op."""
    arenas: dict[str, Arena]
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    """By arena: the view that the call may write (`out=`)."""

    def freeze(self) -> None:
        for arena in self.arenas.values():
            arena.freeze()

    def changed(self) -> list[str]:
        """Complaints about inputs, or bytes around them, that the call changed."""
        return [
            f"{name} was modified, or memory around it"
            for name, arena in self.arenas.items()
            if arena.changed(self.written.get(name))
        ]


class Kit:
    """What differs between ops: an op's folder has one for each of its ops in conformance.py, by name in `BY_OP`."""

    claims: Sequence[str] = ()
    """Axes of which every value must have a legal problem: a claim that nothing can use is no claim."""
    self_explaining: Sequence[str] = ("dtype", "memory", "layout")
    """Axes of which a value is named without its axis."""
    checks: Mapping[str, Callable[[torch.device], list[str]]] = {}
    """What the op promises whatever the variant, checked once: functions of the device that return complaints."""

    def axes(self, requires: Requires, size: Size) -> dict[str, list[Any]]:
        """Values of each axis that the claims allow, the plainest first."""
        raise NotImplementedError

    def pinned(self) -> Sequence[Spec]:
        """Combinations that are always tried where they are legal."""
        return ()

    def crowded(self, size: Size) -> Sequence[Spec]:
        """Large problems of many short tiles, tried with every config: what one tile leaves behind meets the next."""
        return ()

    def outside(self, requires: Requires) -> dict[str, Spec]:
        """By description: axis values just outside of the claims, which must be refused."""
        return {}

    def sensible(self, spec: Spec) -> bool:
        """Whether the axis values make a call at all; where not, another one is drawn."""
        return True

    def word(self, axis: str, value: Any) -> str:
        """An axis value in the name of a check; left out where it is false or empty."""
        if value is True:
            return axis
        if isinstance(value, str):
            return value if axis in self.self_explaining else f"{axis}:{value}"
        return f"{axis}:" + ("x".join(map(str, value)) if isinstance(value, tuple) else str(value))

    def make(self, spec: Spec, device: torch.device, seed: int) -> Sample:
        """The call with its tensors; on the meta device without values."""
        raise NotImplementedError

    def launch(self, launch: Callable[..., Any], sample: Sample) -> Results:
        """Call a bound launch and name its results."""
        raise NotImplementedError

    def front_door(self, variant: str, sample: Sample) -> Results:
        """The same through the op as a user calls it, with the variant asked for by name."""
        raise NotImplementedError

    def expected(self, sample: Sample) -> list[Expected]:
        """What the results are held against."""
        raise NotImplementedError

    def form(self, sample: Sample, results: Results) -> list[str]:
        """Complaints about strides of results; shapes and dtypes are those of `expected`."""
        return []


# --- sampling -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One problem to run with one config."""

    name: str
    spec: Spec = field(compare=False)
    config: Config = field(compare=False)
    problem: Problem = field(compare=False)


@dataclass(frozen=True)
class Drawn:
    """What sampling found: problems to run, and axis values that no legal problem has."""

    trials: tuple[Trial, ...]
    uncovered: tuple[str, ...]


TRIES = 60
_CROWDED = "crowded"
MOST_CONFIGS = 1000
DRAWS = 3000


def problem_of(op: Op, kit: Kit, spec: Spec, target: Target) -> Problem:
    """The problem of a spec, without memory behind it."""
    sample = kit.make(spec, torch.device("meta"), 0)
    with spec_conditions(spec):
        return op.problem_of(*sample.tensors, target=target, **sample.arguments)[0]


def spec_conditions(spec: Spec) -> Any:
    """torch's global switches as the spec asks for them."""
    ieee = spec.get("ieee") if spec.get("dtype") == "float32" else None
    return conditions(deterministic=bool(spec.get("deterministic")), ieee=ieee)


def draw(variant: Variant, op: Op, kit: Kit, target: Target, size: Size) -> Drawn:
    """Problems that the variant's claims make legal: every axis value, the pinned combinations, and random ones."""
    axes = kit.axes(variant.requires, size)
    rng = random.Random(zlib.crc32(f"{variant.name}/{variant.op}".encode()))
    if empty := [axis for axis, values in axes.items() if not values]:
        return Drawn((), tuple(f"{axis}: nothing is claimed" for axis in empty))
    wanted: list[tuple[str, Spec]] = [("", dict(spec)) for spec in kit.pinned()]
    wanted += [
        (f"{axis}={value}", {axis: value}) for axis, values in axes.items() for value in _some(values, size.values)
    ]
    wanted += [("", {}) for _ in range(size.samples)]
    wanted += [(_CROWDED, dict(spec)) for spec in kit.crowded(size)]
    found: dict[str, tuple[Spec, Problem]] = {}
    crowded = set()
    uncovered = []
    for label, fixed in wanted:
        if label != _CROWDED and any(axis not in axes or value not in axes[axis] for axis, value in fixed.items()):
            continue
        legal = _first_legal(variant, op, kit, target, axes, fixed, rng)
        if legal is None:
            # A claim that errata alone refuse is no idle claim: it is waited for.
            awaited = _first_legal(variant, op, kit, target, axes, fixed, random.Random(0), Variant.reasons)
            uncovered += [label] if label not in ("", _CROWDED) and awaited is None else []
            continue
        name = spec_name(kit, legal[0], axes)
        found.setdefault(name, legal)
        crowded |= {name} if label == _CROWDED else set()
    trials: list[Trial] = []
    for name, (spec, problem) in found.items():
        every = name in crowded or not trials or _spread(name, size, len(found))
        most = replace(size, configs=MOST_CONFIGS) if name in crowded else size
        trials += _with_configs(variant, name, spec, problem, every, most)
    return Drawn(tuple(trials), tuple(uncovered))


def _first_legal(
    variant: Variant,
    op: Op,
    kit: Kit,
    target: Target,
    axes: Mapping[str, list[Any]],
    fixed: Spec,
    rng: random.Random,
    reasons: Callable[[Variant, Problem], Sequence[Reason]] = all_reasons,
) -> tuple[Spec, Problem] | None:
    tried = 0
    for _ in range(DRAWS):
        # The first tries mix everything; later ones stay near the plainest problem, which is likelier to be legal.
        plain = tried / TRIES
        spec = {
            axis: values[0] if rng.random() < plain else rng.choice(values) for axis, values in axes.items()
        } | fixed
        if not kit.sensible(spec):
            continue
        problem = problem_of(op, kit, spec, target)
        if not reasons(variant, problem) and op.trivial(problem) is None:
            return spec, problem
        tried += 1
        if tried == TRIES:
            break
    return None


def _some(values: list[Any], count: int) -> list[Any]:
    """At most `count` of the values: the ends, and an even spread between them."""
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _spread(name: str, size: Size, count: int) -> bool:
    """Whether a problem (besides the first) is among those that are run with every config."""
    return zlib.crc32(name.encode()) % count < size.full_config_problems - 1


def _with_configs(
    variant: Variant, name: str, spec: Spec, problem: Problem, every: bool, size: Size
) -> Iterator[Trial]:
    configs = variant.legal_configs(problem)
    if every:
        configs = [configs[0], *_some(_distinct([*configs, *_shipped(variant, problem)])[1:], size.configs - 1)]
    for config in configs if every else configs[:1]:
        label = "" if config == configs[0] else " @" + ",".join(f"{k}={v}" for k, v in sorted(config.items()))
        yield Trial(name + label, spec, config, problem)


def _distinct(configs: Sequence[Config]) -> list[Config]:
    return [config for i, config in enumerate(configs) if config not in configs[:i]]


def _shipped(variant: Variant, problem: Problem) -> list[Config]:
    """Configs that the tables in force name for this variant, as far as they are legal here."""
    target = problem.target
    rules = itertools.chain.from_iterable(
        table.rules for table in in_force.tables().applying(problem.op, target.arch, target.name)
    )
    named = [use.config for rule in rules for use in rule.use if use.variant == variant.name and use.config is not None]
    return [one for one in named if not (undeclared(variant, problem, one) or variant.refusals(problem, one))]


def spec_name(kit: Kit, spec: Spec, axes: Mapping[str, list[Any]]) -> str:
    """A short name that tells the spec: values alone where they speak for themselves, flags by their name."""
    words = []
    for axis, value in spec.items():
        if value in (False, None, "", 0.0) or (len(axes[axis]) == 1 and axis != "dtype"):
            continue
        if axis != "ieee" or spec.get("dtype") == "float32":
            words.append(kit.word(axis, value))
    return " ".join(filter(None, words))


# --- the form of results ---------------------------------------------------------------------------------------------


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def dense_complaints(results: Results, sample: Sample) -> list[str]:
    """Results must be dense tensors of their own, with a unit inner stride."""
    found = []
    inputs = {t.untyped_storage().data_ptr() for t in sample.tensors}
    for name, result in results.items():
        if not isinstance(result, torch.Tensor):
            found.append(f"{name} is {type(result).__name__}, not a tensor")
        elif not is_dense(result) or (result.stride(-1) != 1 and result.shape[-1] > 1):
            found.append(f"{name} has strides {result.stride()} for shape {tuple(result.shape)}: not dense")
        elif result.untyped_storage().data_ptr() in inputs:
            found.append(f"{name} shares memory with an input")
    return found
