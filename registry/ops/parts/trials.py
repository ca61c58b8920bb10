"""Problems and configs to check a variant with, drawn from its claims.

Each value of each axis is tried with the other axes drawn at random from a seed that is the variant's name and the
number of the draw, so the same declarations always give the same problems. Configs are dealt out among them, so that
each is run on several.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from registry.contract.capability import Config, Reason, arch_matches
from registry.contract.describe import config_text
from registry.contract.likeness import is_size
from registry.contract.problem import Problem
from registry.contract.target import Target
from registry.contract.variant import Variant
from registry.dispatch import in_force
from registry.dispatch.configs import undeclared
from registry.dispatch.select import all_reasons
from registry.ops.op import Op
from registry.ops.parts.kit import Kit, Spec
from registry.ops.parts.memory import conditions
from registry.ops.parts.sizes import Size


@dataclass(frozen=True)
class Trial:
    """One problem to run with one config."""

    name: str
    spec: Spec = field(compare=False)
    config: Config = field(compare=False)
    problem: Problem = field(compare=False)
    traits: tuple[str, ...] = field(default=(), compare=False)
    """Every axis value in words, those that the name leaves out too, and the config: what failures have in common."""

    @property
    def about(self) -> str:
        """Problem and config in full, for whoever has to find out what went wrong."""
        return f"{self.problem.summary()}; config {config_text(self.config) or '{}'}"


@dataclass(frozen=True)
class Drawn:
    """What sampling found: problems to run, and axis values that no legal problem has."""

    trials: tuple[Trial, ...]
    uncovered: Mapping[str, str]
    """By "axis=value": why it has none, as far as that can be told."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """By "axis=value" that has none here: an architecture of those claimed on which it has one."""


ARCHITECTURES = ("cpu", "sm70", "sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
TRIES = 60
_CROWDED = "crowded"
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


def draw(variant: Variant, op: Op, kit: Kit, target: Target, size: Size, number: int = 0) -> Drawn:
    """Problems that the variant's claims make legal: every axis value, the pinned combinations, and random ones."""
    axes = kit.axes(variant.requires, size)
    rng = random.Random(zlib.crc32(f"{variant.name}/{variant.op}{f'/{number}' if number else ''}".encode()))
    if empty := [axis for axis, values in axes.items() if not values]:
        return Drawn((), dict.fromkeys(empty, "nothing is claimed"))
    wanted: list[tuple[str, Spec]] = [("", dict(spec)) for spec in kit.pinned() if _among(spec, axes)]
    wanted += [
        (f"{axis}={value}", {axis: value}) for axis, values in axes.items() for value in _some(values, size.values)
    ]
    wanted += [("", {}) for _ in range(size.samples)]
    wanted += [(_CROWDED, dict(spec)) for spec in kit.crowded(size)]
    wanted += [(label, dict(spec)) for label, spec in kit.ends(variant.requires, size).items()]
    found: dict[str, tuple[Spec, Problem]] = {}
    near: Spec | None = None
    crowded = set()
    uncovered: dict[str, str] = {}
    elsewhere: dict[str, str] = {}
    for label, fixed in wanted:
        legal = _first_legal(variant, op, kit, target, axes, fixed, rng, near=near)
        if legal is None:
            # A claim that errata alone refuse is no idle claim: it is waited for.
            refused: Counter[str] = Counter()
            by_itself = (random.Random(0), Variant.reasons)
            awaited = _first_legal(variant, op, kit, target, axes, fixed, *by_itself, refused)
            if label in ("", _CROWDED) or awaited is not None:
                continue
            others = [
                name for name in ARCHITECTURES if name != target.arch and arch_matches(variant.requires.arch, name)
            ]
            where = (
                name for name in others if _first_legal(variant, op, kit, Target.named(name), axes, fixed, *by_itself)
            )
            if there := next(where, None):
                elsewhere[label] = there
            else:
                uncovered[label] = _commonest(refused)
            continue
        name = spec_name(kit, legal[0], axes)
        near = legal[0] if near is None and _among(legal[0], axes) else near
        found.setdefault(name, legal)
        crowded |= {name} if label == _CROWDED else set()
    problems = [_Found(name, spec, problem, _traits(kit, spec)) for name, (spec, problem) in found.items()]
    return Drawn(tuple(_with_configs(variant, problems, crowded, size)), uncovered, elsewhere)


def _commonest(refused: Counter[str]) -> str:
    """The reason that most problems were refused for: likelier the author's mistake than what some of them share."""
    return f"most were refused for {refused.most_common(1)[0][0]}" if refused else "the op takes no such call"


