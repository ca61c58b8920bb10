"""The base of every op: a callable front door with `.explain`, `.variants`, `.reference`, and a cache of plans.

What differs between ops (contract, problem, oracle, torch boundary) lives in registry/ops/, one folder an op.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, ClassVar, NoReturn

import torch

from registry.contract.capability import Config
from registry.contract.declared import HANDED, Handed
from registry.contract.problem import Problem
from registry.contract.target import Target, interpreted_as
from registry.contract.variant import Variant
from registry.dispatch.alike import Alike, has_sizes
from registry.dispatch.catalog import catalog
from registry.dispatch.decision import NO_KERNEL, Candidate, Decision
from registry.dispatch.launches import Launches
from registry.dispatch.plan import Dropping, LateLaunch, Plan, Uncaptured, on_its_device
from registry.dispatch.plan_cache import PlanCache
from registry.dispatch.scope import EMPTY, Forced, Scope, current
from registry.dispatch.select import decide
from registry.dispatch.traced import SETTLED
from registry.errors import InvalidArgument, UnknownOp, shown
from registry.ops.tensors import plain


class Op:
    """What is computed. Subclasses give `name`, `problem_type`, the two argument maps, and `__call__`."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    problem_type: ClassVar[type[Problem]]

    tensors: ClassVar[tuple[str, ...]] = ()
    """What `run` and a prepared launch take by position."""
    fixed_arguments: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Keyword of `run` -> (claim that earns it ("" for always), Problem field of its value): constant within a plan."""
    call_arguments: ClassVar[Mapping[str, str]] = {}
    """Keyword of `run` -> claim that earns it ("" for always): differs from call to call (tensors, scale)."""

    def __init__(self) -> None:
        self.plans = PlanCache(self.new_plan, self.eager, alike=Alike(self))
        self.find_plan = self.plans.find
        self._left_out: dict[str, tuple[Variant, list[str]]] = {}
        OPS[self.name] = self
        if self.tensors:
            HANDED[self.name] = self.handed

    def __reduce__(self) -> tuple[Callable[[str], Op], tuple[str]]:
        """Copies and pickles of an op are the op of that name: a module may hold one as an attribute."""
        return op_named, (self.name,)

    def __repr__(self) -> str:
        return f"<op {self.name}: {self.summary}>"

    @property
    def variants(self) -> Mapping[str, Variant]:
        """Every variant of this op, by name."""
        return catalog.get().of(self.name)

    @functools.cached_property
    def tuning(self) -> Any:
        """What the tuner needs to know, a parts.tuning.Tuning, from the folder's tuning.py when first asked."""
        return self._part("tuning")

    @functools.cached_property
    def conformance(self) -> Any:
        """What the conformance kit needs to know, a parts.kit.Kit from conformance.py in the op's folder."""
        return self._part("conformance")

    @functools.cached_property
    def contract(self) -> Any:
        """What an author has to know beyond the declarations, a parts.authors.Contract; None where nobody wrote it."""
        try:
            return self._part("authors")
        except UnknownOp:
            return None

    @property
    def starter(self) -> str | None:
        """A kernel to start from, as `kreg new` copies it; None where the op's folder has none."""
        name = "starter_backward.txt" if self.name.endswith("_backward") else "starter.txt"
        path = resources.files(type(self).__module__.rpartition(".")[0]) / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def _part(self, name: str) -> Any:
        folder = type(self).__module__.rpartition(".")[0]
        try:
            return importlib.import_module(f"{folder}.{name}").BY_OP[self.name]
        except ModuleNotFoundError as error:
            if error.name != f"{folder}.{name}":
                raise
            raise UnknownOp(self.name, [f"ops whose folder has a {name}.py"]) from error

    flops: Callable[[Any], float] = staticmethod(lambda problem: 0.0)
    """Floating-point operations of a problem; 0 where nothing was said."""
    bytes_moved: Callable[[Any], float] = staticmethod(lambda problem: 0.0)
    """The least that must pass through device memory, each operand once; 0 where nothing was said."""

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """What the same call would run, and why; launches nothing.

        Takes what the call takes (real, fake or meta tensors) or a Problem; `target=Target.named("RTX 3090")` asks for
        a GPU that is not there.
        """
        asked_for = kwargs.get("target")
        if asked_for is not None and not isinstance(asked_for, Target):
            raise InvalidArgument("target", shown(asked_for), 'None or a Target, such as Target.named("H100")')
        if args and isinstance(args[0], Problem):
            problem, target = args[0], kwargs.pop("target", None)
            scope = with_variant(self.name, current.get(), kwargs.pop("variant", None))
            if kwargs or len(args) > 1:
                raise TypeError("explain(problem) takes only target= and variant= besides the Problem")
            if not isinstance(problem, self.problem_type):
                raise InvalidArgument("problem", f"one of {problem.op}", f"one of {self.name}")
            problem = problem if target is None else problem.on(target)
            return self.trivial(problem) or decide(problem, scope)
        problem, scope = self.problem_of(*args, **kwargs)
        decided = self.trivial(problem) or decide(problem, scope)
        self.refuse_values(*args, **kwargs)  # in this order, as a call does
        return decided

    def problem_of(self, *args: Any, **kwargs: Any) -> tuple[Problem, Scope]:
        """The Problem and the scope of a call, after all checks of its arguments."""
        raise NotImplementedError

    def refuse(self, late: InvalidArgument, settings: Any, *tensors: Any) -> NoReturn:
        """Raise this error, unless the call has a mistake that `explain` would name first: then that one."""
        try:
            self.asked(settings, False, *tensors)
        except InvalidArgument as first:
            raise first from None
        raise late

    def refuse_values(self, *args: Any, **kwargs: Any) -> None:
        """Raise for values in memory that a call would refuse, which no Problem holds."""

    def empty(self, problem: Any) -> bool:
        """Whether the answer needs no kernel, for there is nothing to compute with."""
        return False

    def trivial(self, problem: Problem) -> Decision | None:
        """The decision to run no kernel, for a problem that is `empty`; None for others."""
        if not self.empty(problem):
            return None
        because = "empty tensors: the op answers by itself"
        return Decision(problem, NO_KERNEL, {}, because, (Candidate(NO_KERNEL, (), 0, because),))

    def trivial_launch(self, problem: Problem) -> Callable[..., Any]:
        """What answers a trivial problem."""
        raise NotImplementedError

    eager: Callable[..., bool] = staticmethod(plain)
    """Whether a call on these tensors need not go by the torch op."""

    def asked(self, settings: Any, with_grad: bool, *tensors: Any) -> tuple[Problem, Scope]:
        """The Problem and the scope of a call, from the settings by which plans are kept, and the tensors."""
        raise NotImplementedError

    def new_plan(self, settings: Any, with_grad: bool, tensors: tuple[Any, ...]) -> Plan:
        """Check, decide and bind."""
        return self._plan(*self.asked(settings, with_grad, *tensors), with_grad)

    def _plan(self, problem: Problem, scope: Scope, with_grad: bool) -> Plan:
        decision, trial = self.trivial(problem), None
        if decision is not None:
            launch = self.trivial_launch(problem)
        else:
            decision, variant = self._decided(problem, scope)
            launch = self.bind(variant, problem, decision.config)
            if scope.trying is not None:
                trial = scope.trying.trial(problem, scope, self.bind)
        replan = functools.partial(self._plan, problem, scope, with_grad)
        return Plan(decision, launch, replan, self.default(problem), with_grad, trial)

    def planned(
        self, decision: Callable[[], Decision], launch: Any, scope: Scope, with_grad: bool, default: Any
    ) -> Plan:
        """A plan for sizes that are decided like earlier ones: the decision and its Problem are made when somebody asks
        for them. `launch` is None where it needs them itself."""

        if launch is None:
            found = decision()
            launch = self.bind(self.variants[found.variant], found.problem, found.config)
        replan = functools.partial(self._replanned, decision, scope, with_grad)
        return Plan(decision, launch, replan, default, with_grad)

    def _replanned(self, decision: Callable[[], Decision], scope: Scope, with_grad: bool) -> Plan:
        return self._plan(decision().problem, scope, with_grad)

    def launch_of_any_size(self, variant: Variant, noted: Problem, config: Config) -> Callable[..., Any] | None:
        """A launch for all sizes for which a decision holds, bound to a Problem of noted sizes; None where there is
        none: prepared launches depend on sizes."""
        fields = [field for claim, field in self.fixed_arguments.values() if self.earned(variant, claim)]
        if variant.prepare is not None or any(has_sizes(getattr(noted, field)) for field in fields):
            return None
        return self.bind(variant, noted, config)

    def launches(self, variant: Variant, problem_of: Callable[[Any], Problem], config: Config) -> Launches | None:
        """How launches of a variant follow from one another where only sizes differ; None where each is bound by
        itself."""
        of_any_size = getattr(variant.prepare, "of_any_size", None)
        if of_any_size is None or variant.waits is not None or interpreted_as() is not None:
            return None
        return Launches(functools.partial(of_any_size, config=config), problem_of, self._unclaimed(variant))

    def prepared(self, decision: Callable[[], Decision]) -> Any:
        """A launch that is bound in full."""
        found = decision()
        prepare = self.variants[found.variant].prepare
        assert prepare is not None
        return prepare(found.problem, {**found.config})

    def _unclaimed(self, variant: Variant) -> list[str]:
        """Arguments of a launch that are not passed on to this variant, worked out once for it."""
        known, found = self._left_out.get(variant.name, (None, []))
        if known is not variant:
            found = [keyword for keyword, claim in self.call_arguments.items() if not self.earned(variant, claim)]
            there = self.variants  # those that were taken back are let go of, with all that they hold
            kept = {name: one for name, one in self._left_out.items() if there.get(name) is one[0]}
            self._left_out = {**kept, variant.name: (variant, found)}
        return found

    def _decided(self, problem: Problem, scope: Scope) -> tuple[Decision, Variant]:
        """A decision and its variant; decided again where another thread took that one back meanwhile."""
        while True:
            decision = decide(problem, scope)
            variant = self.variants.get(decision.variant)
            if variant is not None:
                return decision, variant

    def default(self, problem: Problem) -> Any:
        """What a call uses for an argument that is left out (a scale, a dtype), worked out once for a plan."""
        return None

    def earned(self, variant: Variant, claim: str) -> bool:
        """Whether a variant is handed the arguments that this claim earns; "" earns them for every variant."""
        return not claim or bool(variant.requires.claim(claim))

    def handed(self, variant: Variant) -> Handed:
        """The arguments that `run` is handed besides `config`, by what the variant claims."""
        fixed = [name for name, (claim, _) in self.fixed_arguments.items() if self.earned(variant, claim)]
        varying = [name for name, claim in self.call_arguments.items() if self.earned(variant, claim)]
        return Handed(self.tensors, tuple(fixed), tuple(varying))

    def bind(self, variant: Variant, problem: Problem, config: Config) -> Callable[..., Any]:
        """A launch that takes the op's tensors and all `call_arguments`, and hands `run` exactly what it claims."""
        launch: Callable[..., Any]
        if variant.prepare is not None and interpreted_as() is None:  # an interpreter has no launcher but Triton's own
            prepare = functools.partial(variant.prepare, problem, {**config})
            launch = LateLaunch(variant.name, prepare, self._unclaimed(variant))
        else:
            launch = on_its_device(self._running(variant, problem, config))
        return Uncaptured(launch, variant.name) if variant.may_wait(problem) else launch

    def _running(self, variant: Variant, problem: Problem, config: Config) -> Callable[..., Any]:
        """`run` with what is fixed for a Problem, and without what it does not claim."""
        unclaimed = self._unclaimed(variant)
        fixed = {
            keyword: getattr(problem, field)
            for keyword, (claim, field) in self.fixed_arguments.items()
            if self.earned(variant, claim)
        }
        launch = running(variant.run, config, fixed)
        return Dropping(launch, unclaimed) if unclaimed else launch

    def graph_launch(self, asked: str | None, settings: Any, *tensors: Any) -> Callable[..., Any] | None:
        """torch's own operations for a call of the torch op in a graph that is being compiled; None where the op stays.

        It stays where `asked` does not leave the choice to the compilation (see dispatch/traced.py), where a size is
        not known yet, and where another variant is chosen.
        """
        if asked is None or not asked.startswith(SETTLED):
            return None
        sizes = (size for one in tensors if one is not None for size in (*one.shape, *one.stride()))
        if any(isinstance(size, torch.SymInt) for size in sizes):
            return None
        try:
            problem, _ = self.asked(settings, False, *tensors)
            if self.trivial(problem) is not None:
                return None
            decision, variant = self._decided(problem, EMPTY)
        except Exception:  # the op itself says what is wrong, to those who call it
            return None
        return self._running(variant, problem, decision.config) if variant.traceable else None


