"""A Variant: one named implementation of an op, with all that the registry, the tests and the tuner derive from it."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from registry.contract.capability import (
    MOST_DIGITS,
    Config,
    Design,
    Reason,
    Requires,
    config_meets,
    config_reasons,
    reasons_against,
    too_long,
)
from registry.contract.meeting import meets
from registry.contract.noted import Noted, noting
from registry.contract.problem import Problem
from registry.errors import DeclarationError, shown
from registry.notices import notice, told
from registry.signals import interrupts

_NAME = re.compile(r"(?=.{1,100}$)([a-z][a-z0-9_]*\.)?[a-z][a-z0-9_]*")  # tables hold no longer ones
_PLAIN = (int, str, bool)
_NAMES, _ANY_VALUE, _DICTS = frozenset((str,)), frozenset((int, str, bool)), frozenset((dict,))

GUESSED = 8
"""Configs, the first ones, whose least guess is the variant's."""
Configs = Sequence[Config] | Callable[[Any], Sequence[Config]]
Order = Callable[[Sequence[Config]], Sequence[Config]]
"""What sorts configs, the best guess first."""


class _Asked(NamedTuple):
    """What a variant has answered about one problem: a decision asks for it several times."""

    problem: Problem
    configs: list[Config]
    costs: dict[int, Any]
    """By the id of one of those, what it is guessed to take: of the first, once a guess was asked for. None is none."""