def _among(spec: Spec, axes: Mapping[str, list[Any]]) -> bool:
    return all(axis in axes and value in axes[axis] for axis, value in spec.items())


def named(
    variant: Variant, op: Op, kit: Kit, target: Target, spec: Spec, axes: Mapping[str, list[Any]], config: Config
) -> Trial | None:
    """The trial of this spec and config; None where the variant may not run it."""
    problem = problem_of(op, kit, spec, target)
    if all_reasons(variant, problem) or op.trivial(problem) is not None:
        return None
    legal = _distinct([*variant.legal_configs(problem), *_shipped(variant, problem)])
    if config not in legal:
        return None
    return _Found(spec_name(kit, spec, axes), spec, problem, _traits(kit, spec)).with_config(config, config == legal[0])


def _first_legal(
    variant: Variant,
    op: Op,
    kit: Kit,
    target: Target,
    axes: Mapping[str, list[Any]],
    fixed: Spec,
    rng: random.Random,
    reasons: Callable[[Variant, Problem], Sequence[Reason]] = all_reasons,
    refused: Counter[str] | None = None,
    *,
    near: Spec | None = None,
) -> tuple[Spec, Problem] | None:
    """The first drawn problem that may run; `refused` counts for what reasons others may not.

    The first tries mix everything; later ones stay near the plainest problem and, in turn with it, near one that is
    known to be legal: of a variant for few problems the plainest is none."""
    plainest, tried = {axis: values[0] for axis, values in axes.items()}, 0
    for number in range(DRAWS):
        base = near if near is not None and number % 2 else plainest
        plain = max(tried / TRIES, number / DRAWS)  # of some values nearly all mixtures make no call
        spec = {
            axis: base[axis] if rng.random() < plain else rng.choice(values) for axis, values in axes.items()
        } | fixed
        if not kit.sensible(spec):
            continue
        problem = problem_of(op, kit, spec, target)
        found = reasons(variant, problem)
        if not found and op.trivial(problem) is None:
            return spec, problem
        if refused is not None:
            refused.update(dict.fromkeys(map(str, found), 1))
        tried += 1
        if tried == TRIES:
            break
    return None


def _some(values: list[Any], count: int) -> list[Any]:
    """Of sizes at most `count`: the ends, and an even spread between them. Of what has no order, all."""
    if len(values) <= count or not all(map(_are_sizes, values)):
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def _are_sizes(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_are_sizes, value))
    return is_size(value)


@dataclass(frozen=True)
class _Found:
    """A legal problem that waits for its configs."""

    name: str
    spec: Spec
    problem: Problem
    traits: tuple[str, ...]

    def with_config(self, config: Config, default: bool) -> Trial:
        label = "" if default else " @" + ",".join(f"{k}={v}" for k, v in sorted(config.items()))
        words = tuple(f"{k}={v}" for k, v in sorted(config.items()))
        return Trial(self.name + label, self.spec, config, self.problem, (*self.traits, *words))


FEWEST_PROBLEMS = 2
"""That every config is run on."""


def _with_configs(variant: Variant, problems: Sequence[_Found], crowded: Iterable[str], size: Size) -> Iterator[Trial]:
    """Each problem with one config, dealt out in turn; some with all; and further ones until each config had enough."""
    legal = [_distinct([*variant.legal_configs(f.problem), *_shipped(variant, f.problem)]) for f in problems]
    chosen: list[dict[str, Config]] = []
    for number, (found, configs) in enumerate(zip(problems, legal, strict=True)):
        every = found.name in crowded or number < size.full_config_problems
        some = configs if every else [configs[number % len(configs)]]
        chosen.append({config_text(config): config for config in some})
    ran = Counter(text for configs in chosen for text in configs)
    for number in sorted(range(len(problems)), key=lambda number: zlib.crc32(problems[number].name.encode())):
        for config in legal[number]:
            text = config_text(config)
            if ran[text] < FEWEST_PROBLEMS and text not in chosen[number]:
                chosen[number][text] = config
                ran[text] += 1
    for found, configs, some in zip(problems, legal, chosen, strict=True):  # type: ignore[assignment]
        for config in some.values():  # type: ignore[attr-defined]
            yield found.with_config(config, config == configs[0])


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


def _traits(kit: Kit, spec: Spec) -> tuple[str, ...]:
    return tuple(_trait(kit, axis, value) for axis, value in spec.items())


def _trait(kit: Kit, axis: str, value: Any) -> str:
    """One axis value in words, also where a name would leave it out."""
    plain = value in (False, None, "", 0.0)
    return f"no {axis}" if plain else kit.word(axis, value) or f"no {axis}"