def running(run: Callable[..., Any], config: Config, fixed: dict[str, Any]) -> Callable[..., Any]:
    """`run` with its config and what else is fixed. Each call has a config of its own, which it may take apart."""
    if not config:
        return functools.partial(run, config={}, **fixed)
    kept = {**config}

    def launch(*tensors: Any, **given: Any) -> Any:
        return run(*tensors, config={**kept}, **fixed, **given)

    return launch


def with_variant(op: str, scope: Scope, variant: str | None) -> Scope:
    """The scope with `variant=` of the call on top of the enclosing `use` blocks."""
    if variant is None:
        return scope
    if not isinstance(variant, str):
        raise InvalidArgument("variant", shown(variant), "None or the name of a variant")
    return scope.forcing({op: Forced(variant)})


def problem_of_call(op: str, *tensors: Any, deterministic: Any = None, **given: Any) -> Any:
    """The Problem of what a variant's `run` was handed, in which torch's own setting says what is deterministic. The op
    is found by its name, for kernels' host sides are imported before it."""
    return op_named(op).problem_of(*tensors, **given)[0]


OPS: dict[str, Op] = {}
"""Those imported so far; registry.ops.known finds the others."""


def op_named(name: str) -> Op:
    """The op of that name, such as "attention" or "attention_backward"."""
    if name not in OPS:
        raise UnknownOp(name, list(OPS))
    return OPS[name]