@dataclass(frozen=True)
class Variant:
    """One implementation of an op, as a plugin declares it.

    name      `<dsl>_<algorithm>[_<trait>]`, third parties `vendor.name`: a stable id in tables, benchmarks and caches.
    run       called with the op's tensors, `config`, and exactly those keyword arguments whose features are claimed.
    configs   flat dicts of integers, strings and bools, best first; or a function of the problem that gives them.
    prepare   optional fast path: `prepare(problem, config)` does all host work once and returns a launch that takes
              the tensors and what differs from call to call (`scale`, `bias`, ...), but nothing that the problem says.
              Where that comes down to one of torch's functions of the tensors, `launch.bare` may name it.
              `prepare.of_any_size(noted, problem, config)` may say how launches of other sizes are made of one, as that
              of toolbox.call does: a toolbox.resized.Resizing.
    builds    optional: `builds(problem, config)` lists the GPU kernels it would compile, as toolbox.builds.Build.
    schedule  optional, for ops whose calls come in steps (the layers of a model): `schedule(problem, config)` returns
              a function that makes, from a step's operands, what its calls share. `run` and a prepared launch are
              handed that as `schedule`, or None where the caller has made none.
    design_of optional: the traits of one config, where they differ from `design`.
    traceable whether `run` is made of torch's operations alone, writes to nothing, and looks at no values or addresses:
              where such a variant is chosen, compiled graphs hold those operations.
    waits     optional: `waits(problem)` says whether `run` reads values of the device on the host, and so waits for
              it. Such a call is refused while a CUDA graph is captured, which cannot hold that.
    cost      optional: `cost(problem, config)` guesses how long a config takes, in any unit, best in microseconds. A
              table corrects it by what was measured, and takes the config that is left with the least. Where variants
              are expected to take about as long, tables ask what each of them guesses, too. Only finite numbers above
              zero are guesses, else that is logged; where one config has none, none of the variant's counts there.
    builds_each_size
              whether its library builds a kernel for each size at the first call of it, which takes milliseconds and is
              in no measurement. Where sizes are likely to be new at every call (`Problem.growing`), it goes behind the
              others of its table.
    """

    name: str
    op: str
    run: Callable[..., Any]
    requires: Requires
    design: Design = field(default_factory=Design)
    configs: Configs = ({},)
    prepare: Callable[[Any, Config], Callable[..., Any]] | None = None
    builds: Callable[[Any, Config], Sequence[Any]] | None = None
    schedule: Callable[[Any, Config], Callable[..., Any]] | None = None
    design_of: Callable[[Config], Design] | None = None
    traceable: bool = False
    waits: Callable[[Any], bool] | None = None
    cost: Callable[[Any, Config], float] | None = None
    builds_each_size: bool = False
    summary: str = ""
    origin: str = field(default="", compare=False)
    _declared: tuple[Config, ...] = field(default=(), init=False, repr=False, compare=False)
    """The configs as they were listed, where they were: what is asked about one is handed that itself."""
    _last: list[_Asked] = field(default_factory=list, init=False, repr=False, compare=False)
    """What was asked last, if anything was."""
    _met: list[tuple[Problem, bool]] = field(default_factory=list, init=False, repr=False, compare=False)
    """The same of its claims."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            allowed = "lower-case words, optionally 'vendor.name', of at most 100 letters"
            raise DeclarationError(f"Variant.name: got {shown(self.name)}; allowed: {allowed}")
        if not callable(self.run):
            raise DeclarationError(f"Variant {self.name}: run: got {shown(self.run)}; allowed: a callable")
        if not isinstance(self.op, str):
            raise DeclarationError(f"Variant {self.name}: op: got {shown(self.op)}; allowed: the name of an op")
        for name, kind in (("requires", Requires), ("design", Design)):
            if not isinstance(given := getattr(self, name), kind):
                allowed = f"a record {kind.__name__}(...)"
                raise DeclarationError(f"Variant {self.name}: {name}: got {shown(given)}; allowed: {allowed}")
        if not callable(self.configs):
            if isinstance(self.configs, (str, bytes)) or not isinstance(self.configs, Sequence):
                got = type(self.configs).__name__
                raise DeclarationError(f"Variant {self.name}: configs: got {got}; allowed: a list, or a function")
            if not self.configs:
                raise DeclarationError(
                    f"Variant {self.name}: configs: got none; allowed: at least one (an empty dict will do)"
                )
            for config in self.configs:
                self._check_config(config)
            object.__setattr__(self, "_declared", tuple([{**config} for config in self.configs]))

    def configs_for(self, problem: Problem) -> list[Config]:
        """The declared configs for a problem, best first, legal or not."""
        return list(self._asked(problem).configs if callable(self.configs) else self.configs)

    def as_declared(self, problem: Problem) -> list[Config]:
        """The same, whatever became of them since."""
        return self._made(problem) if callable(self.configs) else [{**config} for config in self._declared]

    def _asked(self, problem: Problem) -> _Asked:
        """Kept for the problem that was asked about last."""
        for asked in self._last:
            if asked.problem is problem:
                return asked
        found = self._made(problem) if callable(self.configs) else list(self.configs)
        if not _DICTS.issuperset(map(type, found)):
            for config in found:
                if not isinstance(config, Mapping):
                    self._check_config(config)
        asked = _Asked(problem, found, {})
        self._last[:] = [asked]
        return asked

    def _made(self, problem: Problem) -> list[Config]:
        """By the function that was declared."""
        made = self.configs(problem)  # type: ignore[operator]
        if type(made) is list:  # told sooner than what else there may be
            return [*made]
        if isinstance(made, (str, bytes, Mapping)) or not isinstance(made, Iterable):
            got = shown(made)
            raise DeclarationError(f"Variant {self.name}: configs: got {got} of its function; allowed: a list of dicts")
        return list(made)

    def costs(self, problem: Problem) -> Callable[[Config], Any] | None:
        """What guesses how long each config takes, or gives None for no guess; None where it guesses nothing."""
        if self.cost is None:
            return None
        known = next((asked.costs for asked in self._last if asked.problem is problem), {})
        return functools.partial(self._guessed, problem, known)

    def _guessed(self, problem: Problem, known: Mapping[int, Any], config: Config) -> Any:
        """What was guessed before, if it was. A cost that raises guesses nothing; it is blamed for its own configs, not
        for those of an earlier version, whose keys may be others."""
        found = known.get(id(config))
        if found is not None:
            return found
        try:
            return self._guess_of(problem, config)
        except BaseException as error:
            if noting() or interrupts(error):
                raise
            if config in self.configs_for(problem):
                self._failed(problem, error)
            return None

    def _guess_of(self, problem: Problem, config: Config) -> Any:
        """What its cost gives; None for what is no guess, which is said. Raises what its cost raises."""
        found: Any = self.cost(problem, config)  # type: ignore[misc]
        if type(found) is float and 0.0 < found < math.inf:  # as nearly every guess
            return found
        if type(found) not in (float, Noted) and isinstance(found, Real):
            found = float(found)
        if type(found) in (float, Noted) and 0.0 < found < math.inf:
            return found
        text = f"Variant {self.name}: cost: got {shown(found)}, which is no guess; allowed: a finite number above zero"
        if noting():
            raise DeclarationError(text)
        notice(text)
        return None

    def guess(self, problem: Problem) -> Any:
        """The least that it guesses one of its configs to take; None where it guesses nothing of such problems."""
        if self.cost is None:
            return None
        try:
            asked = self._asked(problem)
            if not asked.costs:
                asked.costs.update([(id(one), self._guess_of(problem, one)) for one in asked.configs[:GUESSED]])
            return None if None in asked.costs.values() else min(asked.costs.values())
        except BaseException as error:  # a problem that it does not run, mostly
            if noting() or interrupts(error):
                raise
            return None

    def reasons(self, problem: Problem) -> list[Reason]:
        """Every reason why this variant may not run the problem with any config."""
        return self.answer(problem, lambda: self._reasons(problem))

    def _reasons(self, problem: Problem) -> list[Reason]:
        found = reasons_against(self.requires, problem)
        if found or self._first_config(problem) is not None:
            return found
        refused = self.config_refusals(problem)
        if not refused and self.configs_for(problem):
            refused = [
                Reason("config", "requires.never", "rules out every config here", "a problem that it lets through")
            ]
        nothing = Reason("config", "config", "no config is declared for this problem", "at least one")
        return refused or [nothing]

    def may_run(self, problem: Problem) -> bool:
        """Whether what it claims lets the problem through, whatever the config."""
        try:
            return self._meets(problem)
        except BaseException as error:
            self._failed(problem, error)
            return False

    def _meets(self, problem: Problem) -> bool:
        for asked, met in self._met:
            if asked is problem:
                return met
        met = meets(self.requires, problem)
        self._met[:] = [(problem, met)]
        return met

    def first_legal(self, problem: Problem, order: Order | None = None) -> Config | None:
        """The first config that may run the problem, of all in the order declared or in this one; None exactly where
        `reasons` gives some. Stops as early as it can.

        It answers for a launch, so it makes no more reasons than it takes to refuse.
        """
        try:
            return self._first_config(problem, order) if self._meets(problem) else None
        except BaseException as error:
            self._failed(problem, error)
            return None

    def _first_config(self, problem: Problem, order: Order | None = None) -> Config | None:
        if self.requires.never is not None and self.requires.never(problem):
            return None
        configs: Sequence[Config] = self.configs_for(problem)
        if order is not None:
            configs = self._ordered(problem, configs, order)
        for config in configs:
            if config_meets(self.requires, problem, config):
                self._check_config(config)
                return config
        return None

    def _ordered(self, problem: Problem, configs: Sequence[Config], order: Order) -> Sequence[Config]:
        """In this order; as declared where that fails, which refuses nothing."""
        try:
            return order(configs) or configs
        except BaseException as error:
            self._failed(problem, error)
            return configs

    def legal_configs(self, problem: Problem) -> list[Config]:
        """The declared configs that the problem and the target allow; assumes that `reasons_against` is empty."""
        return [config for config in self.configs_for(problem) if not self.refusals(problem, config)]

    def config_refusals(self, problem: Problem) -> list[Reason]:
        """Why declared configs are illegal: each distinct reason once."""
        found: dict[str, Reason] = {}
        for config in self.configs_for(problem):
            for reason in self.refusals(problem, config):
                found.setdefault(str(reason), reason)
        return list(found.values())

    def refusals(self, problem: Problem, config: Config) -> list[Reason]:
        """Every reason why this config may not run a problem that the claims let through."""
        return self.answer(problem, lambda: config_reasons(self.requires, problem, config))

    def answer(self, problem: Problem, ask: Callable[[], list[Reason]]) -> list[Reason]:
        """What the declaration answers. One that raises, SystemExit too, makes its own variant illegal and no other."""
        try:
            return ask()
        except BaseException as error:
            return [Reason("declaration", "requires", self._failed(problem, error), "a declaration that answers")]

    def _failed(self, problem: Problem, error: BaseException) -> str:
        """What is said of a declaration that raised this, which is being handled."""
        if noting() or interrupts(error):
            raise error
        text = told(error)
        notice(f"the declaration of {self.name} failed for {problem.summary()}: {text}", cause=(self.name, text))
        return text

    def may_wait(self, problem: Problem) -> bool:
        """Whether a launch may wait for the device: it says so, or fails to say."""
        waits, said = self.waits, [True]
        if waits is None:
            return False

        def ask() -> list[Reason]:
            said[:] = [bool(waits(problem))]
            return []

        self.answer(problem, ask)
        return said[0]

    def design_for(self, config: Config) -> Design:
        """The traits of one config."""
        return self.design_of(config) if self.design_of else self.design

    def _check_config(self, config: Any) -> None:
        if (
            type(config) is dict
            and _NAMES.issuperset(map(type, config))
            and _ANY_VALUE.issuperset(map(type, config.values()))
            and not any(map(too_long, config.values()))
        ):
            return
        items = config.items() if isinstance(config, Mapping) else [(None, None)]
        if not all(
            isinstance(name, str) and isinstance(value, _PLAIN) and not too_long(value) for name, value in items
        ):
            allowed = (
                f"a flat dict of integers (of {MOST_DIGITS} digits at most), strings and bools, by name, which tables "
                "can hold"
            )
            raise DeclarationError(f"Variant {self.name}: config {shown(config)}; allowed: {allowed}")
